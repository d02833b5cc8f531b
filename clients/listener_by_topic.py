"""One producer for several listeners: each has the messages of its topics, or of one tag."""

from collections.abc import Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

from halfway.clients.messages import CheckRequest, HalfMessage

Returned_co = TypeVar("Returned_co", covariant=True)


class _Listener(Protocol[Returned_co]):
    """A `TransactionListener` or an `AsyncTransactionListener`."""

    def execute_local_transaction(self, message: HalfMessage, arg: Any) -> Returned_co: ...

    def check_local_transaction(self, message: CheckRequest) -> Returned_co: ...


class ListenerByTopic(Generic[Returned_co]):
    """Gives each message to the listener of its type: its topic and tag, or else its topic.

    A producer takes it as its listener: a `TransactionProducer` if all listeners are `TransactionListener`s, an
    `AsyncTransactionProducer` if all are `AsyncTransactionListener`s.

    A send of a type without a listener runs nothing, and its outcome is UNKNOWN with the type's name in `REMARK`. So is
    the answer to a check: another version of the service may know the type.

    Args:
        listeners: `topic`, or `topic:tag`, → listener.

    Example:
        ListenerByTopic({"orders:placed": Placed(), "orders:cancelled": Cancelled(), "payments": Payments()})
    """

    def __init__(self, listeners: Mapping[str, _Listener[Returned_co]]) -> None:
        """Store the listeners."""
        self._listeners = dict(listeners)

    @property
    def listeners(self) -> Collection[_Listener[Returned_co]]:
        """Return the listeners."""
        return self._listeners.values()

    def execute_local_transaction(self, message: HalfMessage, arg: Any) -> Returned_co:
        """Run the local transaction of the type's listener.

        Raises:
            LookupError: the type has none. The producer says UNKNOWN.
        """
        return self._listener_of(message).execute_local_transaction(message, arg)

    def check_local_transaction(self, message: CheckRequest) -> Returned_co:
        """Ask the type's listener.

        Raises:
            LookupError: the type has none. The producer says UNKNOWN.
        """
        return self._listener_of(message).check_local_transaction(message)

    def _listener_of(self, message: HalfMessage) -> _Listener[Returned_co]:
        with_tag = f"{message.topic}:{message.tags}"
        for name in (with_tag, message.topic) if message.tags else (message.topic,):
            if name in self._listeners:
                return self._listeners[name]
        name = with_tag if message.tags else message.topic
        raise LookupError(f"no listener for messages of {name!r}; there are some for {', '.join(sorted(self._listeners))}")
