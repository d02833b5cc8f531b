"""Shows how the job reads Kafka's records. In the job itself they travel packed, and Spark cannot look into a pack."""

import json
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from halfway.schemas.events import EVENT_SCHEMA, EventKind
from halfway.schemas.tick_value import ALL_ASKED
from halfway.transforms.decoding import DecoderConfig, decode
from halfway.transforms.horizon import Tick
from halfway.transforms.packing import to_records


def header_texts() -> Column:
    """Return the column `headers` of Kafka's records as a map of texts. Of two with one name the last one counts.

    The topics hold records of every kind, and `map_from_entries` alone would end the query at a name that occurs twice.
    What is no UTF-8 becomes U+FFFD: pandas takes no other text.
    """
    is_last = "(header, n) -> NOT exists(slice(headers, n + 2, size(headers)), later -> later.key = header.key)"
    text = "header -> struct(header.key, make_valid_utf8(CAST(header.value AS string)))"
    return F.expr(f"map_from_entries(transform(filter(headers, {is_last}), {text}))").alias("header")


def decoded_records(records: DataFrame, config: DecoderConfig, op_topic: str) -> DataFrame:
    """Return what the job makes of records, one row each.

    Args:
        records: Spark's Kafka columns of the half and op topics, with headers.
        config: what decoding depends on.
        op_topic: the name of the op topic.

    Returns:
        EVENT_SCHEMA, with the name of the kind as `event`. The `detail` of a tick holds what it says.
    """

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            events, ticks, _ = decode(batch, config)
            yield events
            zeros = dict.fromkeys(("incarnation", "immunity_ms", "discarded_ms", "binding", "valid_ms"), 0)
            numbers = {**zeros, "event": int(EventKind.TICK), "offset": -1}
            yield pa.RecordBatch.from_pylist([numbers | {**tick._asdict(), "detail": _said(tick)} for tick in ticks], EVENT_SCHEMA)

    names = F.create_map(*(F.lit(value) for kind in EventKind for value in (int(kind), kind.name)))
    events = to_records(records, op_topic, digests=config.keyring is not None).mapInArrow(rows, from_arrow_schema(EVENT_SCHEMA))
    return events.withColumn("event", names[F.col("event").cast("int")])


def _said(tick: Tick) -> str:
    asked = {} if tick.asked_ms == ALL_ASKED else {"asked_ms": tick.asked_ms}
    return json.dumps({"absent_groups": tick.absent_groups, **asked})
