"""The judge of a history: the rules of docs/rules.md and the promises of docs/reliability.md.

Knows neither the product nor the simulator. It asks of each half, each op, each row and each check request whether the
rules allow what became of it; where a rule depends on what the job had read, it uses bounds that follow from where the
ticks are, so that a finding is always a defect. Times are in ms.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from tests.simulation.facts import Facts, name_of, place_of, pointer_of
from tests.simulation.history import CHECK, HALF, OP, Fate, History, KafkaState, Record, Row


class Finding(NamedTuple):
    """What a history shows, and the rules forbid."""

    rule: str
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.about}: {self.text}"


def judge(history: History) -> list[Finding]:
    """Return everything in a history that the rules forbid."""
    facts = Facts(history)
    return [finding for rule in _RULES for finding in rule(facts)]


def _one_row_each(facts: Facts) -> Iterator[Finding]:
    """A half has one row at most, and one fate; an id has a second message only after it was forgotten (R11)."""
    rows = Counter((row.table, *pointer_of(row)) for row in [*facts.messages, *facts.discarded])
    for (table, transaction_id, *_), times in rows.items():
        if times > 1:
            yield Finding("R1 twice", transaction_id, f"{times} rows of one half in {table}")
    for half in facts.halves:
        fates = set(facts.fates(half))
        if len(fates) > 1 and not facts.is_held_and_refused(half):
            yield Finding("R1 two fates", half.text_key, f"{half.partition}.{half.offset} is {' and '.join(sorted(fates))}")
    of_id: dict[str, list[Row]] = defaultdict(list)
    for row in facts.messages:
        of_id[row["transaction_id"]].append(row)
    remembered_ms = min((numbers.resolved_retention_ms for numbers in facts.numbers), default=0)
    for transaction_id, those in of_id.items():
        # By a clock that was set back, the second one may have the earlier time.
        for first, second in pairwise(sorted(those, key=lambda row: facts.all[HALF, row["half_partition"], row["half_offset"]].seq)):
            # A new checkpoint remembers the ids whose records it reads again.
            is_gone = facts.was_adopted and all(record.deleted_seq is not None for record in facts.records_of(first))
            # It may read a half that nobody but a stranger has sent, in another partition, before the first one.
            other = facts.records_of(second)[0]
            is_gone |= facts.was_adopted and other.is_stray and other.partition != first["half_partition"]
            is_early = facts.may_have_jumped(facts.records_of(first)[1], other)
            if second["half_at"] <= first["committed_at"] + remembered_ms and not is_early and not is_gone:
                yield Finding("R11 twice", transaction_id, "a second message of an id that is still remembered")


def _rows_are_true(facts: Facts) -> Iterator[Finding]:
    """A row tells its half as Kafka held it, and follows from a verdict that names it (R1, R2, R13, R16)."""
    for row in [*facts.messages, *facts.discarded]:
        half = facts.all.get((HALF, row["half_partition"], row["half_offset"]))
        about = row["transaction_id"]
        if half is None or half.text_key != about:
            yield Finding("R1 unknown", about, f"a row of {row.table} points to another record")
            continue
        if half.state is not KafkaState.COMMITTED:
            yield Finding("aborted", about, f"a row of {row.table} for a half that was {half.state}")
        if half.flaw and not facts.may_be_let_in(half):
            yield Finding("R14", about, f"a row of {row.table} for a half that is {half.flaw}")
        told = (row["body"], row["half_at"], row["producer_group"], row["topic"], row["incarnation"])
        if told != (half.value or b"", half.at_ms, half.header("PGROUP"), half.header("REAL_TOPIC"), name_of(half)[2]):
            yield Finding("R1 other content", about, f"{told} of {half}")
        if row.table == "messages" and not any(
            op.header("ACTION") == "COMMIT" and op.at_ms == row["committed_at"] for op in facts.verdicts(half)
        ):
            aborted = [
                op for op in facts.history.records if op.topic == OP and op.text_key == about and op.state is not KafkaState.COMMITTED
            ]
            yield Finding("aborted" if aborted else "R1 no verdict", about, "a message without a COMMIT that names it")


def _first_verdict_wins(facts: Facts) -> Iterator[Finding]:
    """The first verdict that names a half decides, unless it came too early, or after a discard (R1, R2, R9, R10)."""
    for half in facts.halves:
        pointer, about = place_of(half), half.text_key
        fates = facts.fates(half)
        if fates and not set(fates) & {"committed", "discarded"}:
            continue
        read = [op for op in facts.verdicts(half) if not facts.is_orphan(op)]
        row = facts.committed_at.get(pointer)
        verdicts = read if row is None else [op for op in read if not facts.was_refused(op, row.seq)]
        # A verdict that Kafka has deleted may never have been read.
        first = verdicts[0] if verdicts and verdicts[0].deleted_seq is None and not facts.may_be_aged_out(verdicts[0]) else None
        is_ordered = len({op.partition for op in verdicts}) < 2 and all(a.at_ms <= b.at_ms for a, b in pairwise(verdicts))
        if "committed" in fates and first is not None and is_ordered:
            at_ms = facts.committed_at[pointer]["committed_at"]
            if first.header("ACTION") == "ROLLBACK" and len(facts.halves_of[about]) == 1:
                is_again = facts.was_adopted and any(op.at_ms < half.at_ms for op in facts.verdicts_of[about])
                rule = "R2 after an adoption" if is_again else "R2"
                yield Finding(rule, about, "committed, and the first verdict was ROLLBACK")
            elif first.header("ACTION") == "COMMIT" and at_ms != first.at_ms and len(facts.halves_of[about]) == 1:
                yield Finding("R2", about, f"committed at {at_ms}, and the first verdict was at {first.at_ms}")
        if "discarded" in fates and not facts.may_be_anew(half):
            row = facts.discarded_at[pointer]
            horizon_ms = row["discarded_at"]
            for op in (op for op in read if not facts.was_refused(op, row.seq)):
                if facts.ticks.is_read_at(op, horizon_ms) and op.at_ms >= half.at_ms and op.deleted_seq is None:
                    yield Finding("R9", about, f"discarded at {horizon_ms}, and a verdict had been read")
                    break
        is_alone = len(facts.halves_of[about]) == 1 and half.deleted_seq is None and about not in facts.history.still_pending
        if fates or not is_alone or not is_ordered or first is None or first.header("ACTION") != "COMMIT":
            continue
        if not any(facts.fates(each) for each in facts.let_in_of[about]):  # It is a duplicate of that one.
            yield Finding("R2 lost", about, "the first verdict was COMMIT, and it has made no message")


def _everything_has_a_fate(facts: Facts) -> Iterator[Finding]:
    """At the end each half is committed, rolled back, discarded, refused by name, or a counted duplicate."""
    pending = facts.history.still_pending
    remembered_ms = max((numbers.resolved_retention_ms for numbers in facts.numbers), default=0)
    for transaction_id, halves in facts.halves_of.items():
        if transaction_id in pending:
            if facts.history.is_at_rest:
                yield Finding("R6 pending", transaction_id, "nothing became of it in all that time")
            continue
        settled: set[tuple[str, str, int]] = set()
        let_in: dict[tuple[str, str, int], Record] = {}
        for half in halves:
            if facts.fates(half) or any(op.header("ACTION") == "ROLLBACK" for op in facts.verdicts(half)):
                settled.add(name_of(half))
        for half in facts.let_in_of[transaction_id]:
            if {"committed", "discarded"} & set(facts.fates(half)):
                let_in[name_of(half)] = half  # Those after it are its duplicates, by its clock too.
        held = [row for row in facts.messages if facts.was_adopted and row["transaction_id"] == transaction_id]
        gone = [(row, first, ends) for row in held if (ends := facts.adopted_without(first := facts.records_of(row)[0]))]
        for half in halves:
            first_one = let_in.get(name_of(half), half)
            is_duplicate = first_one.seq < half.seq or (facts.history.clocks_jumped and first_one.at_ms < half.at_ms)
            # A new checkpoint whose Kafka has deleted the first half counts a later one of its group as a copy if it or
            # its verdict came before the adoption: a stale one, or one that came while the message was remembered.
            came = min([half.seq, *(op.seq for op in facts.verdicts(half))])
            for row, first, ends in gone:
                is_near = half.at_ms <= row["committed_at"] + remembered_ms
                is_copy = name_of(first)[1] == name_of(half)[1] and (is_near or name_of(first)[2] > name_of(half)[2])
                is_duplicate |= is_copy and first.seq < half.seq and came < max(ends)
            if name_of(half) in settled or is_duplicate:
                continue
            if half.deleted_seq is None:
                yield Finding("R1 no fate", transaction_id, f"nothing became of {half.partition}.{half.offset}")
            elif facts.checks.get(place_of(half)) and facts.checkpoints < 2 and not facts.was_adopted:
                yield Finding("R17 dropped", transaction_id, f"{half.partition}.{half.offset} was read and deleted, and is nowhere")


def _what_services_committed_is_readable(facts: Facts) -> Iterator[Finding]:
    """What a service has committed is readable once everything was given its time, and resent if it was discarded."""
    readable = {row["transaction_id"] for row in facts.messages}
    for transaction_id, decision in facts.decided.items():
        halves = [half for half in facts.halves_of[transaction_id] if half.header("PGROUP") == decision.group]
        others = [op for op in facts.verdicts_of[transaction_id] if op.is_stray]
        is_foreign = len({half.header("PGROUP") for half in facts.halves_of[transaction_id]}) > 1
        is_gone = any(half.deleted_seq is not None for half in halves)
        if not halves or is_foreign or is_gone or transaction_id in facts.history.still_pending:
            continue
        if any("body_too_large" in facts.fates(half) for half in halves):
            continue
        if decision.fate is Fate.COMMIT and transaction_id not in readable and not any(op.header("ACTION") == "ROLLBACK" for op in others):
            was_discarded = facts.was_adopted and any(row["transaction_id"] == transaction_id for row in facts.discarded)
            rule = "lost after an adoption" if was_discarded else "lost"
            yield Finding(rule, transaction_id, "its service has committed it, and it is not readable")
        if decision.fate is Fate.ROLLBACK and transaction_id in readable and not any(op.header("ACTION") == "COMMIT" for op in others):
            yield Finding("R1 rolled back", transaction_id, "its service has rolled it back, and it is readable")
    for transaction_id in readable - facts.decided.keys():
        if not any(op.is_stray for op in facts.verdicts_of[transaction_id]):
            yield Finding("R1 undecided", transaction_id, "readable, and no service has committed it")


def _checks_keep_their_times(facts: Facts) -> Iterator[Finding]:
    """Checks are numbered without gaps, and none is too early, too many, or behind a verdict (R4 to R7, R9)."""
    interval_ms = min((numbers.interval_ms for numbers in facts.numbers), default=0)
    for pointer, checks in facts.checks.items():
        half = facts.all.get((HALF, pointer[1], pointer[2]))
        is_bad = half is not None and (half.state is not KafkaState.COMMITTED or (half.flaw and not facts.may_be_let_in(half)))
        if half is None or half.text_key != pointer[0] or is_bad:
            yield Finding("aborted" if half and half.state is not KafkaState.COMMITTED else "R4", pointer[0], "a check of no good half")
            continue
        if sorted(checks) != list(range(1, len(checks) + 1)) or len(checks) > facts.most_checks:
            yield Finding("R6", pointer[0], f"checks {sorted(checks)}, at most {facts.most_checks}")
        for number, check in checks.items():
            earliest_ms = facts.ticks.earliest(_first_due_ms(facts, half), interval_ms, number)
            if facts.ticks.horizon_before(check.seq) < earliest_ms:
                yield Finding("R4" if number == 1 else "R5", pointer[0], f"check {number} before the horizon can be {earliest_ms}")
            # A verdict that Kafka has deleted may never have been read.
            kept = [op for op in facts.verdicts(half) if op.deleted_seq is None]
            early = [op for op in kept if op.at_ms >= half.at_ms and not facts.is_orphan(op) and not facts.was_refused(op, check.seq)]
            if any(facts.ticks.is_read_at(op, earliest_ms) for op in early) and not facts.may_be_anew(half):
                yield Finding("R9", pointer[0], f"check {number} after a verdict had been read")
            if (check.value or b"") != (half.value or b""):
                yield Finding("R16", pointer[0], f"check {number} has another body than the half")


def _first_due_ms(facts: Facts, half: Record) -> int:
    immunity_ms = int(half.header("CHECK_IMMUNITY_TIME_IN_SECONDS", "0")) * 1000
    return half.at_ms + 1 + min(min(immunity_ms or numbers.timeout_ms, numbers.half_retention_ms) for numbers in facts.numbers)


def _discards_keep_their_times(facts: Facts) -> Iterator[Finding]:
    """A discard comes after all checks, or after a last call, or while its group is away (R6, R8, R15)."""
    interval_ms = min((numbers.interval_ms for numbers in facts.numbers), default=0)
    for pointer, row in facts.discarded_at.items():
        half, about = facts.all.get((HALF, pointer[1], pointer[2])), pointer[0]
        if half is None:
            continue
        horizon_ms, checks = row["discarded_at"], facts.checks.get(pointer, {})
        if set(range(1, row["check_times"] + 1)) - checks.keys():
            yield Finding("R6", about, f"discarded after {row['check_times']} checks, of which {sorted(checks)} were sent")
        if row["reason"] == "check_max":
            if not facts.fewest_checks <= row["check_times"] <= facts.most_checks:
                yield Finding("R6", about, f"discarded as check_max after {row['check_times']} checks")
        elif row["reason"] != "expired":
            yield Finding("R6", about, f"discarded for {row['reason']}")
        elif not any(horizon_ms > half.at_ms + numbers.half_retention_ms for numbers in facts.numbers):
            yield Finding("R8", about, f"expired at the age of {horizon_ms - half.at_ms}")
        else:
            yield from _last_call(facts, half, row)
        earliest_ms = facts.ticks.earliest(_first_due_ms(facts, half), interval_ms, row["check_times"] + 1)
        if horizon_ms < earliest_ms:
            yield Finding("R5", about, f"discarded at {horizon_ms}, before {earliest_ms}")
    for transaction_id in facts.history.overdue:
        yield Finding("R8 overdue", transaction_id, "its group stayed away, and it was not discarded")


_HEARD_BEFORE_MS = 60_000


def _is_heard(facts: Facts, op: Record, check: Record) -> bool:
    """Return True if an op answers a check. A client that has just answered it does not answer it again."""
    return op.seq > check.seq or op.at_ms > check.at_ms - _HEARD_BEFORE_MS or facts.history.clocks_jumped


def _last_call(facts: Facts, half: Record, row: Row) -> Iterator[Finding]:
    """Before it expires, a half is asked about, or waited for, after it was too old; and its group answers (R8)."""
    oldest_ms = half.at_ms + min(numbers.half_retention_ms for numbers in facts.numbers)
    group, about = half.header("PGROUP"), half.text_key
    waited = [tick for tick in facts.ticks.all if oldest_ms < tick.at_ms <= row["discarded_at"] and _names(tick, group)]
    # The latest tick of a partition may be from a clock that was ahead, and name a group that is back.
    is_named_ahead = any(tick.at_ms > row["discarded_at"] and tick.seq < row.seq and _names(tick, group) for tick in facts.ticks.all)
    if len({tick.at_ms for tick in waited}) >= min(numbers.check_max for numbers in facts.numbers):
        return
    if facts.history.clocks_jumped and is_named_ahead:
        return
    asked = [check for check in facts.requests[place_of(half)] if facts.ticks.horizon_before(check.seq) > oldest_ms]
    answers = [op for op in facts.ops if op.text_key == about and op.header("PGROUP") == group and not op.is_stray and op.seq < row.seq]
    if not asked:
        yield Finding("R8 no last call", about, "expired, and neither asked about nor waited for after that age")
    elif facts.is_known(f"txn-check-{group}", asked[-1].seq) and not any(_is_heard(facts, op, asked[0]) for op in answers):
        yield Finding("R8 unheard", about, "expired, and nobody answered the request after that age")


def _names(tick: Record, group: str) -> bool:
    return f'"{group}"'.encode() in (tick.value or b"")


def _nobody_is_discarded_unasked(facts: Facts) -> Iterator[Finding]:
    """While a group is away, or behind with its checks, it loses nothing (R15)."""
    passed: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for commit in facts.history.commits:
        passed[commit.group, commit.partition].append((commit.seq, commit.offset))
    interval_ms = max((numbers.interval_ms for numbers in facts.numbers), default=0)
    for pointer, row in facts.discarded_at.items():
        half = facts.all.get((HALF, pointer[1], pointer[2]))
        if half is None or row["reason"] == "expired":
            continue
        group = f"txn-check-{half.header('PGROUP')}"
        at = [tick for tick in facts.ticks.all if tick.at_ms >= row["discarded_at"] and tick.seq < row.seq]
        if not at or row["discarded_at"] > half.at_ms + min(numbers.half_retention_ms for numbers in facts.numbers):
            continue
        # The horizon is the time of the latest tick of a partition, and that tick does not name the group.
        of_horizon = [tick for tick in at if tick.at_ms == row["discarded_at"] and not facts.history.clocks_jumped]
        is_named = bool(of_horizon) and all(_names(tick, half.header("PGROUP")) for tick in of_horizon)
        with_it = [tick.seq for tick in at if not _names(tick, half.header("PGROUP"))]
        if not with_it or is_named:
            yield Finding("R15", pointer[0], "discarded while its group was away")
        first_seq = min(with_it, default=0)
        if not with_it or not facts.is_known(group, first_seq):
            continue
        for number, check in facts.checks.get(pointer, {}).items():
            committed = [offset for seq, offset in passed[group, check.partition] if seq < first_seq]
            # Two intervals: the publisher asks Kafka now and then, and clocks differ.
            is_old = check.at_ms + 2 * interval_ms < row["discarded_at"] and not facts.history.clocks_jumped
            if is_old and max(committed, default=0) <= check.offset:
                yield Finding("R15 behind", pointer[0], f"discarded, and its group had not passed check {number}")
                break


def _last_checks_can_be_answered(facts: Facts) -> Iterator[Finding]:
    """No half is discarded on what was read within half an interval of its last check (R5)."""
    interval_ms = min((numbers.interval_ms for numbers in facts.numbers), default=0)
    for pointer, row in facts.discarded_at.items():
        check = facts.request_of(row)
        if check is None or facts.history.clocks_jumped:
            continue
        since_ms = facts.ticks.published_since(check.seq, row["discarded_at"])
        if since_ms is not None and since_ms + facts.history.publisher_set_back_ms < interval_ms // 2:
            yield Finding("R5 unheard", pointer[0], f"discarded {since_ms} ms after check {row['check_times']} was sent")


def _refusals_are_true(facts: Facts) -> Iterator[Finding]:
    """What breaks the contract is in quarantine once, and what is there has a reason (R10 to R14, R17)."""
    for record in facts.flawed:
        reasons = [row["reason"] for row in facts.refused.get((record.topic, record.partition, record.offset), ())]
        if not reasons and record.deleted_seq is None and not facts.may_be_let_in(record):
            yield Finding("R14 dropped", record.text_key, f"a record that is {record.flaw} is nowhere")
    for (topic, partition, offset), rows in facts.refused.items():
        refused = facts.all.get((topic, partition, offset))
        about = rows[0]["transaction_id"] or f"{topic} {partition}.{offset}"
        for reason, times in Counter(row["reason"] for row in rows).items():
            if times > 1:
                yield Finding("quarantine twice", about, f"{times} rows of {topic} {partition}.{offset} as {reason}")
            if refused is None:
                yield Finding("quarantine unknown", about, f"{topic} {partition}.{offset} was never there")
            elif refused.state is not KafkaState.COMMITTED:
                yield Finding("aborted", about, f"refused as {reason}, and it was {refused.state}")
            elif reason == "half_lost" and refused.deleted_seq is None:
                yield Finding("R17", about, "half_lost, and it is there")
            elif reason == "body_too_large" and len(refused.value or b"") > facts.smallest_body:
                continue
            elif reason != refused.flaw and reason not in ("orphan_op", "half_lost") and not _is_borne_out(facts, refused, reason):
                yield Finding("R14", about, f"refused as {reason}, and it is {refused.flaw or 'good'}")


def _is_borne_out(facts: Facts, refused: Record, reason: str) -> bool:
    """Return True if another record of the id, or what became of it, may be why a record was refused (R2, R11 to R13).

    A new checkpoint may know more of an id than Kafka holds of it.
    """
    transaction_id, group, incarnation = name_of(refused)
    halves = [*facts.halves_of[transaction_id], *(half for half in facts.flawed if half.topic == HALF and half.text_key == transaction_id)]
    names = {name_of(half)[1:] for half in halves}
    ended = {row["transaction_id"] for row in [*facts.discarded, *(row for row in facts.quarantine if row["reason"] == "half_lost")]}
    may_be = {
        "conflicting_verdict": any(
            name_of(op) == name_of(refused) and op.header("ACTION") != refused.header("ACTION") for op in facts.verdicts_of[transaction_id]
        ),
        "late_verdict": transaction_id in ended or any(number > incarnation for _, number in names),
        "group_mismatch": any(name != (group, incarnation) for name in names),
        "id_conflict": any(of != group for of, _ in names),
        "stale_incarnation": any(number > incarnation for _, number in names),
        "incarnation_refused": any(number < incarnation for _, number in names),
    }
    return may_be.get(reason, False) or (facts.was_adopted and reason in may_be)


def _no_verdict_is_dropped(facts: Facts) -> Iterator[Finding]:
    """A verdict that settles nothing is in quarantine, unless it repeats another (R2, R10, R11, R13)."""
    for transaction_id, ops in facts.verdicts_of.items():
        names = {name_of(half): half for half in facts.halves_of[transaction_id]}
        for op in ops:
            if facts.refused.get((OP, op.partition, op.offset)) or transaction_id in facts.history.still_pending or op.deleted_seq:
                continue
            half, let_in = names.get(name_of(op)), [each for each in facts.let_in_of[transaction_id] if name_of(each) == name_of(op)]
            if half is None and (facts.may_be_aged_out(op) or let_in):
                continue
            if half is None:
                yield Finding("R10 dropped", transaction_id, f"{op.header('ACTION')} of {name_of(op)} is nowhere")
                continue
            is_alone = len(facts.halves_of[transaction_id]) == 1
            # A new checkpoint may read verdicts of several partitions in another order.
            is_ordered = is_alone and not facts.history.clocks_jumped and not (facts.was_adopted and len({op.partition for op in ops}) > 1)
            if is_ordered and place_of(half) in facts.committed_at and op.header("ACTION") == "ROLLBACK":
                yield Finding("R2 dropped", transaction_id, "a ROLLBACK of a committed message is not in quarantine")
            actions = {each.header("ACTION") for each in facts.verdicts(half)}
            settled = {fate for each in (half, *facts.halves_of[transaction_id], *let_in) for fate in facts.fates(each)}
            # The first half of an id stays, and so it is lost with it, even if the same was sent once more (R12, R17).
            is_settled = "committed" in settled or "half_lost" in settled
            if op.header("ACTION") == "COMMIT" and not is_settled and actions == {"COMMIT"} and not half.deleted_seq:
                rule = "lost after an adoption" if facts.was_adopted and "discarded" in settled else "R1"
                yield Finding(rule, transaction_id, "a COMMIT has neither made a message nor been refused")


def _orphans_have_no_half(facts: Facts) -> Iterator[Finding]:
    """No first verdict is an orphan whose half was there before it (R1, R10)."""
    if facts.history.clocks_jumped:
        return
    for half in facts.halves:
        verdicts = facts.verdicts(half)
        is_alone = len(facts.halves_of[half.text_key]) == 1 and len({op.partition for op in verdicts}) == 1
        if not is_alone or half.at_ms > verdicts[0].at_ms or half.deleted_seq or place_of(half) in facts.discarded_at:
            continue
        if set(facts.fates(half)) - {"committed"}:
            continue
        reasons = [row["reason"] for row in facts.refused.get((OP, verdicts[0].partition, verdicts[0].offset), ())]
        if "orphan_op" in reasons:
            yield Finding("R10", half.text_key, "its first verdict is an orphan, and its half was there before")


def _the_first_half_stays(facts: Facts) -> Iterator[Finding]:
    """A half that comes again changes nothing while the first is pending (R12)."""
    for halves in facts.halves_of.values():
        first: dict[tuple[str, str, int], Record] = {}
        for half in halves:
            earlier = first.setdefault(name_of(half), half)
            if earlier is half or earlier.partition != half.partition or earlier.deleted_seq or earlier.at_ms > half.at_ms:
                continue
            is_settled = facts.fates(earlier) or any(op.header("ACTION") == "ROLLBACK" for op in facts.verdicts(earlier))
            if not is_settled and set(facts.fates(half)) & {"committed", "discarded"}:
                yield Finding("R12", half.text_key, "a duplicate took the place of the first half")
        # A replay that the job has refused may be sent again.
        taken = (half for half in halves if (HALF, half.partition, half.offset) not in facts.refused)
        sent = Counter(name_of(half) for half in taken if not half.is_stray and half.header("INCARNATION"))
        for name, times in sent.items():
            # An id that somebody uses again after it was forgotten is discarded, and resent, once more.
            discards = sum((row["transaction_id"], row["producer_group"], row["incarnation"] + 1) == name for row in facts.discarded)
            if times > max(1, discards) and not any(half.deleted_seq for half in halves):
                yield Finding("replay", name[0], f"incarnation {name[2]} was sent {times} times")


def _checks_are_answered(facts: Facts) -> Iterator[Finding]:
    """A group commits the offset of a check after it has sent an answer."""
    answers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for op in facts.history.records:
        if op.topic == OP and not op.is_stray:
            answers[op.text_key, op.header("PGROUP")].append(op.seq)
    checks: dict[int, list[Record]] = defaultdict(list)
    for record in facts.history.records:
        if record.topic == CHECK:
            checks[record.partition].append(record)
    done: dict[tuple[str, int], int] = {}
    for commit in facts.history.commits:
        since = done.get((commit.group, commit.partition), 0)
        done[commit.group, commit.partition] = max(since, commit.offset)
        for check in checks[commit.partition][since : commit.offset]:
            group = check.header("PGROUP")
            asked = facts.checks[check.text_key, *_half_of(check)][int(check.header("TRANSACTION_CHECK_TIMES"))]
            given = answers[check.text_key, group]
            at = bisect_left(given, asked.seq)
            if commit.group == f"txn-check-{group}" and (at == len(given) or given[at] > commit.seq):
                yield Finding("client", check.text_key, f"{group} passed check {check.header('CHECK_ID')} without an answer")


def _half_of(check: Record) -> tuple[int, int]:
    partition, offset = check.header("CHECK_ID").rsplit(":", 2)[1].split(".")
    return int(partition), int(offset)


def _the_job_lives(facts: Facts) -> Iterator[Finding]:
    """Nothing ends the job but what its operator is told, with a way out."""
    for act in facts.history.acts:
        if act.name in ("crashed", "dead"):
            yield Finding("job", act.name, act.detail)


def _bookmarks_hold(facts: Facts) -> Iterator[Finding]:
    """The rows with a greater (epoch, batch id) are exactly those that came later (§4)."""
    for rows in (facts.messages, facts.discarded):
        marks = [(row.seq, (row.values.get("epoch", 0), row["batch_id"])) for row in rows]
        for (seq, mark), (later, next_mark) in pairwise(marks):
            if (later > seq and next_mark <= mark) or (later == seq and next_mark != mark):
                yield Finding("bookmark", rows[0].table, f"{next_mark} was written after {mark}")
                break


_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _the_job_lives,
    _one_row_each,
    _rows_are_true,
    _first_verdict_wins,
    _everything_has_a_fate,
    _what_services_committed_is_readable,
    _checks_keep_their_times,
    _discards_keep_their_times,
    _nobody_is_discarded_unasked,
    _last_checks_can_be_answered,
    _refusals_are_true,
    _no_verdict_is_dropped,
    _orphans_have_no_half,
    _the_first_half_stays,
    _checks_are_answered,
    _bookmarks_hold,
)
