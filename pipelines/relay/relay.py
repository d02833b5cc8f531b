"""Runs the relay: verifies where it begins, waits until it is active, and starts again after an interruption."""

import logging
import math
import threading
import time
from typing import NamedTuple

from confluent_kafka.admin import AclOperation

from halfway.pipelines.kafka.admin import Admin, admin_client, partition_counts
from halfway.pipelines.kafka.rights import verify_rights
from halfway.pipelines.kafka.topic_setup import verify_one_partition
from halfway.pipelines.relay.active_relay import ActiveRelay, RelayReport
from halfway.pipelines.relay.leader_election import LeaderElection, relay_id
from halfway.pipelines.relay.position_reader import missing_relay_topic, read_positions
from halfway.pipelines.relay.positions import BEFORE_THE_FIRST, RelayPositions, TablePosition
from halfway.pipelines.relay.relay_producer import TransactionLostError
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.schemas.errors import KafkaUnavailableError, RelayError, TableError, TopicError
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_UNKNOWN_LIMIT_S = 60.0
"""A broker that has just started knows no topic for a moment."""
_BEGIN_COUNTS_S = 60.0
"""How long after its start a relay takes `--begin`: a standby must not send all again after a lost bookmark."""


class Begin(NamedTuple):
    """Where a relay without a bookmark begins: after a position in the table, or with None at the first message."""

    after: TablePosition | None


class Relay:
    """One relay. It stands by until it is the active one of its name.

    Args:
        settings: all settings.
        begin: where to begin if Kafka holds no bookmark. None refuses that.
    """

    def __init__(self, settings: Settings, begin: Begin | None = None) -> None:
        """Open the table. Does not connect to Kafka.

        Raises:
            SetupError: deltalake is not installed.
            TableError: there is no table, or it cannot be read without Spark.
        """
        self._settings, self._table, self._begin = settings, RelayTable(settings.storage), begin
        self._started_s = time.monotonic()
        self._stopping = threading.Event()
        self.report = RelayReport()

    def stop(self) -> None:
        """End the run after the present transaction. May be called from a signal handler and from any thread."""
        self._stopping.set()

    def run(self, *, available_now: bool = False) -> bool:
        """Relay until `stop`; with `available_now` until all messages that there are were read. Return True then.

        Raises:
            TopicError: the relay's own topic is missing at the start, or for a minute.
            RelayError: Kafka holds no bookmark, or only a part of it, or one of another table.
            AccessError: a right is missing.
            KafkaUnavailableError: Kafka cannot be reached at the start.
        """
        client = admin_client(self._settings.kafka)
        self._verify(client)
        election = LeaderElection(self._settings)
        unknown_since_s = math.inf
        try:
            while not self._stopping.is_set():
                try:
                    if election.serve(self._settings.relay.poll_interval / 1000):
                        self._run_active(client, election, available_now=available_now)
                        if available_now and not self._stopping.is_set() and election.is_leader:
                            return True
                except (TransactionLostError, KafkaUnavailableError, TableError, TopicError, OSError) as error:
                    if self.report.is_active or not isinstance(error, TopicError):
                        unknown_since_s = math.inf
                    if isinstance(error, TopicError):
                        unknown_since_s = min(unknown_since_s, time.monotonic())
                    if time.monotonic() > unknown_since_s + _UNKNOWN_LIMIT_S:
                        raise
                    self.report.interruptions += 1
                    log.warning("event=relay_interrupted cause=%r", str(error))
                else:
                    unknown_since_s = math.inf
                    continue
                finally:
                    self.report.is_active = False
                # Does not wait for the event: a signal handler in this thread that sets it could hang on its lock.
                time.sleep(_AGAIN_S)
        finally:
            election.close()
            log.info("event=relay_stopped")
        return False

    def _verify(self, client: Admin) -> None:
        kafka, relay = self._settings.kafka, self._settings.relay
        group = relay_id(kafka, relay.name)
        partitions = partition_counts(client, [kafka.relay_topic]).get(kafka.relay_topic)
        if partitions is None:
            raise missing_relay_topic(kafka.relay_topic)
        verify_one_partition(kafka.relay_topic, partitions)
        verify_rights(client, {kafka.relay_topic: (AclOperation.READ, AclOperation.WRITE)}, groups=(group,))
        positions = read_positions(client, kafka, group).get(relay.name)
        if positions is not None and self._begin is not None:
            raise RelayError(f"relay {relay.name} has a bookmark already ({positions.after or BEFORE_THE_FIRST}): start it without --begin")
        self._verified(positions)

    def _verified(self, positions: RelayPositions | None) -> RelayPositions:
        """Return the positions to begin with.

        Raises:
            RelayError: there are none, or not all, or they are of another table.
        """
        name, table = self._settings.relay.name, self._table.id
        if positions is None:
            if self._begin is None or time.monotonic() > self._started_s + _BEGIN_COUNTS_S:
                raise RelayError(
                    f"Kafka holds no bookmark of relay {name}. Start it once with --begin earliest, which sends all messages of the "
                    "table, or with --begin EPOCH.BATCH, which sends those after it (its consumers must not have them already)"
                )
            return RelayPositions(table, self._begin.after)
        if positions.lost:
            raise RelayError(
                f"the topic {self._settings.kafka.relay_topic} has lost {positions.lost} of the topics that relay {name} has stopped, "
                "whose messages would be left out. Nothing but compaction may delete its records (cleanup.policy=compact). Begin with "
                "another relay.name, as docs/relay.md says of a lost bookmark"
            )
        if positions.table != table:
            raise RelayError(
                f"the bookmark of relay {name} ({positions.after or BEFORE_THE_FIRST}) is of another table than the one in storage, "
                "which was recreated: use another relay.name, and start it once with --begin"
            )
        return positions

    def _run_active(self, client: Admin, election: LeaderElection, *, available_now: bool) -> None:
        """Relay while this is the active relay.

        Raises:
            TransactionLostError: a transaction did not end, or another relay has taken over.
            KafkaUnavailableError: Kafka cannot be reached.
            TopicError: Kafka does not know the relay's own topic, or not yet.
            RelayError: Kafka holds no bookmark, or only a part of it, or one of another table.
            TableError: the table is gone, was recreated, or cannot be read.
        """

        def may_go_on() -> bool:
            return election.serve(0) and not self._stopping.is_set()

        active = ActiveRelay(self._settings, self._table, client, self.report)
        try:
            self._table.look()
            stored = active.stored()
            active.take_over(stored, self._verified(stored))
            self._begin = None  # It has begun: a bookmark that is lost later is not to send everything again.
            self.report.behind_since_ms = self.report.last_look_s = None  # What it knew when it was active before is old.
            is_behind = True
            while may_go_on():
                is_behind = is_behind or self._table.has_news()
                if is_behind:
                    is_behind = active.read_on(may_go_on)
                has_more = active.try_stopped(may_go_on) or is_behind
                if available_now and not has_more:
                    return
                if not has_more:
                    election.serve(self._settings.relay.poll_interval / 1000)
        finally:
            active.close()
