"""`halfway.testing`: a service's tests without Kafka, with the outcomes of the real job."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from halfway import (
    AsyncSqlTransactions,
    CheckRequest,
    HalfMessage,
    ListenerByTopic,
    LocalTransactionState,
    ProducerClosedError,
    SendResult,
    SqlTransactions,
)
from halfway.clients.testing import pytest_plugin
from halfway.schemas.settings import ResolutionSettings
from halfway.testing import InMemoryHalfway, InMemoryProducer, in_memory_halfway

in_memory = pytest_plugin.in_memory
COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN


class Shop:
    """A listener that answers as it is told, and counts the checks."""

    def __init__(self, first: LocalTransactionState, *later: LocalTransactionState) -> None:
        self._first, self._later = first, list(later)
        self.checks: list[int] = []

    def execute_local_transaction(self, _: HalfMessage, __: object) -> LocalTransactionState:
        return self._first

    def check_local_transaction(self, request: CheckRequest) -> LocalTransactionState:
        self.checks.append(request.check_times)
        return self._later.pop(0) if self._later else UNKNOWN


@pytest.fixture
def connect(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    def made() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db")

    with closing(made()) as database:
        database.execute("CREATE TABLE orders (item TEXT)")
    return made


def order(producer: InMemoryProducer, item: str) -> None:
    with producer.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES (?)", (item,))
        tx.send("orders", item.encode())


def test_a_committed_message_is_readable_at_once_and_a_block_that_fails_leaves_nothing(
    connect: Callable[[], sqlite3.Connection], in_memory: InMemoryHalfway
) -> None:
    threads = threading.active_count()
    producer = in_memory.producer(SqlTransactions(connect))
    order(producer, "apples")
    with pytest.raises(sqlite3.OperationalError), producer.transaction() as tx:
        tx.execute("INSERT INTO nowhere VALUES (1)", tx.send("orders", b"pears") and ())
    assert [message.body for message in in_memory.messages("orders")] == [b"apples"]
    assert in_memory.messages("invoices") == in_memory.pending() == []
    assert threading.active_count() == threads
    assert producer.close()


def test_another_instance_answers_for_one_that_died_after_its_commit(connect: Callable[[], sqlite3.Connection]) -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(connect))
        with producer.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('apples')")
            tx.send("orders", b"apples")
            halfway.crash(producer)
        assert [message.body for message in halfway.pending()] == [b"apples"]
        halfway.advance("1h")
        assert len(halfway.pending()) == 1, "its group is away (R15)"
        halfway.producer(SqlTransactions(connect))
        halfway.advance("40s")
        assert [message.body for message in halfway.messages()] == [b"apples"]


def test_a_service_with_the_same_group_name_settles_nothing_of_another_one(
    connect: Callable[[], sqlite3.Connection], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with in_memory_halfway() as halfway:
        orders = halfway.producer(SqlTransactions(connect), "service")
        with orders.transaction() as tx:
            tx.send("orders", b"apples")
            halfway.crash(orders)
        billing = halfway.producer(SqlTransactions(lambda: sqlite3.connect(tmp_path / "billing.db")), "service")
        halfway.advance("5m")
        assert len(halfway.pending()) == 1
        assert "SharedGroupError" in caplog.text
        assert "another service has the producer group 'service' too" in caplog.text
        billing.close()
        halfway.producer(SqlTransactions(connect), "service")
        halfway.advance("40s")
        assert [message.body for message in halfway.messages()] == [b"apples"]


def test_each_send_has_its_result(connect: Callable[[], sqlite3.Connection], in_memory: InMemoryHalfway) -> None:
    producer = in_memory.producer(SqlTransactions(connect))
    in_memory.advance("3s")
    with producer.transaction() as tx:
        names = [tx.send("orders", b"apples"), tx.send("invoices", b"apples")]
        assert tx.results == []
    at_ms = in_memory.now_ms
    assert tx.results == [SendResult(name, 0, offset, at_ms, COMMIT) for offset, name in enumerate(names)]
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:
        tx.send("orders", b"%d" % (1 // 0))
    assert tx.results == []
    in_memory.advance("1s")
    assert in_memory.producer(Shop(ROLLBACK)).send_in_transaction("orders", b"pears", transaction_id="t") == SendResult(
        "t", 0, 2, at_ms + 1000, ROLLBACK
    )


def test_checks_come_in_time_and_end_in_a_discard() -> None:
    shop = Shop(UNKNOWN)
    with in_memory_halfway(transactionCheckMax=3) as halfway:
        halfway.producer(shop).send_in_transaction("orders", b"apples")
        for duration, checks in (("6s", 0), ("1s", 1), ("29s", 1), ("1s", 2), (29_999, 2), (1, 3)):
            halfway.advance(duration)
            assert len(shop.checks) == checks
        halfway.advance("30s")
        assert ([message.body for message in halfway.discarded()], halfway.pending(), shop.checks) == ([b"apples"], [], [1, 2, 3])


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK])
def test_a_check_settles_what_the_first_answer_left_open(answer: LocalTransactionState) -> None:
    shop = Shop(UNKNOWN, UNKNOWN, answer)
    with in_memory_halfway() as halfway:
        halfway.producer(shop).send_in_transaction("orders", b"apples")
        halfway.advance("10m")
        assert shop.checks == [1, 2]
        assert (len(halfway.messages()), len(halfway.pending())) == (1 if answer is COMMIT else 0, 0)


class AsyncShop(Shop):
    """The same listener in coroutines."""

    async def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:  # type: ignore[override]
        return super().execute_local_transaction(message, arg)

    async def check_local_transaction(self, request: CheckRequest) -> LocalTransactionState:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().check_local_transaction(request)


def test_a_producer_for_asyncio_needs_neither_kafka_nor_threads_that_stay() -> None:
    threads = threading.active_count()
    shop = AsyncShop(UNKNOWN)

    async def main() -> None:
        with in_memory_halfway() as halfway:
            async with halfway.async_producer(shop) as producer:
                results = await asyncio.gather(*(producer.send_in_transaction("orders", b"%d" % number) for number in range(40)))
                assert [result.half_offset for result in results] == list(range(40))
                with pytest.raises(TypeError, match="advance_async"):
                    halfway.advance("7s")
            assert len(halfway.pending()) == 40
            async with halfway.async_producer(ListenerByTopic({"orders": AsyncShop(UNKNOWN, *[UNKNOWN] * 40, COMMIT, *[ROLLBACK] * 39)})):
                await halfway.advance_async("10m")
            assert (len(halfway.messages()), halfway.pending()) == (1, [])

    asyncio.run(main())
    assert threading.active_count() == threads


def test_a_block_of_asyncio_and_a_crash_after_its_commit(tmp_path: Path) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
        with in_memory_halfway() as halfway:
            producer = halfway.async_producer(AsyncSqlTransactions(engine))
            async with producer.transaction() as tx:
                await tx.execute(text("CREATE TABLE orders (item TEXT)"))
                tx.send("orders", b"apples")
                halfway.crash(producer)
            assert (halfway.messages(), [result.state for result in tx.results]) == ([], [COMMIT])
            async with halfway.async_producer(AsyncSqlTransactions(engine)):
                await halfway.advance_async("40s")
            assert [message.body for message in halfway.messages("orders")] == [b"apples"]
        await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["append", "remove"])
def test_a_signal_handler_never_waits_for_the_send_that_it_interrupts(moment: str) -> None:
    """It runs in the thread that sends: before the send is counted, or after it, `close` has nothing to wait for."""
    with in_memory_halfway() as halfway:
        producer = halfway.producer(Shop(COMMIT))
        closed: list[bool] = []

        class Interrupted(list[object]):
            def append(self, caller: object) -> None:
                if moment == "append":
                    closed.append(producer.close(timeout_s=0.1))
                super().append(caller)

            def remove(self, caller: object) -> None:
                super().remove(caller)
                if moment == "remove":
                    closed.append(producer.close(timeout_s=0.1))

        producer._instance._callers = Interrupted()
        with pytest.raises(ProducerClosedError) if moment == "append" else nullcontext():
            producer.send_in_transaction("orders", b"apples")
        assert closed == [True]


def test_close_waits_for_a_block_of_a_thread_whose_other_block_has_ended() -> None:
    """The pool of a framework enters and leaves a `yield` dependency in two calls, each in any of its threads."""
    with in_memory_halfway() as halfway:
        producer = halfway.producer(Shop(COMMIT))
        first, second = producer._instance.sending("thread"), producer._instance.sending("thread")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not producer.close(timeout_s=0.1)
        second.__exit__(None, None, None)


def test_ctrl_c_while_a_send_is_counted_leaves_nothing_to_wait_for() -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(Shop(COMMIT))

        class Interrupting(threading.Condition):
            def __exit__(self, *error: object) -> None:
                super().__exit__(*error)
                raise KeyboardInterrupt

        producer.start()
        producer._instance._changed = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            producer.send_in_transaction("orders", b"apples")
        producer._instance._changed = threading.Condition()
        assert producer.close(timeout_s=2)


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="transactionCheckMin"), in_memory_halfway(transactionCheckMin=3):
        pass


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_are_those_that_the_rules_say(seed: int) -> None:
    """50 transactions of each seed, a thousand together, against the rules as they read."""
    chance = random.Random(seed)
    rules = ResolutionSettings(transactionCheckMax=3)
    for _ in range(50):
        first, *later = chance.choices([COMMIT, ROLLBACK, UNKNOWN], weights=[1, 1, 6], k=5)
        with in_memory_halfway(transactionCheckMax=3) as halfway:
            shop = Shop(first, *later)
            halfway.producer(shop).send_in_transaction("orders", b"x")
            waits_s = [chance.randint(0, 60) for _ in range(5)]
            for wait_s in waits_s:
                halfway.advance(f"{wait_s}s")
            found = (len(halfway.messages()), len(halfway.pending()), len(halfway.discarded()), shop.checks)
        assert found == _expected(first, later, sum(waits_s) * 1000, rules)


def _expected(
    first: LocalTransactionState, later: list[LocalTransactionState], until_ms: int, rules: ResolutionSettings
) -> tuple[int, int, int, list[int]]:
    """Return (committed, pending, discarded, checks), as R1 to R6 read: with a tick a second."""
    checks: list[int] = []
    state, due_ms = first, rules.transactionTimeOut + 1
    while state is UNKNOWN:
        due_ms += -due_ms % 1000  # the next tick
        if due_ms > until_ms:
            return 0, 1, 0, checks
        if len(checks) == rules.transactionCheckMax:
            return 0, 0, 1, checks
        checks.append(len(checks) + 1)
        state = later[len(checks) - 1]
        due_ms += rules.transactionCheckInterval
    return int(state is COMMIT), 0, 0, checks


def test_a_check_that_advance_refuses_is_left_for_advance_async() -> None:
    class Asked:
        async def execute_local_transaction(self, _: object, __: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOWN

        async def check_local_transaction(self, _: object) -> LocalTransactionState:
            return LocalTransactionState.COMMIT

    async def run() -> int:
        with in_memory_halfway() as halfway:
            async with halfway.async_producer(Asked()) as producer:
                await producer.send_in_transaction("orders", b"")
                with pytest.raises(TypeError, match="advance_async"):
                    halfway.advance("7s")
                await halfway.advance_async("10s")
                return len(halfway.messages())

    assert asyncio.run(run()) == 1
