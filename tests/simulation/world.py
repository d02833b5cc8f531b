"""A world in one thread: a broker, a disk, services, operators and any number of jobs, driven by a list of actions.

An action that does not apply does nothing, and each holds all of its numbers. So any part of a list is a list too,
which is how a failing one is made shorter.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from halfway.conf.loader import load_settings
from halfway.schemas import headers as h
from halfway.schemas.errors import HalfwayError, NotPendingError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from halfway.schemas.tick_value import TickValue
from halfway.transforms.rules import rules_of
from tests.simulation.history import CLOCK_SET, HALF, OP, Act, Fate, Headers, History, KafkaState, Numbers
from tests.simulation.job import Job, pending_in
from tests.simulation.log import LOG_APPEND_TIME, Clock, Kafka, Partition
from tests.simulation.operators import replay
from tests.simulation.services import Service, half_headers, op_headers
from tests.simulation.storage import Checkpoint, DeltaTable, Storage, in_place_of_spark

GROUPS = ("g1", "g2")
PARTITIONS = 2
NUMBERS = {
    "resolution.transactionTimeOut": 6_000,
    "resolution.transactionCheckInterval": 30_000,
    "resolution.transactionCheckMax": 3,
    "resolution.half_retention": 2_000_000,
    "resolution.resolved_retention": 60_000,
    "resolution.max_body_bytes": 100,
}
_settings: dict[tuple[tuple[str, object], ...], Settings] = {}


class Action(NamedTuple):
    """One thing that happens, and how long until the next one."""

    name: str
    dt_ms: int
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())}) +{self.dt_ms}"


class Killed(BaseException):
    """The job was killed at a step."""


class World:
    """Everything there is, and what happens to it."""

    def __init__(self, actions: Sequence[Action], *, is_full: bool = False, timestamp_type: int = LOG_APPEND_TIME) -> None:
        self.actions, self.is_full = actions, is_full
        self.cursor = 0
        self.history = History()
        self.clock = Clock()
        self.kafka = Kafka(self.clock, self.history, PARTITIONS, timestamp_type)
        self.storage = Storage(self.clock, self.history)
        self.storage.step = self._step
        self.leaving: set[str] = set()
        """Groups that stay away after the actions, until all that waits for them has been discarded."""
        self.services = {group: Service(group, self.clock, self.kafka, self.history) for group in GROUPS}
        self.jobs: list[Job] = []
        self.frozen: set[str] = set()
        """Checkpoints that a frozen job holds."""
        self.hanging: list[Job] = []
        """Frozen jobs whose ticks go on, as where a batch waits for a storage that does not answer."""
        self.wanted: dict[str, object] = {}
        """Settings that the next start has."""
        self.path = "/checkpoint-0"
        self.made = 0
        self.backup: tuple[str, Checkpoint] | None = None
        self.kill_in = self.freeze_in = 0
        self.open_tx: int | None = None

    def run(self) -> History:
        """Let the actions happen, then bring everything to rest. Return what is left."""
        with in_place_of_spark():
            self._play()
            self._come_to_rest()
        return self.history

    def _play(self, *, until_wake: bool = False) -> None:
        while self.cursor < len(self.actions):
            action = self.actions[self.cursor]
            self.cursor += 1
            if until_wake and action.name == "wake":
                return
            getattr(self, f"do_{action.name}")(**action.arguments)
            self.pass_time(action.dt_ms)

    def pass_time(self, ms: int, steps: int = 1) -> None:
        """Let time pass in steps. In each, services work, and each job publishes a tick and runs a batch."""
        for _ in range(steps):
            self.clock.now_ms += ms // steps
            for service in self.services.values():
                service.step()
            for job in list(self.jobs):
                if job in self.jobs:
                    self.tick(job)
                    self._tick_of_hanging()
                    self._guard(job, job.batch)

    def _tick_of_hanging(self) -> None:
        for job in self.hanging:
            if job.pace.is_due(self.clock.now_ms):
                self.tick(job)
                job.pace.note_tick(self.clock.now_ms)

    def tick(self, job: Job) -> None:
        """Publish a tick to each partition, as the job's publisher does."""
        unable, known_s = job.lag.unable()
        value = TickValue(tuple(unable), job.manifest.query_id, job.sent.asked_ms(known_s)).to_bytes()
        now = str(self.clock.now_ms + self.clock.publisher_ms).encode()
        for topic in (HALF, OP):
            count = len(self.kafka.topics[topic])
            for partition in range(count):
                headers: Headers = ((h.TICK, now), (h.PARTITIONS, str(count).encode()))
                is_bad = abs(self.clock.now_ms + self.clock.publisher_ms - self.kafka.broker_ms(topic, partition)) > 300_000
                self.kafka.append(topic, None, value, headers, partition=partition, flaw="bad_tick" if is_bad else None)

    # The job.

    def settings(self) -> Settings:
        """Return the settings that a start has now."""
        named = {**NUMBERS, **self.wanted, "storage.checkpoint": self.path}
        key = tuple(sorted(named.items()))
        if key not in _settings:
            fixed = {"kafka.bootstrap_servers": "simulated:9092", "kafka.half_topic": HALF, "kafka.op_topic": OP, "state.buckets": 2}
            _settings[key] = load_settings(environ={}, overrides={**fixed, **named})
        return _settings[key]

    def do_start(self, adopt: bool = False) -> None:
        """Start a job, unless one runs."""
        if self.jobs:
            return
        settings = self.settings()
        job = Job(f"job-{self.made}", self.kafka, self.storage, settings, self._step, is_full=self.is_full)
        self.made += 1
        self.jobs.append(job)
        if self._guard(job, lambda: job.start(adopt=adopt, in_use=self.frozen)) and job in self.jobs:
            # A start may end an adoption that was killed.
            is_first = not any(act.name == "started" and act.detail.split()[0] == job.path for act in self.history.acts)
            is_adopting = adopt or (is_first and job.manifest.epoch > 0)
            self.act("started", f"{job.path}{' --adopt' if is_adopting else ''}")
            self.history.numbers.append(
                Numbers(*rules_of(settings.resolution)[:5], settings.resolution.max_clock_skew, settings.resolution.max_body_bytes)
            )

    def _guard(self, job: Job, what: Callable[[], object]) -> bool:
        """Let a job do something. Return False if that ended it."""
        try:
            what()
        except Killed:
            self.act("killed", job.name)
        except HalfwayError as error:
            self.act("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            self.act("crashed", f"{type(error).__name__}: {error}")
        else:
            return True
        if job in self.jobs:
            self.jobs.remove(job)
        return False

    def _step(self, name: str) -> None:
        """Kill or freeze the job at a step, if that was asked for."""
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                self.act("killed at", name)
                raise Killed
        if self.freeze_in:
            self.freeze_in -= 1
            if not self.freeze_in:
                self._freeze(name)

    def _freeze(self, name: str) -> None:
        """Let everything else go on while this job stands still, until it wakes."""
        self.act("frozen at", name)
        still, self.jobs = self.jobs, []
        paths = {job.path for job in still}
        self.frozen |= paths
        self.hanging = [job for job in still if job.is_started] if len(self.history.acts) % 2 else []
        self._play(until_wake=True)
        self.frozen -= paths
        self.hanging = []
        self.act("woken")
        self.jobs.extend(still)

    def act(self, name: str, detail: str = "") -> None:
        """Record what an operator did, or what became of a job."""
        self.history.acts.append(Act(self.clock.next_seq(), name, detail))

    def do_kill(self) -> None:
        """Kill the job between two batches."""
        if self.jobs:
            self.act("killed", self.jobs.pop(0).name)

    def do_kill_at(self, step: int) -> None:
        """Kill the job at one of its next steps."""
        self.kill_in = step

    def do_freeze_at(self, step: int) -> None:
        """Freeze the job at one of its next steps, until it wakes."""
        if not self.frozen:
            self.freeze_in = step

    def do_wake(self) -> None:
        """Nothing is frozen, or this would not be called."""

    def do_new_checkpoint(self) -> None:
        """Give up the checkpoint: it is lost, or a frozen job holds it."""
        self.path = f"/checkpoint-{self.clock.next_seq()}"

    def do_lose_tables(self) -> None:
        """Lose the tables, and with them what readers and the checkpoint could go on with."""
        if not self.jobs and not self.frozen:
            self.storage.tables = {name: DeltaTable(name) for name in Table}
            self.history.rows.clear()
            self.do_new_checkpoint()

    def do_back_up(self) -> None:
        """Keep a copy of the checkpoint."""
        self.backup = (self.path, self.storage.checkpoint(self.path).copy())

    def do_restore(self) -> None:
        """Put the copy in the place of the checkpoint. No job may run."""
        if self.backup and not self.jobs and self.backup[0] not in self.frozen:
            self.path = self.backup[0]
            self.storage.checkpoints[self.path] = self.backup[1].copy()
            self.act("restored", self.path)

    def do_lose_commit(self) -> None:
        """Remove the newest file of the log of commits, while no job runs: Spark repeats that batch."""
        checkpoint = self.storage.checkpoint(self.path)
        if not self.jobs and self.path not in self.frozen:
            checkpoint.files.pop(f"commits/{checkpoint.last_planned}", None)

    def do_set(self, name: str, value: object) -> None:
        """Change a setting. The next start has it."""
        self.wanted[name] = value

    def do_wait(self, ms: int, steps: int) -> None:
        """Let time pass."""
        self.pass_time(ms, steps)

    # Services.

    def do_send(self, group: str, transaction_id: str, fate: Fate, way: str, delay_ms: int, immunity_s: int, size: int) -> None:
        self.services[group].send(transaction_id, fate, way, delay_ms, immunity_s, b"x" * size, self.open_tx)

    def do_stop_service(self, group: str) -> None:
        """Kill all instances of a group."""
        for instance in self.services[group].instances:
            self.services[group].kill(instance)

    def do_leave(self, group: str) -> None:
        """Let a group stay away after the actions, until R8 has ended what waits for it."""
        self.leaving.add(group)

    def do_scale_service(self, group: str, instances: int) -> None:
        """Let a group have this many instances."""
        service = self.services[group]
        for number, instance in enumerate(service.instances):
            if number < instances:
                service.begin(instance)
            elif instance.is_alive:
                service.kill(instance)

    def do_stick(self, group: str, stuck: bool) -> None:
        """Let a group's listener hang, or go on."""
        self.services[group].is_stuck = stuck

    # Records that no service sends.

    def do_op(self, group: str, transaction_id: str, action: str, incarnation: int) -> None:
        """Send an op by hand."""
        headers = op_headers(group, action, incarnation=incarnation)
        self.kafka.append(OP, transaction_id.encode(), None, headers, tx=self.open_tx, is_stray=True)

    def do_half(self, group: str, transaction_id: str, incarnation: int, size: int) -> None:
        """Send a half once more, or one that no service stands behind."""
        headers = half_headers(group, incarnation=incarnation)
        self.kafka.append(HALF, transaction_id.encode(), b"x" * size, headers, tx=self.open_tx, is_stray=True)

    def do_broken(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, flaw: str) -> None:
        """Send a record that breaks the contract."""
        self.kafka.append(topic, key, value, headers, partition=0 if key is None else None, flaw=flaw, is_stray=True)

    # The machines.

    def do_broker_clock(self, broker: int, ms: int) -> None:
        """Set a broker's clock to be this far off."""
        if self.clock.brokers_ms[broker] != ms:
            self.act(CLOCK_SET)
            self.clock.brokers_ms[broker] = ms
            self.history.clocks_jumped = True

    def do_publisher_clock(self, ms: int) -> None:
        """Set the clock of the job's machine to be this far off."""
        self.history.publisher_set_back_ms = max(self.history.publisher_set_back_ms, self.clock.publisher_ms - ms)
        self.clock.publisher_ms = ms

    def do_lag(self, topic: str, partition: int, batches: int) -> None:
        """Let a partition's leader be slow: the next batches do not see what is new there."""
        self.kafka.lagging[topic, partition] = batches

    def do_add_partition(self, topic: str) -> None:
        """Give a topic another partition."""
        if len(self.kafka.topics[topic]) < 3:
            self.kafka.topics[topic].append(Partition())
            for service in self.services.values():
                service.rebalance()

    def do_expire(self) -> None:
        """Let Kafka delete what is older than both topics must keep."""
        for topic in (HALF, OP):
            self.kafka.expire(topic, 2 * int(NUMBERS["resolution.half_retention"]))

    def do_begin_tx(self) -> None:
        """Send what follows in a Kafka transaction."""
        if self.open_tx is None:
            self.open_tx = self.kafka.begin()

    def do_end_tx(self, commit: bool) -> None:
        """Commit or abort the Kafka transaction."""
        if self.open_tx is not None:
            self.kafka.end(self.open_tx, KafkaState.COMMITTED if commit else KafkaState.ABORTED)
            self.open_tx = None

    # Operators.

    def do_settle(self, transaction_id: str, action: str) -> None:
        """Run `halfway commit` or `halfway rollback`."""
        for known in pending_in(self.storage.checkpoint(self.path)):
            if known.transaction_id == transaction_id and not known.is_waiting:
                headers = op_headers(known.producer_group, action, incarnation=known.incarnation)
                self.kafka.append(OP, transaction_id.encode(), None, headers, is_stray=True)

    def do_replay(self, transaction_ids: tuple[str, ...] = (), unproven: bool = False) -> int:
        """Run `halfway replay`, without ids for all that were discarded. Return how many messages it has resent."""
        pending = pending_in(self.storage.checkpoint(self.path))
        try:
            sent = replay(self.settings(), self.storage, self.kafka, transaction_ids, pending=pending, unproven=unproven)
        except NotPendingError:
            return 0
        except Exception as error:
            self.act("crashed", f"replay: {type(error).__name__}: {error}")
            return 0
        self.act("replayed", str(sent))
        return sent

    # The end.

    def _come_to_rest(self) -> None:
        """End every fault, give every job and service its time, resend what was discarded, and give time again."""
        self.cursor = len(self.actions)
        self.kill_in = self.freeze_in = 0
        self.kafka.lagging.clear()
        self.do_end_tx(commit=False)
        behind_ms = max(0, *self.clock.brokers_ms)
        self.clock.brokers_ms = [0] * len(self.clock.brokers_ms)
        self.do_publisher_clock(0)
        self.clock.now_ms += behind_ms
        if self.leaving:
            self._outlast_the_leaving()
        self.wanted.clear()
        self.jobs.clear()
        for service in self.services.values():
            service.is_stuck = False
            service.rebalance()
        for times_left in (2, 1, 0):
            self._until_quiet()
            if not self.jobs:
                self.act("dead", "the job ends however it is started")
                return
            self.history.still_pending = {known.transaction_id for known in pending_in(self.storage.checkpoint(self.path))}
            if not times_left or not (self.do_replay(unproven=True) or self.history.still_pending):
                return

    def _outlast_the_leaving(self) -> None:
        """Give the job its time while some groups stay away (R8). The others live, and may still hang."""
        self.wanted = {"resolution.half_retention": 300_000}
        self.jobs.clear()
        self._until_quiet(away=self.leaving)
        if self.jobs and not self.history.clocks_jumped:  # A half from a clock that was ahead is not old yet.
            pending = [known for known in pending_in(self.storage.checkpoint(self.path)) if not known.is_waiting]
            self.history.overdue = {known.transaction_id for known in pending if known.producer_group in self.leaving}

    def _until_quiet(self, away: Collection[str] = ()) -> None:
        """Let time pass until nothing is pending. Start the job as an operator would, if it has ended."""
        starts = 0
        for round_number in range(60):
            for group in self.services:
                self.do_scale_service(group, 0 if group in away else 1)
            if not self.jobs and starts < 4:
                is_lost = any(act.name == "refused" and "RecordsLostError" in act.detail for act in self.history.acts[-1:])
                if not is_lost:
                    self.do_start()
                if not self.jobs:
                    self.do_new_checkpoint()
                    self.do_start(adopt=True)
                starts += 1
            self.pass_time(31_000)
            if self.jobs and round_number > 1 and not pending_in(self.storage.checkpoint(self.path)):
                return
