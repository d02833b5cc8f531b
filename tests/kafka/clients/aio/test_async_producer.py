"""The client for asyncio against a real broker: what it sends, cancellation at each await, a loop that never waits."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from halfway import (
    AsyncSqlTransactions,
    AsyncTransactionProducer,
    CheckRequest,
    HalfMessage,
    LocalTransactionState,
    ProducerClosedError,
    QueueFullError,
    SendResult,
)
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import (
    COMMIT,
    GROUP,
    ROLLBACK,
    UNKNOWN,
    check_of,
    committed,
    frozen,
    members,
    ops,
    own_topics,
    read,
    send_checks,
)
from tests.support.partition_records import headers_of
from tests.support.stepwise import CancelledAt, Turns, cancel_other_tasks
from tests.support.waiting import until

BLOCK_S = 0.005
"""How long the loop may be busy at a time."""


async def says_commit(*_: object) -> LocalTransactionState:
    return COMMIT


class AsyncListener:
    """A listener that answers with two coroutine functions."""

    def __init__(
        self,
        execute: Callable[[HalfMessage, Any], Awaitable[Any]] = says_commit,
        check: Callable[[CheckRequest], Awaitable[Any]] = says_commit,
    ) -> None:
        self._execute, self._check = execute, check
        self.checked: list[str] = []

    async def execute_local_transaction(self, message: HalfMessage, arg: Any) -> LocalTransactionState | None:
        answer: LocalTransactionState | None = await self._execute(message, arg)
        return answer

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        self.checked.append(message.transaction_id)
        answer: LocalTransactionState | None = await self._check(message)
        return answer


@asynccontextmanager
async def shop(kafka: KafkaSettings, folder: Path) -> AsyncIterator[AsyncTransactionProducer]:
    """A producer with a database of orders."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'shop.db'}")
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("CREATE TABLE orders (item TEXT)"))
    try:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncSqlTransactions(engine)) as producer:
            yield producer
    finally:
        await engine.dispose()


def orders(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        return {item for (item,) in database.execute("SELECT item FROM orders")}


async def order(producer: AsyncTransactionProducer, item: str, fail: Callable[[], object] = lambda: None) -> None:
    async with producer.transaction() as tx:
        await tx.execute(sqlalchemy.text("INSERT INTO orders VALUES (:item)"), {"item": item})
        tx.send("orders", item.encode())
        tx.send("invoices", item.encode())
        fail()


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def verdicts(kafka: KafkaSettings) -> dict[str, str]:
    """Return id → action of all ops."""
    found = ops(kafka)
    assert len(dict(found)) == len(found), "one op for each half"
    return {name: headers["ACTION"] for name, headers in found}


def items(kafka: KafkaSettings) -> dict[str, str]:
    """Return id → body of all halves."""
    return {(half.key() or b"").decode(): (half.value() or b"").decode() for half in read(kafka, kafka.half_topic)}


def test_it_sends_the_records_of_the_contract(kafka: KafkaSettings) -> None:
    async def main() -> SendResult:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener()) as producer:
            return await producer.send_in_transaction("orders", b"apples", transaction_id="t1", keys="k1", properties={"colour": "red"})

    result = asyncio.run(main())
    [half] = read(kafka, kafka.half_topic)
    found = headers_of(half)
    assert (half.key(), half.value(), found["REAL_TOPIC"], found["KEYS"], found["colour"]) == (b"t1", b"apples", b"orders", b"k1", b"red")
    assert result == SendResult("t1", half.partition() or 0, half.offset() or 0, half.timestamp()[1], COMMIT)
    assert ops(kafka) == [("t1", {"ACTION": "COMMIT", "PGROUP": GROUP, "INCARNATION": "0"})]


def test_each_answer_of_a_listener_becomes_an_op(kafka: KafkaSettings) -> None:
    async def execute(_: HalfMessage, arg: object) -> object:
        if isinstance(arg, Exception):
            raise arg
        return arg

    async def main() -> list[SendResult]:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener(execute)) as producer:
            given = [COMMIT, ROLLBACK, UNKNOWN, None, ValueError("no stock")]
            sends = [producer.send_in_transaction("orders", b"", transaction_id=f"t{n}", arg=arg) for n, arg in enumerate(given)]
            return await asyncio.gather(*sends)

    assert [result.state for result in asyncio.run(main())] == [COMMIT, ROLLBACK, UNKNOWN, UNKNOWN, UNKNOWN]
    found = dict(ops(kafka))
    assert [found[f"t{n}"]["ACTION"] for n in range(5)] == ["COMMIT", "ROLLBACK", "UNKNOWN", "UNKNOWN", "UNKNOWN"]
    assert found["t4"]["REMARK"] == "ValueError: no stock"


def test_coroutines_answer_checks_at_once(kafka: KafkaSettings) -> None:
    waiting = asyncio.Barrier(3)

    async def check(message: CheckRequest) -> LocalTransactionState:
        await waiting.wait()
        if message.transaction_id == "t2":
            raise SystemExit
        return ROLLBACK

    async def main() -> None:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener(check=check)):
            for number in range(3):
                send_checks(kafka, check_of(f"t{number}"))
            await asyncio.to_thread(until, lambda: len(ops(kafka)) == 3, "the answers")

    asyncio.run(main())
    found = dict(ops(kafka))
    assert {name: headers["ACTION"] for name, headers in found.items()} == {"t0": "ROLLBACK", "t1": "ROLLBACK", "t2": "UNKNOWN"}
    assert all(headers["FROM_CHECK"] == "true" for headers in found.values())
    assert committed(kafka) == {0: 3}


@pytest.mark.parametrize("again", [True, False], ids=["done again", "left"])
def test_a_start_that_was_cancelled_answers_checks(kafka: KafkaSettings, again: bool) -> None:
    """The thread that connects goes on, and is a member of the group."""
    listener = AsyncListener()

    async def main() -> None:
        producer = AsyncTransactionProducer(kafka, GROUP, listener)
        first = asyncio.create_task(producer.start())
        for _ in range(2):  # Then it waits for the thread.
            await asyncio.sleep(0)
        await cancel_other_tasks()
        assert first.cancelled()
        await asyncio.to_thread(until, lambda: members(kafka) == [2], "the thread has gone on")
        if again:
            await producer.start()
        await asyncio.to_thread(send_checks, kafka, check_of("t1"))
        await asyncio.to_thread(ops, kafka, at_least=1)
        assert await producer.close()

    asyncio.run(main())
    assert listener.checked == ["t1"]


def test_the_next_instance_answers_a_check_that_a_loop_has_left(kafka: KafkaSettings) -> None:
    asked = asyncio.Event()

    async def check(_: CheckRequest) -> LocalTransactionState:
        asked.set()
        await asyncio.Event().wait()
        return COMMIT

    async def dies() -> None:
        await AsyncTransactionProducer(kafka, GROUP, AsyncListener(check=check), session_timeout_ms=6000).start()
        send_checks(kafka, check_of("t1"))
        await asked.wait()

    async def lives() -> None:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener()):
            await asyncio.to_thread(until, lambda: len(ops(kafka)) == 1, "the answer")

    asyncio.run(dies())
    until(lambda: members(kafka) == [], "the dead loop's instance has left the group")
    asyncio.run(lives())
    assert verdicts(kafka) == {"t1": "COMMIT"}


def test_a_block_commits_orders_with_their_messages_or_neither(kafka: KafkaSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with shop(kafka, tmp_path) as producer:
            await asyncio.gather(*(order(producer, f"item {number}") for number in range(5)))
            with pytest.raises(ZeroDivisionError):
                await order(producer, "none", lambda: 1 // 0)

    asyncio.run(main())
    assert orders(tmp_path) == {f"item {number}" for number in range(5)} == set(items(kafka).values())
    assert set(verdicts(kafka).values()) == {"COMMIT"}
    assert verdicts(kafka).keys() == items(kafka).keys()


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
def test_a_block_that_is_cancelled_at_any_await_leaves_both_or_neither(kafka: KafkaSettings, tmp_path: Path, *, again: bool) -> None:
    async def main() -> int:
        async with shop(kafka, tmp_path) as producer:
            await order(producer, "first")  # creates the table
            await asyncio.wait([asyncio.ensure_future(order(producer, "at its end", cancel_this_task))])  # while its halves are sent
            for step in range(500):
                cancelled = CancelledAt(order(producer, f"step {step}"), step, again=again)
                task = asyncio.ensure_future(_await(cancelled))
                await asyncio.wait([task])
                if not task.cancelled():
                    assert task.exception() is None
                    assert cancelled.steps <= step, "it was not cancelled, because it has ended before"
                    return step
        raise AssertionError

    steps = asyncio.run(main())
    assert steps > 5
    ordered, sent, said = orders(tmp_path), items(kafka), verdicts(kafka)
    assert {"first", f"step {steps}"} <= ordered < {"first", *(f"step {step}" for step in range(steps + 1))}
    assert "at its end" in sent.values()
    assert said == {name: "COMMIT" if item in ordered else "ROLLBACK" for name, item in sent.items()}
    assert ordered <= set(sent.values())


def test_a_send_that_is_cancelled_at_any_await_leaves_a_verdict_or_a_listener_to_ask(kafka: KafkaSettings) -> None:
    begun: set[str] = set()

    async def execute(message: HalfMessage, _: object) -> LocalTransactionState:
        begun.add(message.body.decode())
        await asyncio.sleep(0)
        return COMMIT

    async def main() -> int:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener(execute)) as producer:
            for step in range(100):
                cancelled = CancelledAt(producer.send_in_transaction("orders", f"step {step}".encode()), step, again=False)
                task = asyncio.ensure_future(_await(cancelled))
                await asyncio.wait([task])
                if not task.cancelled():
                    return step
        raise AssertionError

    steps = asyncio.run(main())
    assert steps >= 2
    said, sent = verdicts(kafka), items(kafka)
    actions = {item: said.get(name) for name, item in sent.items()}
    for step in range(steps):
        item = f"step {step}"
        assert actions.get(item) in ((None,) if item in begun else ("ROLLBACK", None if item not in actions else "ROLLBACK"))
    assert actions[f"step {steps}"] == "COMMIT"


async def _await(awaitable: CancelledAt) -> Any:
    return await awaitable


def test_more_sends_than_the_queue_holds_wait_for_room(kafka: KafkaSettings) -> None:
    async def main() -> None:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener(), max_in_flight=5) as producer:
            await asyncio.gather(*(producer.send_in_transaction("orders", b"") for _ in range(300)))

    asyncio.run(main())
    assert len(verdicts(kafka)) == len(items(kafka)) == 300
    assert set(verdicts(kafka).values()) == {"COMMIT"}


def test_the_loop_is_never_busy_for_5_ms(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    async def sends(producer: AsyncTransactionProducer) -> None:
        for _ in range(20):
            await producer.send_in_transaction("orders", bytes(1024))

    async def main() -> None:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener()) as producer:
            await sends(producer)  # imports and connections
            with turns.counted(monkeypatch):
                for number in range(50):
                    send_checks(kafka, check_of(f"asked {number}"))
                await asyncio.gather(*(sends(producer) for _ in range(100)))

    asyncio.run(main())
    assert len(turns.used_s) > 2000
    # One turn is this test's own sends of checks. The machine may have been taken away from others.
    assert sorted(turns.used_s)[-len(turns.used_s) // 100] < BLOCK_S


def test_the_loop_goes_on_while_kafka_does_not_answer(own_broker: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    kafka = own_topics(own_broker)
    caplog.set_level(logging.CRITICAL, "halfway")

    async def main() -> float:
        producer = AsyncTransactionProducer(kafka, GROUP, AsyncListener(), max_in_flight=5, send_timeout_ms=2000)
        await producer.send_in_transaction("orders", b"")
        longest_s = 0.0
        with frozen(own_broker):
            sends = [asyncio.ensure_future(producer.send_in_transaction("orders", b"")) for _ in range(20)]
            while not all(send.done() for send in sends):
                began_s = time.monotonic()
                await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - began_s)
            errors = {type(send.exception()) for send in sends}
        assert QueueFullError in errors
        await producer.close(10)
        return longest_s

    assert asyncio.run(main()) < 1.8  # A send that blocks the loop blocks it for the 2 s of `send_timeout_ms`.


def test_close_delivers_what_is_queued_and_refuses_new_sends(kafka: KafkaSettings) -> None:
    async def main() -> None:
        producer = AsyncTransactionProducer(kafka, GROUP, AsyncListener(), linger_ms=1000)
        sending = asyncio.ensure_future(producer.send_in_transaction("orders", b"", transaction_id="t1"))
        await asyncio.to_thread(until, lambda: len(read(kafka, kafka.half_topic)) == 1, "the half")
        assert await producer.close() is True
        assert (await sending).state is COMMIT
        assert await producer.close() is True
        with pytest.raises(ProducerClosedError):
            await producer.send_in_transaction("orders", b"")

    asyncio.run(main())
    assert verdicts(kafka) == {"t1": "COMMIT"}


def test_a_block_and_a_listener_cannot_close_the_producer_that_waits_for_them(kafka: KafkaSettings) -> None:
    refused: list[str] = []

    async def execute(_: HalfMessage, producer: AsyncTransactionProducer) -> LocalTransactionState:
        with pytest.raises(RuntimeError, match="by a listener") as found:
            await producer.close()
        refused.append(str(found.value))
        return COMMIT

    async def main() -> None:
        async with AsyncTransactionProducer(kafka, GROUP, AsyncListener(execute)) as producer:
            await producer.send_in_transaction("orders", b"", arg=producer)

    asyncio.run(main())
    assert len(refused) == 1


def test_a_producer_belongs_to_one_loop(kafka: KafkaSettings) -> None:
    producer = AsyncTransactionProducer(kafka, GROUP, AsyncListener())

    async def main() -> None:
        await producer.start()
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, producer.start())
        assert await producer.close()

    asyncio.run(main())
