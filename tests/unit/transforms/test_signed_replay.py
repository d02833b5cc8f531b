"""Signed records that an attacker copies byte for byte, alone or together, at any later time, make no second outcome.

The attacker can write both topics and read all of them, and knows no key. The job is the real decoder and buckets. The
service is honest: it answers each check of a half with COMMIT.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
from hypothesis import event, given, settings
from hypothesis import strategies as st

from halfway.schemas import headers as h
from halfway.schemas.events import RECORD_SCHEMA
from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Kind
from halfway.schemas.records import HalfHeaders, OpHeaders
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.transforms.bucket import Bucket
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.operator import to_batch
from halfway.transforms.packing import pack_events
from halfway.transforms.protocol import Outcome, Rules

KEYS = Keyring({"g": [b"k" * 32]}, required=True, cluster="c", job_keys=[b"j" * 32])
TOPICS = {Source.HALF: "halves", Source.OP: "ops"}
CONFIG = DecoderConfig(1_000, h.SIGNED_WINDOW_MS, KEYS, TOPICS)
RULES = Rules(6_000, 30_000, 2, 72 * 3_600_000, 60_000)
START_MS = 1_700_000_000_000
PARTITIONS = 2
WINDOW_MS = h.SIGNED_WINDOW_MS


class Stored(NamedTuple):
    """A record in Kafka."""

    source: Source
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes | None]]
    partition: int
    at_ms: int


class Attacked:
    """A job whose topics an attacker can write."""

    def __init__(self, *, has_broker_times: bool = True) -> None:
        self.has_broker_times = has_broker_times
        self.now_ms = START_MS
        self.bucket = Bucket()
        self.stored: list[Stored] = []
        self.outcomes: list[Outcome] = []
        self._unread: list[Stored] = []
        self._offset = 0

    def half(self, transaction_id: str = "id", body: bytes = b"body", incarnation: int = 0, signed_ms: int | None = None) -> Stored:
        headers = HalfHeaders(real_topic="orders", producer_group="g", incarnation=incarnation)
        own = headers.signed(transaction_id.encode(), body, "halves", KEYS, signed_ms or self.now_ms)
        return self.append(Stored(Source.HALF, transaction_id.encode(), body, own.to_headers(), 0, self.now_ms))

    def op(self, half: Stored, action: LocalTransactionState = LocalTransactionState.COMMIT) -> Stored:
        key, said = (half.key or b"").decode(), HalfHeaders.from_headers(half.headers)
        op = OpHeaders(action=action, producer_group="g", incarnation=said.incarnation, half_signature=said.signature)
        return self.append(Stored(Source.OP, half.key, b"", op.signed(key, "ops", KEYS).to_headers(), 0, self.now_ms))

    def append(self, record: Stored) -> Stored:
        self.stored.append(record)
        self._unread.append(record)
        return record

    def copy(self, number: int, partition: int, at_ms: int | None = None) -> None:
        """Append a copy of a record. Its time is the broker's, unless the topic has CreateTime."""
        at_ms = self.now_ms if self.has_broker_times or at_ms is None else at_ms
        self._unread.append(self.stored[number % len(self.stored)]._replace(partition=partition, at_ms=at_ms))

    def run(self, after_ms: int) -> list[Outcome]:
        """Let time pass, and run a batch. The service answers what it is asked."""
        self.now_ms += after_ms
        for source in Source:
            for partition in range(PARTITIONS):
                headers: h.HeaderList = [(h.TICK, b"%d" % self.now_ms), (h.PARTITIONS, b"%d" % PARTITIONS)]
                signature = KEYS.sign_as_job(Signable(TOPICS[source], None, sha256_of(b""), headers, partition)) or ""
                self._unread.append(Stored(source, None, b"", [*headers, (h.SIGNATURE, signature.encode())], partition, self.now_ms))
        rows = [
            {
                "source": int(record.source),
                "partition": record.partition,
                "offset": self._offset + number,
                "at_ms": record.at_ms,
                "timestamp_type": int(self.has_broker_times),
                "key": record.key,
                "headers": [{"key": name, "value": value} for name, value in record.headers],
                "value_bytes": len(record.value),
                "tick_value": None if record.key else record.value,
                "value_sha256": sha256_of(record.value),
            }
            for number, record in enumerate(self._unread)
        ]
        self._offset += len(rows)
        self._unread = []
        pack = pack_events(ByBatch([(0, CONFIG)]), (0,), b"")
        packs = [batch.to_pandas() for batch in pack([pa.RecordBatch.from_pylist(rows, schema=RECORD_SCHEMA)])]
        self.bucket, outcomes, _ = Bucket.decode(*self.bucket.encode()).after(to_batch(packs), RULES)
        self.outcomes += outcomes
        for outcome in outcomes:
            if outcome.kind is Kind.CHECK:
                asked = next(one for one in self.stored if one.source is Source.HALF and one.key == outcome.transaction_id.encode())
                self.op(asked)
        return outcomes

    def ends(self) -> list[tuple[str, str, int]]:
        """Return how the transactions ended, by id, kind and incarnation."""
        kinds = (Kind.COMMIT, Kind.DISCARD)
        return [(one.transaction_id, one.kind.name, one.incarnation) for one in self.outcomes if one.kind in kinds]

    def reasons(self) -> list[str]:
        return [str(one.reason) for one in self.outcomes if one.kind is Kind.QUARANTINE]


def test_a_copied_half_and_commit_make_no_second_message_after_the_id_is_forgotten() -> None:
    w = Attacked()
    w.op(w.half())
    w.run(1_000)
    w.run(3 * WINDOW_MS)
    assert w.bucket.entries.num_rows == 0, "the id is forgotten"
    w.copy(0, 1)
    w.copy(1, 0)
    w.run(10_000)
    w.run(60_000)
    assert w.ends() == [("id", "COMMIT", 0)]
    assert w.reasons() == ["bad_signature", "orphan_op"]


def test_a_copied_half_alone_asks_nobody_after_the_id_is_forgotten() -> None:
    w = Attacked()
    w.op(w.half(), LocalTransactionState.ROLLBACK)
    w.run(1_000)
    w.run(3 * WINDOW_MS)
    w.copy(0, 0)
    w.run(60_000)
    assert w.outcomes == [outcome for outcome in w.outcomes if outcome.kind is Kind.QUARANTINE]


def test_a_settled_id_is_remembered_as_long_as_a_copy_of_its_half_is_valid() -> None:
    """The half was signed at the latest moment that its record's timestamp allows: its copies are valid longest."""
    w = Attacked()
    w.op(w.half(signed_ms=w.now_ms + WINDOW_MS))
    w.run(1_000)
    w.run(2 * WINDOW_MS - 1_000)
    w.copy(0, 1)
    w.run(0)
    assert w.bucket.entries.num_rows == 1
    w.run(1)
    assert w.bucket.entries.num_rows == 0
    w.copy(0, 1)
    w.run(60_000)
    assert (w.ends(), w.reasons()) == ([("id", "COMMIT", 0)], ["bad_signature"])


def test_where_producers_set_the_time_a_copy_with_the_old_time_is_refused_too() -> None:
    w = Attacked(has_broker_times=False)
    w.op(w.half())
    w.run(1_000)
    w.run(3 * WINDOW_MS)
    w.copy(0, 0, at_ms=START_MS)
    w.copy(1, 0, at_ms=START_MS)
    w.run(60_000)
    assert w.ends() == [("id", "COMMIT", 0)]
    assert w.reasons() == ["bad_signature", "orphan_op"]


def test_an_op_settles_no_other_half_of_its_id() -> None:
    """A service that uses an id twice, which the contract forbids, has its ops kept apart at least."""
    w = Attacked()
    first = w.half(body=b"first")
    w.op(first)
    w.run(1_000)
    w.run(3 * WINDOW_MS)
    w.half(body=b"second")
    w.copy(1, 0)
    w.run(1_000)
    assert w.ends() == [("id", "COMMIT", 0)]
    assert w.reasons() == ["bad_signature"]
    assert w.outcomes[-1].detail == "COMMIT is signed for another half of this id"


def test_a_half_that_waits_in_a_backlog_is_valid_whenever_it_is_read() -> None:
    w = Attacked()
    w.run(0)
    w.op(w.half())
    w.run(100 * WINDOW_MS)
    assert w.ends() == [("id", "COMMIT", 0)]


_steps = st.tuples(
    st.sampled_from([0, 1_000, 30_000, 60_001, WINDOW_MS, 2 * WINDOW_MS, 2 * WINDOW_MS + 1, 3 * WINDOW_MS]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, PARTITIONS - 1), st.integers(-3, 3)), max_size=4),
    st.sampled_from(["", "half", "half and op", "rollback", "late half"]),
)


@settings(max_examples=60)
@given(st.lists(_steps, min_size=2, max_size=12), st.booleans())
def test_whatever_is_copied_whenever_no_transaction_ends_twice(
    steps: list[tuple[int, list[tuple[int, int, int]], str]], has_broker_times: bool
) -> None:
    w = Attacked(has_broker_times=has_broker_times)
    for number, (after_ms, copies, sent) in enumerate(steps):
        if sent:
            half = w.half(f"id{number}", signed_ms=w.now_ms - WINDOW_MS * (sent == "late half"))
            if sent in ("half and op", "rollback"):
                w.op(half, LocalTransactionState.ROLLBACK if sent == "rollback" else LocalTransactionState.COMMIT)
        for which, partition, shift in copies if w.stored else ():
            w.copy(which, partition, w.now_ms + shift * WINDOW_MS)
        w.run(after_ms)
    for _ in range(4):
        w.run(31_000)
    ends = w.ends()
    for reason in set(w.reasons()):
        event(reason)
    assert len(set(ends)) == len(ends)
    rolled_back = {f"id{number}" for number, (_, _, sent) in enumerate(steps) if sent == "rollback"}
    assert not rolled_back & {transaction_id for transaction_id, _, _ in ends}
