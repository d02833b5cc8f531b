"""R14, `bad_signature`: attacks on a job, its clients and its commands, in topics that everyone can write."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.service import CLIENT_SOURCE, java_program
from halfway import TransactionProducer
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.storage import first_start
from halfway.pipelines.storage.manifest import write_manifest
from halfway.schemas.errors import SettingsError
from halfway.schemas.headers import SIGNED_WINDOW_MS, Source
from halfway.schemas.signing import Signable, sha256_of, signature_of
from halfway.schemas.tables import Table
from tests.support.client_world import COMMIT, UNKNOWN, Listener
from tests.support.commands import facts, invoke
from tests.support.forged_checks import forged_checks
from tests.support.job_world import START_MS, Headers, MakeWorld, World, half_headers, op_headers
from tests.support.waiting import until

KEY, OLD, OTHER, JOB_KEY = (f"{name} key of thirty-two bytes or more" for name in ("the", "an old", "another's", "the job's"))
CLIENT = "signing-client"
"""A group for these tests alone. Its consumer group stays in the broker, and later tests find it absent (R15)."""
JAVA, BEGINNER = "java-service", "beginner"
SIGNING = {
    "kafka.signing.cluster": "test",
    "kafka.signing.keys": {"g": [KEY, OLD], "h": [OTHER], CLIENT: [KEY, OLD], JAVA: KEY},
    "kafka.signing.job_keys": [JOB_KEY],
    "kafka.signing.topics": {"g": ["orders"]},
}


def signed(
    w: World, source: Source, key: str | None, value: bytes | None, headers: Headers, by: str = KEY, cluster: str = "test"
) -> Headers:
    """Return headers with the signature of this record at their end."""
    topic = w.settings.kafka.half_topic if source is Source.HALF else w.settings.kafka.op_topic
    signable = Signable(topic, None if key is None else key.encode(), sha256_of(value), headers)
    return [*headers, ("SIGNATURE", signature_of(by.encode(), cluster, signable).encode())]


def send_half(w: World, key: str, at_ms: int = 0, by: str = KEY, body: bytes = b"body", **changes: bytes | None) -> Headers:
    """Send a signed half, and return its headers."""
    own = half_headers(**{"SIGNED_AT": b"%d" % (START_MS + at_ms), **changes})
    headers = signed(w, Source.HALF, key, body, own, by)
    w.produce(Source.HALF, key, body, headers, at_ms)
    return headers


def answer(w: World, key: str, half: Headers, at_ms: int = 1, by: str = KEY, action: bytes = b"COMMIT", **changes: bytes | None) -> Headers:
    """Send a signed op for a half, and return its headers."""
    own = op_headers(action, **{"HALF_SIGNATURE": dict(half)["SIGNATURE"], **changes})
    headers = signed(w, Source.OP, key, b"", own, by)
    w.produce(Source.OP, key, b"", headers, at_ms)
    return headers


def signing_file(folder: Path, *, required: bool = False) -> str:
    """Write a settings file with the keys, for a command, and return its path."""
    signing = {name.removeprefix("kafka.signing."): value for name, value in SIGNING.items()}
    (folder / "keys.yaml").write_text(yaml.safe_dump({"kafka": {"signing": {**signing, "required": required}}}))
    return str(folder / "keys.yaml")


def test_r14_an_op_counts_only_with_its_groups_signature(world: MakeWorld) -> None:
    w = world(**SIGNING)
    good = {"signed": {}, "by the old key": {"by": OLD}}
    for name, how in good.items():
        answer(w, name, send_half(w, name), **how)
    halves = {name: send_half(w, name) for name in ("unsigned", "another's key", "moved", "turned round", "no text", "another half's")}
    w.op("unsigned", b"COMMIT", 1)
    answer(w, "another's key", halves["another's key"], by=OTHER)
    moved = answer(w, "signed", halves["moved"], 2)
    w.produce(Source.OP, "moved", b"", moved, 2)
    turned = answer(w, "turned round", halves["turned round"], 900_000, action=b"ROLLBACK")
    w.produce(Source.OP, "turned round", b"", [("ACTION", b"COMMIT"), *turned[1:]], 1)
    w.op("no text", b"COMMIT", 1, SIGNATURE=b"\xc3(")
    answer(w, "another half's", halves["moved"])
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == set(good)
    refused = [(row.transaction_id, row.reason) for row in w.rows(Table.QUARANTINE)]
    assert sorted(refused) == sorted((name, "bad_signature") for name in (*halves, "signed"))
    answer(w, "unsigned", halves["unsigned"], 3)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {*good, "unsigned"}, "a refused op does not change its half"


def test_r14_a_half_counts_only_with_its_groups_signature(world: MakeWorld) -> None:
    w = world(**SIGNING, **{"kafka.signing.required": True})
    good = send_half(w, "good")
    answer(w, "good", good)
    w.half("forged in the victim's name")
    w.produce(Source.HALF, "good, with another id", b"body", good)
    w.produce(Source.HALF, "good", b"another body", good)
    w.produce(Source.OP, "good", b"", good)
    send_half(w, "to another topic", REAL_TOPIC=b"payments")
    send_half(w, "too late", SIGNED_AT=b"%d" % (START_MS - SIGNED_WINDOW_MS - 1))
    send_half(w, "nobody's", PGROUP=b"nobody")
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"good"}
    details = {row.transaction_id: (row.reason, row.detail) for row in w.rows(Table.QUARANTINE) if row.transaction_id != "good"}
    assert {name: detail for name, (reason, detail) in details.items() if reason == "bad_signature"} == {
        "forged in the victim's name": "the record is not signed",
        "good, with another id": "the signature does not fit this record, its topic and its cluster",
        "to another topic": "group g may not send to payments",
        "too late": f"SIGNED_AT is {SIGNED_WINDOW_MS + 1} ms from the record's timestamp, at most {SIGNED_WINDOW_MS}",
        "nobody's": "there is no key for group nobody",
    }
    assert w.rows(Table.DISCARDED) == []


@pytest.mark.long
def test_r14_a_half_that_the_job_refuses_is_no_replay(world: MakeWorld, tmp_path: Path) -> None:
    """The next incarnation is signed by the group's key, but for a topic of another group, or at another time."""
    w = world(**SIGNING, **{"resolution.transactionCheckMax": 1})
    send_half(w, "a")
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    assert set(w.by_id(Table.DISCARDED)) == {"a"}
    send_half(w, "a", 40_000, REAL_TOPIC=b"payments", INCARNATION=b"1")
    send_half(w, "a", 40_000, SIGNED_AT=b"%d" % (START_MS + 40_000 - SIGNED_WINDOW_MS - 1), INCARNATION=b"1")
    own = half_headers(INCARNATION=b"1")
    w.produce(Source.HALF, "a", b"body", signed(w, Source.HALF, "a", b"body", own), 40_000)
    w.resolve()
    assert [row.reason for row in w.rows(Table.QUARANTINE)] == ["bad_signature"] * 3
    for counts in ((1, 0), (0, 1)):
        said = facts(invoke(w.settings, "replay", "--all", "--json", "--config", signing_file(tmp_path)))
        assert (said["replayed"], said["already_replayed"]) == counts


@pytest.mark.long
def test_copies_make_no_second_message_after_the_id_is_forgotten(world: MakeWorld) -> None:
    w = world(**SIGNING)
    half = send_half(w, "a")
    op = answer(w, "a", half)
    w.tick(1_000)
    w.resolve()
    late_ms = 3 * SIGNED_WINDOW_MS
    w.tick(late_ms)
    w.resolve()
    for at_ms in (0, late_ms + 1):
        w.produce(Source.HALF, "a", b"body", half, at_ms)
        w.produce(Source.OP, "a", b"", op, at_ms)
    w.tick(late_ms + 60_000)
    w.resolve()
    assert len(w.rows(Table.MESSAGES)) == 1
    assert w.checks() == []
    assert sorted(row.reason for row in w.rows(Table.QUARANTINE)) == ["bad_signature"] * 2 + ["orphan_op"] * 2


@pytest.mark.parametrize(
    ("copied_ms", "is_late"),
    [(121_000, True), (121_000, False), pytest.param(-121_000, False, marks=pytest.mark.long)],
)
def test_copies_make_no_second_message_if_an_adoption_reads_them_first(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, copied_ms: int, is_late: bool
) -> None:
    """They are in another partition, behind fewer records; also those that are made when the adoption has begun."""
    w = world(partitions=2, **SIGNING)
    partition = w.half("another", PGROUP=b"z")[0]
    for number in range(60):
        for source, headers in ((Source.HALF, half_headers(PGROUP=b"z")), (Source.OP, op_headers(b"UNKNOWN", PGROUP=b"z"))):
            w.produce(source, f"{number}", b"", headers, partition=partition)
    own = half_headers(SIGNED_AT=b"%d" % (START_MS + 1_000))
    half = signed(w, Source.HALF, "a", b"body", own)
    op = signed(w, Source.OP, "a", b"", op_headers(b"COMMIT", HALF_SIGNATURE=dict(half)["SIGNATURE"]))

    def produce(at_ms: int, where: int) -> None:
        w.produce(Source.HALF, "a", b"body", half, at_ms, where)
        w.produce(Source.OP, "a", b"", op, at_ms, where)

    def begin(*arguments: Any) -> None:
        write_manifest(*arguments)
        produce(copied_ms, 1 - partition)

    produce(1_000, partition)
    w.resolve()
    if is_late:
        monkeypatch.setattr(first_start, "write_manifest", begin)
    else:
        produce(copied_ms, 1 - partition)
        w.resolve()
    assert len(w.rows(Table.MESSAGES)) == 1
    storage = w.settings.storage.model_copy(update={"checkpoint": f"{w.settings.storage.checkpoint}-2"})
    kafka = w.settings.kafka.model_copy(update={"max_offsets_per_trigger": 4})
    reports = w.resolve(w.settings.model_copy(update={"storage": storage, "kafka": kafka}), adopt=True)
    assert len(reports) > 2, "the original was not read in the first batch"
    assert len(w.rows(Table.MESSAGES)) == 1


def test_forged_ticks_and_notices_change_nothing(world: MakeWorld) -> None:
    w = world(**SIGNING)
    half = send_half(w, "a")
    place = w.produce(Source.HALF, "b", b"body", send_half(w, "b"), 1)
    w.tick(1_000, w.away("g"))
    w.resolve()
    ticks: list[Headers] = [
        [("TICK", b"%d" % (START_MS + 7_000)), ("PARTITIONS", partitions)] for partitions in (b"1", b"4", b"2147483647")
    ]
    for headers in ticks:
        for source in Source:
            w.produce(source, None, b'{"absent_groups": []}', headers, 7_000, 0)
            by_group = signed(w, source, None, b'{"absent_groups": []}', headers)
            w.produce(source, None, b'{"absent_groups": []}', by_group, 7_000, 0)
    w.produce(Source.HALF, "b", None, [("HALF_LOST", b"%d:%d" % place)], 2)
    [report] = w.resolve()
    assert report.horizon_ms == START_MS + 1_000
    assert {row.reason for row in w.rows(Table.QUARANTINE)} == {"bad_signature"}
    assert len(w.rows(Table.QUARANTINE)) == 13
    w.tick(7_100)
    w.resolve()
    assert sorted({check[0] for check in w.checks()}) == ["a", "b"], "nothing was lost, and nobody is away"
    answer(w, "a", half, 7_200)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"a"}


def test_a_job_without_a_key_of_its_own_is_refused(world: MakeWorld) -> None:
    w = world(**{"kafka.signing.cluster": "test", "kafka.signing.keys": {"g": KEY}})
    with pytest.raises(SettingsError, match=r"kafka\.signing has no job_keys"):
        w.resolve()


def test_clients_and_commands_sign_and_clients_refuse_forged_checks(world: MakeWorld, tmp_path: Path) -> None:
    quick = {"resolution.tick_interval": 100, "resolution.transactionTimeOut": 1, "kafka.signing.required": True}
    w = world(timestamps="LogAppendTime", **SIGNING, **quick)
    listener = Listener(lambda _, arg: arg)
    # A service knows the key of its own group alone.
    own = {"kafka.signing.cluster": "test", "kafka.signing.required": True, "kafka.signing.keys": {CLIENT: [KEY]}}
    kafka = w.settings.kafka.model_copy(update={"signing": load_settings(environ={}, overrides=own).kafka.signing})
    with TransactionProducer(kafka, CLIENT, listener) as producer:
        writer = RecordWriter(w.settings.kafka)
        for forged in forged_checks(kafka.check_topic, CLIENT, KEY, OTHER).values():
            writer.put(kafka.check_topic, *forged)
        writer.flush()
        producer.send_in_transaction("orders", b"", transaction_id="at-once", arg=COMMIT)
        producer.send_in_transaction("orders", b"", transaction_id="asked", arg=UNKNOWN, properties={"own": "x"})
        producer.send_in_transaction("orders", b"", transaction_id="by-hand", arg=UNKNOWN, immunity_s=3600)
        w.resolve()
        until(lambda: "asked" in {request.transaction_id for request in listener.checked}, "the check")
    # Closing waits for each answer that was begun.
    assert [request.transaction_id for request in listener.checked] == ["asked"]
    keys = signing_file(tmp_path, required=True)
    assert facts(invoke(w.settings, "commit", "by-hand", "--config", keys, "--json"))["action"] == "COMMIT"
    keyless = invoke(w.settings, "commit", "x", "--group", "nobody's", "--config", keys)
    assert (keyless.exit_code, keyless.stderr) == (
        1,
        "error: records must be signed, and kafka.signing.keys has no key for group nobody's\n",
    )
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"at-once", "asked", "by-hand"}
    assert w.rows(Table.QUARANTINE) == []


def test_signing_begins_without_the_loss_of_a_check_or_a_record(world: MakeWorld) -> None:
    """A service with a key skips unsigned checks, which count, and a job with keys refuses unsigned records."""
    w = world(timestamps="LogAppendTime", **{"resolution.tick_interval": 100, "resolution.transactionTimeOut": 1})
    beginning = {"kafka.signing.cluster": "test", "kafka.signing.keys": {BEGINNER: KEY, "g": KEY}, "kafka.signing.accept_unsigned": True}
    service, job = (
        w.settings.kafka.model_copy(update={"signing": load_settings(environ={}, overrides={**beginning, **more}).kafka.signing})
        for more in ({}, {"kafka.signing.job_keys": [JOB_KEY]})
    )
    listener = Listener(lambda _, arg: arg)
    with TransactionProducer(service, BEGINNER, listener) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="asked", arg=UNKNOWN)
        w.resolve()
        until(lambda: len(listener.checked) == 1, "the unsigned check")
    w.half("unsigned")
    w.op("unsigned", b"COMMIT")
    w.half("forged", SIGNATURE=b"0" * 64)
    w.resolve(w.settings.model_copy(update={"kafka": job}))
    assert set(w.by_id(Table.MESSAGES)) == {"asked", "unsigned"}
    assert [(row["transaction_id"], row["reason"]) for row in w.rows(Table.QUARANTINE)] == [("forged", "bad_signature")]


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java here")
def test_the_java_client_signs(world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"resolution.tick_interval": 100, "resolution.transactionTimeOut": 1, "kafka.signing.required": True}
    w = world(timestamps="LogAppendTime", **SIGNING, **quick)
    kafka = w.settings.kafka
    monkeypatch.setenv("HALFWAY_KEY", KEY)
    monkeypatch.setenv("HALFWAY_CLUSTER", "test")
    program = java_program("TransactionClient", (CLIENT_SOURCE,), tmp_path / "java")
    service = subprocess.Popen(
        [*program, kafka.servers(), kafka.half_topic, kafka.op_topic, kafka.check_topic, "java-"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        assert [service.stdout.readline() for _ in range(4)][-1] == "sent\n"
        w.resolve()
        until(lambda: service.poll() == 0, "the answer of the Java client", limit_s=60)
    finally:
        service.kill()
        service.communicate(timeout=30)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"java-commit", "java-unknown"}
    assert w.rows(Table.QUARANTINE) == []


def test_without_keys_the_job_does_not_read_signatures(world: MakeWorld) -> None:
    w = world()
    w.half("a", SIGNATURE=b"whatever")
    w.op("a", b"COMMIT", 1, SIGNATURE=b"\xc3( whatever")
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
    assert w.rows(Table.QUARANTINE) == []
