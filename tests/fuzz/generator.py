"""Generates records of every shape for the half and op topics from a seed: good ones, odd ones and broken ones.

Among them are control transactions, whose outcome is known.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tests.fuzz.judge import HeaderList
from tests.fuzz.shapes import (
    BAD_NOTICES,
    BAD_NUMBERS,
    BAD_TICK_VALUES,
    DELAYS,
    GROUPS,
    HALF_NAMES,
    KEYS,
    NUMBERS,
    ODD_NAMES,
    OP_NAMES,
    OWN_NAMES,
    TEXTS,
    TICK_VALUES,
    VALUES,
)

BASE_MS = 1_700_000_000_000
"""The time of the oldest control record."""
HOUR_MS = 3_600_000
FAR_MS = 250_000_000_000_000
"""A time in the year 9892. Only the last ticks are later."""

_OTHERS_RECENT = 500


class Fate(StrEnum):
    COMMIT = "commit"
    ROLLBACK = "rollback"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Control:
    """The outcome that a control transaction must have."""

    fate: Fate
    decided_ms: int
    """The time of the verdict."""


class NewRecord(NamedTuple):
    """A record to write. If `partition` is -1, the key decides."""

    of_half: bool
    key: bytes | None
    value: bytes | None
    headers: HeaderList
    at_ms: int
    partition: int = -1


class Generator:
    """Makes the same records from the same seed. `control` has the control transactions made so far, by id."""

    def __init__(self, seed: int, partitions: int, max_body_bytes: int) -> None:
        self._random = random.Random(seed)
        self._partitions, self._max_body = partitions, max_body_bytes
        self._later: deque[NewRecord] = deque()
        self._others: deque[bytes] = deque(maxlen=_OTHERS_RECENT)
        self._number = 0
        self.control: dict[str, Control] = {}
        self.control_halves: dict[bytes, NewRecord] = {}
        self.made: Counter[str] = Counter()

    def records(self, count: int) -> Iterator[NewRecord]:
        """Yield `count` records, and then the remaining records of the control transactions."""
        kinds: dict[str, tuple[float, Callable[[], NewRecord]]] = {
            "control": (0.25, self._control),
            "of an id known before": (0.22, self._of_known_id),
            "half, changed": (0.22, self._changed_half),
            "op, changed": (0.2, self._changed_op),
            "at random": (0.06, self._random_record),
            "tick": (0.03, self._tick),
            "notice": (0.02, self._notice),
        }
        weights = [weight for weight, _ in kinds.values()]
        for number in range(count):
            self._number = number
            [kind] = self._random.choices(list(kinds), weights)
            self.made[kind] += 1
            yield kinds[kind][1]()
        yield from self._later

    def ticks(self, at_ms: int) -> Iterator[NewRecord]:
        """Yield one round of good ticks, which moves the horizon to `at_ms`."""
        for of_half in (True, False):
            for partition in range(self._partitions):
                yield self._tick_of(of_half, partition, at_ms, b"")

    def _tick_of(self, of_half: bool, partition: int, at_ms: int, value: bytes | None) -> NewRecord:
        headers: HeaderList = [("TICK", b"%d" % at_ms), ("PARTITIONS", b"%d" % self._partitions)]
        return NewRecord(of_half, None, value, headers, at_ms, partition)

    # Control transactions.

    def _control(self) -> NewRecord:
        if self._later and self._random.random() < 0.55:
            return self._later.popleft()
        key = f"control-{self._number}"
        fate = self._random.choices((Fate.COMMIT, Fate.ROLLBACK, Fate.SILENT), (8, 2, 1))[0]
        at_ms = BASE_MS + self._number
        half = NewRecord(True, key.encode(), self._body(), self._half_headers(), at_ms)
        ops = [self._op(key, b"UNKNOWN", at_ms + 1)] if self._random.random() < 0.2 else []
        if fate is not Fate.SILENT:
            verdicts = 2 if self._random.random() < 0.1 else 1
            ops += [self._op(key, fate.upper().encode(), at_ms + 2 + n) for n in range(verdicts)]
        self.control[key], self.control_halves[key.encode()] = Control(fate, at_ms + 2), half
        # The timestamp of the verdict is later than that of an UNKNOWN. In the topics half and ops have any order.
        records = [*ops, half] if self._random.random() < 0.2 else [half, *ops]
        if self._random.random() < 0.1:
            records.append(self._op(key, b"COMMIT", at_ms + 9, group=b"stranger"))
        first, *rest = records
        self._later.extend(rest)
        return first

    def _half_headers(self) -> HeaderList:
        """Return good headers in any order: the required ones and some others. A user property may repeat."""
        chance = self._random.random
        headers: HeaderList = [("REAL_TOPIC", self._random.choice((b"orders", "größe".encode()))), ("PGROUP", b"g")]
        choices = {
            "REAL_QID": (b"3", b"-7", b"2147483647"),
            "TAGS": (b"", b"TagA"),
            "KEYS": (b"k1 k2",),
            "BORN_TIMESTAMP": (b"0", b"1699999999999"),
        }
        choices |= {"CHECK_IMMUNITY_TIME_IN_SECONDS": (b"1", b"600"), "INCARNATION": (b"0",)}
        headers += [(name, self._random.choice(values)) for name, values in choices.items() if chance() < 0.2]
        headers += [(self._random.choice(OWN_NAMES), self._random.choice((None, *NUMBERS, *TEXTS))) for _ in range(int(chance() * 4))]
        if chance() < 0.002:
            headers += [(f"own-{n}", b"%d" % n) for n in range(500)]
        self._random.shuffle(headers)
        return headers

    @staticmethod
    def _op(key: str, action: bytes, at_ms: int, group: bytes = b"g") -> NewRecord:
        return NewRecord(False, key.encode(), None, [("ACTION", action), ("PGROUP", group)], at_ms)

    def _body(self) -> bytes | None:
        sort = self._random.random()
        if sort < 0.1:
            return self._random.choice((None, b"", b"{}", b"\x00", "größe".encode()))
        if sort < 0.12:
            return self._random.randbytes(self._max_body - self._random.choice((0, 1)))
        return self._random.randbytes(self._random.randrange(200))

    # Other records.

    def _of_known_id(self) -> NewRecord:
        """Make a good half or op of an id that other records have.

        This makes duplicates, conflicts, ops of other groups and higher incarnations.
        """
        key = self._random.choice(self._others) if self._others and self._random.random() < 0.8 else self._new_id()
        group, incarnation = self._random.choices(GROUPS, (8, 1, 1, 2))[0], self._random.choices((b"0", b"1", b"2"), (8, 1, 1))[0]
        if self._random.random() < 0.4:
            headers: HeaderList = [("REAL_TOPIC", b"others"), ("PGROUP", group), ("INCARNATION", incarnation)]
            return NewRecord(True, key, self._body(), headers, self._time())
        action = self._random.choice((b"COMMIT", b"COMMIT", b"ROLLBACK", b"UNKNOWN"))
        return NewRecord(False, key, self._body(), [("ACTION", action), ("PGROUP", group), ("INCARNATION", incarnation)], self._time())

    def _new_id(self) -> bytes:
        key = f"other-{self._number}".encode()
        self._others.append(key)
        return key

    def _changed_half(self) -> NewRecord:
        headers = self._changed(self._half_headers(), HALF_NAMES)
        if self._random.random() < 0.08:
            headers.insert(self._random.randrange(len(headers) + 1), (self._random.choice(DELAYS), self._random.choice(VALUES)))
        large = self._random.random()
        value = self._random.randbytes(self._max_body + self._random.choice((1, 100))) if large < 0.02 else self._body()
        return self._placed(True, self._key(), value, headers)

    def _changed_op(self) -> NewRecord:
        headers: HeaderList = [("ACTION", self._random.choice((b"COMMIT", b"ROLLBACK", b"UNKNOWN", b"UNKNOW"))), ("PGROUP", b"g")]
        choices = {"INCARNATION": (b"0", b"1"), "FROM_CHECK": (b"true", b""), "CHECK_TIMES": (b"1", b"0"), "REMARK": (b"", b"why")}
        headers += [(name, self._random.choice(values)) for name, values in choices.items() if self._random.random() < 0.3]
        return self._placed(False, self._key(), self._body(), self._changed(headers, OP_NAMES))

    def _changed(self, headers: HeaderList, names: tuple[str, ...]) -> HeaderList:
        """Change up to two headers: remove one, change a value, repeat one, or add one of any name."""
        for _ in range(self._random.choice((0, 1, 1, 1, 1, 2))):
            place, chance = self._random.randrange(len(headers)), self._random.random()
            if chance < 0.15 and len(headers) > 1:
                del headers[place]
            elif chance < 0.3:
                headers[place] = (headers[place][0], self._random.choice(VALUES))
            elif chance < 0.65:
                name = self._random.choice(names)
                headers = [header for header in headers if header[0] != name]
                headers.append((name, self._random.choice(VALUES)))
            elif chance < 0.8:
                name, value = headers[place]
                headers.append((name, self._random.choice((value, value, self._random.choice(VALUES)))))
            else:
                headers.append((self._random.choice((*OWN_NAMES, *ODD_NAMES)), self._random.choice(VALUES)))
        return headers

    def _random_record(self) -> NewRecord:
        names = (*OWN_NAMES, *ODD_NAMES, "TICK")
        headers: HeaderList = [(self._random.choice(names), self._random.choice(VALUES)) for _ in range(self._random.randrange(12))]
        if self._random.random() < 0.001:
            headers += [(self._random.choice(ODD_NAMES), b"%d" % n) for n in range(1_000)]
        return self._placed(self._random.random() < 0.5, self._key(), self._body(), headers)

    def _tick(self) -> NewRecord:
        """Make a broken tick, or a good one that does not move the horizon past a control transaction."""
        of_half, partition = self._random.random() < 0.5, self._random.randrange(self._partitions)
        chance = self._random.random()
        if chance < 0.15:
            # The horizon is the smallest time over all partitions, so it stays at that of the half topic's partition 0.
            is_first = of_half and partition == 0
            at_ms = BASE_MS - 2 * HOUR_MS if is_first else self._time()
            return self._tick_of(of_half, partition, at_ms, self._random.choice(TICK_VALUES))
        if chance < 0.2:
            # The tick is good but has a wrong number of partitions. The latest tick counts, which this one never is.
            headers: HeaderList = [
                ("TICK", b"1"),
                ("PARTITIONS", self._random.choice((b"2147483647", b"1000000", b"%d" % (partition + 1)))),
            ]
            return NewRecord(of_half, None, b"", headers, 1 + self._random.randrange(1_000), partition)
        return self._broken(self._tick_of(of_half, partition, self._time(), self._random.choice(TICK_VALUES)))

    def _broken(self, made: NewRecord) -> NewRecord:
        """Return the tick with one fault in it."""
        way = self._random.randrange(5)
        if way == 0:
            return made._replace(key=self._random.choice([key for key in KEYS if key is not None]))
        if way == 1:
            return made._replace(value=self._random.choice(BAD_TICK_VALUES))
        if way == 2:
            return made._replace(headers=[made.headers[self._random.randrange(2)], ("TICK", b"x")])
        if way == 3:
            name = self._random.choice(("TICK", "PARTITIONS"))
            return made._replace(headers=[*made.headers, (name, self._random.choice(VALUES))])
        changed, value = self._random.randrange(2), self._random.choice(BAD_NUMBERS)
        return made._replace(headers=[(name, value if n == changed else old) for n, (name, old) in enumerate(made.headers)])

    def _notice(self) -> NewRecord:
        """Make a notice of a lost half: a broken one, or one of a half that does not exist.

        Of correct programs only the job writes notices.
        """
        value = self._random.choice(BAD_NOTICES) if self._random.random() < 0.6 else b"%d:%d" % (self._random.randrange(9), 10**12)
        headers: HeaderList = [("HALF_LOST", value)] * (2 if self._random.random() < 0.1 else 1)
        key = self._key() if self._random.random() < 0.3 else self._new_id()
        return self._placed(self._random.random() < 0.9, key, None, headers)

    def _key(self) -> bytes | None:
        chance = self._random.random()
        if chance < 0.15:
            return self._random.choice(KEYS)
        return self._random.choice(self._others) if self._others and chance < 0.3 else self._new_id()

    def _placed(self, of_half: bool, key: bytes | None, value: bytes | None, headers: HeaderList) -> NewRecord:
        """Return a record. The seed chooses the partition if there is no key, because librdkafka's choice is random."""
        return NewRecord(of_half, key, value, headers, self._time(), -1 if key else self._random.randrange(self._partitions))

    def _time(self) -> int:
        chance = self._random.random()
        if chance < 0.9:
            return BASE_MS + self._random.randrange(-HOUR_MS, HOUR_MS)
        return self._random.choice((1, BASE_MS, BASE_MS + 2**31, FAR_MS))
