"""The producer's side: send transactional messages, run and check their local transactions. Imports `schemas` only."""

from clients.listener import TransactionListener
from clients.message import CheckRequest, HalfMessage, SendResult
from clients.producer import TransactionProducer
from schemas.errors import ProducerClosedError, QueueFullError, SendError
from schemas.headers import LocalTransactionState

__all__ = [
    "CheckRequest",
    "HalfMessage",
    "LocalTransactionState",
    "ProducerClosedError",
    "QueueFullError",
    "SendError",
    "SendResult",
    "TransactionListener",
    "TransactionProducer",
]
