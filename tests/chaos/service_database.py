"""The database of the chaos run's services: SQLite, which is on the disk before `decide` returns."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tests.chaos.plans import Decision, Fate

_COLUMNS = "transaction_id TEXT PRIMARY KEY, fate TEXT NOT NULL, first_answer TEXT NOT NULL"


class ServiceDatabase:
    """The decisions of all services in one file, which several processes and threads may open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"CREATE TABLE IF NOT EXISTS decisions ({_COLUMNS})")

    def decide(self, transaction_id: str, fate: Fate, first_answer: str) -> Fate:
        """Store a decision unless there is one, sync it to the disk, and return the stored one.

        The first caller decides: the local transaction, or a check that finds no decision.
        """
        with self._open() as database:
            values = (transaction_id, fate, first_answer)
            database.execute("INSERT INTO decisions VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values)
            [(stored,)] = database.execute("SELECT fate FROM decisions WHERE transaction_id = ?", (transaction_id,))
        return Fate(stored)

    def count(self) -> int:
        with self._open() as database:
            [(rows,)] = database.execute("SELECT count(*) FROM decisions")
        return cast(int, rows)

    def decisions(self) -> dict[str, Decision]:
        with self._open() as database:
            rows = database.execute("SELECT transaction_id, fate, first_answer FROM decisions").fetchall()
        return {transaction_id: Decision(Fate(fate), first_answer) for transaction_id, fate, first_answer in rows}

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, timeout=30)
        try:
            database.execute("PRAGMA synchronous = FULL")
            with database:
                yield database
        finally:
            database.close()
