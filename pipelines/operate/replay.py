"""Resends discarded messages, each as a half of the next incarnation. The operation is idempotent.

It can be repeated and interrupted because the half topic is its only memory. For each id and group, the latest
discarded incarnation i is sent as i + 1, unless a half of the same id and group with an incarnation above i was written
after the discard. The search covers, in this order, `messages`, the state, and the half topic from 2 × `max_clock_skew`
before the discard on: a broker's clock may be behind the horizon of the discard. A half of a higher incarnation from
before the discard was refused, so `quarantine` holds it. The topic also holds the halves that the job has not read yet,
that an interrupted replay has sent, and that were rolled back. A half that the job has refused, as `quarantine` tells,
had no effect and does not count.

While an id is pending otherwise, such as for another group, the job would refuse another half of it (R12). It is named
and not sent.

What others send after that search is seen too, until the moment of sending: see `replay_writer.py`. A second replay, or
an erasure, is refused meanwhile if the checkpoint is a local folder.

The guarantee has these limits:

- A message that was discarded before the oldest record that the half topic retains is *unproven*: it may have been
  replayed before and rolled back. It is skipped unless requested.
- Between a look and Kafka's answer to the halves that are sent after it, a replay does not see what others send: for
  milliseconds, or half a minute with a slow broker. Its half is a counted duplicate (R12) as long as theirs is pending
  or remembered. After that it would be a second message; a signed half is refused then, because it was signed before
  the look.
- If producers set the time of records (CreateTime), a service that sends a higher incarnation itself must not set an
  earlier time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.operate.earlier_replays import (
    Candidates,
    Identity,
    LatestDiscard,
    ProgressLine,
    drop_committed,
    drop_pending,
    drop_unproven,
    pending_of,
    refused_halves,
    rows_of,
    sent_halves,
)
from halfway.pipelines.operate.find_pending import did_you_mean
from halfway.pipelines.operate.next_halves import NextHalf, NotReplayed, NotReplayedMessage, next_halves
from halfway.pipelines.operate.replay_writer import ReplayWriter
from halfway.pipelines.operate.settle import argument_of
from halfway.pipelines.storage.delta_tables import read_table, stored_tables
from halfway.pipelines.storage.locks import replay_lock
from halfway.pipelines.storage.state_reader import no_batch_yet, read_state
from halfway.schemas.errors import HalfwayError, NotPendingError
from halfway.schemas.headers import SIGNED_WINDOW_MS
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import view_pending

_NAMED_IDS = 5
_AT_ONCE, _BYTES_AT_ONCE = 1_000, 16 * 1024 * 1024
"""How many halves, or bytes of bodies, are sent before the replay looks again at what has come meanwhile."""


@dataclass(frozen=True)
class Discarded:
    """A message that a replay would resend."""

    transaction_id: str
    producer_group: str
    discarded_at_ms: int
    reason: str
    topic: str
    keys: str | None


@dataclass(frozen=True)
class ReplayResult:
    """Numbers of messages: resent now, resent before, skipped as unproven, and named as not sent or as sent in vain."""

    replayed: int
    already_replayed: int
    unproven: int
    not_sent: int
    would_resend: Sequence[Discarded] = ()
    """Of a dry run: what would be resent, in the order of the discards."""
    left: Sequence[NotReplayedMessage] = ()
    """Those that are unproven, or named as not sent or sent in vain."""


@dataclass(frozen=True)
class ReplaySelection:
    """Selects discarded messages: by id, or, without ids, all that match the other fields."""

    transaction_ids: Sequence[str] = ()
    producer_group: str | None = None
    reason: str | None = None
    unproven: bool = False
    """True to also select unproven messages."""


def replay_discarded(
    spark: SparkSession, settings: Settings, wanted: ReplaySelection, say: Callable[[str], None], *, dry_run: bool = False
) -> ReplayResult:
    """Resend discarded messages, except those that were resent before.

    Args:
        spark: the session that reads the tables and the state.
        settings: the job's.
        wanted: the messages to resend.
        say: gets a sentence about the progress every 5 s, and one about each message that cannot be sent.
        dry_run: True to send nothing, and return what would be resent. Bodies are not read: one that was erased, or is
            too large, is listed too.

    Raises:
        HalfwayError: there are no tables, or the checkpoint does not tell what is pending. Nothing was sent.
        NotPendingError: an id was not discarded. Nothing was sent.
        CheckpointInUseError: another replay or an erasure is running.
        TopicError: the half topic does not exist, takes no message of this size, or no longer holds all that came
            while this ran. A repeated call continues from there.
        KafkaUnavailableError: Kafka cannot be read or does not accept a record. A repeated call continues from there.
    """
    with replay_lock(settings.storage):
        candidates = _latest_discards(spark, settings.storage, wanted)
        if not candidates:
            return ReplayResult(0, 0, 0, 0)
        selected, unproven, not_replayed = len(candidates), list[Identity](), NotReplayed(say)
        drop_committed(spark, settings.storage, candidates)
        pending, read_to, absent_groups = _pending(spark, settings, candidates)
        drop_pending(pending, candidates)
        unsure: set[Identity] = set()
        looked: Mapping[int, int] = {}
        if candidates:
            kafka = settings.kafka
            with TopicScan.open(kafka, kafka.half_topic) as scan, TopicScan.open(kafka, kafka.half_topic, READ_UNCOMMITTED) as whole:
                if not wanted.unproven:
                    unproven = drop_unproven(scan, candidates)
                unsure = _drop_sent(spark, settings, (scan, whole), candidates, say, read_to=read_to)
                looked = whole.ends
        to_send = len(candidates)
        already = selected - len(unproven) - to_send
        _drop_unsure(unsure, candidates, not_replayed)
        _drop_held(pending, candidates, not_replayed)
        _name_shared(candidates, say)
        for group in sorted({group for _, group in candidates} & absent_groups):
            say(f"the group {group} was away or behind at the job's last batch: its messages wait until it answers checks")
        found = []
        if dry_run:
            found = [Discarded(*identity, each.discarded_ms, each.reason, each.topic, each.keys) for identity, each in candidates.items()]
            found.sort(key=lambda each: (each.discarded_at_ms, each.transaction_id, each.producer_group))
        replayed = _send(spark, settings, candidates, looked, not_replayed) if candidates and not dry_run else 0
        left = [*not_replayed.messages, *(NotReplayedMessage(*identity, "unproven") for identity in unproven)]
        return ReplayResult(replayed, already, len(unproven), to_send - len(found) - replayed, found, left)


def _latest_discards(spark: SparkSession, storage: StorageSettings, wanted: ReplaySelection) -> Candidates:
    """Return the latest discard of each selected id and group."""
    found: Candidates = {}
    rows = stored_tables(spark, storage)[Table.DISCARDED]
    if wanted.transaction_ids:
        rows = rows.where(F.col("transaction_id").isin(list(wanted.transaction_ids)))
    discarded_ms = F.unix_millis("discarded_at").alias("discarded_ms")
    latest = F.max(F.struct("incarnation", discarded_ms, "half_partition", "half_offset", "reason", "topic", "keys")).alias("latest")
    if wanted.producer_group is not None:
        rows = rows.where(F.col("producer_group") == wanted.producer_group)
    by_id = rows.groupBy("transaction_id", "producer_group").agg(latest).select("transaction_id", "producer_group", "latest.*")
    if wanted.reason is not None:
        by_id = by_id.where(F.col("reason") == wanted.reason)
    for row in rows_of(by_id.toArrow()):
        transaction_id, group, *discard = row
        found[Identity(transaction_id, group)] = LatestDiscard(*discard)
    known = {identity.transaction_id for identity in found}
    missing = [transaction_id for transaction_id in wanted.transaction_ids if transaction_id not in known]
    if missing:
        named = ", ".join(missing[:_NAMED_IDS]) + (f" and {len(missing) - _NAMED_IDS} more" if len(missing) > _NAMED_IDS else "")
        ask = did_you_mean([read_table(spark, storage, Table.DISCARDED)], missing[0])
        raise NotPendingError(f"not discarded, so nothing was sent: {named}{ask or '; `halfway replay --all --dry-run` lists what was'}")
    return found


def _pending(spark: SparkSession, settings: Settings, candidates: Candidates) -> tuple[pa.Table, Mapping[int, int], frozenset[str]]:
    """Return what is pending (PENDING_SCHEMA) under ids of candidates, how far halves are read, and who is absent."""
    stored = read_state(lambda: spark, settings.storage)
    if stored.batch_id is None:
        raise HalfwayError(f"nothing tells what is pending: {no_batch_yet(settings.storage)}, or let the job end a batch, and replay then")
    view = view_pending(stored.rows)
    return pending_of(candidates, view.transactions), stored.read_to.get(settings.kafka.half_topic, {}), view.absent_groups


def _drop_sent(
    spark: SparkSession,
    settings: Settings,
    scans: tuple[TopicScan, TopicScan],
    candidates: Candidates,
    say: Callable[[str], None],
    *,
    read_to: Mapping[int, int],
) -> set[Identity]:
    """Drop ids of which the half topic holds a higher incarnation since the discard, unless the job has refused it.

    Returns:
        The other ids of which it holds one that cannot be read yet: it may be of a transaction that will be aborted.
    """
    if not candidates:
        return set()
    progress = ProgressLine(say, "searching the half topic for earlier replays")
    sent = list(sent_halves(scans, candidates, settings, read_to, progress))
    committed, _ = scans
    readable = committed.ends
    refused = refused_halves(spark, settings.storage, settings.kafka.half_topic, sent) if sent else set()
    unsure = set()
    for half in sent:
        if half.offset >= readable.get(half.partition, 0):
            unsure.add(half.identity)
        elif half not in refused:
            candidates.pop(half.identity, None)
    return unsure & candidates.keys()


def _drop_unsure(unsure: set[Identity], candidates: Candidates, not_replayed: NotReplayed) -> None:
    """Drop the ids of which the half topic holds a half that cannot be read yet, and name them."""
    for identity in sorted(unsure):
        open_before = "one of its later halves cannot be read yet: the Kafka transaction before it, which `halfway status` names, is open"
        not_replayed.add(identity, f"{open_before}: repeat this when it has ended")
        del candidates[identity]


def _drop_held(pending: pa.Table, candidates: Candidates, not_replayed: NotReplayed) -> None:
    """Drop the ids that are pending, and name them."""
    rows = rows_of(pending.select(["transaction_id", "producer_group", "incarnation"]))
    holders = {transaction_id: (group, incarnation) for transaction_id, group, incarnation in rows}
    for identity in [each for each in candidates if each.transaction_id in holders]:
        group, incarnation = holders[identity.transaction_id]
        held = f"the id is pending for the group {group} (incarnation {incarnation}), so that the job would refuse the half"
        ends = f"`halfway rollback {argument_of(identity.transaction_id)}` ends it"
        not_replayed.add(identity, f"{held}: replay it when that transaction has ended and is forgotten; {ends}")
        del candidates[identity]


def _name_shared(candidates: Candidates, say: Callable[[str], None]) -> None:
    """Name the ids of several groups. If only one group's message were sent, an attacker could hide another's."""
    times = Counter(transaction_id for transaction_id, _ in candidates)
    for transaction_id in sorted(name for name, count in times.items() if count > 1):
        shared = f"{transaction_id} is an id of {times[transaction_id]} groups"
        say(f"{shared}: the job takes one half, and refuses the others, for a later replay")


def _send(spark: SparkSession, settings: Settings, candidates: Candidates, looked: Mapping[int, int], not_replayed: NotReplayed) -> int:
    """Send the halves. Return how many Kafka has stored, without those that the job will refuse."""
    writer = ReplayWriter(settings.kafka, candidates, looked)
    progress, total, done, sent = ProgressLine(not_replayed.say, "sending"), len(candidates), 0, 0
    for halves in _portions(next_halves(spark, settings, candidates, not_replayed)):
        sent += _append(writer, halves, candidates, not_replayed)
        done += len(halves)
        progress(done, total)
    return sent


def _portions(halves: Iterable[NextHalf]) -> Iterator[list[NextHalf]]:
    """Yield lists of `_AT_ONCE` halves, or of `_BYTES_AT_ONCE` bytes of bodies, as soon as each is complete."""
    portion: list[NextHalf] = []
    size = 0
    for half in halves:
        portion.append(half)
        size += len(half.body)
        if len(portion) >= _AT_ONCE or size >= _BYTES_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _append(writer: ReplayWriter, halves: Sequence[NextHalf], candidates: Candidates, not_replayed: NotReplayed) -> int:
    """Append halves, but those that somebody else has sent meanwhile. Return how many the job will take."""
    stored, meanwhile = writer.append(halves)
    own = {half.identity for half in halves}
    for identity in sorted(identity for identity in meanwhile if identity in own or identity in candidates):
        not_replayed.add(identity, "its service, or somebody else, has sent a later half of it meanwhile")
        candidates.pop(identity, None)
    refused = {identity: ahead_ms for identity, ahead_ms in stored.items() if abs(ahead_ms) > SIGNED_WINDOW_MS}
    for identity, ahead_ms in refused.items():
        clock = f"its signature is of {abs(ahead_ms) / 1000:.0f} s {'after' if ahead_ms > 0 else 'before'} the broker's time"
        why = f"{clock}, so that the job refuses it: set this machine's clock right if it is wrong, and repeat"
        not_replayed.add(identity, why, in_vain=True)
    return len(stored) - len(refused)
