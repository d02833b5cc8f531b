"""The active relay: reads the table on, and writes messages and bookmark to Kafka in one transaction.

The bookmark in Kafka is the only memory. Whatever fails, the next transaction begins where the last committed one
ended. A topic that refuses a message is stopped with a bookmark of its own, and the others go on. A large batch of the
job takes several transactions: Kafka aborts one that lasts too long.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from halfway.clients.reading.committed import CommittedMessage
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.relay.leader_election import relay_id
from halfway.pipelines.relay.position_reader import read_positions
from halfway.pipelines.relay.positions import START, RelayPositions, Stop, TablePosition, changes
from halfway.pipelines.relay.real_topics import RealTopic, RealTopics
from halfway.pipelines.relay.relay_producer import RefusedError, RelayProducer, TransactionLostError
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.pipelines.relay.retries import Retries
from halfway.pipelines.relay.route import RelayedRecord, Router
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_ALONE_FOR = 1_000
"""How many messages of a topic are sent one by one after it has refused a batch of them."""
_ALONE_AT_ONCE = 100
"""The most messages in a transaction then, because each waits for the one before."""
_QUICK_SHARE = 1 / 8
"""While a transaction of messages that are sent one by one takes less than this, the next one has twice as many."""
_TURN_S = 0.5
"""How long a turn lasts: stopped topics and the others take turns. A transaction that has begun is finished."""
_ASKED_AT_ONCE = 500
"""Kafka takes about 0.1 s to answer for this many topics."""


@dataclass
class RelayReport:
    """What a relay has done since it started, and how far it is behind. Displayed; no outcome depends on it."""

    is_active: bool = False
    """True once it has taken over and relayed, or found nothing to relay. One that fails at that each time never is."""
    relayed: int = 0
    transactions: int = 0
    refusals: int = 0
    interruptions: int = 0
    """Times that Kafka or the table was away, or another relay took over."""
    positions: RelayPositions | None = None
    behind_since_ms: int | None = None
    """When the newest message that was read was committed, while there are more; None if all were read."""
    newest: Bookmark | None = None
    """The newest batch of the job that was behind the bookmark at the last look at the table."""
    last_look_s: float | None = None
    """When the table was last read to its end (Unix time)."""

    @property
    def batches_behind(self) -> int | None:
        """Return about how many batches of the job are not relayed yet; None if they are of another epoch."""
        if self.newest is None or self.positions is None:
            return 0
        after = self.positions.after or START
        return max(0, self.newest.batch_id - after.batch_id) if after.epoch == self.newest.epoch else None


class ActiveRelay:
    """The active relay: its producer, and where it is.

    Args:
        settings: all settings.
        table: the table `messages`.
        client: an admin client.
        report: is kept up to date.
        clock: returns seconds. It only decides who has the next turn.
    """

    def __init__(
        self, settings: Settings, table: RelayTable, client: Admin, report: RelayReport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Fence every former relay of this name.

        Raises:
            AccessError: this user may not use the transactional id.
            TransactionLostError: Kafka does not answer in time, or refuses.
        """
        self._settings, self._table, self._client, self._report, self._clock = settings, table, client, report, clock
        self._router = Router(settings)
        self._topics = RealTopics(client)
        self._alone: dict[str, int] = {}
        self._part_size = 1
        """How many messages a transaction has while some are sent one by one: Kafka aborts one that takes too long."""
        self._retries = Retries(settings.relay.retry_interval / 1000, clock)
        self._producer = RelayProducer(settings)
        self._positions = RelayPositions("")
        self._written: RelayPositions | None = None
        self._unwritten: set[str] = set()
        """The topics that were stopped since the last transaction."""

    def close(self) -> None:
        """Forget what is in flight."""
        self._producer.close()

    def stored(self) -> RelayPositions | None:
        """Return the positions in Kafka. What an earlier producer left open is aborted, and it can commit no more.

        Raises:
            KafkaUnavailableError: Kafka cannot be reached, a transaction of another relay stays open, or a broker that
                was cut off answers.
            TopicError: Kafka does not know the relay's own topic, or not yet, or it has several partitions.
            TransactionLostError: another relay has taken over, or Kafka does not take a record.
            AccessError: a right is missing.
            RelayError: the topic holds something else.
        """
        relay, kafka = self._settings.relay, self._settings.kafka
        group, wait_s = relay_id(kafka, relay.name), relay.transaction_timeout / 1000
        return read_positions(self._client, kafka, group, self._producer.mark_end, wait_s).get(relay.name)

    def take_over(self, stored: RelayPositions | None, positions: RelayPositions) -> None:
        """Begin at the stored positions, without the stops of topics that are no longer allowed."""
        self._written, self._positions = stored, positions
        self._write([], stops={named: None for named in positions.stopped if not self._router.is_allowed(named)})
        for named in self._positions.stopped:
            self._retries.soon(named)

    def read_on(self, may_go_on: Callable[[], bool]) -> bool:
        """Relay what is after the bookmark. Return True if there may be more, but stopped topics have their turn."""
        self._report.newest = self._table.newest(self._positions.after)
        end_s: float | None = None
        for portion in self._table.read(self._positions.after):
            end_s = self._clock() + _TURN_S if end_s is None else end_s
            allowed = [message for message in portion.messages if self._router.is_allowed(message.topic)]
            is_whole = self._relay(allowed, portion.reached, may_go_on)
            self._report.is_active = True
            if not is_whole or not may_go_on() or (self._clock() >= end_s and self._retries.is_due()):
                return True
        self._report.behind_since_ms, self._report.last_look_s = None, time.time()
        self._report.is_active = True
        return False

    def _relay(self, messages: Sequence[CommittedMessage], reached: TablePosition, may_go_on: Callable[[], bool]) -> bool:
        """Write messages and bookmark, and stop the topics that refuse theirs. Return True if all of it is done."""
        if messages:
            self._report.behind_since_ms = round(messages[-1].committed_at.timestamp() * 1000)
        while True:
            try:
                return self._write_in_parts(self._to_send(messages), reached, self._relay_part, may_go_on)
            except RefusedError as refused:
                record = refused.record
                self._stop({record.named: Stop(self._positions.after, record.transaction_id, refused.refusal, refused.cause)})

    def _to_send(self, messages: Iterable[CommittedMessage]) -> list[CommittedMessage]:
        """Return what is after the bookmark and goes to topics that are not stopped."""
        after, stopped = self._positions.after or START, self._positions.stopped
        return [message for message in messages if TablePosition.of(message) > after and message.topic not in stopped]

    def _relay_part(self, messages: Sequence[CommittedMessage], reached: TablePosition) -> None:
        records = self._records_of(messages)
        self._write(records, after=reached)

    def _write_in_parts(
        self,
        messages: Sequence[CommittedMessage],
        reached: TablePosition,
        write: Callable[[Sequence[CommittedMessage], TablePosition], None],
        may_go_on: Callable[[], bool],
    ) -> bool:
        """Write messages in one transaction, or in several while some are sent one by one. Return True if it wrote all.

        Raises:
            RefusedError: a topic refuses a message that was sent alone. The parts before were written.
        """
        while True:
            is_divided = bool(self._alone) and any(self._router.topic_of(message.topic) in self._alone for message in messages)
            part = messages[: self._part_size] if is_divided else messages
            began_s = self._clock()
            try:
                write(part, reached if len(part) == len(messages) else TablePosition.of(part[-1]))
            except RefusedError as refused:
                if refused.is_alone and (len(part) == 1 or not is_divided):
                    raise
                if refused.is_alone:
                    self._part_size = len(part) // 2  # What comes before the refused message is sent.
            else:
                is_quick = self._clock() - began_s < _QUICK_SHARE * self._settings.relay.transaction_timeout / 1000
                if is_divided:
                    self._part_size = min(2 * self._part_size, _ALONE_AT_ONCE) if is_quick else max(1, self._part_size // 2)
                messages = messages[len(part) :]
                if not messages:
                    return True
                if not may_go_on():
                    return False

    def _records_of(self, messages: Iterable[CommittedMessage]) -> list[RelayedRecord]:
        """Stop the topics that take no messages, and return the records for the others."""
        messages = [message for message in messages if message.topic not in self._positions.stopped]
        topics, records, stops = self._real({message.topic for message in messages}), list[RelayedRecord](), dict[str, Stop]()
        for message in messages:
            topic = topics[message.topic]
            if topic.refusal is None:
                records.append(self._router.record_of(message, topic.partitions))
            elif message.topic not in stops:
                stops[message.topic] = Stop(self._positions.after, message.transaction_id, *topic.refusal)
        self._stop(stops)
        return records

    def _real(self, names: Iterable[str]) -> dict[str, RealTopic]:
        """Return the real topic of each topic that messages name."""
        topics = {named: self._router.topic_of(named) for named in names}
        found = {topic: RealTopic(0, refusal) for topic in topics.values() if (refusal := self._router.refusal(topic))}
        found |= self._topics.of(sorted(set(topics.values()) - found.keys()))
        return {named: found[topic] for named, topic in topics.items()}

    def _stop(self, stops: Mapping[str, Stop]) -> None:
        """Stop topics. The next transaction writes it."""
        for named, stop in stops.items():
            self._report.refusals += 1
            self._retries.later(named)
            log.warning(
                "event=topic_stopped topic=%r transaction_id=%r refusal=%s cause=%r", named, stop.transaction_id, stop.refusal, stop.cause
            )
        self._positions = self._positions.with_stops(stops)
        self._unwritten.update(stops)

    def try_stopped(self, may_go_on: Callable[[], bool]) -> bool:
        """Try stopped topics again, for a turn. Return True if there are some that need not wait for the next one."""
        end_s = self._clock() + _TURN_S

        def is_turn() -> bool:
            return may_go_on() and self._clock() < end_s

        has_more = True
        while has_more:
            due = self._retries.take(_ASKED_AT_ONCE)
            self._try_some(due, is_turn)
            has_more = len(due) >= _ASKED_AT_ONCE and is_turn()
        self._report.positions = self._positions
        return self._retries.has_soon()

    def _try_some(self, due: Sequence[str], is_turn: Callable[[], bool]) -> None:
        """Try stopped topics: at least one of those that take messages again, and others until their turn ends."""
        topics, stopped = self._real(due), self._positions.stopped
        refused = {named: Stop(*stopped[named][:2], *topic.refusal) for named, topic in topics.items() if topic.refusal}
        self._write([], stops=refused)
        for named in refused:
            self._retries.later(named)
        ready = deque(named for named in due if named not in refused)
        for _ in range(len(ready)):
            named = ready.popleft()
            if self._try(named, topics[named].partitions, is_turn):
                ready.append(named)
            if not is_turn():
                break
        for named in ready:
            self._retries.soon(named)

    def _try(self, named: str, partitions: int, is_turn: Callable[[], bool]) -> bool:
        """Send a stopped topic what it has not got; some of it where that is much, and return True then.

        It goes on with the others when it has everything that they have.
        """
        stop, end = self._positions.stopped[named], self._positions.after or START

        def write_part(messages: Sequence[CommittedMessage], reached: TablePosition) -> None:
            records = [self._router.record_of(message, partitions) for message in messages]
            self._write(records, stops={named: stop._replace(after=reached)})

        for portion in self._table.read(stop.after, named):
            # The others have not got the messages after `end` yet, with which this topic goes on.
            messages = [message for message in portion.messages if TablePosition.of(message) <= end]
            try:
                is_whole = self._write_in_parts(messages, min(portion.reached, end), write_part, is_turn)
            except RefusedError as refused:
                at = self._positions.stopped[named].after
                self._stop({named: Stop(at, refused.record.transaction_id, refused.refusal, refused.cause)})
                self._write([])
                return False
            if is_whole and portion.reached >= end:
                break
            if not is_whole or not is_turn():
                return True
        self._write([], stops={named: None})
        log.info("event=topic_resumed topic=%r", named)
        return False

    def _write(self, records: list[RelayedRecord], after: TablePosition | None = None, stops: Mapping[str, Stop | None] = {}) -> None:
        """Write messages and what changes of the positions; nothing if there is neither.

        Args:
            records: the messages.
            after: see `RelayPositions`; None leaves it as it is.
            stops: the stops that change, besides those that `_stop` has noted.

        Raises:
            RefusedError: a topic refuses a message. Nothing was written. If it was not sent alone, it is next time.
            TransactionLostError: it is not known what was written.
        """
        relay, kafka = self._settings.relay, self._settings.kafka
        positions = self._positions.with_stops(stops)
        if after is not None:
            positions = replace(positions, after=after)
        changed = changes(relay.name, self._written, positions, {*self._unwritten, *stops})
        if not changed:
            return
        try:
            self._producer.write(records, self._alone, kafka.relay_topic, changed)
        except RefusedError as refused:
            self._topics.forget()
            self._renew()
            if not refused.is_alone:
                # The refusal may be of other messages in the same batch, or pass.
                self._alone[refused.record.topic], self._part_size = _ALONE_FOR, 1
            raise
        self._positions = self._written = self._report.positions = positions
        self._unwritten.clear()
        self._report.relayed += len(records)
        self._report.transactions += 1
        self._count_alone(records)

    def _renew(self) -> None:
        """Replace the producer: after a refusal librdkafka fails its next transaction (karafka/waterdrop#501).

        Raises:
            TransactionLostError: another relay has taken over, and has written since.
        """
        self._producer.close()
        self._producer = RelayProducer(self._settings)
        if self.stored() != self._written:
            raise TransactionLostError("another relay has taken over")

    def _count_alone(self, records: list[RelayedRecord]) -> None:
        for topic in list(self._alone):
            self._alone[topic] -= sum(record.topic == topic for record in records)
            if self._alone[topic] <= 0:
                del self._alone[topic]
