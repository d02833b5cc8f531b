"""Producer groups with check topics of their own: each service reads the bodies of its own checks, and no others."""

from contextlib import ExitStack

import pytest
from confluent_kafka import Consumer, KafkaError
from confluent_kafka.admin import AclOperation, ResourceType
from pyspark.sql import SparkSession

from halfway import TransactionProducer
from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.rights import FETCH_GROUP, JOB_GROUPS, job_rights, missing_rights, verify_check_groups
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.operate.doctor.kafka_checks import kafka_findings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.errors import AccessError
from halfway.schemas.settings import KafkaSettings, Settings
from halfway.schemas.tables import Table
from tests.support.client_world import COMMIT, UNKNOWN, Listener
from tests.support.partition_records import headers_of, records_of
from tests.support.secure_broker import Right, SecureBroker
from tests.support.secure_world import CHECK, HALF, OP, PASSWORD, USERS, Configure, settings_in
from tests.support.waiting import until

GROUPS = {"billing": "billing.check", "payments": "payments.check"}
KEYS = {"payments": ["a" * 32], "billing": ["b" * 32], "shop": ["c" * 32]}
SIGNING = {"kafka.signing.cluster": "test", "kafka.signing.keys": KEYS, "kafka.signing.job_keys": ["j" * 32]}
LIMIT_S = 60.0


def all_of(topic: str, *operations: AclOperation) -> list[Right]:
    return [Right(ResourceType.TOPIC, topic, operation) for operation in operations]


@pytest.fixture
def services(secure_broker: SecureBroker) -> dict[str, dict[str, object]]:
    """A user for each group, with the rights to its own check topic and group; and the job's to all."""
    logins: dict[str, dict[str, object]] = {}
    for group, topic in {**GROUPS, "shop": CHECK}.items():
        secure_broker.add_user(group, PASSWORD)
        logins[group] = secure_broker.security_of(group)
        own = [*all_of(HALF, AclOperation.WRITE), *all_of(OP, AclOperation.WRITE), *all_of(topic, AclOperation.READ)]
        secure_broker.allow(group, [*own, Right(ResourceType.GROUP, f"txn-check-{group}", AclOperation.READ)])
    for topic in GROUPS.values():
        secure_broker.allow(USERS["job"], all_of(topic, AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS))
        secure_broker.allow(USERS["setup"], all_of(topic, AclOperation.CREATE, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS))
    return logins


def refusal(kafka: KafkaSettings, topic: str, group: str) -> int:
    """Return the error with which Kafka refuses to let a user read a topic."""
    with Consumer({**kafka.as_librdkafka_dict(), "group.id": f"txn-check-{group}"}) as consumer:
        consumer.subscribe([topic])
        errors: list[int] = []

        def is_refused() -> bool:
            message = consumer.poll(0.1)
            if message is not None:
                error = message.error()
                assert error is not None, "it reads the topic"
                errors.append(error.code())
            return bool(errors)

        until(is_refused, "the refusal", limit_s=LIMIT_S)
    return errors[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_service_answers_its_own_checks_and_reads_no_other_bodies(
    spark: SparkSession, configure: Configure, services: dict[str, dict[str, object]]
) -> None:
    own = {"kafka.check_topics": GROUPS, **SIGNING}
    job = settings_in(configure("job", **own))
    made = create_topics(settings_in(configure("setup", **own)), 2)
    assert [(report.topic, report.created) for report in made] == [(HALF, False), (OP, False), (CHECK, False)] + [
        (topic, True) for topic in GROUPS.values()
    ]
    listeners = {group: Listener(lambda _, arg: arg, lambda _: COMMIT) for group in services}

    def settings_of(group: str) -> KafkaSettings:
        """A service knows its own topic and its own key."""
        topics = {name: topic for name, topic in GROUPS.items() if name == group}
        changed = {"kafka.check_topics": topics, "kafka.signing.cluster": "test", "kafka.signing.keys": {group: KEYS[group]}}
        return settings_in(configure("client", **services[group], **changed)).kafka

    with ExitStack() as running:
        for group, listener in listeners.items():
            producer = running.enter_context(TransactionProducer(settings_of(group), group, listener))
            producer.send_in_transaction("orders", group.encode(), transaction_id=f"of-{group}", arg=UNKNOWN)
        ResolveJob(job).run(lambda: spark)
        until(lambda: all(len(listener.checked) == 1 for listener in listeners.values()), "each group's check", limit_s=LIMIT_S)
    ResolveJob(job).run(lambda: spark)
    bodies = {row.transaction_id: bytes(row.body) for row in read_table(spark, job.storage, Table.MESSAGES).collect()}
    assert bodies == {f"of-{group}": group.encode() for group in services}
    for group, topic in {**GROUPS, "shop": CHECK}.items():
        with Consumer({**job.kafka.as_librdkafka_dict(), "group.id": FETCH_GROUP, "enable.auto.commit": False}) as consumer:
            found = {headers_of(record)["PGROUP"].decode() for partition in range(2) for record in records_of(consumer, topic, partition)}
        assert found == {group}, topic
        for foreign in {*GROUPS.values(), CHECK} - {topic}:
            assert refusal(settings_of(group), foreign, group) == KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_a_right_to_describe_groups_that_is_revoked_is_missed_and_found_again(configure: Configure, secure_broker: SecureBroker) -> None:
    """Kafka leaves the groups out of its list without a word; see `test_stale_answer.py`."""
    client, right = admin_client(settings_in(configure("job")).kafka), Right(ResourceType.GROUP, "txn-check-", AclOperation.DESCRIBE, True)
    verify_check_groups(client)
    secure_broker.forbid(USERS["job"], right)
    with pytest.raises(AccessError, match="may not Describe group txn-check-"):
        verify_check_groups(client)
    secure_broker.allow(USERS["job"], [right])
    verify_check_groups(client)


@pytest.mark.usefixtures("services")
def test_doctor_and_start_name_a_missing_right_to_a_groups_topic(configure: Configure, secure_broker: SecureBroker) -> None:
    topic = GROUPS["billing"]
    job: Settings = settings_in(configure("job", **{"kafka.check_topics": GROUPS}))
    create_topics(settings_in(configure("setup", **{"kafka.check_topics": GROUPS})), 2)
    secure_broker.forbid(USERS["job"], Right(ResourceType.TOPIC, topic, AclOperation.WRITE))
    missing = missing_rights(admin_client(job.kafka), job_rights(job.kafka), **JOB_GROUPS)
    assert [line.split(":")[0] for line in missing] == [f"this user may not Write topic {topic}"]
    found = [finding.text.split(":")[0] for finding in kafka_findings(job) if finding.check == "access"]
    assert found == [f"this user may not Write topic {topic}"]
