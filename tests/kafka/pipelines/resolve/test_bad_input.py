"""R14: every record that breaks the contract is in `quarantine` byte for byte, and the stream goes on.

`tests/unit/transforms/test_decoding.py` has a case for each problem and limit. Here are the kinds of records, and the
bytes that Kafka and Spark carry in their own ways.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic
from pyspark.sql import Row, SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_rules import new_topic_config
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.headers import MAX_TICK_BYTES, Source
from halfway.schemas.tables import Table
from tests.support.commands import facts, invoke
from tests.support.delta_rows import delta_rows
from tests.support.job_world import SMALL_JOB, START_MS, Headers, MakeWorld, World, half_headers, op_headers
from tests.support.kafka_topics import patient_admin, unique_topics

MAX_BODY = 1_000
HALF, OP = Source.HALF, Source.OP
AT_MS = 2
EVERYWHERE = {(source, partition) for source in (HALF, OP) for partition in range(2)}
TIME = ("TICK", b"%d" % (START_MS + AT_MS))
TICK: Headers = [TIME, ("PARTITIONS", b"2")]


@dataclass(frozen=True)
class Bad:
    """A bad record, the reason to refuse it, and a part of the row's detail."""

    name: str
    source: Source
    key: bytes | None
    value: bytes | None
    headers: Headers
    reason: str
    detail: str = ""


def bad_half(
    name: str, reason: str, detail: str = "", key: bytes | None = b"bad", value: bytes | None = b"\x00\xffbody", **headers: bytes | None
) -> Bad:
    return Bad(f"half-{name}", HALF, key, value, half_headers(**headers), reason, detail)


def bad_op(name: str, reason: str, detail: str = "", key: bytes | None = b"bad", **headers: bytes | None) -> Bad:
    return Bad(f"op-{name}", OP, key, b"ignored\xff", op_headers(**headers), reason, detail)


def bad_tick(name: str, detail: str, headers: Headers, key: bytes | None = None, value: bytes = b"", source: Source = OP) -> Bad:
    return Bad(f"tick-{name}", source, key, value, headers, "bad_tick", detail)


NOT_UTF8 = b"\xc3("
RECORDS = [
    bad_half("no-key", "missing_key", key=None),
    bad_half("empty-key", "missing_key", key=b""),
    bad_half("key-of-256-bytes", "key_too_long", "256 bytes", key=b"k" * 256),
    bad_half("key-not-utf8", "key_not_utf8", key=NOT_UTF8),
    bad_half("large-headers", "headers_too_large", own=b"x" * 33_000),
    bad_half("no-topic", "missing_header", "REAL_TOPIC", REAL_TOPIC=None),
    bad_half("no-group", "missing_header", "PGROUP", PGROUP=None),
    Bad("half-no-headers-at-all", HALF, b"bad", None, [], "missing_header", "REAL_TOPIC"),
    bad_half("empty-topic", "bad_header", "REAL_TOPIC", REAL_TOPIC=b""),
    bad_half("empty-group", "bad_header", "PGROUP", PGROUP=b""),
    Bad("half-null-topic", HALF, b"bad", b"v", [("REAL_TOPIC", None), ("PGROUP", b"g")], "bad_header", "REAL_TOPIC"),
    Bad("half-null-tags", HALF, b"bad", b"v", [*half_headers(), ("TAGS", None)], "bad_header", "TAGS"),
    bad_half("topic-not-utf8", "bad_header", REAL_TOPIC=NOT_UTF8),
    bad_half("property-not-utf8", "bad_header", "UTF-8", own=NOT_UTF8),
    bad_half("queue-not-a-number", "bad_header", "REAL_QID", REAL_QID=b"three"),
    bad_half("born-beyond-all-calendars", "bad_header", "BORN_TIMESTAMP", BORN_TIMESTAMP=b"9223372036854775807"),
    Bad("half-two-groups", HALF, b"bad", b"v", [*half_headers(), ("PGROUP", b"h")], "duplicate_header", "PGROUP"),
    *[
        bad_half(name.lower(), "delay_not_supported", name, **{name: b"1"})
        for name in ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
    ],
    bad_half("body-too-large", "body_too_large", "1001 bytes", value=b"x" * (MAX_BODY + 1)),
    bad_op("no-key", "missing_key", key=None),
    bad_op("key-not-utf8", "key_not_utf8", key=NOT_UTF8),
    bad_op("no-action", "missing_header", "ACTION", ACTION=None),
    bad_op("no-group", "missing_header", "PGROUP", PGROUP=None),
    bad_op("empty-group", "bad_header", "PGROUP", PGROUP=b""),
    bad_op("group-not-utf8", "bad_header", "PGROUP", PGROUP=NOT_UTF8),
    bad_op("remark-not-utf8", "bad_header", "REMARK", REMARK=NOT_UTF8),
    bad_op("other-action", "unknown_action", "MAYBE", ACTION=b"MAYBE"),
    Bad("op-two-actions", OP, b"bad", b"", [*op_headers(), ("ACTION", b"ROLLBACK")], "duplicate_header", "ACTION"),
    bad_tick("with-key", "no key", TICK, key=b"k"),
    bad_tick("time-not-a-number", "TICK is not a number", [("TICK", b"soon"), ("PARTITIONS", b"2")]),
    bad_tick("no-partitions", "PARTITIONS", [TIME]),
    bad_tick("zero-partitions", "PARTITIONS", [TIME, ("PARTITIONS", b"0")]),
    bad_tick("of-another-time", "ms from the record's timestamp", [("TICK", b"1"), ("PARTITIONS", b"2")]),
    bad_tick("not-json", "absent_groups", TICK, value=b"absent", source=HALF),
    bad_tick("json-of-another-shape", "absent_groups", TICK, value=b'{"absent_groups": "g"}'),
    bad_tick("not-utf8", "absent_groups", TICK, value=NOT_UTF8),
    bad_tick("too-large", "32 KiB", TICK, value=b" " * (MAX_TICK_BYTES + 1)),
]


@dataclass
class Aftermath:
    """The outcome of all bad records, and of the good ones before, between and after them."""

    world: World
    places: dict[str, tuple[int, int]]
    quarantine: dict[tuple[str, int, int], Row]


@pytest.fixture(scope="module")
def aftermath(spark: SparkSession, broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    folder: Path = tmp_path_factory.mktemp("bad-input")
    storage = {"storage.warehouse": str(folder / "warehouse"), "storage.checkpoint": str(folder / "checkpoint")}
    limit = {"resolution.max_body_bytes": MAX_BODY}
    settings = load_settings(environ={}, overrides={**unique_topics(broker), **SMALL_JOB, **storage, **limit})
    client = patient_admin(settings.kafka)
    names = (settings.kafka.half_topic, settings.kafka.op_topic)
    config = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
    new = [NewTopic(name, num_partitions=2, config={**new_topic_config(settings, name), **config}) for name in names]
    for made in client.create_topics(new).values():
        made.result()
    create_topics(settings, 2)
    world = World(spark, settings)
    world.tick(AT_MS - 1)
    places = {}
    for number, bad in enumerate(RECORDS):
        world.half(f"good{number}", 0)
        places[bad.name] = world.produce(bad.source, bad.key, bad.value, bad.headers, AT_MS, partition=number % 2)
        if bad.reason == "bad_tick":
            # Time passes when all partitions have a newer tick: one that counted would move it.
            for source, partition in EVERYWHERE - {(bad.source, number % 2)}:
                world.produce(source, bad.key, bad.value, bad.headers, AT_MS, partition)
        world.op(f"good{number}", b"COMMIT", 5)
    world.resolve()
    quarantine = {(row.source_topic, row.source_partition, row.source_offset): row for row in world.rows(Table.QUARANTINE)}
    return Aftermath(world, places, quarantine)


def raw(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


@pytest.mark.parametrize("bad", RECORDS, ids=[bad.name for bad in RECORDS])
def test_r14_a_bad_record_is_quarantined_whole(aftermath: Aftermath, bad: Bad) -> None:
    kafka = aftermath.world.settings.kafka
    topic = kafka.half_topic if bad.source is HALF else kafka.op_topic
    row = aftermath.quarantine[(topic, *aftermath.places[bad.name])]
    assert row.reason == bad.reason
    assert bad.detail in row.detail
    assert (raw(row.key), raw(row.value)) == (bad.key, bad.value)
    assert [(header.key, raw(header.value)) for header in row.headers] == bad.headers
    assert row.source_timestamp.timestamp() * 1000 == START_MS + AT_MS


def test_the_command_lists_what_was_refused(aftermath: Aftermath) -> None:
    settings = aftermath.world.settings
    listed = facts(invoke(settings, "quarantine", "--json"))
    assert {(each["source_topic"], each["source_partition"], each["source_offset"]) for each in listed} == set(aftermath.quarantine)
    ticks = [each for each in listed if each["reason"] == "bad_tick"]
    assert facts(invoke(settings, "quarantine", "--reason", "bad_tick", "--json")) == ticks
    assert (
        facts(invoke(settings, "quarantine", "bad", "--limit", "2", "--json"))
        == [each for each in listed if each["transaction_id"] == "bad"][:2]
    )

    shown = invoke(settings, "quarantine", "--limit", "1")
    first = listed[0]
    assert f"{first['source_topic']} {first['source_partition']}:{first['source_offset']}" in shown.stdout
    assert first["detail"] in shown.stdout
    assert shown.stdout.splitlines()[-1] == "... and earlier ones (--limit)"
    assert invoke(settings, "quarantine", "good0").stdout == "no such record was refused\n"


def test_r14_the_stream_goes_on_and_nothing_else_is_quarantined(aftermath: Aftermath) -> None:
    assert set(aftermath.world.by_id(Table.MESSAGES)) == {f"good{number}" for number in range(len(RECORDS))}
    ticks = [bad for bad in RECORDS if bad.reason == "bad_tick"]
    assert len(aftermath.quarantine) == len(RECORDS) + len(ticks) * (len(EVERYWHERE) - 1)


def test_bad_ticks_do_not_move_time(aftermath: Aftermath) -> None:
    assert [report.horizon_ms for report in aftermath.world.reports] == [START_MS + AT_MS - 1]


def test_at_the_limits_a_record_is_good(aftermath: Aftermath) -> None:
    w = aftermath.world
    w.half("k" * 255, 10, b"x" * MAX_BODY, REAL_QID=b"2147483647", BORN_TIMESTAMP=b"253402300799999", INCARNATION=b"0")
    w.op("k" * 255, b"UNKNOW", 11)
    w.op("k" * 255, b"COMMIT", 12, REMARK=b"", CHECK_TIMES=b"1", FROM_CHECK=b"true", other=NOT_UTF8)
    w.tick(20, b"{}")
    [report] = w.resolve()
    row = w.by_id(Table.MESSAGES)["k" * 255]
    assert (len(row.body), row.queue_id) == (MAX_BODY, 2147483647)
    latest = delta_rows(f"{w.settings.storage.warehouse}/{Table.MESSAGES}", "SELECT CAST(max(born_at) AS BIGINT) AS us FROM rows")
    assert latest == [{"us": 253402300799999_000}], "a reader without Spark sees the same time"
    assert report.counts["unknown"] == 1
    assert report.horizon_ms == START_MS + 20


def test_r14_a_name_with_a_nul_does_not_stand_for_another(aftermath: Aftermath) -> None:
    """librdkafka ends the name there: the reader of the body would see a second `REAL_QID`, which is no number."""
    w = aftermath.world
    headers = [(name, bytearray(value or b"")) for name, value in [*half_headers(), ("REAL_QID\0x", b"five")]]
    columns = "topic string, key string, value binary, headers array<struct<key: string, value: binary>>"
    sent = w.spark.createDataFrame([(w.settings.kafka.half_topic, "nul", bytearray(b"body"), headers)], columns)
    sent.write.format("kafka").option("kafka.bootstrap.servers", w.settings.kafka.servers()).option("includeHeaders", "true").save()
    w.op("nul", b"COMMIT", 21)
    w.resolve()
    [row] = [row for row in w.rows(Table.QUARANTINE) if row.transaction_id == "nul"]
    assert (row.reason, row.detail, raw(row.value)) == ("bad_header", "the name of a header has a NUL", b"body")


def test_the_names_of_headers_may_be_any_bytes(world: MakeWorld) -> None:
    """Many, because Python finds out at once only in the first calls that confluent_kafka returns a broken list."""
    w = world()
    for number in range(40):
        w.produce_odd(f"odd{number}", b"body", half_headers())
    w.half("good")
    w.op("good", b"COMMIT", 1)
    w.tick(100)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"good"}
    refused = w.rows(Table.QUARANTINE)
    assert [(row.transaction_id, row.reason, row.headers, bytes(row.value)) for row in refused] == [
        (f"odd{number}", "bad_header", None, b"body") for number in range(40)
    ]
    halves = w.settings.kafka.half_topic
    w.half("unread")
    assert facts(invoke(w.settings, "status", "--json"))["unread"][halves] == 1
