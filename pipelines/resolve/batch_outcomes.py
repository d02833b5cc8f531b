"""The outcomes of one batch, and the rows made of them: on the executors or, if there are few, on the driver.

Spark takes a quarter of a second to plan and schedule a stage that reads a few hundred records back. The driver reads
them in a few milliseconds. Either way the same functions read the records and make the rows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark import Accumulator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from halfway.pipelines.resolve.read_back import RecordFetcher, is_full
from halfway.schemas.events import OUTCOME_SCHEMA
from halfway.schemas.outcomes import Kind
from halfway.schemas.reports import BucketReport
from halfway.transforms.packing import UNDIVIDED, outcomes_in, unpack
from halfway.transforms.rows import Records, RowMaker

ROWS_ON_DRIVER = 4_096
"""With more outcomes of a kind, the executors write a batch."""
ROWS_PER_TASK = 2_000
"""With fewer rows, another task, and with it another file, costs more than it saves."""


def max_undivided(buckets: int) -> int:
    """Return how many outcomes of a bucket the driver may collect: twice an even share, as buckets differ."""
    return max(1, 2 * ROWS_ON_DRIVER // buckets)


class BatchOutcomes:
    """The outcomes of one batch."""

    def __init__(self, packs: DataFrame, fetcher: RecordFetcher) -> None:
        """Evaluate the whole batch in one job: count the outcomes, and collect the reports and what is undivided.

        Args:
            packs: PACKED_OUTCOMES_SCHEMA, persisted, because all but small batches evaluate it again.
            fetcher: reads records back.
        """
        self._packs, self._fetcher = packs, fetcher
        self.spark = packs.sparkSession
        self.rows: Counter[Kind] = Counter()
        """How many outcomes there are of each kind."""
        self.may_be_held = 0
        """How many of them adopted tables may hold."""
        self.reports: list[BucketReport] = []
        self._collected: dict[Kind, list[bytes | None]] = defaultdict(list)
        # Not by its rows: divided among many slots, the packs of many outcomes are small too, and take 2 KB each.
        is_wanted = (F.col("kind") == int(Kind.REPORT)) | (F.col("slot") == UNDIVIDED)
        counted = packs.withColumn("outcomes", F.when(is_wanted, F.col("outcomes"))).toArrow()
        for number, _, may_be_held, rows, pack in zip(*(column.to_pylist() for column in counted.columns), strict=True):
            kind = Kind(number)
            self.rows[kind] += rows
            self.may_be_held += rows if may_be_held else 0
            if kind is Kind.REPORT:
                self.reports.append(BucketReport.from_json(pack))
            else:
                self._collected[kind].append(pack)

    def of(self, kind: Kind) -> DataFrame:
        """Return the outcomes of a kind (OUTCOME_SCHEMA)."""
        return outcomes_in(self._packs.where(F.col("kind") == int(kind)))

    def to_frame(self, kind: Kind, make_rows: RowMaker, schema: StructType) -> tuple[DataFrame, Accumulator[int]]:
        """Return the rows that `make_rows` makes of a kind's outcomes and their records.

        Args:
            kind: the kind.
            make_rows: holds the values that differ from batch to batch: as literals they would be part of Spark's
                generated code, compiled again for every batch.
            schema: the schema of the rows.

        Returns:
            The rows, and how many records were lost, which is known once the rows have been evaluated.
        """
        lost = self.spark.sparkContext.accumulator(0)
        counting = _counting(make_rows, lost)
        rows = self._rows_on_driver(kind, counting)
        if rows is None:
            return self._rows_on_executors(kind, counting, schema), lost
        return self.spark.createDataFrame(rows, schema).coalesce(1), lost

    def to_table(self, kind: Kind, make_rows: RowMaker, schema: pa.Schema) -> pa.Table:
        """Call `make_rows` now, and return its rows. Spark calls it again in a task that it repeats."""
        rows = self._rows_on_driver(kind, make_rows)
        return self._rows_on_executors(kind, make_rows, from_arrow_schema(schema)).toArrow() if rows is None else rows

    def _rows_on_driver(self, kind: Kind, make_rows: RowMaker) -> pa.Table | None:
        """Return the rows; None if the outcomes are many or their records large."""
        packs = [pack for pack in self._collected[kind] if pack is not None]
        if len(packs) < len(self._collected[kind]) or self.rows[kind] > ROWS_ON_DRIVER:
            return None
        outcomes, records = next(self._fetcher.portions(_unpacked(packs)))
        return None if is_full(records) else pa.Table.from_batches([make_rows(outcomes, records)])

    def _rows_on_executors(self, kind: Kind, make_rows: RowMaker, schema: StructType) -> DataFrame:
        fetcher = self._fetcher

        def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            packs = [pack for batch in batches for pack in batch["outcomes"].to_pylist()]
            for outcomes, records in fetcher.portions(_unpacked(packs)):
                yield make_rows(outcomes, records)

        tasks = max(1, min(self.spark.sparkContext.defaultParallelism, -(-self.rows[kind] // ROWS_PER_TASK)))
        packs = self._packs.where(F.col("kind") == int(kind)).select("slot", "outcomes")
        placed = packs.repartitionById(tasks, F.pmod(F.col("slot"), F.lit(tasks))) if tasks > 1 else packs.coalesce(1)
        return placed.mapInArrow(rows, schema)


def _unpacked(packs: Iterable[bytes]) -> pa.Table:
    """Return the outcomes of several packs in one table (OUTCOME_SCHEMA)."""
    return pa.concat_tables([OUTCOME_SCHEMA.empty_table(), *map(unpack, packs)])


def _counting(make_rows: RowMaker, lost: Accumulator[int]) -> RowMaker:
    """Return a function that also counts the records that are gone."""

    def make(outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        lost.add(sum(record is None for record in records))
        return make_rows(outcomes, records)

    return make
