"""What each transaction of the chaos run does and what its body is, derived from the seed and its id."""

import hashlib
import random
from enum import StrEnum
from typing import NamedTuple

_SIZES = (0, 1, *(200,) * 8, *(1000,) * 15, *(2000,) * 4, 50_000)


class Fate(StrEnum):
    """How a local transaction ends. NEVER means that the service never knows, so that the message is discarded."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    NEVER = "NEVER"


class Plan(NamedTuple):
    """What one transaction does."""

    fate: Fate
    at_once: bool
    """The local transaction gives the verdict. Otherwise it answers UNKNOWN, and the check gets the verdict."""
    stray: bool = False
    """A contrary verdict that no service gave follows the first one."""


_PLANS = (
    (62, Plan(Fate.COMMIT, at_once=True)),
    (15, Plan(Fate.ROLLBACK, at_once=True)),
    (12, Plan(Fate.COMMIT, at_once=False)),
    (6, Plan(Fate.ROLLBACK, at_once=False)),
    (1, Plan(Fate.COMMIT, at_once=True, stray=True)),
    (1, Plan(Fate.ROLLBACK, at_once=True, stray=True)),
    (3, Plan(Fate.NEVER, at_once=False)),
)


class Decision(NamedTuple):
    """What a service decided on a transaction."""

    fate: Fate
    first_answer: str
    """The first answer of the listener; empty if a check took the decision."""


def plan_of(seed: int, transaction_id: str) -> Plan:
    """Return the plan of a transaction; the same for the same seed and id."""
    drawn = random.Random(f"{seed}:{transaction_id}")
    return drawn.choices([plan for _, plan in _PLANS], [weight for weight, _ in _PLANS])[0]


def body_of(transaction_id: str) -> bytes:
    """Return the body of a transaction: 0 to 50,000 bytes of any value, the same for the same id."""
    drawn = random.Random(f"body:{transaction_id}")
    return drawn.randbytes(drawn.choice(_SIZES))


def digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
