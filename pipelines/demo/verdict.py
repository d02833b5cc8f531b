"""Where `halfway demo` stands: what was found of what was sent, and what is wrong with it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfway.pipelines.demo.traffic import TOPIC, Counts, End, Planned, Traffic
from halfway.pipelines.demo.watch import Row, TableWatch, TopicWatch, read_status
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table


@dataclass
class Account:
    """Where the demo stands: what was found, what is wrong with it, and whether more is to come."""

    found: Counts
    problems: list[str] = field(default_factory=list)
    is_settled: bool = False


class Accountant:
    """Puts tables, topics and the job's status together."""

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        """Begin to watch; `traffic` has sent nothing yet.

        Raises:
            SetupError: the package deltalake is missing, or the checkpoint is not on this machine.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        self._storage = settings.storage
        self._traffic = traffic
        self._horizon_ms = 0
        read_status(self._storage)
        self._tables = TableWatch(settings.storage, traffic.prefix)
        self._topics = TopicWatch(settings, traffic.prefix)

    def watch(self, limit_s: float) -> None:
        """Read what is new in the topics, for at most `limit_s`."""
        self._topics.poll(limit_s)

    def close(self) -> None:
        """Disconnect."""
        self._topics.close()

    def account(self) -> Account:
        """Return where the demo stands now.

        A rollback leaves nothing that could be read. It is found by its ROLLBACK in the op topic, once the job's horizon is past it,
        and by its absence from the tables; had the job missed it all the same, `checked` would tell, as it would have been asked about.
        """
        traffic = self._traffic
        # The status first: what it says has been read, the tables then hold.
        self._horizon_ms = max(self._horizon_ms, read_status(self._storage).get("horizon_ms") or 0)
        messages, discarded = self._tables.rows(Table.MESSAGES), self._tables.rows(Table.DISCARDED)
        quarantined = self._tables.rows(Table.QUARANTINE, traffic.keyless)
        # The topics last: a check that the tables count is there by now.
        is_read = traffic.is_sent and self._topics.read_to_end()
        ends = self._ends(messages, discarded)
        sent = list(traffic.planned)[: traffic.sent]
        counted = Counter(end for found in ends.values() for end in found)
        found = Counts(
            committed=counted[End.COMMITTED],
            rolled_back=counted[End.ROLLED_BACK],
            checked=len(self._topics.asked),
            discarded=counted[End.DISCARDED],
            quarantined=len(quarantined),
            pending=sum(transaction_id not in ends for transaction_id in sent),
        )
        is_past = is_read and self._horizon_ms > self._topics.last_op_ms
        is_settled = is_past and found.pending == 0 and found.quarantined >= len(traffic.quarantined)
        problems = [
            *_wrong_ends(traffic.planned, ends),
            *_wrong_contents(traffic.planned, (*messages, *discarded), self._topics.asked),
            *_wrong_reasons(traffic.quarantined, discarded, quarantined),
        ]
        return Account(found, problems, is_settled)

    def _ends(self, messages: Iterable[Row], discarded: Iterable[Row]) -> dict[str, list[End]]:
        """Return by transaction id how it ended: one end, if all is right."""
        ends: defaultdict[str, list[End]] = defaultdict(list)
        for rows, end in ((messages, End.COMMITTED), (discarded, End.DISCARDED)):
            for row in rows:
                ends[row["transaction_id"]].append(end)
        for (transaction_id, group), at_ms in self._topics.rollbacks.items():
            planned = self._traffic.planned.get(transaction_id)
            if planned is not None and planned.group == group and at_ms < self._horizon_ms and transaction_id not in ends:
                ends[transaction_id].append(End.ROLLED_BACK)
        return ends


def _wrong_ends(planned: Mapping[str, Planned], ends: Mapping[str, list[End]]) -> list[str]:
    problems = []
    for transaction_id, found in ends.items():
        wanted = planned.get(transaction_id)
        if len(found) > 1:
            problems.append(f"{transaction_id} is there {len(found)} times: {', '.join(found)}")
        elif wanted is None:
            problems.append(f"{transaction_id} was {found[0]}, and must not be there at all")
        elif found[0] is not wanted.end:
            problems.append(f"{transaction_id} was {found[0]}, expected {wanted.end}")
    return problems


def _wrong_contents(planned: Mapping[str, Planned], rows: Iterable[Row], asked: Mapping[str, set[int]]) -> list[str]:
    """Compare what came out with what went in, and the number of checks with the checks in the topic, which have no gaps (R6)."""
    problems = []
    for row in rows:
        wanted = planned.get(row["transaction_id"])
        if wanted is None:
            continue
        expected = {"topic": TOPIC, "body": wanted.body, "tags": wanted.tags, "keys": wanted.keys, "producer_group": wanted.group}
        differing = [name for name, value in expected.items() if row[name] != value]
        if differing:
            problems.append(f"{wanted.transaction_id}: {', '.join(differing)} came out other than sent")
        numbers = asked.get(wanted.transaction_id, set())
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
