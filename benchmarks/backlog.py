"""Benchmarks of a backlog: the job drains transactions that wait in Kafka into Delta."""

import itertools
import json
import random
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cpu import core_seconds
from benchmarks.load import Load
from benchmarks.rig import Batches, Figures, Rig, count_rows
from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.schemas.settings import Settings
from halfway.transforms.packing import buckets_of

WARM_UP = 5
"""The number of batches until the JVM has compiled most of the hot code."""
_FULL = 300_000
"""The number of events above which a batch counts as full."""


def drain(rig: Rig) -> Figures:
    """Drain transactions of 1 KiB in batches of 400,000 events. The first five batches only warm the JVM up."""
    settings = rig.settings("drain")
    load = Load(settings.kafka)
    before = _loading_s(rig)
    load.send(rig.amount(2_100_000))
    loading = {name: used_s - before[name] for name, used_s in _loading_s(rig).items()}
    batches, seconds = rig.drain(settings)
    rates = [batches.events(number) / took for number, took in enumerate(seconds)]
    warm = [number for number in range(WARM_UP, len(rates)) if batches.events(number) > _FULL] or list(range(len(rates)))
    warm_rates = [rates[number] for number in warm]
    to_transactions = load.sent.transactions / load.sent.events
    return {
        "transactions": load.sent.transactions,
        "right": count_rows(settings) == load.sent.committed,
        "tx_per_s": round(statistics.median(warm_rates) * to_transactions),
        "tx_per_s_spread": [round(rate * to_transactions) for rate in (min(warm_rates), max(warm_rates))],
        "events_per_s": round(statistics.median(warm_rates)),
        "events_per_s_by_batch": [round(rate) for rate in rates],
        "core_ms_per_tx": _core_ms_per_tx(load.sent.transactions, loading, batches, warm, to_transactions),
        "memory_mib": {name: [used[name] for used in batches.memory_mib] for name in batches.memory_mib[0]},
    }


def _loading_s(rig: Rig) -> dict[str, float]:
    return {"broker": core_seconds(rig.broker_pid), "client": time.process_time()}


def _core_ms_per_tx(loaded: int, loading: dict[str, float], batches: Batches, warm: list[int], to_transactions: float) -> Figures:
    """Return the core-milliseconds of each part: those of loading, and those of the warm batches."""
    drained = round(sum(map(batches.events, warm)) * to_transactions)
    figures = {name: used_s / loaded for name, used_s in loading.items()}
    for name in ("broker", "job"):
        used_s = sum(batches.core_s[number + 1][name] - batches.core_s[number][name] for number in warm)
        figures[name] = figures.get(name, 0) + used_s / drained
    return {name: round(used_s * 1000, 4) for name, used_s in figures.items()}


def bodies(rig: Rig) -> Figures:
    """Drain bodies of other sizes, 100,000 transactions or 800 MiB of each size."""
    _warm_up(rig)
    figures: Figures = {}
    for body_bytes in (100, 1024, 64 * 1024, 1024 * 1024):
        settings = rig.settings("bodies")
        load = Load(settings.kafka, body_bytes=body_bytes)
        rate = _drain_all(rig, settings, load, min(100_000, 800 * 1024 * 1024 // body_bytes))
        figures[str(body_bytes)] = {"tx_per_s": round(rate), "mib_per_s": round(rate * body_bytes / 1024 / 1024, 1)}
    return figures


def groups(rig: Rig) -> Figures:
    """Drain 10,000 producer groups and 1,000 topics, and one of each to compare."""
    _warm_up(rig)
    figures: Figures = {}
    for name, many_groups, many_topics in (("one", 1, 1), ("many", 10_000, 1_000)):
        settings = rig.settings("groups")
        load = Load(settings.kafka, groups=many_groups, topics=many_topics)
        figures[name] = {"tx_per_s": round(_drain_all(rig, settings, load, 200_000))}
    return figures


def skew(rig: Rig) -> Figures:
    """Drain transactions of which half are in one bucket, and evenly spread ones to compare."""
    _warm_up(rig)
    figures: Figures = {}
    for name in ("even", "skewed"):
        settings = rig.settings("skew")
        rig.drain(settings)  # makes the checkpoint, with the secret of its buckets
        load = Load(settings.kafka, ids=_skewed_ids(rig.amount(200_000), settings) if name == "skewed" else None)
        figures[name] = {"tx_per_s": round(_drain_all(rig, settings, load, 200_000))}
    return figures


def _skewed_ids(wanted: int, settings: Settings) -> Iterator[str]:
    """Yield ids of which every second one falls into the first bucket."""
    chance = random.Random(1)
    secret = bytes.fromhex(json.loads(Path(settings.storage.checkpoint, MANIFEST_FILE).read_text())["bucket_secret"])
    drawn = (uuid.UUID(int=chance.getrandbits(128)).hex for _ in itertools.count())
    in_first = (name for name in drawn if buckets_of([name.encode()], settings.state.buckets, secret)[0] == 0)
    for name in itertools.islice(in_first, wanted // 2):
        yield name
        yield uuid.UUID(int=chance.getrandbits(128)).hex


def _warm_up(rig: Rig) -> None:
    settings = rig.settings("warm")
    _drain_all(rig, settings, Load(settings.kafka, seed=9), 400_000)


def _drain_all(rig: Rig, settings: Settings, load: Load, transactions: int) -> float:
    """Send transactions, drain them, and return the rate in transactions a second.

    Raises:
        RuntimeError: the table does not hold exactly the committed messages.
    """
    load.send(rig.amount(transactions))
    _, seconds = rig.drain(settings)
    found = count_rows(settings)
    if found != load.sent.committed:
        raise RuntimeError(f"{found} messages instead of {load.sent.committed}")
    return load.sent.transactions / sum(seconds)
