"""Kills a consumer again and again, mostly between its effect and its bookmark, and counts what each message has done.

A reader with its bookmark in SQLite is killed by SIGKILL. The table grows while it is read. Neither Spark nor Kafka is
needed (`make kills DATABASES=consumer`).
"""

import multiprocessing
import random
import sqlite3
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from halfway import MessageReader, SqlBookmarks
from tests.support.message_tables import append, row
from tests.support.waiting import LIMIT_S

MANY_KILLS = 100
"""As many kills hit each kind of moment at least once."""
_LAST = "last"


class Killed(NamedTuple):
    """What many kills have done. `wrong` must be empty."""

    kills: int
    in_block: int
    """How many hit a consumer between effect and commit."""
    messages: int
    wrong: list[tuple[str, int]]
    """Messages that did not take effect once, with how often they did."""

    def faults(self) -> list[tuple[str, int]]:
        return self.wrong

    def undone(self) -> list[str]:
        """Return what the run should have done and has not: a run that does nothing finds no fault."""
        undone = [] if self.messages > sum(count == 0 for _, count in self.wrong) else ["no message was delivered"]
        return undone if self.in_block or self.kills < MANY_KILLS else [*undone, "no kill hit a consumer between effect and commit"]


def consume(table: str, database: str, steps: Connection) -> None:
    """Write a row for each message, and say where it is: `i` inside of a transaction, `c` after its commit."""
    bookmarks = SqlBookmarks(lambda: sqlite3.connect(database, timeout=30), "consumer")
    for batch in MessageReader(table, max_rows=5).follow(bookmarks.load(), poll_s=0.01):
        with bookmarks.advance(batch) as tx:
            for message in batch.messages:
                tx.execute("INSERT INTO effects (id) VALUES (?)", (message.transaction_id,))
            steps.send("i")
            time.sleep(0.005)
        steps.send(_LAST if any(message.transaction_id == _LAST for message in batch.messages) else "c")


def kill_consumers(folder: Path, kills: int, seed: int = 1) -> Killed:
    """Kill as many consumers; let the last one read all; and compare effects with messages."""
    chance = random.Random(seed)
    table, database = str(folder / "messages"), str(folder / "shop.db")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE effects (id TEXT)")
    processes = multiprocessing.get_context("forkserver")
    # Imported once: each consumer is a copy of a process that has them. The server does not find `tests`.
    reading = ("message_merge", "message_reader")
    processes.set_forkserver_preload([*(f"halfway.clients.reading.{name}" for name in reading), "halfway.clients.sql.sql_bookmarks"])
    sent: list[str] = []
    in_block = 0

    def grow() -> None:
        batch_id = len(sent)
        ids = [f"{batch_id}-{number}" for number in range(chance.randrange(1, 4))]
        append(table, [row((0, batch_id), number, transaction_id=name) for number, name in enumerate(ids)])
        sent.extend(ids)

    grow()
    for number in range(kills + 1):
        is_last = number == kills
        if is_last:
            append(table, [row((1, 0), 0, transaction_id=_LAST)])
            sent.append(_LAST)
        else:
            grow()
            grow()
        steps, theirs = processes.Pipe(duplex=False)
        consumer = processes.Process(target=consume, args=(table, database, theirs), daemon=True)
        consumer.start()
        theirs.close()
        step = _wait(steps, is_last, chance)
        in_block += step == "i"
        consumer.kill()
        consumer.join(LIMIT_S)
        steps.close()
    with closing(sqlite3.connect(database)) as connection:
        times = dict.fromkeys(sent, 0) | dict(connection.execute("SELECT id, count(*) FROM effects GROUP BY id"))
    return Killed(kills, in_block, len(sent), [(name, count) for name, count in times.items() if count != 1])


def _wait(steps: Connection, is_last: bool, chance: random.Random) -> str:
    """Wait for the step at which to kill; for the last consumer until it has read all. Return the last step seen."""
    step = ""
    if not is_last and chance.random() < 0.1:
        time.sleep(chance.random() * 0.1)  # While it starts, loads its bookmark, or opens the table.
        return step
    wanted = _LAST if is_last else chance.choice("iiic")
    while step not in {wanted, _LAST} and steps.poll(LIMIT_S):
        step = steps.recv()
    if not is_last and chance.random() < 0.3:
        time.sleep(chance.random() * 0.01)
    return step
