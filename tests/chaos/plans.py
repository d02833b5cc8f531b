"""What the services decided, written down before they say it: SQLite, on the disk before `decide` returns.

It stands for a service's own database. A decision is taken once, whoever comes first: the local transaction, or a check that finds none.
"""

import hashlib
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, cast

_COLUMNS = "transaction_id TEXT PRIMARY KEY, fate TEXT NOT NULL, said TEXT NOT NULL"
_SIZES = (0, 1, *(200,) * 8, *(1000,) * 15, *(2000,) * 4, 50_000)


class Fate(StrEnum):
    """How a local transaction ended; NEVER: the service does not know and never will, so that its message is discarded."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    NEVER = "NEVER"


class Plan(NamedTuple):
    """What one transaction does. `at_once`: it says so itself, and does not wait for a check. `stray`: a contrary verdict follows."""

    fate: Fate
    at_once: bool
    stray: bool = False


_PLANS = (
    (62, Plan(Fate.COMMIT, at_once=True)),
    (15, Plan(Fate.ROLLBACK, at_once=True)),
    (12, Plan(Fate.COMMIT, at_once=False)),
    (6, Plan(Fate.ROLLBACK, at_once=False)),
    (1, Plan(Fate.COMMIT, at_once=True, stray=True)),
    (1, Plan(Fate.ROLLBACK, at_once=True, stray=True)),
    (3, Plan(Fate.NEVER, at_once=False)),
)


class Entry(NamedTuple):
    """A line of the ledger; `said` is what the listener answered at first, None where a check took the decision."""

    fate: Fate
    said: str


def plan_of(seed: int, transaction_id: str) -> Plan:
    """What the seed has in store for a transaction."""
    drawn = random.Random(f"{seed}:{transaction_id}")
    return drawn.choices([plan for _, plan in _PLANS], [weight for weight, _ in _PLANS])[0]


def body_of(transaction_id: str) -> bytes:
    """The body that belongs to an id, byte for byte: of any length, with any bytes."""
    drawn = random.Random(f"body:{transaction_id}")
    return drawn.randbytes(drawn.choice(_SIZES))


def digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


class Ledger:
    """The decisions in the file `path`; any process and thread may open it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"CREATE TABLE IF NOT EXISTS ledger ({_COLUMNS})")

    def decide(self, transaction_id: str, fate: Fate, said: str) -> Fate:
        """Write a decision down, on the disk, unless there is one; return the one that counts."""
        with self._open() as database:
            database.execute("INSERT INTO ledger VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (transaction_id, fate, said))
            [(counts,)] = database.execute("SELECT fate FROM ledger WHERE transaction_id = ?", (transaction_id,))
        return Fate(counts)

    def count(self) -> int:
        with self._open() as database:
            [(rows,)] = database.execute("SELECT count(*) FROM ledger")
        return cast(int, rows)

    def entries(self) -> dict[str, Entry]:
        with self._open() as database:
            rows = database.execute("SELECT transaction_id, fate, said FROM ledger").fetchall()
        return {transaction_id: Entry(Fate(fate), said) for transaction_id, fate, said in rows}

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, timeout=30)
        try:
            database.execute("PRAGMA synchronous = FULL")
            with database:
                yield database
        finally:
            database.close()
