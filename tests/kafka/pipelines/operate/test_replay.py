"""`halfway replay` resends each discarded message once, however often it is repeated or killed."""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.operate import replay
from halfway.pipelines.operate.earlier_replays import Candidates, Identity, LatestDiscard, drop_unproven, sent_halves
from halfway.pipelines.operate.next_halves import NextHalf
from halfway.pipelines.storage.locks import replay_lock
from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.schemas.headers import Source
from halfway.schemas.tables import Table
from tests.support.commands import facts, halfway_command, invoke, options_of, records, run
from tests.support.job_world import START_MS, MakeWorld, World, half_headers
from tests.support.kafka_topics import delete_records
from tests.support.kafka_transaction import Transaction
from tests.support.partition_records import end_of as partition_end

QUICK_DISCARD = {"resolution.transactionCheckMax": 1}


def now_ms() -> int:
    """Return the present time relative to START_MS. Halves that a command sends have the present time."""
    return time.time_ns() // 1_000_000 - START_MS


def discard(w: World, *ids: str, at_ms: int = 0, **headers: bytes | None) -> None:
    """Send halves, and let them be discarded."""
    for transaction_id in ids:
        w.half(transaction_id, at_ms, **headers)
    for later_ms in (6_001, 36_001):
        w.tick(at_ms + later_ms)
        w.resolve()
    assert set(ids) <= {row.transaction_id for row in w.rows(Table.DISCARDED)}


def replayed(w: World, *arguments: str) -> tuple[int, int, int]:
    counts = facts(invoke(w.settings, "replay", *arguments, "--json"))
    return counts["replayed"], counts["already_replayed"], counts["unproven"]


def halves(w: World) -> list[Message]:
    return records(w.settings, w.settings.kafka.half_topic)


def incarnations(found: Iterable[Message]) -> Counter[tuple[bytes, bytes]]:
    """Count the halves of each id and incarnation above 0."""
    marked = [(half.key() or b"", dict(half.headers() or ()).get("INCARNATION", b"0")) for half in found]
    return Counter((key, incarnation) for key, incarnation in marked if incarnation != b"0")


@pytest.mark.slow
def test_a_replayed_half_is_the_discarded_one_with_the_next_incarnation(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    body = bytes(range(256))
    headers = {"TAGS": b"", "KEYS": b"k1 k2", "REAL_QID": b"3", "BORN_TIMESTAMP": b"1699999999999", "own": "größe".encode()}
    empty: list[tuple[str, bytes | None]] = [*half_headers(**headers), ("nothing", None)]
    w.produce(Source.HALF, "a", body, empty)
    discard(w, "plain", INCARNATION=b"4")
    [discarded] = [row for row in w.rows(Table.DISCARDED) if row.transaction_id == "a"]
    assert replayed(w, "--all") == (2, 0, 0)
    sent = {half.key(): half for half in halves(w)}
    assert dict(sent[b"a"].headers() or ()) == {**dict(empty), "INCARNATION": b"1"}
    assert sent[b"a"].value() == body
    assert dict(sent[b"plain"].headers() or ())["INCARNATION"] == b"5"
    later_ms = now_ms() + 10_000
    w.op("a", b"COMMIT", later_ms, INCARNATION=b"1")
    w.op("plain", b"COMMIT", later_ms, INCARNATION=b"5")
    w.tick(later_ms)
    w.resolve()
    messages = w.by_id(Table.MESSAGES)
    same = ("topic", "queue_id", "tags", "keys", "body", "properties", "producer_group", "born_at")
    assert {name: messages["a"][name] for name in same} == {name: discarded[name] for name in same}
    assert (messages["a"].incarnation, messages["plain"].incarnation) == (1, 5)
    assert w.rows(Table.QUARANTINE) == []


@pytest.mark.long
def test_a_repeated_replay_resends_nothing_whatever_the_outcome_of_the_first(world: MakeWorld) -> None:
    """The half topic knows of a replay that is unread, pending, committed, rolled back, or forgotten (R11)."""
    w = world(**QUICK_DISCARD)
    discard(w, "a", "b", "c")
    assert replayed(w, "a") == (1, 0, 0)
    assert replayed(w, "--all") == (2, 1, 0)
    assert replayed(w, "--all") == (0, 3, 0), "the job has not read them yet"
    sent_ms = now_ms()
    w.tick(sent_ms + 1_000)
    w.resolve()
    assert replayed(w, "--all") == (0, 3, 0), "pending"
    w.op("a", b"COMMIT", sent_ms + 2_000, INCARNATION=b"1")
    w.op("b", b"ROLLBACK", sent_ms + 2_000, INCARNATION=b"1")
    w.op("c", b"ROLLBACK", sent_ms + 2_000, INCARNATION=b"1")
    w.tick(sent_ms + 3_000)
    w.resolve()
    w.tick(sent_ms + 900_000)
    w.resolve()
    assert replayed(w, "--all") == (0, 3, 0), "settled, and forgotten"
    assert replayed(w, "c", "b") == (0, 2, 0)
    assert incarnations(halves(w)) == {(key, b"1"): 1 for key in (b"a", b"b", b"c")}
    assert set(w.by_id(Table.MESSAGES)) == {"a"}


@pytest.mark.long
def test_a_message_discarded_again_is_resent_as_the_next_incarnation(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    discard(w, "a")
    assert replayed(w, "--all") == (1, 0, 0)
    again_ms = now_ms() + 1_000
    for later_ms in (10_000, 50_000):
        w.tick(again_ms + later_ms)
        w.resolve()
    assert [row.incarnation for row in w.rows(Table.DISCARDED)] == [0, 1]
    # The clock of this machine is behind the discard. A replay must find the resent half all the same.
    assert replayed(w, "--all") == (1, 0, 0)
    assert replayed(w, "--all") == (0, 1, 0)
    assert incarnations(halves(w)) == {(b"a", b"1"): 1, (b"a", b"2"): 1}


def test_a_warehouse_without_tables_is_refused(world: MakeWorld) -> None:
    """It is another one than the job's, or its tables are gone: nothing to resend would be a wrong answer."""
    settings = world().settings
    done = invoke(settings, "replay", "--all")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: there is no table {settings.storage.warehouse}/discarded yet: run `halfway resolve`")


def test_a_replay_without_the_checkpoint_is_refused(world: MakeWorld, tmp_path: Path) -> None:
    """It tells what is pending, and which halves the job has read. No folder is made, which would tell otherwise."""
    w, elsewhere = world(**QUICK_DISCARD), tmp_path / "elsewhere"
    discard(w, "a")
    w.half("a", 50_000, PGROUP=b"another")
    w.tick(50_001)
    w.resolve()
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / MANIFEST_FILE).touch()
    refusals = {elsewhere: "there is no state in", tmp_path: "there is no state in", begun: "has no batch yet; check that"}
    for checkpoint, refusal in refusals.items():
        storage = w.settings.storage.model_copy(update={"checkpoint": str(checkpoint)})
        asked = invoke(w.settings.model_copy(update={"storage": storage}), "replay", "--all")
        assert (asked.exit_code, asked.stdout) == (1, "")
        assert refusal in asked.stderr
    assert not elsewhere.exists()
    assert incarnations(halves(w)) == {}


@pytest.mark.long
def test_a_replay_resends_only_the_chosen_messages(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    discard(w, "a", "b")
    discard(w, "c", at_ms=40_000, PGROUP=b"h")
    w.half("open", 80_000)
    w.tick(80_001)
    w.resolve()
    refused = invoke(w.settings, "replay", "a", "open", "never")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "error: not discarded, so nothing was sent: open, never" in refused.stderr
    shown = invoke(w.settings, "replay", "--all", "--dry-run")
    assert "3 would be resent, 0 already resent" in shown.stdout
    assert [line.split()[:2] for line in shown.stdout.splitlines() if "UTC" in line] == [["a", "g"], ["b", "g"], ["c", "h"]]
    [listed] = facts(invoke(w.settings, "replay", "--all", "--group", "h", "--dry-run", "--json"))["would_resend"]
    assert listed == {
        "transaction_id": "c",
        "producer_group": "h",
        "discarded_at_ms": START_MS + 76_001,
        "reason": "check_max",
        "topic": "orders",
        "keys": None,
    }
    assert incarnations(halves(w)) == {}
    assert replayed(w, "--all", "--group", "h") == (1, 0, 0)
    assert replayed(w, "--all", "--reason", "expired") == (0, 0, 0)
    assert replayed(w, "b") == (1, 0, 0)
    assert replayed(w, "--all", "--reason", "check_max") == (1, 2, 0)


def test_a_replay_that_a_slow_clock_has_dated_before_the_discard_is_found(world: MakeWorld) -> None:
    """The broker that stamped it is behind the one whose ticks brought the horizon of the discard."""
    w = world(**QUICK_DISCARD)
    discard(w, "a")
    w.half("a", 20_000, INCARNATION=b"1")
    assert replayed(w, "--all") == (0, 1, 0)


def test_a_half_that_the_job_has_read_is_not_judged_by_the_keys_of_today(world: MakeWorld) -> None:
    """It was taken before the group's key was changed, or it had one. A half that is not read yet will be refused."""
    w = world()
    partition, offset = w.half("a", 40_000, INCARNATION=b"1")
    keys = {"kafka.signing.cluster": "test", "kafka.signing.keys": {"g": "k" * 32}}
    signing = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "none:1", **keys}).kafka.signing
    settings = w.settings.model_copy(update={"kafka": w.settings.kafka.model_copy(update={"signing": signing})})
    discarded: Candidates = {Identity("a", "g"): LatestDiscard(0, START_MS, 0, 0, "check_max", "orders", None)}
    with TopicScan.open(settings.kafka, settings.kafka.half_topic) as scan:
        for read_to, is_found in ((offset + 1, True), (offset, False)):
            found = list(sent_halves((scan, scan), discarded, settings, {partition: read_to}, lambda *_: None))
            assert [(half.partition, half.offset) for half in found] == [(partition, offset)] * is_found


@pytest.mark.timeout(120)
def test_a_replay_behind_an_open_kafka_transaction_is_found(world: MakeWorld) -> None:
    """The job reads it once the transaction has ended. Until then a second one would be a second message."""
    w = world(partitions=1, **QUICK_DISCARD)
    discard(w, "a")
    transaction = Transaction(w, "open").half("inside", 40_000)
    assert replayed(w, "--all") == (1, 0, 0)
    again = invoke(w.settings, "replay", "--all", "--json")
    assert {name: facts(again)[name] for name in ("replayed", "already_replayed", "not_sent")} == {
        "replayed": 0,
        "already_replayed": 0,
        "not_sent": 1,
    }
    assert "a is not sent: one of its later halves cannot be read yet" in again.stderr
    [left] = facts(again)["left"]
    assert (left["transaction_id"], left["producer_group"]) == ("a", "g")
    assert left["why"].startswith("one of its later halves cannot be read yet")
    transaction.abort()
    assert replayed(w, "--all") == (0, 1, 0)


def test_a_topic_that_was_made_anew_proves_nothing_of_what_was_discarded_before(world: MakeWorld) -> None:
    """It is longer than the former one was by now, and nothing was deleted from it."""
    w = world(partitions=1)
    for number in range(3):
        w.half(f"later{number}", 70_000)
    for at_ms, dropped in ((60_000, 1), (80_000, 0)):
        discarded: Candidates = {Identity("a", "g"): LatestDiscard(0, START_MS + at_ms, 0, 1, "check_max", "orders", None)}
        with TopicScan.open(w.settings.kafka, w.settings.kafka.half_topic) as scan:
            assert len(drop_unproven(scan, discarded)) == dropped


@pytest.mark.long
def test_a_half_of_another_group_a_broken_one_and_one_before_the_discard_are_no_replays(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    w.half("a", 10, INCARNATION=b"7")  # refused, because incarnation 0 is pending
    discard(w, "a")
    w.half("a", 40_000, PGROUP=b"h", INCARNATION=b"1")
    w.half("a", 40_000, INCARNATION=b"one")
    w.half("a", 40_000, INCARNATION=b"0")
    assert replayed(w, "--all") == (1, 0, 0)


def rollback(w: World, key: str, at_ms: int, **headers: bytes | None) -> None:
    """End a transaction, and let the job forget it."""
    w.op(key, b"ROLLBACK", at_ms, **headers)
    w.tick(at_ms + 61_000)
    w.resolve()
    w.tick(at_ms + 70_000)
    w.resolve()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_replay_that_the_job_refused_is_sent_again_when_the_id_is_free(world: MakeWorld) -> None:
    """Another group uses the id of a discarded message, which it has read in a check topic."""
    w = world(**QUICK_DISCARD)
    discard(w, "a", "b")
    w.tick(150_000)
    w.resolve()
    w.half("a", 160_000, PGROUP=b"h", CHECK_IMMUNITY_TIME_IN_SECONDS=b"259200")
    assert replayed(w, "--all") == (2, 0, 0), "the job has not read the half of the other group"
    assert replayed(w, "--all") == (0, 2, 0), "nor those of the replay"
    w.resolve()
    assert [(row.transaction_id, row.reason) for row in w.rows(Table.QUARANTINE)] == [("a", "id_conflict")]
    for _ in range(2):
        done = invoke(w.settings, "replay", "--all")
        assert "0 resent, 1 already resent" in done.stdout
        assert "1 not sent, or in vain: the reasons are above" in done.stdout
        assert "a is not sent: the id is pending for the group h" in done.stderr
        assert "`halfway rollback a`" in done.stderr
    assert incarnations(halves(w)) == {(b"a", b"1"): 1, (b"b", b"1"): 1}
    sent_ms = now_ms()
    rollback(w, "a", sent_ms, PGROUP=b"h")
    assert replayed(w, "a") == (1, 0, 0)
    assert replayed(w, "a") == (0, 1, 0)
    w.op("a", b"COMMIT", sent_ms + 100_000, INCARNATION=b"1")
    w.tick(sent_ms + 100_001)
    w.resolve()
    assert {key: row.incarnation for key, row in w.by_id(Table.MESSAGES).items()} == {"a": 1}
    assert replayed(w, "a") == (0, 1, 0)


@pytest.mark.long
def test_a_message_whose_id_its_own_group_uses_again_is_named_and_not_sent(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    discard(w, "a")
    w.tick(150_000)
    w.resolve()
    w.half("a", 160_000)
    w.resolve()
    done = invoke(w.settings, "replay", "a")
    assert "0 resent, 0 already resent" in done.stdout
    assert "a is not sent: the id is pending for the group g" in done.stderr
    assert incarnations(halves(w)) == {}
    rollback(w, "a", 170_000)
    assert replayed(w, "a") == (1, 0, 0)


@pytest.mark.long
def test_a_poisoned_discard_stops_no_other_message(world: MakeWorld) -> None:
    """An attacker's largest incarnation, and another group's discard of the victim's id."""
    w = world(**QUICK_DISCARD)
    w.half("largest", INCARNATION=b"999999")
    discard(w, "a", "victim")
    w.tick(150_000)
    w.resolve()
    discard(w, "victim", at_ms=200_000, PGROUP=b"attacker", INCARNATION=b"9")
    done = invoke(w.settings, "replay", "--all")
    assert done.exit_code == 0, done.output
    assert "largest is not sent: bad_header: incarnation: " in done.stderr
    assert "victim is an id of 2 groups: the job takes one half, and refuses the others, for a later replay" in done.stderr
    assert incarnations(halves(w)) == {
        (b"largest", b"999999"): 1,
        (b"victim", b"9"): 1,
        (b"a", b"1"): 1,
        (b"victim", b"1"): 1,
        (b"victim", b"10"): 1,
    }


@pytest.mark.long
def test_a_message_discarded_before_the_oldest_record_is_resent_only_with_unproven(world: MakeWorld) -> None:
    w = world(partitions=1, **QUICK_DISCARD)
    discard(w, "old")
    _, offset = w.half("between", 60_000)
    w.op("between", b"ROLLBACK", 60_001)
    discard(w, "new", at_ms=70_000)
    forget_until(w, offset)
    assert replayed(w, "--all") == (1, 0, 1)
    assert incarnations(halves(w)) == {(b"new", b"1"): 1}
    printed = invoke(w.settings, "replay", "--all").stdout
    assert "0 resent, 1 already resent" in printed
    assert "1 skipped" in printed
    assert replayed(w, "--all", "--unproven") == (1, 1, 0)
    assert replayed(w, "--all", "--unproven") == (0, 2, 0), "it finds the halves that exist"


def test_a_second_replay_at_the_same_time_is_refused(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    discard(w, "a")
    with replay_lock(w.settings.storage):
        done = invoke(w.settings, "replay", "--all")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "a replay or an erasure is running" in done.stderr
    assert replayed(w, "--all") == (1, 0, 0)


def meanwhile(monkeypatch: pytest.MonkeyPatch, *others: Callable[[], object]) -> None:
    """Let others act after a replay has looked, and before it sends."""
    make = replay.next_halves

    def frozen(*arguments: Any) -> Iterator[NextHalf]:
        monkeypatch.undo()
        for other in others:
            other()
        return make(*arguments)

    monkeypatch.setattr(replay, "next_halves", frozen)


def test_what_a_service_resends_while_a_replay_is_frozen_is_sent_once(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be committed, delivered and forgotten when the replay goes on: a second one would be a second message."""
    w = world(**QUICK_DISCARD)
    discard(w, "a", "b", "c", "d")
    w.half("c", 50_000, INCARNATION=b"1", PGROUP=b"another")
    transaction = Transaction(w, "open")
    meanwhile(
        monkeypatch,
        lambda: w.half("a", 60_000, INCARNATION=b"1"),
        lambda: transaction.half("d", 60_000, partition=0, INCARNATION=b"1"),
    )
    done = invoke(w.settings, "replay", "--all", "--json")
    assert {name: facts(done)[name] for name in ("replayed", "already_replayed", "not_sent")} == {
        "replayed": 2,
        "already_replayed": 0,
        "not_sent": 2,
    }
    assert [(left["transaction_id"], left["why"]) for left in facts(done)["left"]] == [
        (name, "its service, or somebody else, has sent a later half of it meanwhile") for name in "ad"
    ]
    transaction.abort()
    with TopicScan.open(w.settings.kafka, w.settings.kafka.half_topic) as scan:
        assert incarnations(scan.beyond({})) == {(b"a", b"1"): 1, (b"b", b"1"): 1, (b"c", b"1"): 2}
    assert replayed(w, "--all") == (1, 3, 0), "the transaction was aborted, so that nobody has sent d"


def test_a_replay_that_was_frozen_sees_what_another_one_has_sent(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock keeps a second one away if the checkpoint is in an object store."""
    w = world(**QUICK_DISCARD)
    discard(w, "a", "b")
    with monkeypatch.context() as patch, pytest.MonkeyPatch.context() as lock:
        lock.setattr(replay, "replay_lock", lambda _: nullcontext())
        second: list[tuple[int, int, int]] = []
        meanwhile(patch, lambda: second.append(replayed(w, "a")))
        assert replayed(w, "--all") == (1, 0, 0)
    assert second == [(1, 0, 0)]
    assert incarnations(halves(w)) == {(b"a", b"1"): 1, (b"b", b"1"): 1}


def test_a_replay_that_cannot_see_what_came_meanwhile_sends_nothing(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was frozen for so long that Kafka has deleted that."""
    w = world(partitions=1, **QUICK_DISCARD)
    discard(w, "a")
    meanwhile(monkeypatch, lambda: forget_until(w, w.half("another", 60_000)[1] + 1))
    done = invoke(w.settings, "replay", "--all")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "does not hold all that came while this command ran" in done.stderr
    assert incarnations(halves(w)) == {}


def test_a_replay_before_any_discard_does_nothing(world: MakeWorld) -> None:
    w = world()
    w.tick(1)
    w.resolve()
    assert replayed(w, "--all") == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replay_that_is_killed_and_repeated_resends_each_message_exactly_once(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    ids, body = [f"t{n}" for n in range(1_500)], os.urandom(100_000)
    for transaction_id in ids:
        w.produce_later(Source.HALF, transaction_id, body, half_headers())
    discard(w)
    before = end_of(w)
    command = subprocess.Popen(
        halfway_command("replay", "--all", *options_of(w.settings)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 120
    while end_of(w) <= before:
        assert time.monotonic() < deadline
        assert command.poll() is None, command.communicate()[0]
    command.kill()
    command.communicate(timeout=30)
    sent = len(incarnations(halves(w)))
    assert 0 < sent < len(ids), "the kill came too early or too late for this test"

    assert replayed(w, "--all") == (len(ids) - sent, sent, 0)
    assert incarnations(halves(w)) == {(transaction_id.encode(), b"1"): 1 for transaction_id in ids}
    later_ms = now_ms() + 1_000
    for transaction_id in ids:
        w.produce_later(Source.OP, transaction_id, b"", [("ACTION", b"COMMIT"), ("PGROUP", b"g"), ("INCARNATION", b"1")], later_ms)
    w.tick(later_ms)
    w.resolve()
    messages = w.by_id(Table.MESSAGES)
    assert messages.keys() == set(ids)
    assert all(row.incarnation == 1 and bytes(row.body) == body for row in messages.values())
    assert replayed(w, "--all") == (0, len(ids), 0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_replay_resends_large_bodies_with_a_small_spark(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    bodies = {f"big{n}": os.urandom(4 * 1024 * 1024) for n in range(30)}
    for transaction_id, body in bodies.items():
        w.produce_later(Source.HALF, transaction_id, body, half_headers())
    discard(w)
    assert facts(run(w.settings, "replay", "--all", "--json"))["replayed"] == 30
    sent = {(half.key() or b"").decode(): half.value() for half in halves(w) if "INCARNATION" in dict(half.headers() or ())}
    assert sent == bodies


def end_of(w: World) -> int:
    consumer = Consumer({"bootstrap.servers": w.settings.kafka.servers(), "group.id": "reader"})
    try:
        return sum(partition_end(consumer, w.settings.kafka.half_topic, n) for n in range(2))
    finally:
        consumer.close()


def forget_until(w: World, offset: int) -> None:
    """Delete the records of the half topic's only partition before an offset, as retention does."""
    delete_records(w.settings.kafka, w.settings.kafka.half_topic, {0: offset})


def test_a_message_over_a_lowered_max_body_bytes_is_named_and_not_sent(world: MakeWorld) -> None:
    w = world(**QUICK_DISCARD)
    w.half("large", 0, b"x" * 2_000)
    discard(w, "small")
    done = invoke(w.settings, "replay", "--all", "--set", "resolution.max_body_bytes=1000")
    assert "large is not sent: its body has 2000 bytes, over resolution.max_body_bytes" in done.stderr
    assert "1 resent, 0 already resent" in done.stdout
    assert replayed(w, "--all") == (1, 1, 0), "it is sent under the former limit"
