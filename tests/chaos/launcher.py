"""Starts the job with failpoints: `python -m tests.chaos.launcher FOLDER resolve OPTIONS...`.

The product has no failpoints. This module wraps its methods: each step of a batch reads the file FOLDER/arm.json. If
the file names the step, the process group dies by SIGKILL, or the job waits while a fault kills something else. The
wrappers also write each check request to FOLDER/journal before the job sends it, with the horizon at which the job
decided it, because the request does not contain that horizon.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from halfway.pipelines.cli.app import app
from halfway.pipelines.resolve import sinks
from halfway.pipelines.resolve.batch_outcomes import BatchOutcomes
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.pipelines.storage import delta_tables
from halfway.schemas.headers import check_id
from halfway.schemas.outcomes import Kind
from halfway.schemas.tables import Table

ARM_FILE = "arm.json"
REACHED_FILE = "reached.json"
GO_FILE = "go"
JOURNAL_FILE = "journal"
WAIT_LIMIT_S = 120.0


class Step(StrEnum):
    """Steps of a batch, in their order. A batch reaches the steps of a sink only if it has rows for that sink."""

    BEFORE_PERSIST = "before_persist"
    AFTER_COUNT = "after_count"
    AFTER_MESSAGES = "after_messages"
    AFTER_DISCARDED = "after_discarded"
    AFTER_QUARANTINE = "after_quarantine"
    BEFORE_CHECKS = "before_checks"
    AFTER_CHECKS = "after_checks"
    BEFORE_COMMIT = "before_commit"


AFTER_TABLE = {
    Table.MESSAGES: Step.AFTER_MESSAGES,
    Table.DISCARDED: Step.AFTER_DISCARDED,
    Table.QUARANTINE: Step.AFTER_QUARANTINE,
}


class Failpoints:
    """Dies or waits as FOLDER/arm.json says: {"number", "step", "batches", "action"}.

    The action is done when the job reaches `step` for the `batches`th time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._order: dict[str, Any] = {}
        self._reached = 0
        self._batch_id = -1

    def reach(self, step: Step, batch_id: int | None = None) -> None:
        if batch_id is not None:
            self._batch_id = batch_id
        try:
            order = json.loads((self._folder / ARM_FILE).read_text())
        except FileNotFoundError:
            return
        if order != self._order:
            self._order, self._reached = order, 0
        if step != order["step"]:
            return
        self._reached += 1
        if self._reached < order["batches"]:
            return
        (self._folder / ARM_FILE).unlink()
        write_atomically(self._folder / REACHED_FILE, {"step": step, "batch_id": self._batch_id})
        if order["action"] == "die":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while not (self._folder / GO_FILE).exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)


def write_atomically(path: Path, content: object) -> None:
    """Write a JSON file, so that a reader sees all of it or none."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def wrap(folder: Path) -> None:
    """Put the failpoints into the product's batch writer."""
    failpoints = Failpoints(folder)
    write, count, send_checks, append_once = BatchWriter.write, BatchWriter._count, BatchWriter._send_checks, delta_tables.append_once

    def written(self: BatchWriter, outcomes: DataFrame, batch_id: int) -> BatchReport:
        failpoints.reach(Step.BEFORE_PERSIST, batch_id)
        report = write(self, outcomes, batch_id)
        failpoints.reach(Step.BEFORE_COMMIT, batch_id)
        return report

    def counted(self: BatchWriter, packs: DataFrame, report: BatchReport) -> BatchOutcomes:
        outcomes = count(self, packs, report)
        failpoints.reach(Step.AFTER_COUNT)
        return outcomes

    def appended(rows: DataFrame, storage: Any, table: Table, app_id: str, batch_id: int, *, origin: str) -> None:
        append_once(rows, storage, table, app_id, batch_id, origin=origin)
        failpoints.reach(AFTER_TABLE[table], batch_id)

    def sent(self: BatchWriter, outcomes: BatchOutcomes) -> DataFrame | None:
        if not outcomes.rows[Kind.CHECK]:
            return send_checks(self, outcomes)
        write_to_journal(folder / JOURNAL_FILE, outcomes)
        failpoints.reach(Step.BEFORE_CHECKS)
        lost = send_checks(self, outcomes)
        failpoints.reach(Step.AFTER_CHECKS)
        return lost

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (BatchWriter, "write", written),
        (BatchWriter, "_count", counted),
        (BatchWriter, "_send_checks", sent),
        (sinks, "append_once", appended),
    ]
    for owner, name, wrapped in replaced:
        setattr(owner, name, wrapped)


def write_to_journal(journal: Path, outcomes: BatchOutcomes) -> None:
    """Append CHECK_ID and horizon of each check of a batch, and sync the file."""
    rows = outcomes.of(Kind.CHECK).select("transaction_id", "partition", "offset", "check_times", "decided_ms").collect()
    with journal.open("a") as lines:
        for transaction_id, partition, offset, times, decided_ms in rows:
            # The line break comes first, because an earlier kill may have cut off the last line.
            lines.write(f"\n{json.dumps([check_id(transaction_id, partition, offset, times), decided_ms])}")
        lines.flush()
        os.fsync(lines.fileno())


if __name__ == "__main__":
    wrap(Path(sys.argv.pop(1)))
    app()
