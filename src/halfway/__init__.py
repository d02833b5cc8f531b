"""Halfway: transactional messages on Kafka, resolved by Spark. A service imports these names and nothing else.

`import halfway` loads neither a Kafka client nor Spark: each name is imported from its module on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfway.clients.aio.async_listener import AsyncTransactionListener
    from halfway.clients.aio.async_producer import AsyncTransactionProducer
    from halfway.clients.aio.async_transaction import AsyncLocalTransaction
    from halfway.clients.cloud_events import cloud_event
    from halfway.clients.listener import TransactionListener
    from halfway.clients.listener_by_topic import ListenerByTopic
    from halfway.clients.messages import CheckRequest, HalfMessage, SendResult
    from halfway.clients.producer import TransactionProducer
    from halfway.clients.reading.committed import CommittedMessage, MessageBatch
    from halfway.clients.reading.message_reader import MessageReader
    from halfway.clients.sql.async_sql_transactions import AsyncSqlTransactions
    from halfway.clients.sql.sql_bookmarks import SqlBookmarks
    from halfway.clients.sql.sql_transactions import SqlTransactions
    from halfway.clients.transaction import LocalTransaction
    from halfway.conf.loader import load_settings
    from halfway.schemas.bookmark import Bookmark
    from halfway.schemas.errors import (
        BookmarkMovedError,
        HalfwayError,
        KafkaUnavailableError,
        OutcomeUnknownError,
        ProducerClosedError,
        QueueFullError,
        RolledBackError,
        SendError,
        SettingsError,
        TableError,
    )
    from halfway.schemas.headers import LocalTransactionState
    from halfway.schemas.settings import KafkaSettings, Settings

__all__ = [
    "AsyncLocalTransaction",
    "AsyncSqlTransactions",
    "AsyncTransactionListener",
    "AsyncTransactionProducer",
    "Bookmark",
    "BookmarkMovedError",
    "CheckRequest",
    "CommittedMessage",
    "HalfMessage",
    "HalfwayError",
    "KafkaSettings",
    "KafkaUnavailableError",
    "ListenerByTopic",
    "LocalTransaction",
    "LocalTransactionState",
    "MessageBatch",
    "MessageReader",
    "OutcomeUnknownError",
    "ProducerClosedError",
    "QueueFullError",
    "RolledBackError",
    "SendError",
    "SendResult",
    "Settings",
    "SettingsError",
    "SqlBookmarks",
    "SqlTransactions",
    "TableError",
    "TransactionListener",
    "TransactionProducer",
    "cloud_event",
    "load_settings",
]

# The imports above as data, for the running program. tests/unit/test_public_face.py holds the three lists together.
_HOMES = {
    "AsyncLocalTransaction": "halfway.clients.aio.async_transaction",
    "AsyncSqlTransactions": "halfway.clients.sql.async_sql_transactions",
    "AsyncTransactionListener": "halfway.clients.aio.async_listener",
    "AsyncTransactionProducer": "halfway.clients.aio.async_producer",
    "Bookmark": "halfway.schemas.bookmark",
    "BookmarkMovedError": "halfway.schemas.errors",
    "CheckRequest": "halfway.clients.messages",
    "CommittedMessage": "halfway.clients.reading.committed",
    "HalfMessage": "halfway.clients.messages",
    "HalfwayError": "halfway.schemas.errors",
    "KafkaSettings": "halfway.schemas.settings",
    "KafkaUnavailableError": "halfway.schemas.errors",
    "ListenerByTopic": "halfway.clients.listener_by_topic",
    "LocalTransaction": "halfway.clients.transaction",
    "LocalTransactionState": "halfway.schemas.headers",
    "MessageBatch": "halfway.clients.reading.committed",
    "MessageReader": "halfway.clients.reading.message_reader",
    "OutcomeUnknownError": "halfway.schemas.errors",
    "ProducerClosedError": "halfway.schemas.errors",
    "QueueFullError": "halfway.schemas.errors",
    "RolledBackError": "halfway.schemas.errors",
    "SendError": "halfway.schemas.errors",
    "SendResult": "halfway.clients.messages",
    "Settings": "halfway.schemas.settings",
    "SettingsError": "halfway.schemas.errors",
    "SqlBookmarks": "halfway.clients.sql.sql_bookmarks",
    "SqlTransactions": "halfway.clients.sql.sql_transactions",
    "TableError": "halfway.schemas.errors",
    "TransactionListener": "halfway.clients.listener",
    "TransactionProducer": "halfway.clients.producer",
    "cloud_event": "halfway.clients.cloud_events",
    "load_settings": "halfway.conf.loader",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module and keep it, so that the next use finds it here."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
