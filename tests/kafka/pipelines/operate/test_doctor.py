"""The doctor checks a real Kafka, topics that are wrong in each way, and tables of the real job."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from halfway.conf.loader import conf_file, load_settings
from halfway.pipelines.cli.app import app
from halfway.pipelines.kafka import tick_records
from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local import broker as broker_module
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.operate.doctor.finding import Health
from halfway.pipelines.operate.doctor.kafka_checks import kafka_findings
from halfway.pipelines.operate.doctor.machine_checks import disk_findings
from halfway.pipelines.operate.doctor.storage_checks import storage_findings
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.delta_tables import Owner
from halfway.pipelines.storage.file_systems import verify_folder_writable
from halfway.pipelines.storage.local_ownership import read_local_ownership
from halfway.pipelines.storage.locks import job_lock
from halfway.pipelines.storage.ownership import read_ownership
from halfway.schemas.errors import SetupError
from halfway.schemas.headers import Source
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.commands import as_options
from tests.support.job_world import MakeWorld
from tests.support.kafka_topics import MakeTopics, patient_admin, set_topic_config, topic_settings, unique_topics
from tests.support.waiting import until

DAY_MS = 86_400_000
Findings = dict[tuple[str, str], str]


def findings_of(settings: Settings) -> Findings:
    """Return the findings on Kafka and storage that are not ok: the text by check and state."""
    found = [*kafka_findings(settings), *storage_findings(settings)]
    return {(each.check, str(each.health)): each.text for each in found if each.health is not Health.OK}


ONE_REPLICA = ("replicas", "warning")
"""The doctor always finds that the tests' Kafka has one broker."""


@pytest.fixture
def settings(topics: MakeTopics, tmp_path: Path) -> Settings:
    return topics(overrides={"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")})


def test_the_doctor_finds_no_problem_if_there_is_none(settings: Settings, tmp_path: Path) -> None:
    TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000)).publish()
    places = {f"storage.{name}": getattr(settings.storage, name) for name in ("warehouse", "checkpoint")}
    command = ["doctor", *as_options({**topic_settings(settings.kafka), **places})]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert {each["state"] for each in answer["checks"] if each["check"] != "replicas"} == {"ok"}
    assert {each["check"] for each in answer["checks"]} == {
        *("python", "java", "jars", "settings", "kafka", "topics", "access", "replicas"),
        *("clock", "warehouse", "checkpoint", "ownership", "disk", "metrics"),
    }
    [clock] = [each["text"] for each in answer["checks"] if each["check"] == "clock"]
    assert "delivery included (last tick 20" in clock
    assert list(tmp_path.iterdir()) == [], "the doctor leaves no file behind"
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert len(lines) == len(answer["checks"])


@pytest.mark.parametrize(
    ("topic", "name", "value", "state", "words"),
    [
        ("half_topic", "retention.ms", 3 * DAY_MS - 1, "problem", "shorter than half_retention"),
        ("half_topic", "cleanup.policy", "compact", "problem", "cleanup.policy=delete"),
        ("check_topic", "max.message.bytes", 1_000_000, "problem", "lower resolution.max_body_bytes"),
        ("op_topic", "message.timestamp.type", "CreateTime", "warning", "set the record times by their clocks"),
        ("op_topic", "retention.ms", DAY_MS, "problem", "keeps verdicts for"),
        ("check_topic", "retention.ms", 3 * DAY_MS - 1, "warning", "keeps check requests for"),
        ("half_topic", "retention.bytes", 10**9, "warning", "retention.bytes is set"),
        ("op_topic", "compression.type", "producer", "warning", "a small compressed batch may hold any amount of data"),
        ("check_topic", "compression.type", "producer", "warning", "a small compressed batch may hold any amount of data"),
    ],
)
def test_a_wrong_topic_setting_is_found(settings: Settings, topic: str, name: str, value: object, state: str, words: str) -> None:
    set_topic_config(settings, getattr(settings.kafka, topic), name, value)
    found = findings_of(settings)
    assert set(found) == {("topics", state), ONE_REPLICA}
    assert words in found["topics", state]
    assert getattr(settings.kafka, topic) in found["topics", state]


def test_fewer_replicas_than_demanded_are_found(settings: Settings) -> None:
    set_topic_config(settings, settings.kafka.op_topic, "min.insync.replicas", 2)
    assert "takes no writes: 1 of 1 replicas" in findings_of(settings)["replicas", "problem"]


def test_missing_topics_are_found(broker: LocalBroker, settings: Settings) -> None:
    client = patient_admin(settings.kafka)
    client.delete_topics([settings.kafka.check_topic])[settings.kafka.check_topic].result()
    until(lambda: not partition_counts(client, [settings.kafka.check_topic]), "the deletion", 30)
    found = findings_of(settings)
    assert found["topics", "problem"] == f"no topic {settings.kafka.check_topic}: `halfway topics create` makes it"
    none = load_settings(environ={}, overrides=unique_topics(broker))
    missing = [each for each in kafka_findings(none) if each.health is not Health.OK]
    assert [each.check for each in missing] == ["topics"]


def test_before_the_first_tick_the_clock_is_unknown(settings: Settings) -> None:
    assert [each.text for each in kafka_findings(settings) if each.check == "clock"] == [
        f"unknown: no job has lately written a tick to partition 0 of {settings.kafka.half_topic}"
    ]


@pytest.mark.parametrize(("off_ms", "state"), [(2_000, "ok"), (20_000, "warning"), (3_600_000, "problem")])
def test_a_clock_at_which_time_stands_still_is_a_problem(
    settings: Settings, off_ms: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more records than the last 500."""
    clock = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(tick_records.time, "time_ns", lambda: clock() - off_ms * 1_000_000)
        TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000), "this").publish()
    producer = Producer({"bootstrap.servers": settings.kafka.servers()})
    for _ in range(600):
        producer.produce(settings.kafka.half_topic, b"", b"busy", partition=0)
    assert producer.flush(30) == 0
    [found] = [each for each in kafka_findings(settings) if each.check == "clock"]
    assert (found.health, "and time stands still" in found.text) == (state, state == "problem")


def test_a_running_job_of_another_checkpoint_is_found(settings: Settings) -> None:
    client, sent = admin_client(settings.kafka), SentChecks(1_000)
    TickPublisher(settings, client, sent, "another").publish()
    checkpoint = Path(settings.storage.checkpoint)
    assert "(query another), ticked on these topics" in findings_of(settings)["jobs", "warning"]
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id": "this"}')
    TickPublisher(settings, client, sent, "this").publish()
    assert "(query another), ticked on these topics" in findings_of(settings)["jobs", "warning"]  # Both may run.
    (checkpoint / "metadata").write_text('{"id": "another"}')
    assert "(query this), ticked on these topics" in findings_of(settings)["jobs", "warning"]
    (checkpoint / "metadata").write_text("{")
    assert {check for check, _ in findings_of(settings)} == {"replicas", "jobs", "ownership"}


def test_the_job_whose_tables_an_adoption_takes_over_is_no_other_one(settings: Settings) -> None:
    TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000), "former").publish()
    log = Path(settings.storage.warehouse) / "messages" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text(json.dumps({"metaData": {"configuration": {"halfway.query_id": "former"}}}))
    assert not [each for each in kafka_findings(settings) if each.check == "jobs"]


def test_a_forged_tick_ends_no_look_at_the_clock(world: MakeWorld) -> None:
    w = world(partitions=1)
    w.tick(1_000)
    w.produce(Source.HALF, None, b"", [("TICK", b"soon"), ("PARTITIONS", b"1")])
    w.produce_odd("", b"", [("TICK", b"7"), ("PARTITIONS", b"1")])
    [clock] = [each.text for each in kafka_findings(w.settings) if each.check == "clock"]
    assert clock == "not compared: the half topic has CreateTime"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBroker]:
    """A broker with an authorizer that allows everything without an ACL."""
    own = "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\nallow.everyone.if.no.acl.found=true\n"
    guarding = tmp_path / "broker.properties"
    guarding.write_text(conf_file("broker.properties").read_text() + own)
    monkeypatch.setattr(broker_module, "conf_file", lambda _: guarding)
    running = LocalBroker(tmp_path / "broker")
    running.start()
    yield running
    running.stop()


def test_missing_rights_are_found(guarded: LocalBroker, tmp_path: Path) -> None:
    places = {"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")}
    settings = load_settings(environ={}, overrides={**unique_topics(guarded), **places})
    create_topics(settings, 1)
    assert set(findings_of(settings)) == {ONE_REPLICA}
    topic = settings.kafka.op_topic
    deny = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
    allow = AclBinding(*deny, AclOperation.ALL, AclPermissionType.ALLOW)
    client = patient_admin(settings.kafka)
    for done in client.create_acls([allow, AclBinding(*deny, AclOperation.WRITE, AclPermissionType.DENY)]).values():
        done.result()
    found = findings_of(settings)
    assert set(found) == {ONE_REPLICA, ("access", "problem")}
    assert f"may not Write topic {topic}" in found["access", "problem"]
    assert f"--operation Write --topic {topic}`" in found["access", "problem"]
    blind = AclBinding(*deny, AclOperation.DESCRIBE_CONFIGS, AclPermissionType.DENY)
    for done in client.create_acls([blind]).values():
        done.result()
    found = findings_of(settings)
    assert f"may not DescribeConfigs topic {topic}" in found["topics", "problem"]
    assert "may not Write" in found["access", "problem"], "the doctor goes on with its other checks"


def test_the_doctor_finds_the_owner_of_the_tables_without_spark(world: MakeWorld, spark: SparkSession, tmp_path: Path) -> None:
    w = world()
    w.half("a")
    w.op("a", b"COMMIT", 1)
    w.resolve()
    assert findings_of(w.settings).keys() <= {ONE_REPLICA, ("topics", "warning")}
    places = w.settings.storage
    found = read_local_ownership(places)
    assert found == read_ownership(spark, places)
    assert found.last_batch_id == 0
    assert found.manifest is not None
    assert dict(found.tables) == dict.fromkeys(Table, Owner(found.query_id))

    messages = Path(places.warehouse) / Table.MESSAGES
    DeltaTable(str(messages)).create_checkpoint()
    for commit in (messages / "_delta_log").glob("*.json"):
        commit.unlink()
    assert read_local_ownership(places) == found, "from the log's checkpoint, once the first files of the log are cleaned up"

    moved = places.model_copy(update={"checkpoint": str(tmp_path / "another")})
    other = findings_of(w.settings.model_copy(update={"storage": moved}))
    assert "belongs to another checkpoint" in other["ownership", "problem"]
    assert "--adopt" in other["ownership", "problem"]
    more = findings_of(w.settings.model_copy(update={"state": w.settings.state.model_copy(update={"buckets": 5})}))
    assert "state.buckets = 4, not 5" in more["ownership", "problem"]
    with job_lock(places):
        assert ["a job is running on it" in each.text for each in storage_findings(w.settings) if each.check == "checkpoint"] == [True]
    shutil.rmtree(messages)
    assert "is missing" in findings_of(w.settings)["ownership", "problem"]


def test_spark_checks_the_places_that_only_it_can_reach(spark: SparkSession, tmp_path: Path) -> None:
    verify_folder_writable(spark, tmp_path.as_uri())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SetupError, match="cannot be written"):
        verify_folder_writable(spark, "file:///proc/none")
    with pytest.raises(SetupError, match="cannot be written"):
        verify_folder_writable(spark, "nosuchfs://bucket/place")


def test_tables_of_a_catalog_are_not_searched_in_folders(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    settings = load_settings(environ={}, overrides={"storage.catalog_schema": "default", "storage.checkpoint": str(tmp_path / "c")})
    assert spark_session(settings) is spark
    assert [(each.check, each.health) for each in storage_findings(settings)] == [
        ("warehouse", Health.UNKNOWN),
        ("checkpoint", Health.OK),
        ("ownership", Health.OK),
    ]
    assert [each.text.split(" for the ")[1] for each in disk_findings(settings.storage)] == [f"checkpoint {tmp_path}/c"]
    (tmp_path / "c" / "halfway.json").write_text('{"format_version": 1}')
    [ownership] = [each for each in storage_findings(settings) if each.check == "ownership"]
    assert "has the state's format 1" in ownership.text
