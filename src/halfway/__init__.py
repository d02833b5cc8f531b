"""Halfway: transactional messages on Kafka, resolved by Spark. A service imports these names and nothing else.

`import halfway` loads neither a Kafka client nor Spark: each name is imported from its module on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfway.clients.listener import TransactionListener
    from halfway.clients.messages import CheckRequest, HalfMessage, SendResult
    from halfway.clients.producer import TransactionProducer
    from halfway.conf.loader import load_settings
    from halfway.schemas.errors import (
        HalfwayError,
        KafkaUnavailableError,
        ProducerClosedError,
        QueueFullError,
        SendError,
        SettingsError,
    )
    from halfway.schemas.headers import LocalTransactionState
    from halfway.schemas.settings import KafkaSettings, Settings

__all__ = [
    "CheckRequest",
    "HalfMessage",
    "HalfwayError",
    "KafkaSettings",
    "KafkaUnavailableError",
    "LocalTransactionState",
    "ProducerClosedError",
    "QueueFullError",
    "SendError",
    "SendResult",
    "Settings",
    "SettingsError",
    "TransactionListener",
    "TransactionProducer",
    "load_settings",
]

# The imports above as data, for the running program. tests/unit/test_public_face.py holds the three lists together.
_HOMES = {
    "CheckRequest": "halfway.clients.messages",
    "HalfMessage": "halfway.clients.messages",
    "HalfwayError": "halfway.schemas.errors",
    "KafkaSettings": "halfway.schemas.settings",
    "KafkaUnavailableError": "halfway.schemas.errors",
    "LocalTransactionState": "halfway.schemas.headers",
    "ProducerClosedError": "halfway.schemas.errors",
    "QueueFullError": "halfway.schemas.errors",
    "SendError": "halfway.schemas.errors",
    "SendResult": "halfway.clients.messages",
    "Settings": "halfway.schemas.settings",
    "SettingsError": "halfway.schemas.errors",
    "TransactionListener": "halfway.clients.listener",
    "TransactionProducer": "halfway.clients.producer",
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
