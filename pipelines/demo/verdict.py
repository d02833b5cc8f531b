"""Judges a demo: compares what tables and topics hold with what was sent."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfway.pipelines.demo.traffic import TOPIC, DemoCounts, PlannedTransaction, Traffic, TransactionEnd
from halfway.pipelines.demo.watch import Row, TableWatch, TopicWatch, read_status
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table


@dataclass
class DemoVerdict:
    """The state of a demo: what was found, and what is wrong with it."""

    found: DemoCounts
    problems: list[str] = field(default_factory=list)
    is_settled: bool = False
    """True if every transaction has its outcome."""


class DemoJudge:
    """Judges a demo by the tables, the topics and the job's status."""

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        """Start to watch, before `traffic` sends anything.

        Raises:
            SetupError: the checkpoint is not on this machine.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        self._storage = settings.storage
        self._traffic = traffic
        self._horizon_ms = 0
        read_status(self._storage)
        self._tables = TableWatch(settings.storage, traffic.prefix)
        self._topics = TopicWatch(settings.kafka, traffic.prefix)

    def judge(self) -> DemoVerdict:
        """Judge the demo as it is now.

        A rolled-back transaction leaves no row. It counts as rolled back if its ROLLBACK is in the op topic, the job's
        horizon has passed that record, and no table holds the id. If the job had missed the ROLLBACK, it would have
        sent a check, and `checked` would be too high.
        """
        traffic = self._traffic
        # Read the status before the tables, so that the tables hold everything up to its horizon.
        status = read_status(self._storage)
        self._horizon_ms = max(self._horizon_ms, (status and status.horizon_ms) or 0)
        messages, discarded = self._tables.rows(Table.MESSAGES), self._tables.rows(Table.DISCARDED)
        quarantined = self._tables.rows(Table.QUARANTINE, traffic.keyless)
        # Read the topics after the tables, so that they hold every check that the tables count.
        is_sent = traffic.is_sent
        is_read = self._topics.read() and is_sent
        ends = self._ends(messages, discarded)
        sent = list(traffic.planned)[: traffic.sent]
        counted = Counter(end for found in ends.values() for end in found)
        found = DemoCounts(
            committed=counted[TransactionEnd.COMMITTED],
            rolled_back=counted[TransactionEnd.ROLLED_BACK],
            checked=len(self._topics.checks),
            discarded=counted[TransactionEnd.DISCARDED],
            quarantined=len(quarantined),
            pending=sum(transaction_id not in ends for transaction_id in sent),
        )
        is_past = is_read and self._horizon_ms > self._topics.last_op_ms
        is_settled = is_past and found.pending == 0 and found.quarantined >= len(traffic.quarantined)
        problems = [
            *_wrong_ends(traffic.planned, ends),
            *_wrong_contents(traffic.planned, (*messages, *discarded), self._topics.checks),
            *_wrong_reasons(traffic.quarantined, discarded, quarantined),
        ]
        return DemoVerdict(found, problems, is_settled)

    def _ends(self, messages: Iterable[Row], discarded: Iterable[Row]) -> dict[str, list[TransactionEnd]]:
        """Return the ends of each transaction, by id. A correct one has a single end."""
        ends: defaultdict[str, list[TransactionEnd]] = defaultdict(list)
        for rows, end in ((messages, TransactionEnd.COMMITTED), (discarded, TransactionEnd.DISCARDED)):
            for row in rows:
                ends[row["transaction_id"]].append(end)
        for (transaction_id, group), at_ms in self._topics.rollbacks.items():
            planned = self._traffic.planned.get(transaction_id)
            if planned is not None and planned.group == group and at_ms < self._horizon_ms and transaction_id not in ends:
                ends[transaction_id].append(TransactionEnd.ROLLED_BACK)
        return ends


def _wrong_ends(planned: Mapping[str, PlannedTransaction], ends: Mapping[str, list[TransactionEnd]]) -> list[str]:
    problems = []
    for transaction_id, found in ends.items():
        wanted = planned.get(transaction_id)
        if len(found) > 1:
            problems.append(f"{transaction_id} has {len(found)} outcomes: {', '.join(found)}")
        elif wanted is None:
            problems.append(f"{transaction_id} was {found[0]}, and must not have an outcome")
        elif found[0] is not wanted.end:
            problems.append(f"{transaction_id} was {found[0]}, expected {wanted.end}")
    return problems


def _wrong_contents(planned: Mapping[str, PlannedTransaction], rows: Iterable[Row], checks: Mapping[str, set[int]]) -> list[str]:
    """Compare rows with what was sent, and their check_times with the checks in the topic, which have no gaps (R6)."""
    problems = []
    for row in rows:
        wanted = planned.get(row["transaction_id"])
        if wanted is None:
            continue
        expected = {"topic": TOPIC, "body": wanted.body, "tags": wanted.tags, "keys": wanted.keys, "producer_group": wanted.group}
        differing = [name for name, value in expected.items() if row[name] != value]
        if differing:
            problems.append(f"{wanted.transaction_id}: {', '.join(differing)} differ from what was sent")
        numbers = checks.get(wanted.transaction_id, set())
        if numbers != set(range(1, row["check_times"] + 1)):
            problems.append(f"{wanted.transaction_id}: check_times is {row['check_times']}, the check topic has {sorted(numbers)}")
    return problems


def _wrong_reasons(expected: Iterable[Reason], discarded: Iterable[Row], quarantined: Iterable[Row]) -> list[str]:
    reasons, wanted = Counter(row["reason"] for row in quarantined), Counter(str(reason) for reason in expected)
    return [
        f"{row['transaction_id']} was discarded for {row['reason']}, expected {Reason.CHECK_MAX}"
        for row in discarded
        if row["reason"] != Reason.CHECK_MAX
    ] + [
        f"quarantined for {reason}: {reasons[reason]}, expected {wanted[reason]}"
        for reason in sorted(reasons | wanted)
        if reasons[reason] != wanted[reason]
    ]
