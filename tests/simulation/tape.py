"""A simulated history that can be played again: what happened to Kafka, the disk and the job, in order."""

from collections.abc import Mapping
from typing import NamedTuple

from tests.simulation.generator import generate
from tests.simulation.history import HALF, OP, Place
from tests.simulation.job import Job
from tests.simulation.log import CREATE_TIME, Partition
from tests.simulation.storage import Offsets
from tests.simulation.world import NUMBERS, Action, World

LENGTH = (50, 80)
TOGETHER = 10
"""How many actions happen at one time. A real run takes seconds."""
_NOT_PLAYED = ("slow partitions", "a rate limit", "frozen jobs")
"""Features that decide what a batch reads, or need two jobs: a real job reads all there is."""
_LAST = (Action("start", 1_000, {}), Action("wait", 0, {"ms": 65_000, "steps": 2}), Action("wait", 0, {"ms": 130_000, "steps": 1}))


class Run(NamedTuple):
    """A start of the job, and the batch that it runs; two if it has to repeat one first."""

    seq: int
    settings: Mapping[str, object]
    path: str
    is_adopting: bool
    query_id: str = ""
    """The job's query. The ticks name it."""
    killed_at: str = ""
    killed_at_time: int = 0
    """At which of the times that the job reaches that step: 1 for the first."""
    refusal: str = ""
    """The class of the error that ended it."""


class TransactionEnd(NamedTuple):
    """The open Kafka transaction is committed or aborted."""

    seq: int
    is_commit: bool
    ends: Offsets
    """Where the partitions end with it."""


class Deletion(NamedTuple):
    """Kafka deletes the records before these offsets."""

    seq: int
    first: Offsets


class MorePartitions(NamedTuple):
    """A topic has more partitions."""

    seq: int
    topic: str
    count: int


class BackUp(NamedTuple):
    """The folder of a checkpoint is copied."""

    seq: int
    path: str


class Restore(NamedTuple):
    """The copy is put in the place of a checkpoint."""

    seq: int
    path: str


class LostCommit(NamedTuple):
    """A file of the log of commits is removed."""

    seq: int
    path: str
    batch_id: int


Event = Run | TransactionEnd | Deletion | MorePartitions | BackUp | Restore | LostCommit


class TapedWorld(World):
    """A world with CreateTime topics that records what a real one can do too.

    Each batch is a run of its own, as a real job with `available_now` reads all there is and ends. Several actions at
    one time come before one batch.
    """

    def __init__(self, seed: int) -> None:
        drawn = enumerate(generate(seed, LENGTH, _NOT_PLAYED))
        actions = [action if number % TOGETHER == 0 else action._replace(dt_ms=0) for number, action in drawn]
        super().__init__([*actions, *_LAST], is_full=seed % 2 == 0, timestamp_type=CREATE_TIME)
        self.seed = seed
        self.tape: list[Event] = []
        self.cannot_be_played = ""
        self._named: Mapping[str, object] = {}
        """The settings of the job that runs."""
        self._steps: list[str] = []

    def __str__(self) -> str:
        runs, rows = sum(isinstance(event, Run) for event in self.tape), len(self.history.rows)
        return f"{len(self.history.records)} records, {runs} runs of the job, {rows} rows"

    def _come_to_rest(self) -> None:
        """What is left stays as it is."""

    def pass_time(self, ms: int, steps: int = 1) -> None:
        if not ms:
            return
        for _ in range(min(steps, 2)):
            self.clock.now_ms += ms // steps
            for service in self.services.values():
                service.step()
            if self.jobs:
                self._run(self.jobs[0])

    def do_start(self, adopt: bool = False) -> None:
        if self.jobs:
            return
        acts, self._named = len(self.history.acts), {**NUMBERS, **self.wanted}
        super().do_start(adopt)
        if self.jobs:
            self._run(self.jobs[0], is_adopting=adopt)
            return
        [*_, act] = self.history.acts[acts:]
        if act.name != "refused":
            self.cannot_be_played = "killed in a start"
        self.tape.append(Run(self.clock.next_seq(), self._named, self.path, adopt, refusal=act.detail.split(":")[0]))

    def _run(self, job: Job, *, is_adopting: bool = False) -> None:
        self.tick(job)
        seq, acts, rows = self.clock.next_seq(), len(self.history.acts), len(self.history.rows)
        last = job.checkpoint.last_planned
        is_repeat = last >= 0 and not job.checkpoint.is_committed(last)
        self._steps = ["offsets"] * is_repeat
        if self._guard(job, job.batch) and is_repeat:
            is_lost = any(row.values.get("reason") == "half_lost" for row in self.history.rows[rows:])
            self.cannot_be_played = self.cannot_be_played or "a notice between two batches of one run" * is_lost
            self._guard(job, job.batch)
        run = Run(seq, self._named, job.path, is_adopting, job.manifest.query_id)
        for act in self.history.acts[acts:]:
            if act.name == "killed at":
                run = run._replace(killed_at=act.detail, killed_at_time=self._steps.count(act.detail))
                if is_repeat and act.detail == "commit":
                    self.cannot_be_played = "killed between two batches of one run"
            elif act.name != "killed":
                run = run._replace(refusal=act.detail.split(":")[0])
        self.tape.append(run)

    def _step(self, name: str) -> None:
        if name != "before check" or self._steps[-1:] != [name]:
            self._steps.append(name)
        elif self.kill_in == 1:
            self.cannot_be_played = "killed between two check requests"
        super()._step(name)

    def do_add_partition(self, topic: str) -> None:
        before = len(self.kafka.topics[topic])
        super().do_add_partition(topic)
        if topic in (HALF, OP) and len(self.kafka.topics[topic]) > before:
            self.tape.append(MorePartitions(self.clock.next_seq(), topic, before + 1))

    def do_expire(self) -> None:
        super().do_expire()
        self.tape.append(Deletion(self.clock.next_seq(), {place: partition.first for place, partition in self._places()}))

    def do_end_tx(self, commit: bool) -> None:
        tx = self.open_tx
        super().do_end_tx(commit)
        if tx is not None:
            self.tape.append(TransactionEnd(self.clock.next_seq(), commit, {place: partition.end for place, partition in self._places()}))

    def do_back_up(self) -> None:
        super().do_back_up()
        self.tape.append(BackUp(self.clock.next_seq(), self.path))

    def do_restore(self) -> None:
        acts = len(self.history.acts)
        super().do_restore()
        if len(self.history.acts) > acts:
            self.tape.append(Restore(self.clock.next_seq(), self.path))

    def do_lose_commit(self) -> None:
        files = self.storage.checkpoint(self.path).files
        before = set(files)
        super().do_lose_commit()
        for name in before - set(files):
            self.tape.append(LostCommit(self.clock.next_seq(), self.path, int(name.removeprefix("commits/"))))

    def _places(self) -> list[tuple[Place, Partition]]:
        return [((topic, number), each) for topic in (HALF, OP) for number, each in enumerate(self.kafka.topics[topic])]
