"""With TLS, passwords and ACLs each part needs just the rights of docs/security.md. Each refusal names a remedy."""

import json
import re

import pytest
from confluent_kafka.admin import AclOperation, ResourceType
from pyspark.sql import SparkSession

from halfway import TransactionProducer
from halfway.pipelines.kafka.rights import OPERATOR_GROUP
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.operate.doctor.kafka_checks import kafka_findings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.errors import AccessError
from halfway.schemas.tables import Table
from tests.support.client_world import COMMIT, GROUP, UNKNOWN, Listener
from tests.support.secure_broker import Right, SecureBroker
from tests.support.secure_world import HALF, OP, USERS, Configure, TakeAway, facts, named, refused, rights_of, run, settings_in
from tests.support.waiting import until


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_every_part_works_with_just_the_rights_of_the_page(spark: SparkSession, configure: Configure) -> None:
    job, operator = settings_in(configure("job")), configure("operator")

    def resolve() -> None:
        ResolveJob(job).run(lambda: spark)

    listener = Listener(lambda _, arg: arg, lambda check: COMMIT if check.transaction_id == "asked" else UNKNOWN)
    with TransactionProducer(settings_in(configure("client")).kafka, GROUP, listener) as producer:
        for name, state in (("at-once", COMMIT), ("asked", UNKNOWN), ("silent", UNKNOWN)):
            producer.send_in_transaction("orders", b"body", transaction_id=name, arg=state)
        producer.send_in_transaction("orders", b"body", transaction_id="by-hand", arg=UNKNOWN, immunity_s=3600)
        resolve()
        until(lambda: len(listener.checked) == 2, "both checks")
        # The job runs while the client is present, because the checks of an absent group are put off (R15).
        resolve()
    assert [row["transaction_id"] for row in facts(run(operator, "pending", "--json"))] == ["by-hand"]
    assert facts(run(operator, "status", "--json"))["kafka_error"] is None
    assert facts(run(operator, "commit", "by-hand", "--json"))["action"] == "COMMIT"
    assert facts(run(operator, "replay", "--all", "--json"))["replayed"] == 1
    assert facts(run(operator, "replay", "--all", "--json"))["already_replayed"] == 1, "it finds the half that it sent"
    resolve()
    delivered = {row.transaction_id for row in read_table(spark, job.storage, Table.MESSAGES).collect()}
    assert delivered == {"at-once", "asked", "by-hand"}
    assert [row["incarnation"] for row in facts(run(operator, "pending", "--json"))] == [1]
    assert [row["created"] for row in facts(run(configure("setup"), "topics", "create", "--json"))] == [False] * 3
    found = json.loads(run(configure("doctor"), "doctor", "--json").stdout)
    assert [each["state"] for each in found["checks"] if each["check"] == "access"] == ["ok"], found
    assert [each for each in found["checks"] if each["state"] == "problem"] == []


COMMANDS = {"job": ("resolve",), "setup": ("topics", "create", "--relay")}
TAKEN = [(part, right) for part in COMMANDS for right in rights_of(part) if right.operation is not AclOperation.CREATE]


def of_taken(part: str, right: Right) -> str:
    return f"{part}-{named(right).removeprefix('may not ').replace(' ', '-')}"


@pytest.mark.parametrize(("part", "right"), TAKEN, ids=[of_taken(*each) for each in TAKEN])
def test_the_error_names_the_missing_right_and_the_command_that_grants_it(
    part: str, right: Right, without: TakeAway, configure: Configure
) -> None:
    without(part, right)
    line = refused(configure(part), *COMMANDS[part])
    shown = named(right)
    if right.operation is AclOperation.WRITE and part == "setup":
        shown = named(right._replace(operation=AclOperation.DESCRIBE))  # the user has no right on the topic then
    assert shown in line
    assert "kafka-acls.sh" in line
    assert f"--operation {shown.split()[2]}" in line


def test_the_error_names_the_topic_or_group_that_an_operator_may_not_use(
    secure_broker: SecureBroker, without: TakeAway, configure: Configure
) -> None:
    """`TopicScan` stands for `replay`, which opens it first, so that no Spark starts here."""
    operator = configure("operator")
    without("operator", Right(ResourceType.TOPIC, OP, AclOperation.WRITE))
    assert f"may not Write topic {OP}" in refused(operator, "commit", "x", "--group", "g")
    without("operator", Right(ResourceType.TOPIC, OP, AclOperation.READ))
    assert f"may not Describe topic {OP}" in refused(operator, "commit", "x", "--group", "g")
    for right in rights_of("operator"):
        if right.name in (HALF, OPERATOR_GROUP) and right.operation is not AclOperation.WRITE:
            secure_broker.forbid(USERS["operator"], right)
            with pytest.raises(AccessError, match=re.escape(named(right))), TopicScan.open(settings_in(operator).kafka, HALF):
                pass
            secure_broker.allow(USERS["operator"], [right])


def test_a_user_without_the_right_may_not_create_topics(configure: Configure, secure_broker: SecureBroker) -> None:
    other = Right(ResourceType.TOPIC, "other.half", AclOperation.DESCRIBE)
    secure_broker.allow(USERS["setup"], [other])
    line = refused(configure("setup", **{"kafka.half_topic": "other.half"}), "topics", "create")
    assert "this user may not Create topic other.half: `kafka-acls.sh" in line


@pytest.mark.parametrize("may_write", [True, False])
def test_topics_are_created_also_without_the_right_to_write_ticks(
    may_write: bool, configure: Configure, secure_broker: SecureBroker
) -> None:
    topic = f"new{may_write}.half"
    operations = [AclOperation.CREATE, AclOperation.DESCRIBE_CONFIGS, AclOperation.WRITE if may_write else AclOperation.DESCRIBE]
    secure_broker.allow(USERS["setup"], [Right(ResourceType.TOPIC, topic, operation) for operation in operations])
    changed = {"kafka.half_topic": topic, "resolution.tick_interval": 100}
    half, *_ = facts(run(configure("setup", **changed), "topics", "create", "--json"))
    note = f"no first tick, so that time begins with the job's own ticks: this user may not Write topic {topic}: `kafka-acls.sh"
    assert half["created"]
    assert [each[: len(note)] for each in half["notes"] if "tick" in each] == ([] if may_write else [note])


def test_the_doctor_reports_every_missing_right(without: TakeAway, configure: Configure) -> None:
    taken = [Right(ResourceType.TOPIC, HALF, AclOperation.WRITE), Right(ResourceType.GROUP, "txn-check-", AclOperation.DESCRIBE, True)]
    for right in taken:
        without("doctor", right)
    settings = settings_in(configure("doctor"))
    found = [each.text for each in kafka_findings(settings) if each.check == "access"]
    assert [text.split(":")[0].removeprefix("this user ") for text in found] == [
        f"may not Write topic {HALF}",
        "may not Describe group txn-check-*",
    ]
    assert "--group txn-check- --resource-pattern-type prefixed" in found[1]
