"""Kills the instances of a service at random moments, and compares its orders with the messages in the end."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from halfway.schemas.settings import KafkaSettings
from tests.kills.consumer import MANY_KILLS
from tests.kills.service import SCHEMA, connect_to
from tests.support.client_world import ops, read
from tests.support.delta_rows import delta_rows
from tests.support.job_process import JobProcess
from tests.support.kafka_topics import topic_settings
from tests.support.paths import ROOT
from tests.support.waiting import until

QUICK = {"resolution.transactionTimeOut": "1s", "resolution.transactionCheckInterval": "1s", "resolution.transactionCheckMax": 100_000}
_LONGEST_LIFE_S = 0.8
_SHARE_KILLED_WHILE_IT_SENDS = 0.8
_STALL_EVERY = 20
_STALL_S = 5.0
"""Longer than `transactionTimeOut`, so that another instance is asked about what the stalled one was doing."""


class Findings(NamedTuple):
    """What a run found. The lists must be empty."""

    kills: int
    orders: int
    messages: int
    rolled_back: int
    by_check: int
    without_message: list[str]
    without_order: list[str]
    committed_after_rollback: list[str]
    discarded_or_contrary: list[str]

    def faults(self) -> list[str]:
        return [*self.without_message, *self.without_order, *self.committed_after_rollback, *self.discarded_or_contrary]

    def undone(self) -> list[str]:
        """Return what the run should have done and has not: a run that does nothing finds no fault."""
        undone = [] if self.orders else ["no order was placed"]
        return undone if self.by_check or self.kills < MANY_KILLS else [*undone, "no check was answered"]


class Instances:
    """Two instances of the service, and the process that forks them."""

    def __init__(self, kafka: KafkaSettings, kind: str, where: str, folder: Path) -> None:
        self._folder = folder
        file = folder / "kafka.json"
        names = topic_settings(kafka)
        file.write_text(
            KafkaSettings.model_validate({name.removeprefix("kafka."): value for name, value in names.items()}).model_dump_json()
        )
        command = [sys.executable, "-m", "tests.kills.service", str(file), kind, where]
        with (folder / "service.log").open("w") as log:
            self._forker = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.pids: list[int] = []

    def start(self, what: str) -> int:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(f"{what}\n")
        self._forker.stdin.flush()
        self.pids.append(int(self._forker.stdout.readline()))
        return self.pids[-1]

    def wait_for_start(self, pid: int) -> None:
        """Wait until it sends: on a slow machine an instance may take longer to start than most live."""
        until((self._folder / f"begun.{pid}").exists, "the instance has sent a message", limit_s=60)

    def kill(self, pid: int) -> None:
        self.pids.remove(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for pid in list(self.pids):
            self.kill(pid)
        self._forker.kill()
        self._forker.wait(30)


def kill_often(kafka: KafkaSettings, job: JobProcess, kind: str, where: str, folder: Path, *, kills: int, seed: int) -> Findings:
    """Kill one of two instances `kills` times, and stall one now and then. Then let two others answer all checks.

    Args:
        kafka: three topics of this run.
        job: the real job on these topics, running, with many quick checks.
        kind: sqlite, postgresql or mariadb.
        where: the file, or the port.
        folder: for settings and logs.
        kills: how many.
        seed: of the moments.
    """
    connect = connect_to(kind, where)
    with closing(connect()) as database:
        database.cursor().execute(SCHEMA)
        database.commit()
    chance = random.Random(seed)
    instances = Instances(kafka, kind, where, folder)
    try:
        for _ in range(2):
            instances.start("send")
        for number in range(1, kills + 1):
            victim = chance.choice(instances.pids)
            if chance.random() < _SHARE_KILLED_WHILE_IT_SENDS:
                instances.wait_for_start(victim)
            time.sleep(chance.uniform(0.0, _LONGEST_LIFE_S))
            if number % _STALL_EVERY == 0:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(_STALL_S)
                os.kill(victim, signal.SIGCONT)
                time.sleep(chance.uniform(0.0, 0.2))
            instances.kill(victim)
            instances.start("send")
        for pid in list(instances.pids):
            instances.kill(pid)
        for _ in range(2):
            instances.start("answer")
        until(lambda: _is_settled(kafka, job), "every half has its verdict, and every commit its row", limit_s=300)
    finally:
        instances.stop()
    return _compare(kafka, job, kind, where, kills)


def _verdicts(kafka: KafkaSettings) -> dict[str, str]:
    """Return id → its first verdict."""
    found: dict[str, str] = {}
    for name, headers in ops(kafka):
        if headers.get("ACTION") in ("COMMIT", "ROLLBACK"):
            found.setdefault(name, headers["ACTION"])
    return found


def _is_settled(kafka: KafkaSettings, job: JobProcess) -> bool:
    halves = {(message.key() or b"").decode() for message in read(kafka, kafka.half_topic) if message.key()}
    verdicts = _verdicts(kafka)
    if not halves <= verdicts.keys():
        time.sleep(1)
        return False
    return len(job.delivered()) >= len([name for name in halves if verdicts[name] == "COMMIT"])


def _compare(kafka: KafkaSettings, job: JobProcess, kind: str, where: str, kills: int) -> Findings:
    with closing(connect_to(kind, where)()) as database:
        cursor = database.cursor()
        cursor.execute("SELECT transaction_id, messages FROM placed")
        placed = dict(tuple(row) for row in cursor.fetchall())
    expected = {f"{name}.{number}" for name, count in placed.items() for number in range(count)}
    delivered = job.delivered()
    all_ops = [(name, headers) for name, headers in ops(kafka) if "ACTION" in headers]
    rolled_back = {name for name, headers in all_ops if headers["ACTION"] == "ROLLBACK"}
    tables = {name: delta_rows(job.warehouse / name, "SELECT transaction_id, reason FROM rows") for name in ("discarded", "quarantine")}
    return Findings(
        kills=kills,
        orders=len(placed),
        messages=len(delivered),
        rolled_back=len(rolled_back),
        by_check=len({name for name, headers in all_ops if "FROM_CHECK" in headers}),
        without_message=sorted(expected - set(delivered)),
        without_order=sorted(set(delivered) - expected) + sorted({name for name in delivered if delivered.count(name) > 1}),
        committed_after_rollback=sorted(name for name in rolled_back if name.split(".")[0] in placed),
        discarded_or_contrary=[str(row) for rows in tables.values() for row in rows if row["reason"] != "orphan_op"],
    )
