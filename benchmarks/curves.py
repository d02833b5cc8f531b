"""Curves against what grows: `python -m benchmarks.curves [--only NAMES]` measures them and draws each as an SVG."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.pandas.types import to_arrow_schema

from benchmarks.live import measured, warm_up
from benchmarks.load import Load
from benchmarks.picture import draw
from benchmarks.rig import Figures, Rig, in_own_process
from halfway.schemas.settings import Settings
from halfway.schemas.tables import MESSAGES_SCHEMA
from tests.support.signals import end_at_sigterm

_SMALL_BYTES = 100
"""The size of bodies that are only there to be many."""
_PART = "curve_"
_ROWS_A_FILE = 1_000_000


@dataclass(frozen=True)
class Curve:
    """A curve of points, each with `count` of something."""

    unit: str
    counts: tuple[int, ...]
    prepare: Callable[[Rig, int], Settings]
    """Makes topics and tables with `count` of it."""
    smallest: int = 0

    def __call__(self, rig: Rig) -> Figures:
        """Measure all points on one JVM that is warm before the first."""
        warm_up(rig)
        scaled = sorted({max(self.smallest, round(count * rig.scale)) for count in self.counts})
        return {str(count): measured(rig, self.prepare(rig, count)) for count in scaled}


def _pending(rig: Rig, count: int) -> Settings:
    settings = rig.settings("pending")
    Load(settings.kafka, body_bytes=_SMALL_BYTES).send(count, answered=False)
    return settings


def _remembered(rig: Rig, count: int) -> Settings:
    settings = rig.settings("remembered", {"resolution.resolved_retention": "24h"})
    Load(settings.kafka, body_bytes=_SMALL_BYTES, commit=0, roll_back=1).send(count)
    return settings


def _groups(rig: Rig, count: int) -> Settings:
    """Let as many transactions be pending at each point, so that only their groups and topics differ."""
    settings = rig.settings("groups")
    Load(settings.kafka, body_bytes=_SMALL_BYTES, groups=count, topics=count).send(rig.amount(1_000_000), answered=False)
    return settings


def _partitions(rig: Rig, count: int) -> Settings:
    return rig.settings("partitions", partitions=count)


def _rows(rig: Rig, count: int) -> Settings:
    """Let the job create its table, and add rows with delta-rs, which is quicker."""
    settings = rig.settings("rows")
    Load(settings.kafka).send(100)
    rig.drain(settings)
    table = DeltaTable(f"{settings.storage.warehouse}/messages")
    for start in range(0, count, _ROWS_A_FILE):
        write_deltalake(table, _old_messages(start, min(count, start + _ROWS_A_FILE)), mode="append")
    return settings


def _age(rig: Rig, count: int) -> Settings:
    """Let the table's log be as long as that of a job that has made `count` commits, and was never optimised.

    Like the job's own it has checkpoints, here after each hundredth commit: without one an append reads all before it.
    """
    settings = _rows(rig, 0)
    table = DeltaTable(f"{settings.storage.warehouse}/messages")
    for number in range(count):
        write_deltalake(table, _old_messages(number, number + 1), mode="append")
        if number % 100 == 99:
            table.create_checkpoint()
            table = DeltaTable(table.table_uri)
    return settings


def _old_messages(start: int, end: int) -> pa.Table:
    """Return messages of epoch 0, like those of 100-byte bodies that the job wrote long ago."""
    schema = to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")
    same = {"topic": "orders0", "properties": [("trace", "abc")], "producer_group": "bench0", "body": bytes(_SMALL_BYTES)}

    def value(field: pa.Field) -> pa.Scalar:
        is_number = pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)
        return pa.scalar(0 if is_number else same.get(field.name), field.type)

    columns = {field.name: pa.repeat(value(field), end - start) for field in schema}
    columns["transaction_id"] = pa.array([f"old-{number}" for number in range(start, end)])
    return pa.table(columns, schema=schema)


CURVES = {
    "pending": Curve("pending transactions", (0, 10_000, 100_000, 1_000_000, 10_000_000), _pending),
    "remembered": Curve("remembered ids", (0, 20_000, 200_000, 2_000_000, 20_000_000), _remembered),
    "groups": Curve("groups and topics", (1, 1_000, 10_000, 100_000, 1_000_000), _groups, smallest=1),
    "partitions": Curve("partitions of each topic", (1, 8, 64, 512), _partitions, smallest=1),
    "rows": Curve("rows in the table", (0, 50_000, 500_000, 5_000_000, 50_000_000), _rows),
    "age": Curve("commits of the table (10,000: three hours of one a second)", (0, 100, 1_000, 10_000), _age),
}
CURVE_PARTS: dict[str, Callable[[Rig], Figures]] = {f"{_PART}{name}": curve for name, curve in CURVES.items()}
"""The curves by the names under which they run in their own processes."""


def main() -> None:
    """Measure the chosen curves, write the figures of each to a file, and draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description="Measure what grows, and draw it.")
    parser.add_argument("--only", default="", help=f"comma-separated names of {', '.join(CURVES)} (default all)")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the usual amounts (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/curves"), help="folder for NAME.json and NAME.svg (default build/curves)")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(CURVES)
    unknown = set(names) - set(CURVES)
    if unknown:
        parser.error(f"no curve is called {', '.join(sorted(unknown))}; choose from {', '.join(CURVES)}")
    end_at_sigterm()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        facts = {"unit": CURVES[name].unit, "fraction": options.scale, "points": in_own_process(f"{_PART}{name}", options.scale)}
        (options.out / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
        draw(facts["unit"], facts["points"], options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
