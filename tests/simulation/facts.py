"""A history, indexed: what became of each record, and what a horizon proves to have been read."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from tests.simulation.history import CHECK, CLOCK_SET, HALF, OP, History, KafkaState, Place, Record, Row

VERDICTS = ("COMMIT", "ROLLBACK")


class Ticks:
    """The good ticks of all partitions: what a horizon proves to have been read, and which one is known when."""

    def __init__(self, ticks: Iterable[Record], *, clocks_jumped: bool) -> None:
        self._clocks_jumped = clocks_jumped
        of_place: dict[Place, list[Record]] = defaultdict(list)
        for tick in ticks:
            of_place[tick.topic, tick.partition].append(tick)
        self._newest: dict[Place, list[tuple[int, int, int]]] = {}
        """Place → (seq, offset, newest time so far) of each tick that was newer than all before it."""
        for place, those in of_place.items():
            found: list[tuple[int, int, int]] = []
            for tick in those:
                if not found or tick.at_ms > found[-1][2]:
                    found.append((tick.seq, tick.offset, tick.at_ms))
            self._newest[place] = found
        self.all = sorted((tick for those in of_place.values() for tick in those), key=lambda tick: tick.seq)
        counts = {tick.topic: int(tick.header("PARTITIONS")) for tick in reversed(self.all)}
        self._first = [place for place in self._newest if place[1] < counts[place[0]]]
        """The partitions that there were from the start. Every horizon waits for them."""
        self._times = sorted({tick.at_ms for tick in self.all})
        """Every horizon is the time of a tick."""

    def is_read_at(self, record: Record, horizon_ms: int) -> bool:
        """Return True if a job at this horizon has read the record: it is before the tick that brought the horizon."""
        place = record.topic, record.partition
        newest = self._newest.get(place, [])
        number = bisect_left(newest, horizon_ms, key=lambda tick: tick[2])
        if place not in self._first and (number == 0 or self._clocks_jumped):  # The horizon may have come before this partition.
            return False
        return number < len(newest) and record.offset < newest[number][1]

    def horizon_before(self, seq: int) -> int:
        """Return the latest horizon that a job can have known before an event: the first partitions bound it."""
        return min((self._latest(place, seq) for place in self._first), default=-1)

    def published_since(self, seq: int, horizon_ms: int) -> int | None:
        """Return how long after an event the ticks that bring a horizon were written.

        That is by the publisher's clock. None if it was set back meanwhile.
        """
        number = bisect_left(self.all, seq, key=lambda tick: tick.seq)
        last = max((tick.seq for tick in self.all if tick.at_ms == horizon_ms), default=2**62)
        times = [int(tick.header("TICK")) for tick in self.all[max(0, number - 1) :] if tick.seq <= last]
        return None if times != sorted(times) else times[-1] - times[0] if times else 0

    def earliest(self, first_ms: int, interval_ms: int, number: int) -> int:
        """Return the first horizon at which the check of a number can be due: each has its own, an interval apart."""
        horizon_ms = first_ms
        for each in range(number):
            at = bisect_left(self._times, horizon_ms + interval_ms * bool(each))
            if at == len(self._times):
                return 2**62
            horizon_ms = self._times[at]
        return horizon_ms

    def _latest(self, place: Place, seq: int) -> int:
        newest = self._newest[place]
        number = bisect_left(newest, seq, key=lambda tick: tick[0])
        return newest[number - 1][2] if number else -1


class Facts:
    """A history, indexed."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.numbers = history.numbers
        self.fewest_checks = min((numbers.check_max for numbers in history.numbers), default=0)
        self.most_checks = max((numbers.check_max for numbers in history.numbers), default=0)
        self.smallest_body = min((numbers.max_body_bytes for numbers in history.numbers), default=0)
        """The largest body that was always allowed. It depends on the settings of the time whether a larger one is."""
        self.all = {(record.topic, record.partition, record.offset): record for record in history.records}
        good = [record for record in history.records if record.flaw is None and record.state is KafkaState.COMMITTED]
        self.ticks = Ticks((record for record in good if record.header("TICK")), clocks_jumped=history.clocks_jumped)
        said = [record for record in good if not record.header("TICK") and not record.header("HALF_LOST")]
        self.halves = [record for record in said if record.topic == HALF]
        self.ops = [record for record in said if record.topic == OP]
        self.flawed = [record for record in history.records if record.flaw is not None and record.state is KafkaState.COMMITTED]
        self.halves_of = _by_id(self.halves)
        self.verdicts_of = _by_id(op for op in self.ops if op.header("ACTION") in VERDICTS)
        self.messages = [row for row in history.rows if row.table == "messages"]
        self.discarded = [row for row in history.rows if row.table == "discarded"]
        self.quarantine = [row for row in history.rows if row.table == "quarantine"]
        self.refused: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
        for row in self.quarantine:
            self.refused[row["source_topic"], row["source_partition"], row["source_offset"]].append(row)
        self.committed_at = {pointer_of(row): row for row in self.messages}
        self.discarded_at = {pointer_of(row): row for row in self.discarded}
        self.checks: dict[tuple[str, int, int], dict[int, Record]] = defaultdict(dict)
        """Half → number → the first request with that number."""
        self.requests: dict[tuple[str, int, int], list[Record]] = defaultdict(list)
        """Half → every request: a batch that is repeated, and an adoption, send them again."""
        for record in history.records:
            if record.topic == CHECK:
                transaction_id, place, number = record.header("CHECK_ID").rsplit(":", 2)
                partition, offset = place.split(".")
                half = transaction_id, int(partition), int(offset)
                self.checks[half].setdefault(int(number), record)
                self.requests[half].append(record)
        oldest_ms: dict[int, int] = {}
        has_all: dict[int, bool] = {}
        for record in history.records:
            if record.topic == HALF:
                has_all[record.partition] = has_all.get(record.partition, True) and record.deleted_seq is None
                if record.deleted_seq is None:
                    oldest_ms.setdefault(record.partition, record.at_ms)
        self._halves_since_ms = 0 if any(has_all.values()) else min(oldest_ms.values(), default=2**62)
        settled_ms = [*(row["committed_at"] for row in self.messages), *(row["discarded_at"] for row in self.discarded)]
        self._last_settled_ms = max(settled_ms, default=0)
        self._adopted_seqs = [act.seq for act in history.acts if "--adopt" in act.detail]
        self.was_adopted = bool(self._adopted_seqs)
        self.let_in_of = _by_id(half for half in self.flawed if half.topic == HALF and self.may_be_let_in(half))
        """The halves above the limit, of an id, that may be taken for good ones."""
        self.checkpoints = len({act.detail.split()[0] for act in history.acts if act.name == "started"})
        self.decided = {decision.transaction_id: decision for decision in history.decisions}

    def fates(self, half: Record) -> list[str]:
        """Return what became of a half itself, in tables."""
        pointer = place_of(half)
        found = ["committed"] * (pointer in self.committed_at) + ["discarded"] * (pointer in self.discarded_at)
        return found + [row["reason"] for row in self.refused.get((HALF, half.partition, half.offset), ())]

    def may_have_jumped(self, after: Record, before: Record) -> bool:
        """Return True if a broker's clock was set between two records, or if it is not known when one was."""
        jumps = [act.seq for act in self.history.acts if act.name == CLOCK_SET]
        return self.history.clocks_jumped and (not jumps or any(after.seq < seq < before.seq for seq in jumps))

    def records_of(self, row: Row) -> list[Record]:
        """Return the half and the COMMIT of a message."""
        return [self.all[HALF, row["half_partition"], row["half_offset"]], self.all[OP, row["op_partition"], row["op_offset"]]]

    def verdicts(self, half: Record) -> list[Record]:
        """Return the verdicts that name the half's id, group and incarnation, in the order in which they were sent."""
        return [op for op in self.verdicts_of[half.text_key] if name_of(op) == name_of(half)]

    def was_refused(self, op: Record, by_seq: int) -> bool:
        """Return True if a verdict was refused before an adoption that was before `by_seq`: it is not judged again."""
        return any(row.seq < seq < by_seq for row in self.refused.get((OP, op.partition, op.offset), ()) for seq in self._adopted_seqs)

    def is_held_and_refused(self, half: Record) -> bool:
        """Return True if an adoption has refused a half that is readable, and may do so.

        It reads again, together with a half from before, what came when the id was free again (R11, R12).
        """
        row, refusals = self.committed_at.get(place_of(half)), self.refused.get((HALF, half.partition, half.offset), [])
        if row is None or place_of(half) in self.discarded_at or len(refusals) != 1 or refusals[0]["epoch"] <= row["epoch"]:
            return False
        names = {name_of(other)[1:] for other in self.halves_of[half.text_key]}
        _, group, incarnation = name_of(half)
        others_of_group = [number for of, number in names if of == group]
        return {
            "id_conflict": any(of != group for of, _ in names),
            "stale_incarnation": any(number > incarnation for number in others_of_group),
            "incarnation_refused": any(number < incarnation for number in others_of_group),
        }.get(refusals[0]["reason"], False)

    def adopted_without(self, record: Record) -> list[int]:
        """Return when the adoptions ended that came after a record and may not have found it in Kafka any more."""
        starts = [*(act.seq for act in self.history.acts if act.name == "started"), 2**62]
        ends = (min(end for end in starts if end > seq) for seq in self._adopted_seqs if seq > record.seq)
        return [end for end in ends if record.deleted_seq is not None and record.deleted_seq < end]

    def request_of(self, row: Row) -> Record | None:
        """Return the request of a discarded half's last check: the first that its checkpoint sent. It may repeat it."""
        started = [act for act in self.history.acts if act.name == "started" and act.seq < row.seq]
        by_others = [act.seq for act in started if act.detail.split()[0] != started[-1].detail.split()[0]]
        since = next((act.seq for act in started if by_others and act.seq > by_others[-1]), 0)
        number = str(row["check_times"])
        sent = (check for check in self.requests[pointer_of(row)] if check.header("TRANSACTION_CHECK_TIMES") == number)
        return next((check for check in sent if since < check.seq < row.seq), None)

    def is_known(self, group: str, seq: int) -> bool:
        """Return True if Kafka knows a consumer group at a time: it has members, or has committed an offset."""
        if any(commit.group == group and commit.seq < seq for commit in self.history.commits):
            return True
        counts = [members.members for members in self.history.members if members.group == group and members.seq < seq]
        return bool(counts and counts[-1])

    def may_be_anew(self, half: Record) -> bool:
        """Return True if a half may come anew after its verdict: its id was used before.

        A clock jumped, and the earlier half is forgotten. Or the id was free again: if the verdict was read before its
        half, it counted as a copy of the former one's.
        """
        if len(self.halves_of[half.text_key]) < 2:
            return False
        remembered_ms = max((numbers.resolved_retention_ms for numbers in self.numbers), default=0)
        return self.history.clocks_jumped or any(op.at_ms + remembered_ms < half.at_ms for op in self.verdicts_of[half.text_key])

    def is_orphan(self, op: Record) -> bool:
        """Return True if a verdict was refused, and so does not count. A new checkpoint believes a former one.

        To a later checkpoint a COMMIT may be an orphan that has made a message: Kafka has deleted its half since.
        """
        if any((row["op_partition"], row["op_offset"]) == (op.partition, op.offset) for row in self.messages):
            return False
        reasons = ("orphan_op", "late_verdict", *(("group_mismatch",) if self.was_adopted else ()))
        return any(row["reason"] in reasons for row in self.refused.get((OP, op.partition, op.offset), ()))

    def may_be_aged_out(self, op: Record) -> bool:
        """Return True if a new checkpoint may count a verdict as one of a half that Kafka has deleted."""
        was_there = op.seq < max(self._adopted_seqs, default=0)
        return was_there and op.at_ms < min(self._halves_since_ms, self._last_settled_ms)

    def may_be_let_in(self, half: Record) -> bool:
        """Return True if a half above the limit may be taken for a good one.

        A former checkpoint read it, and ended before it refused it. To the new one it may have had a higher limit.
        """
        return half.flaw == "body_too_large" and self.was_adopted


def _by_id(records: Iterable[Record]) -> defaultdict[str, list[Record]]:
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record.text_key].append(record)
    return found


def place_of(record: Record) -> tuple[str, int, int]:
    return record.text_key, record.partition, record.offset


def pointer_of(row: Row) -> tuple[str, int, int]:
    return row["transaction_id"], row["half_partition"], row["half_offset"]


def name_of(record: Record) -> tuple[str, str, int]:
    return record.text_key, record.header("PGROUP"), int(record.header("INCARNATION", "0"))
