"""Services: a database each, instances that send halves and ops, and the product's ledger of open checks.

An instance does what `clients/producer.py` does: it sends the half, waits until Kafka has it, runs the local
transaction, and sends the op. It reads checks by `OpenChecks`, answers them from the database, and commits its group's
offsets when the answers are in Kafka.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import CheckTask, OpenChecks
from halfway.clients.verdicts import KnownVerdicts
from halfway.schemas import headers as h
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import RecordError
from tests.simulation.history import CHECK, HALF, OP, Decision, Fate, Headers, History, Members, Record
from tests.simulation.log import Clock, Kafka

ANSWERS_AT_ONCE = 4


def half_headers(group: str, *, incarnation: int = 0, immunity_s: int = 0, **others: str) -> tuple[tuple[str, bytes | None], ...]:
    """Return the headers of a half."""
    headers = {h.REAL_TOPIC: "orders", h.PGROUP: group}
    if incarnation:
        headers[h.INCARNATION] = str(incarnation)
    if immunity_s:
        headers[h.CHECK_IMMUNITY_TIME_IN_SECONDS] = str(immunity_s)
    return tuple((name, value.encode()) for name, value in {**headers, **others}.items())


def op_headers(group: str, action: str, *, incarnation: int = 0) -> tuple[tuple[str, bytes | None], ...]:
    """Return the headers of an op."""
    headers = {h.ACTION: action, h.PGROUP: group} | ({h.INCARNATION: str(incarnation)} if incarnation else {})
    return tuple((name, value.encode()) for name, value in headers.items())


@lru_cache(maxsize=1_000)
def _check_request(key: bytes | None, value: bytes | None, headers: Headers) -> CheckRequest | None:
    """Return what a record of the check topic asks; None if it breaks the contract. It is read at each rebalance."""
    try:
        return CheckRequest.from_record(key, value, headers)
    except RecordError:
        return None


@dataclass
class Instance:
    """A process of a service. It loses what it knows when it is killed."""

    name: str
    is_alive: bool = True
    ledger: OpenChecks = field(default_factory=lambda: OpenChecks(1_000))
    verdicts: KnownVerdicts = field(default_factory=KnownVerdicts)
    positions: dict[int, int] = field(default_factory=dict)
    tasks: list[CheckTask] = field(default_factory=list)
    life: int = 0


class Service:
    """A producer group with its database."""

    def __init__(self, group: str, clock: Clock, kafka: Kafka, history: History) -> None:
        self.group, self.clock, self.kafka, self.history = group, clock, kafka, history
        self.check_group = h.check_group(group)
        self.database: dict[tuple[str, int], Fate] = {}
        self.instances = [Instance(f"{group}-0"), Instance(f"{group}-1", is_alive=False)]
        self.is_stuck = False
        """Its listener does not return: it is a member of its group, and answers nothing."""
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self.rebalance()

    def send(self, transaction_id: str, fate: Fate, way: str, delay_ms: int, immunity_s: int, body: bytes, tx: int | None = None) -> None:
        """Send a half, and go on with its local transaction `delay_ms` later.

        Args:
            transaction_id: the id.
            fate: what the local transaction will come to.
            way: "op": the op follows; "unknown": the op says UNKNOWN; "dies before" or "dies after" the local
                transaction; "unsure": the half's acknowledgement is lost, so that a ROLLBACK is sent.
            delay_ms: how long the local transaction takes.
            immunity_s: the half's immunity; 0 for none.
            body: the body.
            tx: the Kafka transaction that half and op are sent in.
        """
        instance = next((each for each in self.instances if each.is_alive), None)
        if instance is None:
            return
        self.kafka.append(HALF, transaction_id.encode(), body, half_headers(self.group, immunity_s=immunity_s), tx=tx)
        if way == "dies before":
            self.kill(instance)
            return
        life = instance.life

        def go_on() -> None:
            if instance.life != life:
                return
            if way == "unsure":
                self.op(transaction_id, "ROLLBACK", 0)
                return
            decided = self.decide(transaction_id, 0, fate)
            if way == "dies after":
                self.kill(instance)
            elif tx is None or tx in self.kafka.open_transactions():
                self.op(transaction_id, "UNKNOWN" if way == "unknown" else str(decided), 0, tx=tx)

        heapq.heappush(self._later, (self.clock.now_ms + delay_ms, self.clock.next_seq(), go_on))

    def decide(self, transaction_id: str, incarnation: int, fate: Fate) -> Fate:
        """Store a decision unless there is one; return the stored one. A retry has the fate of the first."""
        known = self.database.get((transaction_id, 0))
        if known is not None:
            return known
        if fate is not Fate.NEVER:
            self.database[transaction_id, 0] = fate
            self.history.decisions.append(Decision(self.clock.next_seq(), self.group, transaction_id, incarnation, fate))
        return fate

    def op(self, transaction_id: str, action: str, incarnation: int, tx: int | None = None) -> Record:
        """Send an op."""
        return self.kafka.append(OP, transaction_id.encode(), None, op_headers(self.group, action, incarnation=incarnation), tx=tx)

    def kill(self, instance: Instance) -> None:
        """Kill an instance. What it had read and not answered is read again by another one."""
        instance.is_alive = False
        instance.life += 1
        instance.tasks = []
        self.rebalance()

    def begin(self, instance: Instance) -> None:
        """Start an instance."""
        if not instance.is_alive:
            instance.is_alive = True
            instance.ledger = OpenChecks(1_000)
            instance.verdicts = KnownVerdicts()
            self.rebalance()

    def rebalance(self) -> None:
        """Share the check topic's partitions among the instances that live."""
        group = self.kafka.group(self.check_group)
        alive = [instance for instance in self.instances if instance.is_alive]
        if len(group.members) != len(alive):
            self.history.members.append(Members(self.clock.next_seq(), self.check_group, len(alive)))
        group.members = [instance.name for instance in alive]
        for instance in self.instances:
            instance.ledger.revoke([*instance.positions])
            instance.positions = {}
        for partition in range(len(self.kafka.topics[CHECK])) if alive else ():
            owner = alive[partition % len(alive)]
            committed = group.committed.get(partition)
            owner.positions[partition] = self.kafka.topics[CHECK][partition].first if committed is None else committed
            owner.ledger.assign({partition: committed})
            self._commit(owner)

    def step(self) -> None:
        """Do what is due by now: ops, and answers to checks."""
        while self._later and self._later[0][0] <= self.clock.now_ms:
            heapq.heappop(self._later)[2]()
        for instance in self.instances:
            if instance.is_alive:
                self._poll(instance)
                if not self.is_stuck:
                    self._answer(instance)

    def _poll(self, instance: Instance) -> None:
        for number, position in instance.positions.items():
            partition = self.kafka.topics[CHECK][number]
            for record in self.kafka.read((CHECK, number), position, partition.end, committed_only=True):
                task = instance.ledger.add(number, record.offset, self._request(record), record.at_ms)
                if task is not None:
                    instance.tasks.append(task)
            instance.positions[number] = partition.end

    def _request(self, record: Record) -> CheckRequest | None:
        if record.header(h.PGROUP) != self.group:
            return None
        return _check_request(record.key, record.value, record.headers)

    def _answer(self, instance: Instance) -> None:
        # Listeners run in several threads: checks are answered in another order than they were read.
        for task in reversed(instance.tasks[:ANSWERS_AT_ONCE]):
            if not instance.ledger.keep_owned(task):
                continue
            request = task.request
            answer = instance.verdicts.of(request)
            if answer is None:
                answer = LocalTransactionState(self.database.get((request.transaction_id, 0), Fate.NEVER))
                instance.verdicts.note(request, answer)
            self.op(request.transaction_id, str(answer), request.incarnation)
            task.answer = Answer(answer)
            instance.ledger.finish(task)
            self._commit(instance)
        del instance.tasks[:ANSWERS_AT_ONCE]
        self._commit(instance)

    def _commit(self, instance: Instance) -> None:
        for partition, offset in instance.ledger.to_commit().items():
            self.kafka.commit(self.check_group, partition, offset)
