"""A service in its own process, which a fault may kill: `python -m tests.chaos.client FOLDER GROUP RUN RATE SEED`.

The service sends transactions through the real client, as the seed plans them, until SIGTERM. While FOLDER/pause
exists, it sends none and answers checks. A rogue writer adds contrary verdicts, verdicts of a strange group, and halves
without headers.
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
from tests.chaos.plans import Fate, Plan, body_of, plan_of
from tests.chaos.service_database import ServiceDatabase

SETTINGS_FILE = "kafka.json"
DATABASE_FILE = "decisions.db"
PAUSE_FILE = "pause"
GARBAGE = "garbage-"
"""The prefix of the keys of halves without headers."""
STRANGER = "stranger"
"""The producer group of verdicts that have no service."""
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
    """Decides by the plan, and answers checks from the database alone."""

    def __init__(self, database: ServiceDatabase) -> None:
        self._database = database

    def execute_local_transaction(self, message: HalfMessage, plan: Plan) -> LocalTransactionState:
        answer = _STATES[plan.fate] if plan.at_once else LocalTransactionState.UNKNOWN
        stored = self._database.decide(message.transaction_id, plan.fate, answer)
        # If this process was frozen, a check may have decided first. Then its decision counts.
        return answer if stored is plan.fate else _STATES[stored]

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        return _STATES[self._database.decide(message.transaction_id, Fate.ROLLBACK, "")]


class RogueWriter:
    """Writes records to the topics that no correct client writes."""

    def __init__(self, kafka: KafkaSettings, group: str) -> None:
        self._kafka, self._group = kafka, group
        self._producer = Producer({**kafka.as_librdkafka_dict(), "partitioner": "murmur2_random", "message.timeout.ms": SEND_LIMIT_MS})

    def contradict(self, transaction_id: str, verdict: LocalTransactionState) -> None:
        """Send the contrary verdict twice, for the same group and for a strange one."""
        contrary = b"ROLLBACK" if verdict is LocalTransactionState.COMMIT else b"COMMIT"
        for group in (self._group, STRANGER):
            headers: list[tuple[str, bytes]] = [("ACTION", contrary), ("PGROUP", group.encode()), ("REMARK", STRAY)]
            self._producer.produce(self._kafka.op_topic, b"", transaction_id, headers=list(headers))
        self._producer.poll(0)

    def send_half_without_headers(self, name: str) -> None:
        self._producer.produce(self._kafka.half_topic, b"garbage", GARBAGE + name)
        self._producer.poll(0)

    def close(self) -> None:
        self._producer.flush(SEND_LIMIT_MS / 1000)


def run(folder: Path, group: str, run_name: str, rate: float, seed: int) -> None:
    """Send until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    kafka = KafkaSettings.model_validate_json((folder / SETTINGS_FILE).read_text())
    database = ServiceDatabase(folder / DATABASE_FILE)
    rogue = RogueWriter(kafka, group)
    number, due_s = 0, time.monotonic()
    with TransactionProducer(kafka, group, Service(database), send_timeout_ms=SEND_LIMIT_MS, session_timeout_ms=6_000) as producer:
        while not stopping.wait(max(0.0, due_s - time.monotonic())):
            # After an outage the service goes on at its rate: it does not catch up.
            due_s = max(due_s, time.monotonic() - 1) + random.Random(f"{run_name}{number}").uniform(0.5, 1.5) / rate
            if (folder / PAUSE_FILE).exists():
                continue
            number += 1
            transaction_id = f"{group}-{run_name}-{number}"
            plan = plan_of(seed, transaction_id)
            try:
                result = producer.send_in_transaction("orders", body_of(transaction_id), transaction_id=transaction_id, arg=plan)
            except SendError as error:
                print(f"{time.time():.3f} not sent: {error}", flush=True)  # noqa: T201  # the log of this process
                continue
            if plan.stray:
                # The first verdict is stored by then, so that there is no doubt which one comes first.
                time.sleep(0.05)
                rogue.contradict(transaction_id, result.state)
            if number % _GARBAGE_EVERY == 0:
                rogue.send_half_without_headers(transaction_id)
        rogue.close()


def main(arguments: list[str]) -> NoReturn:
    folder, group, run_name, rate, seed = arguments
    run(Path(folder), group, run_name, float(rate), int(seed))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
