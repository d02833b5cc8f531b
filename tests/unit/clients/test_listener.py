"""What is no listener is refused when a producer is made, before a half is sent that it could not answer for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from halfway import (
    AsyncTransactionProducer,
    CheckRequest,
    HalfMessage,
    ListenerByTopic,
    LocalTransactionState,
    SqlTransactions,
    TransactionProducer,
)
from halfway.conf.loader import load_settings
from halfway.testing import in_memory_halfway
from tests.support.client_world import COMMIT, Listener

KAFKA = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "nowhere:1"}).kafka
MISSPELT = SimpleNamespace(execute_local_transaction=lambda *_: COMMIT, check_local_transactions=lambda _: COMMIT)


class Coroutines:
    """A listener for asyncio."""

    async def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:
        del message, arg
        return COMMIT

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        del message
        return COMMIT


@pytest.mark.parametrize("kind", [TransactionProducer, AsyncTransactionProducer])
@pytest.mark.parametrize("listener", [None, "orders", MISSPELT, ListenerByTopic({"orders": MISSPELT})])
def test_a_listener_has_both_methods(kind: Any, listener: Any) -> None:
    with pytest.raises(TypeError, match=r"is no listener, because it has no (check|execute)_local_transaction"):
        kind(KAFKA, "shop", listener)


def test_a_database_of_the_other_kind_is_told_which_one_it_is_to_be() -> None:
    with pytest.raises(TypeError, match="no database, which is AsyncSqlTransactions here"):
        AsyncTransactionProducer(KAFKA, "shop", SqlTransactions(lambda: None))  # type: ignore[arg-type]


def test_a_listener_may_have_listeners_of_its_own() -> None:
    listener = Listener()
    listener.listeners = [print]  # type: ignore[attr-defined]
    TransactionProducer(KAFKA, "shop", listener)


@pytest.mark.parametrize("listener", [Coroutines(), ListenerByTopic({"orders": Coroutines()})])
def test_coroutines_are_for_asyncio(listener: Any) -> None:
    """Nobody would await them, and each message would be discarded."""
    with pytest.raises(TypeError, match=r"execute_local_transaction of .*Coroutines is a coroutine: use an AsyncTransactionProducer"):
        TransactionProducer(KAFKA, "shop", listener)
    AsyncTransactionProducer(KAFKA, "shop", listener)


def test_what_a_plain_function_has_committed_is_not_discarded() -> None:
    """It has run before anything can be awaited."""
    listener: Any = Listener()

    async def send() -> LocalTransactionState:
        with in_memory_halfway() as halfway:
            async with halfway.async_producer(listener) as producer:
                state = (await producer.send_in_transaction("orders", b"apples")).state
            assert [message.body for message in halfway.messages()] == [b"apples"]
        return state

    assert asyncio.run(send()) is COMMIT
