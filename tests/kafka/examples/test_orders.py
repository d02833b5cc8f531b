"""The order service in its own processes, with the real job: order and message, both or neither, at every crash."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from examples.orders import CRASHED, GROUP
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import ops
from tests.support.delta_rows import delta_rows
from tests.support.job_process import JobProcess
from tests.support.paths import ROOT

# Kafka gives a dead instance's partitions to the next one after 10 s. The last check must not be sent in that time.
QUICK = {"resolution.transactionTimeOut": "1s", "resolution.transactionCheckInterval": "1s", "resolution.transactionCheckMax": 100}


class Service:
    """The service: one database, and one process for each command."""

    def __init__(self, kafka: KafkaSettings, folder: Path) -> None:
        self.database = folder / "orders.db"
        names = ("bootstrap_servers", "half_topic", "op_topic", "check_topic")
        self._environ = {**os.environ, **{f"HALFWAY__KAFKA__{name.upper()}": str(getattr(kafka, name)) for name in names}}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "examples.orders", *arguments, "--database", str(self.database)]
        done = subprocess.run(command, cwd=ROOT, env=self._environ, capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def orders(self) -> list[tuple[str, int]]:
        with sqlite3.connect(self.database) as database:
            return database.execute("SELECT item, quantity FROM orders ORDER BY rowid").fetchall()


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_both_or_neither(job: JobProcess, tmp_path: Path) -> None:
    kafka = KafkaSettings.model_validate({name.removeprefix("kafka."): value for name, value in job.options.items() if "kafka." in name})
    service = Service(kafka, tmp_path)
    job.start(**QUICK)
    job.until_first_batch()

    assert service("place", "apples", "--quantity", "3").endswith(": COMMIT\n")
    assert service("place", "figs", "--quantity", "101").startswith("refused: CHECK constraint")
    job.until(lambda: len(job.delivered()) == 1, "the message about the apples")

    service("place", "pears", "--crash", "after-commit", code=CRASHED)
    service("place", "plums", "--crash", "before-commit", code=CRASHED)
    assert service.orders() == [("apples", 3), ("pears", 1)]
    assert sorted(headers["ACTION"] for _, headers in ops_of(kafka)) == ["COMMIT"], "nothing was sent for the figs"
    assert len(job.delivered()) == 1

    # The first check may have been sent before the service is back, so there may be several. All answers are the same.
    answers = set(service("serve", "--until", "2").splitlines())
    assert sorted(answer.split("}: ")[1] for answer in answers) == ["COMMIT", "ROLLBACK"]
    job.until(lambda: len(job.delivered()) == 2, "the message about the pears")
    assert service.orders() == [("apples", 3), ("pears", 1)]
    columns = "CAST(body AS STRING) AS body, check_times > 0 AS asked, producer_group"
    assert delta_rows(job.warehouse / "messages", f"SELECT {columns} FROM rows ORDER BY committed_at") == [
        {"body": '{"item": "apples", "quantity": 3}', "asked": False, "producer_group": GROUP},
        {"body": '{"item": "pears", "quantity": 1}', "asked": True, "producer_group": GROUP},
    ]
    assert len(service("list").splitlines()) == 2
    by_check = [headers for _, headers in ops_of(kafka) if "FROM_CHECK" in headers]
    assert {headers["ACTION"] for headers in by_check} == {"COMMIT", "ROLLBACK"}


def ops_of(kafka: KafkaSettings) -> list[tuple[str, dict[str, str]]]:
    """Return the service's ops, without the job's ticks."""
    return [(name, headers) for name, headers in ops(kafka) if "ACTION" in headers]
