"""The benchmark of the clients: threads, asyncio and the example in Java, in turn on one broker, without the job."""

from benchmarks.cpu import core_seconds
from benchmarks.rig import Figures, Rig
from benchmarks.service import Client, produce_alone

_ROUNDS = 3


def client(rig: Rig) -> Figures:
    """Measure one process of each client in a closed loop, in turn, three rounds of ten seconds.

    All have 32 senders, and asyncio also 256, because a task costs little. Figures: transactions a second, core-ms of
    the client and of the broker a transaction, and the ratios to the client with threads.
    """
    settings, classes = rig.settings("client"), rig.folder / "java"
    ways = {
        "threads": (Client.PYTHON, 32),
        "asyncio": (Client.ASYNCIO, 32),
        "asyncio_256": (Client.ASYNCIO, 256),
        "java": (Client.JAVA, 32),
    }
    sums: dict[str, dict[str, float]] = {name: {"transactions": 0, "seconds": 0, "client_s": 0, "broker_s": 0} for name in ways}
    for number in range(_ROUNDS + 1):  # the first is to warm up
        for name, (way, senders) in ways.items():
            broker_s = core_seconds(rig.broker_pid)
            done = produce_alone(way, settings.kafka, classes, rig.seconds(10), senders)
            done["broker_s"] = core_seconds(rig.broker_pid) - broker_s
            if number:
                sums[name] = {figure: value + done[figure] for figure, value in sums[name].items()}
    found: Figures = {
        name: {
            "tx_per_s": round(sums[name]["transactions"] / sums[name]["seconds"]),
            "client_core_ms": round(sums[name]["client_s"] / sums[name]["transactions"] * 1000, 4),
            "broker_core_ms": round(sums[name]["broker_s"] / sums[name]["transactions"] * 1000, 4),
        }
        for name in ways
    }
    found["to_threads"] = {
        name: {figure: round(found[name][figure] / found["threads"][figure], 2) for figure in found[name]}
        for name in ways
        if name != "threads"
    }
    return found
