"""Draws a history's actions from a seed.

Each seed switches a random half of the features off (swarm testing): a rare action is frequent where few others are
left.
"""

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any

from halfway.schemas import headers as h
from tests.simulation.history import HALF, OP, Fate
from tests.simulation.services import half_headers, op_headers
from tests.simulation.world import GROUPS, Action

ACTIONS = (50, 80)
_WAYS = ("op", "op", "op", "op", "unknown", "dies before", "dies after", "unsure")
_FATES = (Fate.COMMIT, Fate.COMMIT, Fate.COMMIT, Fate.ROLLBACK, Fate.NEVER)
_OTHER = "other"
Draw = Callable[[Random, "Ids"], tuple[str, Mapping[str, Any]]]


class Ids:
    """The ids that a history has used."""

    def __init__(self) -> None:
        self.made = 0

    def new(self) -> str:
        self.made += 1
        return f"t{self.made - 1}"

    def some(self, chance: Random) -> str:
        """Return an id, mostly a recent one."""
        return f"t{max(0, self.made - 1 - min(chance.randrange(8), chance.randrange(8)))}"


def _send(chance: Random, ids: Ids) -> tuple[str, Mapping[str, Any]]:
    immunity_s = chance.choice((0, 0, 0, 0, 1, 20, 300))
    delay_ms = chance.choice((0, 0, 500, 4_000, 9_000, 40_000))
    size = chance.choice((0, 4, 100))
    group, fate, way = chance.choice(GROUPS), chance.choice(_FATES), chance.choice(_WAYS)
    arguments = {"group": group, "transaction_id": ids.new(), "fate": fate, "way": way, "delay_ms": delay_ms, "immunity_s": immunity_s}
    return "send", {**arguments, "size": size}


def _op(chance: Random, ids: Ids) -> tuple[str, Mapping[str, Any]]:
    group = chance.choice((*GROUPS, *GROUPS, _OTHER))
    action, incarnation = chance.choice(("COMMIT", "ROLLBACK", "UNKNOWN", "UNKNOW")), chance.choice((0, 0, 0, 1))
    return "op", {"group": group, "transaction_id": ids.some(chance), "action": action, "incarnation": incarnation}


def _half(chance: Random, ids: Ids) -> tuple[str, Mapping[str, Any]]:
    group, incarnation = chance.choice((*GROUPS, *GROUPS, _OTHER)), chance.choice((0, 0, 0, 1, 2))
    return "half", {"group": group, "transaction_id": ids.some(chance), "incarnation": incarnation, "size": 4}


def _broken(chance: Random, ids: Ids) -> tuple[str, Mapping[str, Any]]:
    key, good = ids.some(chance).encode(), half_headers(GROUPS[0])
    tick = ((h.TICK, b"9999999999999"), (h.PARTITIONS, b"9"))
    return "broken", chance.choice(
        (
            {"topic": HALF, "key": None, "value": b"x", "headers": good, "flaw": "missing_key"},
            {"topic": HALF, "key": b"\xff", "value": b"x", "headers": good, "flaw": "key_not_utf8"},
            {"topic": HALF, "key": key, "value": b"x", "headers": good[:1], "flaw": "missing_header"},
            {"topic": HALF, "key": key, "value": bytes(101), "headers": good, "flaw": "body_too_large"},
            {"topic": HALF, "key": key, "value": b"x", "headers": (*good, ("DELAY", b"3")), "flaw": "delay_not_supported"},
            {"topic": HALF, "key": key, "value": b"x", "headers": (*good, good[1]), "flaw": "duplicate_header"},
            {"topic": HALF, "key": None, "value": b"{}", "headers": tick, "flaw": "bad_tick"},
            {"topic": OP, "key": key, "value": None, "headers": op_headers(GROUPS[0], "MAYBE"), "flaw": "unknown_action"},
            {"topic": OP, "key": key, "value": None, "headers": op_headers("", "COMMIT"), "flaw": "bad_header"},
            {"topic": OP, "key": None, "value": b"{]", "headers": tick, "flaw": "bad_tick"},
        )
    )


def _wait(chance: Random, _: Ids) -> tuple[str, Mapping[str, Any]]:
    steps = chance.choice((1, 2, 4))
    return "wait", {"ms": chance.choice((7_000, 31_000, 65_000, 130_000)), "steps": steps}


def _plain(name: str, /, **choices: tuple[Any, ...]) -> Draw:
    return lambda chance, _: (name, {argument: chance.choice(values) for argument, values in choices.items()})


def _of_id(name: str, /, **choices: tuple[Any, ...]) -> Draw:
    def draw(chance: Random, ids: Ids) -> tuple[str, Mapping[str, Any]]:
        return name, {"transaction_id": ids.some(chance), **{argument: chance.choice(values) for argument, values in choices.items()}}

    return draw


_STEPS = tuple(range(1, 24))
_START = _plain("start")

ALWAYS: tuple[tuple[int, Draw], ...] = ((30, _send), (8, _wait), (4, _plain("scale_service", group=GROUPS, instances=(1,))))
"""Sends, time, and the supervisor of the services: without it most services would be dead for most of a history."""
FEATURES: dict[str, tuple[tuple[int, Draw], ...]] = {
    "stray verdicts": ((5, _op),),
    "stray halves": ((5, _half),),
    "broken records": ((4, _broken),),
    "killed jobs": ((3, _plain("kill")), (4, _plain("kill_at", step=_STEPS)), (6, _START)),
    "lost commits": ((2, _plain("kill")), (2, _plain("lose_commit")), (3, _START)),
    "lost checkpoints": ((2, _plain("kill")), (1, _plain("new_checkpoint")), (4, _plain("start", adopt=(True,)))),
    "services that die": ((3, _plain("stop_service", group=GROUPS)), (4, _plain("scale_service", group=GROUPS, instances=(1, 2)))),
    "settled by hand": ((4, _of_id("settle", action=("COMMIT", "ROLLBACK"))),),
    "replays": ((3, _plain("replay")),),
    "slow partitions": ((9, _plain("lag", topic=(HALF, OP), partition=(0, 1), batches=(1, 2, 5))),),
    "more partitions": ((1, _plain("add_partition", topic=(HALF, OP, "check"))),),
    "a rate limit": (
        (2, _plain("set", name=("kafka.max_offsets_per_trigger",), value=(12, 40, 400_000))),
        (1, _plain("kill")),
        (2, _START),
    ),
    "jumping clocks": ((2, _plain("broker_clock", broker=(0, 1), ms=(0, 0, -5_000, 20_000, 200_000, 3_600_000))),),
    "the publisher's clock": ((1, _plain("publisher_clock", ms=(-2_000, 0, 3_000))),),
    "kafka transactions": ((3, _plain("begin_tx")), (3, _plain("end_tx", commit=(True, False)))),
    "services that hang": ((3, _plain("stick", group=GROUPS, stuck=(True,))), (2, _plain("stick", group=GROUPS, stuck=(False,)))),
    "long stops": ((2, _plain("kill")), (2, _plain("wait", ms=(2_500_000, 9_000_000), steps=(1,))), (3, _START), (1, _plain("expire"))),
    "other settings": (
        (2, _plain("set", name=("resolution.transactionCheckMax",), value=(1, 2, 3))),
        (2, _plain("set", name=("resolution.max_body_bytes",), value=(50, 100))),
        (2, _plain("kill_at", step=_STEPS)),
        (3, _START),
    ),
    "other times": (
        (2, _plain("set", name=("resolution.transactionTimeOut",), value=(500, 6_000, 60_000))),
        (2, _plain("set", name=("resolution.transactionCheckInterval",), value=(4_000, 30_000, 90_000))),
        (1, _plain("set", name=("resolution.half_retention",), value=(100_000, 2_000_000))),
        (1, _plain("set", name=("resolution.resolved_retention",), value=(0, 60_000, 600_000))),
        (2, _plain("kill")),
        (3, _START),
    ),
    "restored checkpoints": ((2, _plain("back_up")), (2, _plain("kill")), (2, _plain("restore")), (3, _START)),
    "groups that stay away": ((1, _plain("leave", group=GROUPS)),),
    "frozen jobs": (
        (3, _plain("freeze_at", step=_STEPS)),
        (3, _plain("wake")),
        (2, _plain("new_checkpoint")),
        (3, _plain("start", adopt=(True,))),
    ),
}


def generate(seed: int, length: tuple[int, int] = ACTIONS, without: Collection[str] = ()) -> list[Action]:
    """Return the actions of a seed.

    Args:
        seed: the seed.
        length: how many actions there are, at least and at most.
        without: features that are switched off.
    """
    chance = Random(seed)
    ids = Ids()
    chosen = [name for name in FEATURES if chance.random() < 0.4 and name not in without]
    draws = [*ALWAYS, *(draw for name in chosen for draw in FEATURES[name])]
    weights = [weight for weight, _ in draws]
    actions = [Action("start", 1_000, {})]
    for _ in range(chance.randint(*length)):
        name, arguments = chance.choices(draws, weights)[0][1](chance, ids)
        actions.append(Action(name, chance.choice((0, 0, 100, 1_000, 3_000, 7_000)), arguments))
    return actions
