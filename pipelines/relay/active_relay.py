"""The active relay: reads the table on, and writes messages and bookmark to Kafka in one transaction.

The bookmark in Kafka is the only memory. Whatever fails, the next transaction begins where the last committed one
ended. A topic that refuses a message is stopped with a bookmark of its own, and the others go on. A large batch of the
job takes several transactions: Kafka aborts one that lasts too long.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfway.clients.reading.committed import CommittedMessage
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.relay.leader_election import relay_id
from halfway.pipelines.relay.position_reader import read_positions
from halfway.pipelines.relay.positions import START, Reached, RelayPositions, Stop, changes
from halfway.pipelines.relay.real_topics import RealTopic, RealTopics
from halfway.pipelines.relay.relay_producer import RefusedError, RelayProducer, TransactionLostError
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.pipelines.relay.route import RelayedRecord, Router
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_ALONE_FOR = 1_000
"""How many messages of a topic are sent one by one after it has refused a batch of them."""
_ALONE_AT_ONCE = 100
"""So many messages are then in a transaction: each waits for the one before."""
_TIMES_AT_ONCE = 5
"""After so many transactions for a topic that goes on, the others get their turn."""


@dataclass
class RelayReport:
    """What a relay has done since it started, and how far it is behind. Displayed; no outcome depends on it."""

    is_active: bool = False
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
    """

    def __init__(self, settings: Settings, table: RelayTable, client: Admin, report: RelayReport) -> None:
        """Fence every former relay of this name.

        Raises:
            AccessError: this user may not use the transactional id.
            TransactionLostError: Kafka does not answer in time, or refuses.
        """
        self._settings, self._table, self._client, self._report = settings, table, client, report
        self._router = Router(settings)
        self._topics = RealTopics(client)
        self._alone: dict[str, int] = {}
        self._retry_at_s: dict[str, float] = {}
        self._producer = RelayProducer(settings)
        self._positions = RelayPositions("")
        self._written: RelayPositions | None = None

    def close(self) -> None:
        """Forget what is in flight."""
        self._producer.close()

    def stored(self) -> RelayPositions | None:
        """Return the positions in Kafka. What an earlier producer left open is aborted, and it can commit no more.

        Raises:
            KafkaUnavailableError: Kafka cannot be reached.
        """
        relay, kafka = self._settings.relay, self._settings.kafka
        return read_positions(self._client, kafka, relay_id(kafka, relay.name), relay.transaction_timeout / 1000).get(relay.name)

    def take_over(self, stored: RelayPositions | None, positions: RelayPositions) -> None:
        """Begin at the stored positions, without the stops of topics that are no longer allowed."""
        for named in positions.stopped:
            if not self._router.is_allowed(named):
                positions = positions.with_stop(named, None)
        self._written, self._positions = stored, positions
        self._write([], positions)

    def read_on(self, may_go_on: Callable[[], bool]) -> bool:
        """Relay what is after the bookmark. Return True if there may be more, but a stopped topic has its turn."""
        self._report.newest = self._table.newest(self._positions.after)
        for portion in self._table.read(self._positions.after):
            self._relay([message for message in portion.messages if self._router.is_allowed(message.topic)], portion.reached)
            if self._due() or not may_go_on():
                return True
        self._report.behind_since_ms, self._report.last_look_s = None, time.time()
        return False

    def _relay(self, messages: Sequence[CommittedMessage], reached: Reached) -> None:
        """Write messages and bookmark; stop the topics that refuse theirs, and write the rest."""
        if messages:
            self._report.behind_since_ms = round(messages[-1].committed_at.timestamp() * 1000)
        while True:
            try:
                self._write_in_parts(_after(messages, self._positions.after), reached, self._relay_part)
            except RefusedError as refused:
                record = refused.record
                stop = Stop(self._positions.after, record.transaction_id, refused.refusal, refused.cause)
                self._positions = self._stopped(self._positions, record.named, stop)
            else:
                return

    def _relay_part(self, messages: Sequence[CommittedMessage], reached: Reached) -> None:
        self._positions, records = self._sorted(messages)
        self._write(records, self._positions.moved(reached))

    def _write_in_parts(
        self, messages: Sequence[CommittedMessage], reached: Reached, write: Callable[[Sequence[CommittedMessage], Reached], None]
    ) -> None:
        """Write messages in one transaction, or in several while some are sent one by one.

        Raises:
            RefusedError: a topic refuses a message that was sent alone. The parts before were written.
        """
        while True:
            part = messages[:_ALONE_AT_ONCE] if self._alone else messages
            try:
                write(part, reached if len(part) == len(messages) else Reached.of(part[-1]))
            except RefusedError as refused:
                if refused.is_alone:
                    raise
            else:
                messages = messages[len(part) :]
                if not messages:
                    return

    def _sorted(self, messages: Iterable[CommittedMessage]) -> tuple[RelayPositions, list[RelayedRecord]]:
        """Return the positions with the topics stopped that take no messages, and the records for the others."""
        positions, records = self._positions, list[RelayedRecord]()
        topics = self._real({message.topic for message in messages})
        for message in messages:
            if message.topic in positions.stopped:
                continue
            topic = topics[message.topic]
            if topic.refusal:
                positions = self._stopped(positions, message.topic, Stop(self._positions.after, message.transaction_id, *topic.refusal))
            else:
                records.append(self._router.record_of(message, topic.partitions))
        return positions, records

    def _real(self, names: Iterable[str]) -> dict[str, RealTopic]:
        """Return the real topic of each topic that messages name."""
        topics = {named: self._router.topic_of(named) for named in names}
        found = {topic: RealTopic(0, refusal) for topic in topics.values() if (refusal := self._router.refusal(topic))}
        found |= self._topics.of(sorted(set(topics.values()) - found.keys()))
        return {named: found[topic] for named, topic in topics.items()}

    def _stopped(self, positions: RelayPositions, named: str, stop: Stop) -> RelayPositions:
        self._report.refusals += 1
        self._retry_at_s[named] = time.monotonic() + self._settings.relay.retry_interval / 1000
        log.warning(
            "event=topic_stopped topic=%s transaction_id=%s refusal=%s cause=%r", named, stop.transaction_id, stop.refusal, stop.cause
        )
        return positions.with_stop(named, stop)

    def _due(self) -> list[str]:
        """Return the stopped topics whose turn it is."""
        now_s = time.monotonic()
        return sorted(named for named in self._positions.stopped if self._retry_at_s.get(named, 0.0) <= now_s)

    def try_stopped(self) -> bool:
        """Send the stopped topics what they lack, where it is time to try again. Return True if there is more."""
        due, again_s = self._due(), time.monotonic() + self._settings.relay.retry_interval / 1000
        topics, has_more = self._real(due), False
        for named in due:
            is_behind = self._try(named, topics[named])
            self._retry_at_s[named] = 0.0 if is_behind else again_s
            has_more = has_more or is_behind
        self._report.positions = self._positions
        return has_more

    def _try(self, named: str, topic: RealTopic) -> bool:
        """Send a stopped topic what it has not got; some of it where that is much, and return True then.

        It goes on with the others when it has everything that they have.
        """
        stop, end = self._positions.stopped[named], self._positions.after or START
        if topic.refusal:
            self._write([], self._positions.with_stop(named, Stop(stop.after, stop.transaction_id, *topic.refusal)))
            return False

        def write_part(messages: Sequence[CommittedMessage], reached: Reached) -> None:
            records = [self._router.record_of(message, topic.partitions) for message in messages]
            self._write(records, self._positions.with_stop(named, stop._replace(after=reached)))

        for times, portion in enumerate(self._table.read(stop.after, named)):
            if times == _TIMES_AT_ONCE:
                return True
            # The others have not got the messages after `end` yet, with which this topic goes on.
            messages = [message for message in portion.messages if Reached.of(message) <= end]
            try:
                self._write_in_parts(messages, min(portion.reached, end), write_part)
            except RefusedError as refused:
                at = self._positions.stopped[named].after
                again = Stop(at, refused.record.transaction_id, refused.refusal, refused.cause)
                self._write([], self._stopped(self._positions, named, again))
                return False
            if portion.reached >= end:
                break
        self._write([], self._positions.with_stop(named, None))
        log.info("event=topic_resumed topic=%s", named)
        return False

    def _write(self, records: list[RelayedRecord], positions: RelayPositions) -> None:
        """Write messages and what changes of the positions; nothing if there is neither.

        Raises:
            RefusedError: a topic refuses a message. Nothing was written. If it was not sent alone, it is next time.
            TransactionLostError: it is not known what was written.
        """
        relay, kafka = self._settings.relay, self._settings.kafka
        changed = changes(relay.name, self._written, positions)
        if not changed:
            return
        try:
            self._producer.write(records, self._alone, kafka.relay_topic, changed)
        except RefusedError as refused:
            self._topics.forget()
            self._renew()
            if not refused.is_alone:
                # The refusal may be of other messages in the same batch, or pass.
                self._alone[refused.record.topic] = _ALONE_FOR
            raise
        self._positions = self._written = self._report.positions = positions
        self._report.relayed += len(records)
        self._report.transactions += 1
        self._count_alone(records)

    def _renew(self) -> None:
        """Make the producer anew: after a refusal librdkafka fails its next transaction (karafka/waterdrop#501).

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


def _after(messages: Sequence[CommittedMessage], reached: Reached | None) -> Sequence[CommittedMessage]:
    return messages if reached is None else [message for message in messages if Reached.of(message) > reached]
