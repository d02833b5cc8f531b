"""What the faults happen to: Kafka, topics, tables, the job and its services, each part in its own process."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.runtime.java import SHORT_LIVED_JVM
from halfway.pipelines.storage.manifest import STATUS_FILE
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.auditor import Findings, Verdict, audit
from tests.chaos.client import DATABASE_FILE, PAUSE_FILE, SETTINGS_FILE, STRANGER
from tests.chaos.evidence import TopicReader, gather, ids_in, query
from tests.chaos.launched_job import LaunchedJob
from tests.chaos.plans import Fate
from tests.chaos.relays import Relays
from tests.chaos.service_database import ServiceDatabase
from tests.chaos.told_history import history_of
from tests.chaos.waiting import LIMIT_S, ChaosError, until
from tests.simulation.checker import judge
from tests.simulation.saved import save
from tests.support.kafka_cluster import KafkaCluster
from tests.support.paths import ROOT

_MAX_STARTS = 6
_CLOCKS_AGREE_MS = 60_000
HISTORY_FILE = "history.json"
JVM_OPTIONS = f"{SHORT_LIVED_JVM} -Dspark.sql.streaming.stateStore.maintenanceInterval=5s"
"""The JVM lives for seconds, so it starts quickly and writes snapshots of the state often, which faults can damage."""
SHORT_TIMES: dict[str, object] = {
    "state.buckets": 2,
    "state.shuffle_partitions": 1,
    "resolution.transactionTimeOut": "2s",
    "resolution.transactionCheckInterval": "1s",
    "resolution.transactionCheckMax": 12,
    "resolution.tick_interval": "500ms",
    "resolution.resolved_retention": "20s",
    "trigger.interval": "200ms",
}


class World:
    """One job on `kafka` with its own topics, tables and services; `with` starts all of it and ends it."""

    def __init__(
        self,
        folder: Path,
        kafka: KafkaCluster,
        seed: int,
        overrides: Mapping[str, object] | None = None,
        *,
        groups: Sequence[str] = ("alpha", "beta"),
        rate: float = 2.5,
        jvm_options: str = JVM_OPTIONS,
    ) -> None:
        """Prepare a world with one service for each producer group, which sends `rate` transactions a second."""
        self.folder, self.kafka, self.seed = folder, kafka, seed
        self.groups, self._rate = groups, rate
        folder.mkdir(parents=True, exist_ok=True)
        self.warehouse = folder / "warehouse"
        name = folder.name
        self._options: dict[str, object] = {
            **SHORT_TIMES,
            "kafka.bootstrap_servers": kafka.bootstrap_servers,
            **{f"kafka.{kind}_topic": f"{name}-{kind}" for kind in ("half", "op", "check")},
            "storage.warehouse": str(self.warehouse),
            **(overrides or {}),
        }
        self.job = LaunchedJob(folder, self._options, jvm_options)
        self.database = ServiceDatabase(folder / DATABASE_FILE)
        self.settings = self._settings()
        self.topics = TopicReader(self.settings)
        self.destroyed: set[str] = set()
        """The ids whose half or verdict a fault deleted from Kafka before the job had settled them."""
        self.left_pending: frozenset[str] = frozenset()
        """The ids that were pending when the world had settled."""
        self.missing: set[str] = set()
        """The committed messages that the last recovery waits for and that are not readable yet."""
        self.disks: dict[str, Path] = {}
        """The file systems that only this world uses, by the name of their folder."""
        self.relays: Relays | None = None
        """The relays, where there are any."""
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        self._client_runs = 0
        (folder / SETTINGS_FILE).write_text(self.settings.kafka.model_dump_json())

    def _settings(self) -> Settings:
        return load_settings(environ={}, overrides={**self._options, "storage.checkpoint": str(self.job.checkpoint)})

    def make_topics(self, partitions: int = 2) -> None:
        create_topics(self.settings, partitions)

    def add_relays(self) -> None:
        """Let a relay send on what is committed, from now on."""
        self.relays = Relays(self.folder, self._options)
        self.relays.make_topics()
        self.relays.start_what_is_down()

    def new_checkpoint(self) -> None:
        """Let the next start of the job use a new checkpoint, with --adopt."""
        self.job.take_new_checkpoint()
        self.settings = self._settings()

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
        """Wait until the services have decided `count` more transactions."""
        goal = self.database.count() + count
        until(lambda: self.database.count() >= goal, f"transaction {goal}")

    def pause_traffic(self, on: bool = True) -> None:
        file = self.folder / PAUSE_FILE
        file.touch() if on else file.unlink(missing_ok=True)

    # Recovery and judgement.

    def start_what_is_down(self) -> None:
        """Start again what has ended, as a supervisor does."""
        if not self.kafka.status()["running"]:
            self.kafka.start()
        if not self.job.is_running():
            self.job.kill()
            self.job.start()
        if self.relays is not None:
            self.relays.start_what_is_down()
        for group in self.groups:
            if group not in self.clients or self.clients[group].poll() is not None:
                self.start_client(group)

    def recover(self, *, also_checked: bool = False) -> float:
        """Start what is down until every message committed so far is readable, and return the seconds that took.

        Without `also_checked`, messages whose service answers COMMIT only to a check do not count. A start that adopts
        tables, and its first batch, have taken three minutes of two slow cores that other tests used too.
        """
        began_s, first = time.monotonic(), self.job.starts
        self.start_what_is_down()
        committed = {name: decision for name, decision in self.database.decisions().items() if decision.fate is Fate.COMMIT}
        wanted = {name for name, decision in committed.items() if also_checked or decision.first_answer == Fate.COMMIT} - self.destroyed
        self.missing = wanted

        def is_readable() -> bool:
            self.start_what_is_down()
            if self.job.starts - first > _MAX_STARTS:
                raise ChaosError(f"the job does not come up again: {self.job.last_words()}")
            time.sleep(0.5)
            self.missing = wanted - ids_in(self.warehouse, Table.MESSAGES)
            if self.missing:
                self.missing -= self._overruled() | self.reported_lost() | self.not_due()
            return not self.missing

        try:
            until(is_readable, "every committed message", LIMIT_S)
        except ChaosError as error:
            raise ChaosError(f"{error}; not readable: {len(self.missing)}; the job: {self.job.last_words()}") from None
        self.job.is_adopting = False
        return time.monotonic() - began_s

    def reported_lost(self) -> set[str]:
        """Return the ids whose half is in quarantine as `half_lost` (R17)."""
        rows = query(self.warehouse, Table.QUARANTINE, "transaction_id", f"reason = '{Reason.HALF_LOST}'")
        return {row["transaction_id"] for row in rows}

    def not_due(self) -> set[str]:
        """Return the ids without a verdict whose half has a time to come, by a broker's fast clock: no check is due."""
        decided = {verdict.transaction_id for verdict in self.topics.verdicts}
        come_ms = time.time() * 1000 + _CLOCKS_AGREE_MS
        return {half.transaction_id for half in self.topics.halves if half.at_ms > come_ms} - decided

    def _overruled(self) -> set[str]:
        """Return the ids whose first verdict in Kafka is a stray one, which counts then (R2)."""
        with suppress(KafkaException, AssertionError):
            self.topics.read_on()
        first: dict[str, Verdict] = {}
        for verdict in sorted(self.topics.verdicts, key=lambda verdict: verdict[1:4]):
            if verdict.group != STRANGER:
                first.setdefault(verdict.transaction_id, verdict)
        return {name for name, verdict in first.items() if verdict.is_stray}

    def audit(self, *, settled: Iterable[str] | None = (), pending: frozenset[str] | None = None) -> Findings:
        """Judge the present state.

        Each id of `settled` must be settled. With None every id must be settled or pending.
        """
        evidence = gather(self.folder, self.settings, self.topics, pending=pending, destroyed=frozenset(self.destroyed))
        return audit(replace(evidence, not_due=frozenset(self.not_due())), settled)

    def pending(self) -> frozenset[str]:
        """Return the ids that `halfway pending` lists."""
        done = self.job.run_command("pending", "--json", limit_s=120)
        if done.returncode:
            raise ChaosError(f"halfway pending: {done.stderr[-500:]}")
        return frozenset(row["transaction_id"] for row in json.loads(done.stdout))

    def _has_none_pending(self) -> bool:
        """Return True if the last batch left nothing pending that is due. A new checkpoint has no batch at first."""
        path = self.job.checkpoint / STATUS_FILE
        status = BatchStatus.parse(path.read_text()) if path.exists() else None
        return status is not None and status.pending <= len(self.not_due())

    def settle(self) -> Findings:
        """Let all that is due be settled, stop the job, and judge the whole. What is not settled must be pending."""
        self.pause_traffic()
        self.recover(also_checked=True)
        unsettled: list[str] = []
        try:
            until(self._has_none_pending, "the end of all unanswered transactions")
        except ChaosError as error:
            unsettled.append(str(error))
        for client in self.clients.values():
            client.terminate()
            client.wait(30)
        # After three more batches the job has read the last answers of the services.
        self.job.wait_for_batches(3)
        self.job.stop()
        self.left_pending = self.pending()
        findings = self.audit(settled=None, pending=self.left_pending)
        findings.wrong += unsettled
        if self.relays is not None:
            relayed = self.relays.judge()
            for kind in ("lost", "twice", "wrong"):
                getattr(findings, kind).extend(getattr(relayed, kind))
        return findings

    def judge_history(self) -> Findings:
        """Save the history of a settled world, and let the checker of the simulator judge it.

        Raises:
            ChaosError: Kafka has deleted a part of it. Faults that delete records have worlds of their own.
        """
        was_adopted = self.job.checkpoint.name != "1"
        history = history_of(self.settings, self.database.decisions(), self.left_pending, was_adopted=was_adopted)
        if history is None:
            raise ChaosError("Kafka has deleted a part of the history")
        save(history, self.folder / HISTORY_FILE)
        return Findings(wrong=[f"{self.folder / HISTORY_FILE}: {finding}" for finding in judge(history)])

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
        if self.job.is_running():
            self.job.signal(signal.SIGCONT)
        self.job.kill()
        if self.relays is not None:
            self.relays.close()
        for client in self.clients.values():
            client.kill()
            client.wait(30)
