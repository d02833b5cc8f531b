"""Kafka and the job in the memory of a test: the real protocol core, the real client, no thread.

The job's time moves by `advance` alone. `born_at_ms` is this machine's time, as in a real producer.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halfway.clients.aio.async_listener import AsyncTransactionListener
from halfway.clients.aio.async_transaction import AsyncTransactionDatabase
from halfway.clients.listener import Arg_contra, TransactionListener
from halfway.clients.messages import CheckRequest, HalfMessage
from halfway.clients.testing.in_memory_producers import InMemoryAsyncProducer, InMemoryProducer
from halfway.clients.transaction import TransactionDatabase
from halfway.schemas.headers import Source, check_id
from halfway.schemas.outcomes import Kind, Phase
from halfway.schemas.records import OpHeaders, Record, decode_key
from halfway.schemas.settings import ResolutionSettings, parse_duration_ms
from halfway.transforms.horizon import Tick
from halfway.transforms.protocol import Batch, BucketState, Half, Op, Outcome, Rules, resolve
from halfway.transforms.rules import rules_of

_Producer = InMemoryProducer[Any] | InMemoryAsyncProducer[Any]

_BEGIN_MS = 1_800_000_000_000
"""When each world begins, in ms since 1970 UTC. Its time moves by `advance` alone."""


class InMemoryHalfway:
    """Topics, job and time of one test.

    Args:
        resolution: the job's settings.

    Attributes:
        now_ms: the time, in ms since 1970 UTC. `advance` alone moves it.
    """

    def __init__(self, resolution: ResolutionSettings) -> None:
        """Begin without messages."""
        self._rules: Rules = rules_of(resolution)
        self._tick_ms = resolution.tick_interval or 1_000
        self.now_ms = _BEGIN_MS
        self._state = BucketState()
        self._halves: list[HalfMessage] = []
        self._ops = 0
        self._committed: list[HalfMessage] = []
        self._discarded: list[HalfMessage] = []
        self._due_checks: deque[CheckRequest] = deque()
        self._producers: list[_Producer] = []
        self._known_groups: set[str] = set()
        self._apply(Batch(ticks=self._ticks()))

    def producer(
        self, listener: TransactionListener[Arg_contra] | TransactionDatabase, group: str = "test"
    ) -> InMemoryProducer[Arg_contra]:
        """Return a started producer, an instance of its group. Each call makes another instance."""
        made = InMemoryProducer(self, group, listener)
        made.start()
        return made

    def async_producer(
        self, listener: AsyncTransactionListener[Arg_contra] | AsyncTransactionDatabase, group: str = "test"
    ) -> InMemoryAsyncProducer[Arg_contra]:
        """Return a producer for asyncio, an instance of its group once it has started: by `async with`, or a send."""
        return InMemoryAsyncProducer(self, group, listener)

    def advance(self, duration: str | int) -> None:
        """Let time pass, with a tick of the job each second, and answer the checks that fall due.

        Args:
            duration: as in the settings: `500ms`, `10s`, `72h`, or a number of ms.

        Raises:
            ValueError: it is no duration.
            TypeError: a check falls due that a producer for asyncio answers: await `advance_async`.
        """
        for producer, request in self._checks_within(duration):
            if isinstance(producer, InMemoryAsyncProducer):
                raise TypeError("a check is due that a coroutine answers: use `await halfway.advance_async(...)`")
            producer.answer(request)

    async def advance_async(self, duration: str | int) -> None:
        """Do what `advance` does, and await the answers of producers for asyncio."""
        for producer, request in self._checks_within(duration):
            if isinstance(producer, InMemoryAsyncProducer):
                await producer.answer(request)
            else:
                producer.answer(request)

    def messages(self, topic: str | None = None) -> list[HalfMessage]:
        """Return what consumers can read, in the order of the commits; of one topic, or of all."""
        return [message for message in self._committed if topic in (None, message.topic)]

    def pending(self) -> list[HalfMessage]:
        """Return the halves without a verdict, in the order in which they were sent."""
        pending = {known.half.offset for known in self._state.transactions.values() if known.phase is Phase.PENDING}
        return [self._halves[offset] for offset in sorted(pending)]

    def discarded(self) -> list[HalfMessage]:
        """Return the messages that had no verdict after all checks (R6), or in `half_retention` (R8)."""
        return list(self._discarded)

    def crash(self, producer: _Producer) -> None:
        """Let an instance die: what it sends from now on is lost, and other instances answer its checks.

        Inside of a block of `producer.transaction()` this is a death after the commit: the database commits, and the
        ops are lost.
        """
        self.remove(producer)
        producer.has_crashed = True

    def remove(self, producer: _Producer) -> None:
        """Let an instance leave its group. `close` of the producer calls it."""
        self._producers = [other for other in self._producers if other is not producer]

    def join(self, producer: _Producer) -> None:
        """Add an instance to its group. `start` of the producer calls it."""
        self._producers.append(producer)
        self._known_groups.add(producer.group)

    def append(self, source: Source, record: Record) -> int:
        """Append a record to a topic, let the job read it, and return its offset."""
        if source is Source.HALF:
            message = HalfMessage.from_record(record.key, record.value, record.headers)
            self._halves.append(message)
            offset = len(self._halves) - 1
            half = Half(
                transaction_id=message.transaction_id,
                producer_group=message.producer_group,
                topic=message.topic,
                incarnation=message.incarnation,
                at_ms=self.now_ms,
                partition=0,
                offset=offset,
                immunity_ms=(message.immunity_s or 0) * 1000,
            )
            self._apply(Batch(halves=[half], read_ms={(source, 0): self.now_ms}))
            return offset
        op = OpHeaders.from_headers(record.headers)
        self._ops += 1
        read = Op(decode_key(record.key), op.producer_group, op.incarnation, op.action, self.now_ms, 0, self._ops - 1)
        self._apply(Batch(ops=[read], read_ms={(source, 0): self.now_ms}))
        return self._ops - 1

    def _checks_within(self, duration: str | int) -> Iterator[tuple[_Producer, CheckRequest]]:
        """Let time pass, and yield each check that falls due, with the instance to ask: the one that joined last."""
        end_ms = self.now_ms + parse_duration_ms(duration)
        yield from self._asked()  # what `advance` has refused to ask
        while (tick_ms := self._next_tick_ms()) <= end_ms:
            self.now_ms = tick_ms
            self._apply(Batch(ticks=self._ticks()))
            yield from self._asked()
        self.now_ms = end_ms

    def _asked(self) -> Iterator[tuple[_Producer, CheckRequest]]:
        while self._due_checks:
            request = self._due_checks[0]
            members = [producer for producer in self._producers if producer.group == request.producer_group]
            if members:
                yield members[-1], request
            self._due_checks.popleft()

    def _ticks(self) -> list[Tick]:
        return [Tick(source, 0, 1, self.now_ms, tuple(self._absent_groups())) for source in Source]

    def _absent_groups(self) -> list[str]:
        """Return the groups that had an instance and have none (R15)."""
        return sorted(self._known_groups - {producer.group for producer in self._producers})

    def _next_tick_ms(self) -> int:
        """Return the next tick that something waits for, so that a long time costs no more than a short one."""
        due_ms = [known.due_ms for known in self._state.transactions.values()]
        due_ms += [op.due_ms for ops in self._state.waiting.values() for op in ops]
        later_ms = max(min(due_ms, default=1 << 62), self.now_ms + 1)
        return later_ms + (_BEGIN_MS - later_ms) % self._tick_ms

    def _apply(self, batch: Batch) -> None:
        """Run the core on a batch, and do what follows from it."""
        done = resolve(self._state, batch, self._rules)
        self._state = done.state
        for outcome in done.outcomes:
            self._on_outcome(outcome)

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.kind is Kind.COMMIT:
            self._committed.append(self._halves[outcome.offset])
        elif outcome.kind is Kind.DISCARD:
            self._discarded.append(self._halves[outcome.offset])
        elif outcome.kind is Kind.CHECK:
            self._due_checks.append(self._check_of(outcome))

    def _check_of(self, outcome: Outcome) -> CheckRequest:
        half = self._halves[outcome.offset]
        fields: dict[str, Any] = {name: getattr(half, name) for name in HalfMessage.__dataclass_fields__}
        name = check_id(half.transaction_id, 0, outcome.offset, outcome.check_times)
        return CheckRequest(**fields, check_times=outcome.check_times, check_id=name)


@contextmanager
def in_memory_halfway(**resolution: Any) -> Iterator[InMemoryHalfway]:
    """Run a block with Kafka and the job in memory.

    Args:
        **resolution: settings of the job's group `resolution`, such as `transactionCheckMax=3`.

    Raises:
        ValueError: there is no such setting, or its value is wrong.

    Example:
        with in_memory_halfway() as halfway:
            producer = halfway.producer(SqlTransactions(engine))
            place_order(producer, "apples")
            assert [message.body for message in halfway.messages("orders")] == [b"apples"]
    """
    yield InMemoryHalfway(ResolutionSettings(**resolution))
