"""The real producers on a Kafka that is the memory of a test: `InMemoryHalfway` makes them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError

from halfway.clients.aio.async_listener import AsyncTransactionListener
from halfway.clients.aio.async_producer import AsyncTransactionProducer
from halfway.clients.aio.async_transaction import AsyncTransactionDatabase
from halfway.clients.check_workers import CheckWorkers
from halfway.clients.checks import CheckAnswerer
from halfway.clients.instance import GroupInstance, ProducerLimits
from halfway.clients.kafka.sender import Sender
from halfway.clients.listener import Arg_contra, TransactionListener
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import OpenChecks
from halfway.clients.producer import TransactionProducer
from halfway.clients.transaction import TransactionDatabase
from halfway.schemas.headers import Source
from halfway.schemas.records import Record
from halfway.schemas.settings import KafkaSettings

_SETTINGS = KafkaSettings(bootstrap_servers="in-memory:1")


class _Member(Protocol):
    """An instance of a group, with or without an event loop."""

    group: str
    has_crashed: bool


class _World(Protocol):
    """What producers need of an `InMemoryHalfway`."""

    now_ms: int

    def append(self, source: Source, record: Record) -> int: ...

    def join(self, producer: Any) -> None: ...

    def remove(self, producer: Any) -> None: ...


class InMemoryProducer(TransactionProducer[Arg_contra]):
    """A producer whose Kafka is the memory of the test. `InMemoryHalfway.producer` makes it."""

    def __init__(self, world: _World, group: str, listener: TransactionListener[Arg_contra] | TransactionDatabase) -> None:
        """Store the world."""
        self.world, self.group = world, group
        self.has_crashed = False
        super().__init__(_SETTINGS, group, listener)

    def answer(self, request: CheckRequest) -> None:
        """Answer a check, as the group's consumer would."""
        self._send_answer(request, self._look_up(request), lambda _: None)

    def _make_instance(self, settings: KafkaSettings, group: str, limits: ProducerLimits, *_: object) -> GroupInstance:
        return _InMemoryInstance(self.world, self, settings, group, limits)


class InMemoryAsyncProducer(AsyncTransactionProducer[Arg_contra]):
    """A producer for asyncio whose Kafka is the memory of the test. `InMemoryHalfway.async_producer` makes it."""

    def __init__(self, world: _World, group: str, listener: AsyncTransactionListener[Arg_contra] | AsyncTransactionDatabase) -> None:
        """Store the world."""
        self.world, self.group = world, group
        self.has_crashed = False
        super().__init__(_SETTINGS, group, listener)

    async def answer(self, request: CheckRequest) -> None:
        """Answer a check, as the group's consumer would."""
        self._send_answer(request, await self._look_up(request), lambda _: None)

    def _make_instance(self, settings: KafkaSettings, group: str, limits: ProducerLimits, *_: object) -> GroupInstance:
        sender = self._sender
        return _InMemoryInstance(self.world, self, settings, group, limits, on_served=sender.on_served, flush=sender.flush)


class _InMemoryInstance(GroupInstance):
    def __init__(
        self, world: _World, member: _Member, settings: KafkaSettings, group: str, limits: ProducerLimits, **hooks: Callable[..., Any]
    ) -> None:
        self._world, self._member = world, member
        super().__init__(settings, group, limits, _no_workers, **hooks)

    def make_sender(self) -> Sender:
        return cast(Sender, _InMemorySender(self._world, self._member, self.settings, self._on_served))

    def make_checks(self, _: object) -> CheckAnswerer:
        return cast(CheckAnswerer, _InMemoryChecks(self._world, self._member))  # `answer` is called directly.


def _no_workers(_: OpenChecks) -> CheckWorkers:
    raise NotImplementedError


class _InMemorySender:
    def __init__(self, world: _World, member: _Member, settings: KafkaSettings, on_served: Callable[[], None]) -> None:
        self._world, self._member, self._on_served = world, member, on_served
        self._sources: Mapping[str, Source] = {settings.half_topic: Source.HALF, settings.op_topic: Source.OP}

    def send(self, topic: str, record: Record, on_delivery: Callable[[KafkaError | None, Any], None]) -> None:
        self.try_send(topic, record, on_delivery)

    def try_send(self, topic: str, record: Record, on_delivery: Callable[[KafkaError | None, Any], None]) -> bool:
        source, offset = self._sources[topic], -1
        if not self._member.has_crashed or source is Source.HALF:
            offset = self._world.append(source, record)
        on_delivery(None, _Delivered(offset, self._world.now_ms))
        self._on_served()
        return True

    def is_refused(self) -> bool:
        return False

    def works(self) -> bool:
        return True

    def explain(self, _: str, error: KafkaError) -> str:
        return str(error)

    def close(self, _: float) -> bool:
        return True


class _Delivered:
    """What librdkafka reports of a record."""

    def __init__(self, offset: int, at_ms: int) -> None:
        self._offset, self._at_ms = offset, at_ms

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_LOG_APPEND_TIME, self._at_ms

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class _InMemoryChecks:
    """The group's consumer: being a member is all that it does."""

    def __init__(self, world: _World, member: _Member) -> None:
        self._world, self._member = world, member

    def start(self) -> None:
        self._world.join(self._member)

    def stop(self, _: float | None) -> bool:
        self._world.remove(self._member)
        return True

    def leave(self, _: float) -> bool:
        return True

    def is_answering_here(self) -> bool:
        return False
