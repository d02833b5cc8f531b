"""Describes the story of one transaction: its Kafka records and its table rows, in order of time."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from halfway.schemas import headers as h
from halfway.schemas.tables import Table
from halfway.transforms.views.decoded import header_texts

_SHOWN = {
    Table.MESSAGES: ("committed_at", "delivered"),
    Table.DISCARDED: ("discarded_at", "discarded"),
    Table.QUARANTINE: ("source_timestamp", "quarantined"),
}


class Event(NamedTuple):
    """An event of a transaction: its time (ms since 1970), what happened, the details, and where it is recorded."""

    at_ms: int
    what: str
    detail: str
    place: str


def records_of(records: DataFrame, transaction_id: str) -> DataFrame:
    """Return the Kafka records of one transaction, in order of time.

    Args:
        records: Spark's Kafka columns with headers, of half, op and check topics.
        transaction_id: the record key.

    Returns:
        at_ms, topic, partition, offset, body_bytes, header.
    """
    size = F.coalesce(F.length("value"), F.lit(0)).alias("body_bytes")
    mine = records.where(F.col("key") == F.lit(transaction_id.encode()))
    at_ms = F.unix_millis("timestamp").alias("at_ms")
    return mine.select(at_ms, "topic", "partition", "offset", size, header_texts()).orderBy("at_ms", "topic", "partition", "offset")


def rows_of(table: DataFrame, name: Table, transaction_id: str) -> DataFrame:
    """Return a table's rows of one transaction, without bodies, with at_ms added, and half_ms if there is a half."""
    mine = table.where(F.col("transaction_id") == transaction_id).withColumn("at_ms", F.unix_millis(_SHOWN[name][0]))
    if name is not Table.QUARANTINE:
        mine = mine.withColumn("half_ms", F.unix_millis("half_at"))
    return mine.drop("body", "key", "value", "headers", "properties").orderBy("at_ms")


def of_record(record: Mapping[str, Any], half_topic: str, op_topic: str) -> Event:
    """Describe a Kafka record of a transaction (a row of `records_of`)."""
    header: Mapping[str, str | None] = record["header"] or {}
    place = f"{record['topic']} {record['partition']}.{record['offset']}"
    if record["topic"] == op_topic:
        asked = f"answers check {header.get(h.CHECK_TIMES, '?')}" if (header.get(h.FROM_CHECK) or "").lower() == "true" else ""
        detail = ", ".join(part for part in (asked, _named(header, h.PGROUP, h.INCARNATION), header.get(h.REMARK)) if part)
        return Event(record["at_ms"], f"op {header.get(h.ACTION)}", detail, place)
    if record["topic"] == half_topic:
        what = "half lost" if h.HALF_LOST in header else "half"
        detail = _named(header, h.REAL_TOPIC, h.PGROUP, h.INCARNATION, h.CHECK_IMMUNITY_TIME_IN_SECONDS, h.HALF_LOST)
        return Event(record["at_ms"], what, f"{detail}, {record['body_bytes']} bytes", place)
    return Event(record["at_ms"], f"check {header.get(h.TRANSACTION_CHECK_TIMES)}", _named(header, h.CHECK_ID), place)


def of_row(row: Mapping[str, Any], table: Table) -> Event:
    """Describe a table row of a transaction (a row of `rows_of`)."""
    what = _SHOWN[table][1]
    if table is Table.QUARANTINE:
        source = f"{row['source_topic']} {row['source_partition']}.{row['source_offset']}"
        return Event(row["at_ms"], what, f"{row['reason']}: {row['detail']} ({source})", f"{table}, batch {row['epoch']}.{row['batch_id']}")
    detail = f"to {row['topic']}, after {row['check_times']} checks, incarnation {row['incarnation']}"
    reason = f"{row['reason']}, " if table is Table.DISCARDED else ""
    return Event(row["at_ms"], what, reason + detail, f"{table}, batch {row['epoch']}.{row['batch_id']}")


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events in order of time. Events of the same time keep their order."""
    return sorted(events, key=lambda event: event.at_ms)


def _named(header: Mapping[str, str | None], *names: str) -> str:
    return ", ".join(f"{name}={header[name]}" for name in names if name in header)
