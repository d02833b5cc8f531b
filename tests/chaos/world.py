"""What the faults happen to: a broker, topics, the job, its services and its tables, each part a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.storage.checkpoint import STATUS_FILE
from halfway.pipelines.storage.state_reader import ends_in
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.client import LEDGER_FILE, PAUSE_FILE, SETTINGS_FILE, STRANGER
from tests.chaos.evidence import TopicReader, gather, ids_in, query
from tests.chaos.launcher import ARM_FILE, GO_FILE, REACHED_FILE, Step, put
from tests.chaos.plans import Fate, Ledger
from tests.fuzz.auditor import Findings, Verdict, audit
from tests.support.paths import ROOT

LIMIT_S = 150.0
_MAX_STARTS = 6
# Quick to start, for it lives for seconds; and snapshots of the state each few batches, so that there are some to damage.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -Dspark.sql.streaming.stateStore.maintenanceInterval=5s"
QUICK: dict[str, object] = {
    "state.buckets": 2,
    "state.shuffle_partitions": 1,
    "resolution.transactionTimeOut": "2s",
    "resolution.transactionCheckInterval": "1s",
    "resolution.transactionCheckMax": 12,
    "resolution.tick_interval": "500ms",
    "resolution.resolved_retention": "20s",
    "trigger.interval": "200ms",
}


class ChaosError(Exception):
    """A fault could not be made, or nothing recovered from it."""


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise ChaosError(f"{what} did not come within {limit_s:.0f} s")
        time.sleep(0.1)


class World:
    """One job with topics, tables and services of its own on `broker`; `with` ends all that was started."""

    def __init__(
        self,
        folder: Path,
        broker: LocalBroker,
        seed: int,
        overrides: Mapping[str, object] | None = None,
        *,
        groups: Sequence[str] = ("alpha", "beta"),
        rate: float = 2.5,
        jvm_options: str = JVM_OPTIONS,
    ) -> None:
        """`rate` is the transactions a second of each of the services, of which each producer group has one."""
        self.folder, self.broker, self.seed = folder, broker, seed
        self.groups, self._rate, self._jvm_options = groups, rate, jvm_options
        folder.mkdir(parents=True, exist_ok=True)
        self.warehouse, self._checkpoints = folder / "warehouse", 1
        name = folder.name
        self.options: dict[str, object] = {
            **QUICK,
            "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
            **{f"kafka.{kind}_topic": f"{name}-{kind}" for kind in ("half", "op", "check")},
            "storage.warehouse": str(self.warehouse),
            **(overrides or {}),
        }
        self.ledger = Ledger(folder / LEDGER_FILE)
        self.settings = self._settings()
        self.topics = TopicReader(self.settings)
        self.destroyed: set[str] = set()
        """Whose half, or verdict, a fault took out of Kafka before it was settled."""
        self.missing: set[str] = set()
        """What is committed and not readable yet, of what the last recovery waited for."""
        self.disks: dict[str, Path] = {}
        """File systems of this world's own, by their folder's name."""
        self.job: subprocess.Popen[bytes] | None = None
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = self._orders = self._client_runs = 0
        self._is_adopting = False
        (folder / SETTINGS_FILE).write_text(self.settings.kafka.model_dump_json())

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / str(self._checkpoints)

    def _settings(self) -> Settings:
        return load_settings(environ={}, overrides={**self.options, "storage.checkpoint": str(self.checkpoint)})

    def make_topics(self, partitions: int = 2) -> None:
        create_topics(self.settings, partitions)

    # The job.

    def command(self, *arguments: str, launcher: bool = True, changed: Mapping[str, object] | None = None) -> list[str]:
        options = {**self.options, "storage.checkpoint": self.checkpoint, **(changed or {})}
        module = ["tests.chaos.launcher", str(self.folder)] if launcher else ["pipelines"]
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", *module, *arguments, *sets]

    def start_job(self, changed: Mapping[str, object] | None = None) -> None:
        """Start the job; with --adopt if its checkpoint is new and the tables are not."""
        self.starts += 1
        more = ["--adopt"] if self._is_adopting else []
        environ = {**os.environ, "SPARK_SUBMIT_OPTS": self._jvm_options}
        with (self.folder / f"job-{self.starts:03}.log").open("wb") as log:
            # A session of its own: one signal for the driver, its JVM and what else it starts.
            self.job = subprocess.Popen(
                self.command("resolve", *more, changed=changed),
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def job_log(self, start: int | None = None) -> str:
        file = self.folder / f"job-{start or self.starts:03}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def job_runs(self) -> bool:
        return self.job is not None and self.job.poll() is None

    def signal_job(self, number: signal.Signals) -> None:
        """Send a signal to the job's whole process group."""
        assert self.job is not None
        if self.job.poll() is None:
            os.killpg(self.job.pid, number)

    def kill_job(self) -> None:
        if self.job is not None:
            # Also when its leader has ended: a JVM may be left.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.job.pid, signal.SIGKILL)
            self.job.wait(30)

    def stop_job(self) -> None:
        """End the job as an operator does."""
        assert self.job is not None
        self.job.terminate()
        self.job.wait(60)

    def batches(self) -> int:
        """The number of the last batch that is committed in this checkpoint; -1 before the first."""
        folder = self.checkpoint / "commits"
        return max((int(file.name) for file in folder.glob("[0-9]*")), default=-1) if folder.exists() else -1

    def read_to(self, topic: str) -> dict[int, int]:
        """Up to where the batches that are committed have read a topic, by partition."""
        return ends_in((self.checkpoint / "offsets" / str(self.batches())).read_text())[topic]

    def wait_for_batches(self, count: int) -> None:
        """Wait until `count` more batches are committed."""
        goal = self.batches() + count
        until(lambda: self.batches() >= goal or not self.job_runs(), f"batch {goal}")
        if not self.job_runs():
            raise ChaosError(f"the job ended: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line for line in self.job_log().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1][:1500]

    def new_checkpoint(self) -> None:
        """Let the next start take a new checkpoint, by --adopt."""
        self._checkpoints += 1
        self._is_adopting = True
        self.settings = self._settings()

    def arm(self, step: Step, batches: int, action: str) -> None:
        """Have the job die, or wait, at `step` of the `batches`th batch from now that comes to it."""
        self._orders += 1
        for name in (REACHED_FILE, GO_FILE):
            (self.folder / name).unlink(missing_ok=True)
        put(self.folder / ARM_FILE, {"number": self._orders, "step": step, "batches": batches, "action": action})

    def wait_for_step(self) -> int:
        """Wait until the armed step is reached; return the batch."""
        until((self.folder / REACHED_FILE).exists, "the step")
        batch_id: int = json.loads((self.folder / REACHED_FILE).read_text())["batch_id"]
        return batch_id

    def go(self) -> None:
        """Let a job that waits at a step go on."""
        (self.folder / GO_FILE).touch()

    def disarm(self) -> None:
        (self.folder / ARM_FILE).unlink(missing_ok=True)

    # The services.

    def start_client(self, group: str) -> None:
        self._client_runs += 1
        arguments = [str(self.folder), group, f"r{self._client_runs}", str(self._rate), str(self.seed)]
        with (self.folder / f"client-{group}-{self._client_runs:03}.log").open("wb") as log:
            self.clients[group] = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill_client(self, group: str) -> None:
        self.clients[group].kill()
        self.clients[group].wait(30)

    def wait_for_transactions(self, count: int) -> None:
        """Wait until `count` more transactions are decided."""
        goal = self.ledger.count() + count
        until(lambda: self.ledger.count() >= goal, f"transaction {goal}")

    def pause_traffic(self, on: bool = True) -> None:
        file = self.folder / PAUSE_FILE
        file.touch() if on else file.unlink(missing_ok=True)

    # All of it.

    def start_what_is_down(self) -> None:
        """What a supervisor does: start again what has ended."""
        if self.broker.pid() is None:
            self.broker.start()
        if not self.job_runs():
            self.kill_job()
            self.start_job()
        for group in self.groups:
            if group not in self.clients or self.clients[group].poll() is not None:
                self.start_client(group)

    def recover(self, *, asked_too: bool = False, limit_s: float = LIMIT_S) -> float:
        """Start what is down until every message that was committed up to now is readable; return the seconds it took.

        Those that their service did not commit at once, but when asked, only with `asked_too`: the next recoveries show them.
        """
        began_s, first = time.monotonic(), self.starts
        self.start_what_is_down()
        committed = {name: entry for name, entry in self.ledger.entries().items() if entry.fate is Fate.COMMIT}
        wanted = {name for name, entry in committed.items() if asked_too or entry.said == Fate.COMMIT} - self.destroyed
        self.missing = wanted

        def is_readable() -> bool:
            self.start_what_is_down()
            if self.starts - first > _MAX_STARTS:
                raise ChaosError(f"the job does not come up again: {self.last_words()}")
            time.sleep(0.5)
            self.missing = wanted - ids_in(self.warehouse, Table.MESSAGES)
            if self.missing:
                self.missing -= self._overruled() | self.named_lost()
            return not self.missing

        try:
            until(is_readable, "every committed message", limit_s)
        except ChaosError as error:
            raise ChaosError(f"{error}; not readable: {len(self.missing)}; the job: {self.last_words()}") from None
        self._is_adopting = False
        return time.monotonic() - began_s

    def named_lost(self) -> set[str]:
        """Whose half was gone when the job needed it, and is in quarantine for it (R17)."""
        rows = query(self.warehouse, Table.QUARANTINE, "transaction_id", f"reason = '{Reason.HALF_LOST}'")
        return {row["transaction_id"] for row in rows}

    def _overruled(self) -> set[str]:
        """Whose first verdict in Kafka was a stray one: that one counts (R2)."""
        with suppress(KafkaException, AssertionError):
            self.topics.read_on()
        first: dict[str, Verdict] = {}
        for verdict in sorted(self.topics.verdicts, key=lambda verdict: verdict[1:4]):
            if verdict.group != STRANGER:
                first.setdefault(verdict.transaction_id, verdict)
        return {name for name, verdict in first.items() if verdict.is_stray}

    def audit(self, *, settled: Iterable[str] | None = (), pending: frozenset[str] | None = None) -> Findings:
        """Judge what is there now: of `settled`, or all, each must have its end, or be pending."""
        return audit(gather(self.folder, self.settings, self.topics, pending=pending, destroyed=frozenset(self.destroyed)), settled)

    def pending(self) -> frozenset[str]:
        """Who is pending, by `halfway pending`."""
        command = self.command("pending", "--json", launcher=False)
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise ChaosError(f"halfway pending: {done.stderr[-500:]}")
        return frozenset(row["transaction_id"] for row in json.loads(done.stdout))

    def _has_none_pending(self) -> bool:
        """Whether the last batch left nothing pending; a new checkpoint has had none for a while."""
        path = self.checkpoint / STATUS_FILE
        return path.exists() and json.loads(path.read_text())["pending"] == 0

    def settle(self) -> Findings:
        """Let everything come to its end, stop, and judge the whole: what has no end must be pending, as the job says.

        A new checkpoint has what the tables hold as discarded for pending, until it has counted all its checks anew; it sends none.
        """
        self.pause_traffic()
        self.recover(asked_too=True)
        with suppress(ChaosError):
            until(self._has_none_pending, "the end of all that nobody answers for")
        for client in self.clients.values():
            client.terminate()
            client.wait(30)
        # What they said last is read by then.
        self.wait_for_batches(3)
        self.stop_job()
        return self.audit(settled=None, pending=self.pending())

    def __enter__(self) -> Self:
        try:
            self.make_topics()
            self.start_what_is_down()
            self.wait_for_transactions(20)
            self.recover()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.job is not None and self.job.poll() is None:
            self.signal_job(signal.SIGCONT)
        self.kill_job()
        for client in self.clients.values():
            client.kill()
            client.wait(30)
