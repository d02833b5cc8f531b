"""R16: a batch that is repeated after a crash runs under the settings that it first ran under."""

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.schemas.errors import OwnershipError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.job_world import START_MS, MakeWorld, World
from tests.support.kafka_topics import topic_settings
from tests.support.waiting import until

Crash = Callable[[World], None]


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Crash:
    """`crash(world)`: run the job until its batch has written `messages` and `discarded`, and nothing more."""

    def run(w: World) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("between two tables")

        with monkeypatch.context() as patch:
            patch.setattr(BatchWriter, "_append_quarantine", fail)
            with pytest.raises(RuntimeError, match="between two tables"):
                w.resolve()

    return run


def with_changes(w: World, **changes: object) -> Settings:
    """Return the world's settings with other ones for the resolution."""
    return w.settings.model_copy(update={"resolution": w.settings.resolution.model_copy(update=changes)})


@pytest.mark.slow
def test_r16_a_repeated_batch_keeps_its_settings_and_the_next_has_the_new_ones(world: MakeWorld, crash: Crash) -> None:
    w = world(**{"resolution.transactionCheckMax": 1, "resolution.max_body_bytes": 1_000, "resolution.transactionTimeOut": 6_000})
    w.half("asked")
    w.tick(6_001)
    w.resolve()
    w.half("large", 6_002, b"x" * 500)
    w.op("large", b"COMMIT", 6_003)
    w.half("too large", 6_002, b"x" * 1_001)
    w.op("orphan", b"COMMIT", 6_004)
    w.tick(36_001)
    crash(w)
    assert set(w.by_id(Table.DISCARDED)) == {"asked"}
    assert w.rows(Table.QUARANTINE) == []

    changed = with_changes(w, transactionCheckMax=5, max_body_bytes=100, transactionTimeOut=10**6)
    w.resolve(changed)
    assert {name: row["check_times"] for name, row in w.by_id(Table.DISCARDED).items()} == {"asked": 1}
    assert set(w.by_id(Table.MESSAGES)) == {"large"}
    assert {row["transaction_id"]: row["reason"] for row in w.rows(Table.QUARANTINE)} == {
        "too large": "body_too_large",
        "orphan": "orphan_op",
    }
    assert [check[0] for check in w.checks()] == ["asked"]

    w.half("next", 37_000, b"x" * 101)
    w.half("slow", 37_000)
    w.tick(50_000)
    w.resolve(changed)
    assert {row["transaction_id"] for row in w.rows(Table.QUARANTINE)} == {"too large", "orphan", "next"}
    assert [check[0] for check in w.checks()] == ["asked"]

    w.half("last", 51_000, b"x" * 101)
    w.tick(55_000)
    w.resolve()
    assert {row["transaction_id"] for row in w.rows(Table.QUARANTINE)} == {"too large", "orphan", "next"}
    assert sorted(check[0] for check in w.checks()) == ["asked"], "the timer of slow was set when it was read (R4)"


def test_r16_a_batch_is_not_repeated_with_other_signing_keys(world: MakeWorld, crash: Crash) -> None:
    keys: dict[str, Any] = {
        "kafka.signing.cluster": "c",
        "kafka.signing.keys": {"signed": ["k" * 32]},
        "kafka.signing.job_keys": ["j" * 32],
    }
    w = world(**keys)
    w.half("a")
    w.op("a", b"COMMIT", 1)
    w.tick(10)
    crash(w)
    w.tick(20)
    places = {"storage.warehouse": w.settings.storage.warehouse, "storage.checkpoint": w.settings.storage.checkpoint}
    own = {**topic_settings(w.settings.kafka), **places, "state.buckets": 4, "state.shuffle_partitions": 1}
    once = {"resolution.tick_interval": 0, "trigger.available_now": True}
    other = load_settings(environ={}, overrides={**own, **once, **keys, "kafka.signing.keys": {"signed": ["other" * 7]}})
    with pytest.raises(OwnershipError, match=r"^batch 0 of .* began under other kafka.signing settings") as caught:
        w.resolve(other)
    assert "\n" not in str(caught.value)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
    w.tick(30)
    w.resolve(other)


@pytest.mark.long
def test_r5_no_discard_before_a_check_that_a_restart_sends_can_be_answered(world: MakeWorld, crash: Crash) -> None:
    """The last check is decided, the job is killed before it sends it, and starts again more than an interval later."""
    checks = {"resolution.transactionCheckMax": 1, "resolution.transactionTimeOut": 1, "resolution.transactionCheckInterval": 1_000}
    w = world(**{"resolution.tick_interval": 1_000}, **checks)
    group = uuid4().hex.encode()  # another test's group of a common name would be away
    now_ms = time.time_ns() // 1_000_000 - START_MS
    for transaction_id in ("answered", "silent"):
        w.half(transaction_id, now_ms - 1_000, PGROUP=group)
    crash(w)
    assert w.checks() == []
    crashed_s = time.monotonic()
    until(lambda: time.monotonic() > crashed_s + 2, "the time at which the discard would be due", 5)

    w.resolve()
    assert sorted(check[0] for check in w.checks()) == ["answered", "silent"]
    assert w.rows(Table.DISCARDED) == [], "both were asked just now"
    w.op("answered", b"COMMIT", time.time_ns() // 1_000_000 - START_MS, PGROUP=group)
    asked_s = time.monotonic()
    until(lambda: time.monotonic() > asked_s + 1, "an interval", 5)

    w.resolve()
    assert (set(w.by_id(Table.MESSAGES)), set(w.by_id(Table.DISCARDED))) == ({"answered"}, {"silent"})
