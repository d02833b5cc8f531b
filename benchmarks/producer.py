"""A service in its own process: `python -m benchmarks.producer KAFKA_SETTINGS SECONDS RATE THREADS`.

Each thread sends transactions through the real client. With RATE 0 it sends the next one when the last is decided, else
at its share of RATE a second. Without threads the service only answers checks, by COMMIT. It prints the number of
transactions sent and the seconds that took.
"""

import json
import os
import random
import signal
import sys
import threading
import time

from benchmarks.load import GROUP
from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.schemas.settings import KafkaSettings

_STATES = (LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN)


class Service:
    """Commits 85 %, rolls 10 % back and answers UNKNOWN to 5 %. Commits at each check."""

    def execute_local_transaction(self, message: HalfMessage, arg: random.Random) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer at random."""
        return arg.choices(_STATES, (85, 10, 5))[0]

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:  # noqa: ARG002  # the listener's
        """Answer COMMIT."""
        return LocalTransactionState.COMMIT


def main() -> None:
    """Run the service, and print its figures."""
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    seconds, rate, threads = float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    sent = [0] * threads
    pool = os.urandom(1024 * 1024)
    with TransactionProducer(kafka, f"{GROUP}0", Service(), max_open_checks=10_000, linger_ms=2) as producer:

        def work(number: int) -> None:
            chance = random.Random(os.getpid() * 1000 + number)
            until_s = due_s = time.monotonic()
            until_s += seconds
            while (now_s := time.monotonic()) < until_s and not stopping.is_set():
                if rate:
                    due_s += threads / rate * chance.uniform(0.5, 1.5)
                    time.sleep(max(0.0, due_s - now_s))
                at = chance.randrange(len(pool) - 1024)
                producer.send_in_transaction("orders", pool[at : at + 1024], tags="TagA", arg=chance)
                sent[number] += 1

        began_s = time.monotonic()
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if not threads:
            stopping.wait(seconds)
        took_s = time.monotonic() - began_s
    print(json.dumps({"transactions": sum(sent), "seconds": took_s}))  # noqa: T201  # what the benchmark reads


if __name__ == "__main__":
    main()
