"""`halfway.testing` has the outcomes of the job's own way: records as bytes, the decoder, the rules, every tick."""

import random
from contextlib import suppress

import pytest

from halfway import CheckRequest, HalfMessage, HalfwayError, LocalTransactionState
from halfway.clients.testing.in_memory import _BEGIN_MS
from halfway.schemas.headers import PARTITIONS, TICK, Source
from halfway.schemas.outcomes import Kind, Phase
from halfway.schemas.records import Record as Sent
from halfway.schemas.settings import KafkaSettings, ResolutionSettings
from halfway.schemas.tick_value import TickValue
from halfway.testing import InMemoryHalfway
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.protocol import BucketState, Outcome, resolve
from halfway.transforms.rules import rules_of
from tests.simulation.decoded import to_batch
from tests.simulation.history import HALF, OP, Record
from tests.simulation.log import LOG_APPEND_TIME

GROUPS = ("g", "h")
IDS = ("t1", "t2", "t3", "t4", "t5")
"""Few, so that an id is used again while it is pending, remembered, discarded and forgotten."""
END = 1 << 62
TOPICS = {Source.HALF: HALF, Source.OP: OP}
ANSWERS = (*LocalTransactionState, LocalTransactionState.UNKNOWN, LocalTransactionState.UNKNOWN, None)
Told = dict[Kind, list[tuple[str, int, int, int]]]
"""Kind → what was decided: transaction id, offset of the half, number of checks, time."""


class Anyhow:
    """A listener that answers anything, mostly UNKNOWN, or fails."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def execute_local_transaction(self, _: HalfMessage, __: object) -> LocalTransactionState:
        return self._answer()

    def check_local_transaction(self, _: CheckRequest) -> LocalTransactionState:
        return self._answer()

    def _answer(self) -> LocalTransactionState:
        answer = self._chance.choice(ANSWERS)
        if answer is None:
            raise RuntimeError("the listener fails")
        return answer


class Recorded(InMemoryHalfway):
    """Keeps what was appended, who was away meanwhile, and what was decided."""

    def __init__(self, resolution: ResolutionSettings) -> None:
        self.appended: list[tuple[Source, Sent, int]] = []
        self.away: list[tuple[int, list[str]]] = []
        self.told: Told = {kind: [] for kind in (Kind.COMMIT, Kind.CHECK, Kind.DISCARD)}
        super().__init__(resolution)

    def advance(self, duration: str | int) -> None:
        away = self._absent_groups()
        super().advance(duration)
        self.away.append((self.now_ms, away))

    def append(self, source: Source, record: Sent) -> int:
        self.appended.append((source, record, self.now_ms))
        return super().append(source, record)

    def _on_outcome(self, outcome: Outcome) -> None:
        note(self.told, outcome)
        super()._on_outcome(outcome)


def note(told: Told, outcome: Outcome) -> None:
    if outcome.kind in told:
        told[outcome.kind].append((outcome.transaction_id, outcome.offset, outcome.check_times, outcome.decided_ms))


def play(seed: str) -> tuple[Recorded, ResolutionSettings]:
    """Play a random scenario in memory."""
    chance = random.Random(seed)
    settings = ResolutionSettings(
        transactionTimeOut=chance.choice(["1s", "2500ms"]),
        transactionCheckInterval=chance.choice(["1s", "3s", "4500ms"]),
        transactionCheckMax=chance.choice([1, 2, 5]),
        half_retention=chance.choice(["8s", "1h"]),
        resolved_retention=chance.choice(["1s", "5s"]),
        tick_interval=chance.choice(["500ms", "1s"]),
    )
    world = Recorded(settings)
    producers = [world.producer(Anyhow(chance), group) for group in GROUPS]
    for _ in range(chance.randint(5, 25)):
        act = chance.choice(["send", "send", "send", "advance", "advance", "advance", "leave", "join"])
        producer = chance.choice(producers)
        if act == "send":
            with suppress(HalfwayError):
                producer.send_in_transaction(
                    "orders",
                    b"x",
                    transaction_id=chance.choice(IDS),
                    incarnation=chance.choice([0, 0, 0, 1]),
                    immunity_s=chance.choice([None, None, 1, 5]),
                )
        elif act == "advance":
            world.advance(chance.choice([1, 500, 999, 1000, 2501, 7000]))
        elif act == "leave":
            chance.choice([producer.close, lambda gone=producer: world.crash(gone)])()
        else:
            producers.append(world.producer(Anyhow(chance), chance.choice(GROUPS)))
    world.advance(chance.choice([0, 20_000]))
    return world, settings


def resolved(world: Recorded, settings: ResolutionSettings) -> tuple[Told, list[int]]:
    """Return what the job decides of the same records, with one record or one tick a batch, and what is pending."""
    config, rules = DecoderConfig.of(settings, KafkaSettings(bootstrap_servers="in-memory:1")), rules_of(settings)
    state = BucketState()
    told: Told = {kind: [] for kind in world.told}
    offsets = {HALF: 0, OP: 0}

    def batch(*records: Record) -> None:
        nonlocal state
        done = resolve(state, to_batch(records, config, None, LOG_APPEND_TIME), rules)
        state = done.state
        for outcome in done.outcomes:
            note(told, outcome)

    def record(topic: str, at_ms: int, sent: Sent) -> Record:
        offsets[topic] += sent.key is not None  # Ticks have the offsets between: the order in memory is that of the rest.
        return Record(topic, 0, offsets[topic] - 1, at_ms, sent.key, sent.value, tuple(sent.headers), seq=0)

    def tick(at_ms: int) -> None:
        away: list[str] = next((groups for until_ms, groups in world.away if at_ms <= until_ms), [])
        value = TickValue(tuple(away)).to_bytes()
        sent = Sent(None, value, [(TICK, str(at_ms).encode()), (PARTITIONS, b"1")])  # type: ignore[arg-type]
        batch(*(record(topic, at_ms, sent) for topic in TOPICS.values()))

    ticks_ms = iter(range(_BEGIN_MS, world.now_ms + 1, settings.tick_interval))
    tick_ms = next(ticks_ms)
    for source, sent, at_ms in world.appended:
        while tick_ms <= at_ms:  # A tick comes before the records of its time, such as the answers to its checks.
            tick(tick_ms)
            tick_ms = next(ticks_ms, END)
        batch(record(TOPICS[source], at_ms, sent))
    for left_ms in () if tick_ms == END else (tick_ms, *ticks_ms):
        tick(left_ms)
    return told, sorted(known.half.offset for known in state.transactions.values() if known.phase is Phase.PENDING)


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_scenarios_end_as_in_the_job(seed: int) -> None:
    """A hundred of each seed."""
    seen = dict.fromkeys((Kind.COMMIT, Kind.CHECK, Kind.DISCARD), 0)
    for number in range(100):
        world, settings = play(f"{seed}/{number}")
        told, pending = resolved(world, settings)
        assert world.told == told, f"scenario {seed}/{number}"
        assert world.pending() == [world._halves[offset] for offset in pending]
        seen = {kind: count + len(told[kind]) for kind, count in seen.items()}
    assert min(seen.values()) > 20, "each outcome is there often"
