"""An order service that is made to be killed: `python -m tests.kills.service KAFKA_FILE DATABASE URL`.

For each line on its standard input it forks an instance and prints its process id. An instance sends transactions until
it is killed, or only answers checks if the line is `answer`. A fork starts in milliseconds, so that a run may kill a
thousand of them. With its first message an instance makes a file `begun.PID` beside KAFKA_FILE.
"""

import logging
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from halfway import SqlTransactions, TransactionProducer
from halfway.schemas.settings import KafkaSettings

GROUP = "shop"
SCHEMA = "CREATE TABLE IF NOT EXISTS placed (transaction_id VARCHAR(32) PRIMARY KEY, messages INTEGER NOT NULL)"


def connect_to(kind: str, where: str) -> Callable[[], Any]:
    """Return a function that connects to a file of SQLite, or to a port of this machine."""
    if kind == "sqlite":
        return lambda: sqlite3.connect(where, timeout=10)
    if kind == "postgresql":
        return lambda: psycopg.connect(host="127.0.0.1", port=int(where), user="postgres", dbname="postgres", connect_timeout=10)
    return lambda: pymysql.connect(host="127.0.0.1", port=int(where), user="root", database="test", connect_timeout=10)


def serve(kafka: KafkaSettings, connect: Callable[[], Any], begun: Path, *, sends: bool) -> None:
    """Run one instance, until it is killed."""
    logging.disable(logging.CRITICAL)
    transactions = SqlTransactions(connect, lock_wait_ms=500)
    chance = random.Random(os.getpid())
    with TransactionProducer(kafka, GROUP, transactions, session_timeout_ms=6_000, send_timeout_ms=8_000) as producer:
        while sends:
            try:
                with producer.transaction() as tx:
                    messages = chance.randint(1, 3)
                    tx.execute(f"INSERT INTO placed VALUES ('{tx.transaction_id}', {messages})")
                    for _ in range(messages):
                        tx.send("orders", tx.transaction_id.encode())
                    begun.touch()
            except Exception as error:
                print(f"{type(error).__name__}", file=sys.stderr, flush=True)  # noqa: T201
        signal.pause()


def main(kafka_file: str, kind: str, where: str) -> None:
    kafka = KafkaSettings.model_validate_json(Path(kafka_file).read_text())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            begun = Path(kafka_file).with_name(f"begun.{os.getpid()}")
            serve(kafka, connect_to(kind, where), begun, sends=line.strip() == "send")
            os._exit(0)
        print(pid, flush=True)  # noqa: T201  # the runner reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
