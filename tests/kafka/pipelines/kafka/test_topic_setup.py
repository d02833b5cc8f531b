"""The setup of topics on a real broker, and the refusal of topics that break a rule (R17)."""

import json
import time
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka.admin import NewTopic
from typer.testing import CliRunner

from halfway.conf.loader import load_settings
from halfway.pipelines.cli.app import app
from halfway.pipelines.kafka import admin as kafka_module
from halfway.pipelines.kafka import topic_setup
from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.topic_setup import create_topics, inspect_topics, verify_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.headers import CHECK_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES
from halfway.schemas.settings import Settings
from tests.support.commands import as_options
from tests.support.kafka_topics import patient_admin, set_topic_config, topic_settings
from tests.support.partition_records import headers_of, topic_records

DAY_MS = 86_400_000
MakeSettings = Callable[..., Settings]


@pytest.fixture
def names(broker: LocalBroker) -> MakeSettings:
    """`names(**overrides)`: settings that name three topics which do not exist yet."""
    unique = uuid.uuid4().hex[:8]
    own = {f"kafka.{kind}_topic": f"{unique}-{kind}" for kind in ("half", "op", "check")}
    own["kafka.bootstrap_servers"] = str(broker.status()["bootstrap_servers"])
    return lambda **overrides: load_settings(
        environ={}, overrides={**own, **{name.replace("__", "."): value for name, value in overrides.items()}}
    )


def make(settings: Settings, topic: str, **config: object) -> None:
    """Create one topic with a given configuration."""
    text = {name.replace("_", "."): str(value) for name, value in config.items()}
    client = patient_admin(settings.kafka)
    client.create_topics([NewTopic(topic, num_partitions=1, config=text)])[topic].result()


def test_missing_topics_are_created(names: MakeSettings) -> None:
    settings = names()
    reports = create_topics(settings, 3)
    assert [report.topic for report in reports] == [settings.kafka.half_topic, settings.kafka.op_topic, settings.kafka.check_topic]
    for report, room in zip(reports, (0, 0, CHECK_OVERHEAD_BYTES), strict=True):
        assert (report.created, report.partitions, report.timestamp_type, report.notes) == (True, 3, "LogAppendTime", ())
        assert report.max_message_bytes == settings.resolution.max_body_bytes + RECORD_OVERHEAD_BYTES + room
    assert partition_counts(admin_client(settings.kafka), [reports[0].topic, "none"]) == {reports[0].topic: 3}


@pytest.mark.parametrize(("half_retention", "retention_ms"), [("72h", 7 * DAY_MS), ("6d", 7 * DAY_MS), ("30d", 31 * DAY_MS)])
def test_each_topic_outlives_half_retention(names: MakeSettings, half_retention: str, retention_ms: int) -> None:
    reports = create_topics(names(resolution__half_retention=half_retention), 1)
    assert [report.retention_ms for report in reports] == [retention_ms] * 3


def test_creating_again_changes_nothing(names: MakeSettings) -> None:
    settings = names()
    create_topics(settings, 2)
    again = create_topics(settings, 2)
    assert [(report.created, report.partitions, report.notes) for report in again] == [(False, 2, ())] * 3
    assert again == inspect_topics(admin_client(settings.kafka), settings)
    noted = create_topics(settings, 5)
    assert all(report.partitions == 2 and "has 2 partitions, not 5" in report.notes[0] for report in noted)


def test_only_the_missing_one_is_created(names: MakeSettings) -> None:
    settings = names()
    make(settings, settings.kafka.op_topic, max_message_bytes=8_000_000)
    assert [report.created for report in create_topics(settings, 1)] == [True, False, True]


def first_ticks(settings: Settings) -> dict[str, list[tuple[int, int, dict[str, bytes]]]]:
    """Return (partition, offset, headers) of all records of the half, op and check topic."""
    kafka = settings.kafka
    return {
        topic: [(message.partition() or 0, message.offset() or 0, headers_of(message)) for message in topic_records(kafka.servers(), topic)]
        for topic in (kafka.half_topic, kafka.op_topic, kafka.check_topic)
    }


def test_new_topics_begin_with_a_tick_in_each_partition(names: MakeSettings) -> None:
    settings = names()
    before_ms = time.time_ns() // 1_000_000
    create_topics(settings, 3)
    half, op, check = first_ticks(settings).values()
    for ticks in (half, op):
        assert [(partition, offset, headers["PARTITIONS"]) for partition, offset, headers in ticks] == [(n, 0, b"3") for n in range(3)]
        assert all(before_ms <= int(headers["TICK"]) <= time.time_ns() // 1_000_000 for _, _, headers in ticks)
    assert check == []
    create_topics(settings, 3)
    assert list(first_ticks(settings).values()) == [half, op, []], "existing topics are left as they are"


def test_only_a_new_topic_begins_with_a_tick(names: MakeSettings) -> None:
    settings = names()
    make(settings, settings.kafka.half_topic, max_message_bytes=8_000_000)
    create_topics(settings, 2)
    assert [len(ticks) for ticks in first_ticks(settings).values()] == [0, 2, 0]


def test_without_a_tick_interval_time_is_the_tests(names: MakeSettings) -> None:
    settings = names(resolution__tick_interval=0)
    create_topics(settings, 2)
    assert [len(ticks) for ticks in first_ticks(settings).values()] == [0, 0, 0]


def test_topics_are_created_also_where_ticks_cannot_be_written(names: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KafkaUnavailableError("cannot write")

    monkeypatch.setattr(topic_setup, "write_ticks", fail)
    note = "no first tick, so that time begins with the job's own ticks: cannot write"
    assert [(report.created, report.notes) for report in create_topics(names(), 1)] == [(True, (note,)), (True, (note,)), (True, ())]


def test_create_time_is_noted_and_not_refused(names: MakeSettings) -> None:
    settings = names()
    make(settings, settings.kafka.half_topic, max_message_bytes=8_000_000, message_timestamp_type="CreateTime")
    half, op, _check = create_topics(settings, 1)
    assert half.timestamp_type == "CreateTime"
    assert [note.split(":")[0] for note in half.notes] == [
        "CreateTime",
        "a small compressed batch may hold any amount of data, which its readers take into memory",
    ]
    assert op.notes == ()


@pytest.mark.parametrize(
    ("halves_ms", "verdicts_ms", "adopt", "ok"),
    [
        (9 * DAY_MS, 9 * DAY_MS, True, True),
        (-1, -1, True, True),
        (9 * DAY_MS, -1, True, True),
        (9 * DAY_MS, 9 * DAY_MS - 1, True, False),
        (-1, 99 * DAY_MS, True, False),
        (-1, 3 * DAY_MS, False, True),
        (-1, 3 * DAY_MS - 1, False, False),
    ],
)
def test_verdicts_kept_shorter_than_halves_are_refused_at_a_start(
    names: MakeSettings, halves_ms: int, verdicts_ms: int, adopt: bool, ok: bool
) -> None:
    settings = names()
    create_topics(settings, 1)
    set_topic_config(settings, settings.kafka.half_topic, "retention.ms", halves_ms)
    set_topic_config(settings, settings.kafka.op_topic, "retention.ms", verdicts_ms)
    if ok:
        verify_topics(admin_client(settings.kafka), settings, adopt=adopt)
    else:
        with pytest.raises(TopicError, match=r"shorter than .* keeps their halves") as caught:
            verify_topics(admin_client(settings.kafka), settings, adopt=adopt)
        assert f"--topic {settings.kafka.op_topic} --add-config retention.ms={halves_ms}`" in str(caught.value)


@pytest.mark.parametrize(
    ("topic", "name", "value", "way_out"),
    [
        ("half_topic", "retention.ms", 3 * DAY_MS - 1, f"retention.ms={7 * DAY_MS}"),
        ("half_topic", "cleanup.policy", "compact", "cleanup.policy=delete"),
        ("op_topic", "cleanup.policy", "compact,delete", "cleanup.policy=delete"),
        ("op_topic", "max.message.bytes", 5 * 1024**2 - 1, f"max.message.bytes={5 * 1024**2}"),
        ("check_topic", "max.message.bytes", 5 * 1024**2 + 4095, f"max.message.bytes={5 * 1024**2 + 4096}"),
    ],
)
def test_a_topic_that_breaks_a_rule_is_refused_with_the_command_that_mends_it(
    names: MakeSettings, topic: str, name: str, value: object, way_out: str
) -> None:
    settings = names()
    create_topics(settings, 1)
    set_topic_config(settings, getattr(settings.kafka, topic), name, value)
    with pytest.raises(TopicError, match=getattr(settings.kafka, topic)) as caught:
        create_topics(settings, 1)
    assert f"--add-config {way_out}`" in str(caught.value)


@pytest.mark.parametrize(("retention_ms", "ok"), [(3 * DAY_MS - 1, False), (3 * DAY_MS, True), (-1, True)])
def test_r17_half_retention_is_checked_at_a_start(names: MakeSettings, retention_ms: int, ok: bool) -> None:
    settings = names()
    create_topics(settings, 1)
    set_topic_config(settings, settings.kafka.half_topic, "retention.ms", retention_ms)
    set_topic_config(settings, settings.kafka.op_topic, "retention.ms", -1)
    if ok:
        verify_topics(admin_client(settings.kafka), settings)
    else:
        with pytest.raises(TopicError, match=f"shorter than half_retention \\({3 * DAY_MS} ms\\)"):
            verify_topics(admin_client(settings.kafka), settings)


@pytest.mark.parametrize(("retention_ms", "is_noted"), [(3 * DAY_MS - 1, True), (3 * DAY_MS, False), (-1, False)])
def test_r15_a_check_topic_that_loses_requests_is_logged_at_a_start(
    names: MakeSettings, caplog: pytest.LogCaptureFixture, retention_ms: int, is_noted: bool
) -> None:
    settings = names()
    create_topics(settings, 1)
    set_topic_config(settings, settings.kafka.check_topic, "retention.ms", retention_ms)
    verify_topics(admin_client(settings.kafka), settings)
    assert caplog.text.count("event=topic_to_correct") == is_noted
    if is_noted:
        assert f"topic {settings.kafka.check_topic} keeps check requests for" in caplog.text


def test_the_error_of_a_missing_topic_names_the_command_that_creates_it(names: MakeSettings) -> None:
    settings = names()
    with pytest.raises(TopicError, match="halfway topics create"):
        verify_topics(admin_client(settings.kafka), settings)


def test_a_creation_that_kafka_refuses_is_a_topic_error(names: MakeSettings) -> None:
    with pytest.raises(TopicError, match="replication factor of 3"):
        create_topics(names(), 1, replication=3)


def test_the_error_names_wrong_security_settings(names: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_module, "REQUEST_LIMIT_S", 2.0)
    with pytest.raises(KafkaUnavailableError, match=r"does not use TLS, but kafka\.security\.protocol is SSL"):
        create_topics(names(kafka__security__protocol="SSL"))
    with pytest.raises(KafkaUnavailableError, match=r"ssl\.ca\.location"):
        create_topics(names(kafka__security__protocol="SSL", kafka__security__ca="/none.pem"))


def test_the_command_prints_its_facts(names: MakeSettings) -> None:
    kafka = names().kafka
    command = ["topics", "create", "--partitions", "2", *as_options(topic_settings(kafka))]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0
    assert [(fact["topic"], fact["partitions"], fact["created"]) for fact in json.loads(result.stdout)] == [
        (kafka.half_topic, 2, True),
        (kafka.op_topic, 2, True),
        (kafka.check_topic, 2, True),
    ]
    table = CliRunner().invoke(app, command).stdout
    assert table.count("existed") == 3
    assert "5 MiB" in table


def test_the_topics_of_consumers_are_created_with_the_brokers_defaults(names: MakeSettings) -> None:
    settings, real = names(), f"orders-{uuid.uuid4().hex[:8]}"
    command = ["topics", "create", "--real", real, "--partitions", "3", *as_options(topic_settings(settings.kafka))]
    for created in (True, False):
        result = CliRunner().invoke(app, [*command, "--json"])
        assert (result.exit_code, result.stderr) == (0, "")
        fact = json.loads(result.stdout)[-1]
        assert (fact["topic"], fact["partitions"], fact["created"]) == (real, 3, created)
    assert real in CliRunner().invoke(app, command).stdout
    refused = CliRunner().invoke(app, [*command[:3], "no topic", *command[4:]])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "'no topic' is no name of a Kafka topic" in refused.stderr
