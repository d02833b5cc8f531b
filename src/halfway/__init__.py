"""Halfway: transactional messages on Kafka, resolved by Spark. A service imports these names and nothing else.

Each name is imported when it is first used, so that `import halfway` needs no Kafka client and no Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfway.clients.listener import TransactionListener
    from halfway.clients.messages import CheckRequest, HalfMessage, SendResult
    from halfway.clients.producer import TransactionProducer
    from halfway.conf.loader import load_settings
    from halfway.schemas.errors import HalfwayError, ProducerClosedError, QueueFullError, SendError, SettingsError
    from halfway.schemas.headers import LocalTransactionState
    from halfway.schemas.settings import KafkaSettings, Settings

__all__ = [
    "CheckRequest",
    "HalfMessage",
    "HalfwayError",
    "KafkaSettings",
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

_HOMES = {
    "clients.listener": ("TransactionListener",),
    "clients.messages": ("CheckRequest", "HalfMessage", "SendResult"),
    "clients.producer": ("TransactionProducer",),
    "conf.loader": ("load_settings",),
    "schemas.errors": ("HalfwayError", "ProducerClosedError", "QueueFullError", "SendError", "SettingsError"),
    "schemas.headers": ("LocalTransactionState",),
    "schemas.settings": ("KafkaSettings", "Settings"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
