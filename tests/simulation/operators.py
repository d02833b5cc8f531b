"""`halfway replay` over simulated tables and topics: its steps and its proof of what was resent are the product's."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from halfway.pipelines.kafka.range_reader import READ_COMMITTED, OffsetRange
from halfway.pipelines.operate import earlier_replays, next_halves
from halfway.pipelines.operate import replay as product
from halfway.pipelines.operate.earlier_replays import Identity, SentHalf, drop_if_higher
from halfway.schemas.errors import NotPendingError
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import encode_key
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import PENDING_SCHEMA
from tests.simulation.history import HALF, Record
from tests.simulation.job import Pending
from tests.simulation.log import Kafka
from tests.simulation.storage import Storage


class Message:
    """A record, as confluent_kafka gives it."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def key(self) -> bytes | None:
        return self._record.key

    def headers(self) -> list[tuple[str, bytes | None]]:
        return list(self._record.headers)

    def timestamp(self) -> tuple[int, int]:
        return 2, self._record.at_ms

    def partition(self) -> int:
        return self._record.partition

    def offset(self) -> int:
        return self._record.offset


class Scan:
    """What `TopicScan` is to the product."""

    def __init__(self, kafka: Kafka, isolation_level: str = READ_COMMITTED) -> None:
        self._kafka, self._committed_only = kafka, isolation_level == READ_COMMITTED
        self.retained = {
            number: OffsetRange(each.first, each.visible_end(committed_only=self._committed_only))
            for number, each in enumerate(kafka.topics[HALF])
        }

    @property
    def ends(self) -> dict[int, int]:
        return {partition: kept.end for partition, kept in self.retained.items()}

    def known_since_ms(self) -> int:
        partitions = self._kafka.topics[HALF]
        first_ms = [next((record.at_ms for record in each.records[each.first :] if record is not None), 2**63 - 1) for each in partitions]
        cut_ms = [at_ms for at_ms, each in zip(first_ms, partitions, strict=True) if each.first]
        return max([*cut_ms, min(first_ms)])

    def since(self, at_ms: int, _: Callable[[int, int], None]) -> Iterator[Message]:
        for number, (first, end) in self.retained.items():
            for record in self._kafka.read((HALF, number), first, end, committed_only=self._committed_only):
                if record.at_ms >= at_ms:
                    yield Message(record)

    def beyond(self, read_to: Mapping[int, int]) -> Iterator[Message]:
        for number, (first, end) in self.retained.items():
            begin = max(first, read_to.get(number, 0))
            yield from map(Message, self._kafka.read((HALF, number), begin, end, committed_only=self._committed_only))


def replay(settings: Settings, storage: Storage, kafka: Kafka, ids: Sequence[str], *, pending: Sequence[Pending], unproven: bool) -> int:
    """Resend discarded messages; return how many.

    Args:
        settings: the job's.
        storage: the tables.
        kafka: the topics.
        ids: the messages; all if empty.
        pending: what is pending, as the state says.
        unproven: resend also what may have been resent before.

    Raises:
        NotPendingError: an id was not discarded.
    """
    discarded, committed = storage.tables[Table.DISCARDED].rows, storage.tables[Table.MESSAGES].rows

    def latest_discards(*_: Any) -> product.Candidates:
        found: product.Candidates = {}
        for row in sorted(discarded, key=lambda row: (row["incarnation"], row["discarded_at"])):
            if not ids or row["transaction_id"] in ids:
                pointer = (row["discarded_at"], row["half_partition"], row["half_offset"])
                found[Identity(row["transaction_id"], row["producer_group"])] = product.LatestDiscard(
                    row["incarnation"], *pointer, reason=row["reason"], topic=row["topic"], keys=None
                )
        if any(transaction_id not in {known for known, _ in found} for transaction_id in ids):
            raise NotPendingError("not discarded, so nothing was sent")
        return found

    def drop_committed(_: Any, __: Any, candidates: product.Candidates) -> None:
        for row in committed:
            if row["incarnation"] > 0:
                drop_if_higher(candidates, row["transaction_id"], row["incarnation"], row["producer_group"])

    def pending_of(_: Any, __: Any, candidates: product.Candidates) -> tuple[pa.Table, dict[int, int], frozenset[str]]:
        nothing = dict.fromkeys(PENDING_SCHEMA.names, 0) | {"topic": ""}
        rows = [{**nothing, **known._asdict()} for known in pending if not known.is_waiting]
        return earlier_replays.pending_of(candidates, pa.Table.from_pylist(rows, PENDING_SCHEMA)), {}, frozenset()

    def refused_halves(_: Any, __: Any, ___: Any, sent: list[SentHalf]) -> set[SentHalf]:
        rows = (row for row in storage.tables[Table.QUARANTINE].rows if row["reason"] != Reason.HALF_LOST)
        places = {(row["source_topic"], row["source_partition"], row["source_offset"]) for row in rows}
        return {half for half in sent if (HALF, half.partition, half.offset) in places}

    def send(_: Any, __: Any, candidates: product.Candidates, *___: Any) -> int:
        sent = 0
        for row in discarded:
            identity = Identity(row["transaction_id"], row["producer_group"])
            chosen = candidates.get(identity)
            if chosen and (chosen.half_partition, chosen.half_offset) == (row["half_partition"], row["half_offset"]):
                del candidates[identity]
                headers = next_halves.next_headers({**row.values, "born_at_ms": row["born_at"]}, settings.kafka, 0)  # type: ignore[arg-type]
                kafka.append(HALF, encode_key(row["transaction_id"]), bytes(row["body"]), tuple(headers))
                sent += 1
        return sent

    with (
        patch.object(product, "_latest_discards", latest_discards),
        patch.object(product, "drop_committed", drop_committed),
        patch.object(product, "_pending", pending_of),
        patch.object(product, "refused_halves", refused_halves),
        patch.object(product, "_send", send),
        patch.object(product, "replay_lock", lambda _: contextlib.nullcontext()),
        patch.object(product.TopicScan, "open", lambda _, __, *level: contextlib.nullcontext(Scan(kafka, *level))),
    ):
        wanted = product.ReplaySelection(tuple(ids), unproven=unproven)
        done = product.replay_discarded(None, settings, wanted, lambda _: None)  # type: ignore[arg-type]
    return done.replayed
