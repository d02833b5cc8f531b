"""A service in its own process: `python -m benchmarks.producer KAFKA_SETTINGS SECONDS RATE THREADS [asyncio]`.

Each thread, or each task of an event loop, sends transactions through the real client. With RATE 0 it sends the next
one when the last is decided, else at its share of RATE a second. Without threads the service only answers checks, by
COMMIT. It prints the number of transactions sent and the seconds that took.
"""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.load import GROUP
from halfway import AsyncTransactionProducer, CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.schemas.settings import KafkaSettings

_OPTIONS: Any = {"max_open_checks": 10_000, "linger_ms": 2}
_STATES = (LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN)


class Service:
    """Commits 85 %, rolls 10 % back and answers UNKNOWN to 5 %. Commits at each check."""

    def execute_local_transaction(self, message: HalfMessage, arg: random.Random) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer at random."""
        return arg.choices(_STATES, (85, 10, 5))[0]

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer COMMIT."""
        return LocalTransactionState.COMMIT


class AsyncService:
    """The same in coroutines."""

    async def execute_local_transaction(self, message: HalfMessage, arg: random.Random) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer at random."""
        return arg.choices(_STATES, (85, 10, 5))[0]

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer COMMIT."""
        return LocalTransactionState.COMMIT


class Load:
    """What the threads or tasks do together.

    Args:
        seconds: how long they send.
        rate: how many transactions they send a second; 0 for the next one when the last is decided.
        senders: how many they are.
    """

    def __init__(self, seconds: float, rate: float, senders: int) -> None:
        """Start the clock."""
        self._rate, self.senders = rate, senders
        self.stopping = threading.Event()
        self._pool = os.urandom(1024 * 1024)
        self.sent = 0
        self._began_s = time.monotonic()
        self._until_s = self._began_s + seconds

    def pauses(self, chance: random.Random) -> Iterator[float]:
        """Yield the seconds to wait before each transaction, until the time is over."""
        due_s = time.monotonic()
        while (now_s := time.monotonic()) < self._until_s and not self.stopping.is_set():
            due_s += self.senders / self._rate * chance.uniform(0.5, 1.5) if self._rate else 0.0
            yield max(0.0, due_s - now_s) if self._rate else 0.0
            self.sent += 1

    def body(self, chance: random.Random) -> bytes:
        """Return 1 KiB."""
        at = chance.randrange(len(self._pool) - 1024)
        return self._pool[at : at + 1024]

    def figures(self) -> str:
        """Return what was sent, and what it took."""
        return json.dumps({"transactions": self.sent, "seconds": time.monotonic() - self._began_s})


def with_threads(kafka: KafkaSettings, load: Load, seconds: float) -> str:
    """Send from threads."""
    with TransactionProducer(kafka, f"{GROUP}0", Service(), **_OPTIONS) as producer:

        def work(number: int) -> None:
            chance = random.Random(os.getpid() * 1000 + number)
            for pause_s in load.pauses(chance):
                if pause_s:
                    time.sleep(pause_s)
                producer.send_in_transaction("orders", load.body(chance), tags="TagA", arg=chance)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(load.senders)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if not load.senders:
            load.stopping.wait(seconds)
        return load.figures()


async def with_tasks(kafka: KafkaSettings, load: Load) -> str:
    """Send from the tasks of one event loop."""
    async with AsyncTransactionProducer(kafka, f"{GROUP}0", AsyncService(), **_OPTIONS) as producer:

        async def work(number: int) -> None:
            chance = random.Random(os.getpid() * 1000 + number)
            for pause_s in load.pauses(chance):
                if pause_s:
                    await asyncio.sleep(pause_s)
                await producer.send_in_transaction("orders", load.body(chance), tags="TagA", arg=chance)

        await asyncio.gather(*(work(number) for number in range(load.senders)))
        return load.figures()


def main() -> None:
    """Run the service, and print its figures."""
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    load = Load(float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    signal.signal(signal.SIGTERM, lambda *_: load.stopping.set())
    figures = asyncio.run(with_tasks(kafka, load)) if sys.argv[5:] == ["asyncio"] else with_threads(kafka, load, float(sys.argv[2]))
    print(figures)  # noqa: T201  # what the benchmark reads


if __name__ == "__main__":
    main()
