"""A service in a process of its own, which may be killed: `python -m tests.chaos.client FOLDER GROUP RUN RATE SEED`.

It sends transactions through the real client, as the seed plans them, until SIGTERM; while FOLDER/pause exists it sends none, and answers
checks. Now and then somebody writes to the topics what no proper client would: a contrary verdict, a verdict of a strange group, a half
without its headers.
"""

import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from confluent_kafka import Producer

from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.schemas.errors import SendError
from halfway.schemas.settings import KafkaSettings
from tests.chaos.plans import Fate, Ledger, Plan, body_of, plan_of

SETTINGS_FILE = "kafka.json"
LEDGER_FILE = "ledger.db"
PAUSE_FILE = "pause"
GARBAGE = "garbage-"
STRANGER = "stranger"
STRAY = b"stray"
"""The remark on verdicts that no service gave."""
SEND_LIMIT_MS = 8_000
_GARBAGE_EVERY = 40
_STATES = {
    Fate.COMMIT: LocalTransactionState.COMMIT,
    Fate.ROLLBACK: LocalTransactionState.ROLLBACK,
    Fate.NEVER: LocalTransactionState.UNKNOWN,
}


class Service:
    """Decides by the plan, and answers from the ledger alone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def execute_local_transaction(self, message: HalfMessage, plan: Plan) -> LocalTransactionState:
        said = _STATES[plan.fate] if plan.at_once else LocalTransactionState.UNKNOWN
        counts = self._ledger.decide(message.transaction_id, plan.fate, said)
        # A check may have come first, if this process stood still meanwhile: then that is what happened.
        return said if counts is plan.fate else _STATES[counts]

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        return _STATES[self._ledger.decide(message.transaction_id, Fate.ROLLBACK, "")]


class Vandal:
    """Writes to the topics what no proper client would."""

    def __init__(self, kafka: KafkaSettings, group: str) -> None:
        self._kafka, self._group = kafka, group
        self._producer = Producer({**kafka.as_librdkafka_dict(), "partitioner": "murmur2_random", "message.timeout.ms": SEND_LIMIT_MS})

    def contradict(self, transaction_id: str, said: LocalTransactionState) -> None:
        """A contrary verdict of the same group after the first, and one of a strange group."""
        contrary = b"ROLLBACK" if said is LocalTransactionState.COMMIT else b"COMMIT"
        for group in (self._group, STRANGER):
            headers: list[tuple[str, bytes]] = [("ACTION", contrary), ("PGROUP", group.encode()), ("REMARK", STRAY)]
            self._producer.produce(self._kafka.op_topic, b"", transaction_id, headers=list(headers))
        self._producer.poll(0)

    def litter(self, name: str) -> None:
        """A half that names neither topic nor group."""
        self._producer.produce(self._kafka.half_topic, b"garbage", GARBAGE + name)
        self._producer.poll(0)

    def close(self) -> None:
        self._producer.flush(SEND_LIMIT_MS / 1000)


def run(folder: Path, group: str, run_name: str, rate: float, seed: int) -> None:
    """Send until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    kafka = KafkaSettings.model_validate_json((folder / SETTINGS_FILE).read_text())
    ledger = Ledger(folder / LEDGER_FILE)
    vandal = Vandal(kafka, group)
    number, due_s = 0, time.monotonic()
    with TransactionProducer(kafka, group, Service(ledger), send_timeout_ms=SEND_LIMIT_MS, session_timeout_ms=6_000) as producer:
        while not stopping.wait(max(0.0, due_s - time.monotonic())):
            # What was missed while nothing could be sent is not made up for.
            due_s = max(due_s, time.monotonic() - 1) + random.Random(f"{run_name}{number}").uniform(0.5, 1.5) / rate
            if (folder / PAUSE_FILE).exists():
                continue
            number += 1
            transaction_id = f"{group}-{run_name}-{number}"
            plan = plan_of(seed, transaction_id)
            try:
                result = producer.send_in_transaction("orders", body_of(transaction_id), transaction_id=transaction_id, arg=plan)
            except SendError as error:
                print(f"{time.time():.3f} not sent: {error}", flush=True)  # noqa: T201  # this is the process's log
                continue
            if plan.stray:
                # Once the first verdict is stored: which one is the first is then beyond doubt.
                time.sleep(0.05)
                vandal.contradict(transaction_id, result.state)
            if number % _GARBAGE_EVERY == 0:
                vandal.litter(transaction_id)
        vandal.close()


def main(arguments: list[str]) -> NoReturn:
    folder, group, run_name, rate, seed = arguments
    run(Path(folder), group, run_name, float(rate), int(seed))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
