"""Decodes Kafka records to events: each record is a half, an op, a tick, a lost notice, or broken (R14).

Everything is a column expression. Each header of the contract is looked up once per row, by its position in the header
array, because Spark compiles that. A map per row takes three times as long. Higher-order functions take several times
as long, because Spark interprets them.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from halfway.schemas import headers as h
from halfway.schemas.events import EVENT_SCHEMA, EventKind
from halfway.schemas.outcomes import Reason

_ACTIONS = {"COMMIT": "COMMIT", "ROLLBACK": "ROLLBACK", "UNKNOWN": "UNKNOWN", "UNKNOW": "UNKNOWN"}
# Not `$`, which also matches before a line end.
_NUMBER = r"^-?[0-9]{1,19}\z"
_POINTER = r"^[0-9]{1,9}:[0-9]{1,18}\z"
_NAMES = tuple(dict.fromkeys((*h.HALF_HEADERS, *h.OP_HEADERS, *h.DELAY_HEADERS, h.TICK, h.PARTITIONS, h.HALF_LOST)))


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What `decode` depends on: the two topics, the largest body, and the keys that Spark groups the buckets by."""

    half_topic: str
    op_topic: str
    max_body_bytes: int
    bucket_keys: tuple[int, ...]
    is_signed: bool = False
    """True if ops keep their signatures. The operator verifies them, because no key may be part of a query plan."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A header that holds a whole number between `low` and `high`."""

    name: str
    low: int
    high: int

    def value(self) -> Column:
        return _text(self.name).try_cast("bigint")

    def is_bad(self) -> Column:
        text = _text(self.name)
        in_range = text.rlike(_NUMBER) & self.value().between(self.low, self.high)
        return _has(self.name) & ~F.coalesce(in_range, F.lit(False))


_REAL_QID = _Number(h.REAL_QID, -h.MAX_INT - 1, h.MAX_INT)
_IMMUNITY = _Number(h.CHECK_IMMUNITY_TIME_IN_SECONDS, 1, h.MAX_INT)
_BORN = _Number(h.BORN_TIMESTAMP, 0, h.MAX_TIMESTAMP_MS)
_INCARNATION = _Number(h.INCARNATION, 0, h.MAX_INT)
_CHECK_TIMES = _Number(h.CHECK_TIMES, 0, h.MAX_INT)
_TICK = _Number(h.TICK, 0, h.MAX_TIMESTAMP_MS)
_PARTITIONS = _Number(h.PARTITIONS, 1, h.MAX_INT)


def decode(records: DataFrame, config: DecoderConfig) -> DataFrame:
    """Turn Kafka records into events.

    Args:
        records: Spark's Kafka columns with headers, from the half and the op topic. Values may be large.
        config: topics, limits and buckets.

    Returns:
        EVENT_SCHEMA: one row for each record; for a tick, one row for each bucket.
    """
    flat = records.select(
        (F.col("topic") == config.op_topic).cast("int").alias("source"),
        "partition",
        "offset",
        F.unix_millis("timestamp").alias("at_ms"),
        "key",
        F.col("key").cast("string").alias("id"),
        F.when(F.length("value") <= 65_536, F.col("value")).alias("tick_value"),
        F.coalesce(F.length("value"), F.lit(0)).alias("body_bytes"),
        F.coalesce("headers", F.expr("CAST(array() AS array<struct<key:string,value:binary>>)")).alias("headers"),
    )
    names = (*_NAMES, h.SIGNATURE) if config.is_signed else _NAMES
    places = {_place_name(name): F.array_position(F.col("headers.key"), name).cast("int") for name in names}
    placed = flat.withColumns(places).withColumn("reversed_names", F.reverse("headers.key"))
    texts = {_text_name(name): F.get("headers", _place(name) - 1)["value"].cast("string") for name in names}
    looked_up = placed.withColumns(texts)
    kind = (
        F.when(_has(h.TICK), EventKind.TICK)
        .when(F.col("source") == int(h.Source.OP), EventKind.OP)
        .when(_has(h.HALF_LOST) & ~_has(h.REAL_TOPIC), EventKind.LOST)
        .otherwise(EventKind.HALF)
    )
    kinds = looked_up.select("*", kind.alias("record_kind"))
    judged = kinds.select("*", _problem(config).alias("problem"))
    buckets = F.when((F.col("record_kind") == EventKind.TICK) & F.col("problem").isNull(), _array(config.bucket_keys)).otherwise(
        F.array(_bucket(config.bucket_keys))
    )
    return judged.select("*", F.explode(buckets).alias("bucket")).select(*_event_columns(config)).to(EVENT_SCHEMA)


def _array(numbers: tuple[int, ...]) -> Column:
    return F.expr(f"array({', '.join(map(str, numbers))})")


def _bucket(keys: tuple[int, ...]) -> Column:
    """Return the bucket of a transaction id. A broken record gets one that is the same when the batch is repeated."""
    of_id = F.xxhash64("id")
    of_place = F.xxhash64("source", "partition", "offset")
    number = F.pmod(F.when(F.col("problem").isNull(), of_id).otherwise(of_place), F.lit(len(keys)))
    return F.get(_array(keys), number.cast("int"))


def _event_columns(config: DecoderConfig) -> list[Column]:
    kind = F.col("record_kind")
    is_half, is_tick = kind == EventKind.HALF, kind == EventKind.TICK
    good = F.col("problem").isNull()
    zero = F.lit(0)
    return [
        F.col("bucket"),
        F.when(good, kind).otherwise(EventKind.BROKEN).alias("event"),
        F.col("source"),
        F.col("partition"),
        F.col("offset"),
        F.col("at_ms"),
        F.when(F.is_valid_utf8("id"), F.col("id")).alias("transaction_id"),
        F.when(good, _text(h.PGROUP)).alias("producer_group"),
        F.when(good & is_half, _text(h.REAL_TOPIC)).alias("topic"),
        F.when(good, F.coalesce(_INCARNATION.value(), zero)).otherwise(zero).cast("int").alias("incarnation"),
        F.when(good & is_half, F.coalesce(_IMMUNITY.value(), zero) * 1000).otherwise(zero).cast("long").alias("immunity_ms"),
        F.when(good & (kind == EventKind.OP), _action()).alias("action"),
        _signature(config).alias("signature"),
        F.when(good & (kind == EventKind.LOST), _text(h.HALF_LOST)).alias("half_pointer"),
        F.when(good & is_tick, _PARTITIONS.value()).otherwise(zero).cast("int").alias("tick_partitions"),
        F.col("problem.reason").alias("reason"),
        F.when(good & is_tick, F.to_json(_tick_json())).otherwise(F.col("problem.detail")).alias("detail"),
    ]


def _problem(config: DecoderConfig) -> Column:
    """Return the first problem that breaks the contract, as struct<reason,detail>; null if there is none."""
    kind = F.col("record_kind")
    body_size = F.concat(F.col("body_bytes"), F.lit(f" bytes, at most {config.max_body_bytes}"))
    half = _first(
        _key_problems()
        + [(~_has(name), Reason.MISSING_HEADER, F.lit(name)) for name in (h.REAL_TOPIC, h.PGROUP)]
        + [(_is_empty(name), Reason.BAD_HEADER, F.lit(f"{name} is empty or null")) for name in (h.REAL_TOPIC, h.PGROUP)]
        + [(_is_null(name), Reason.BAD_HEADER, F.lit(f"{name} is null")) for name in (h.TAGS, h.KEYS)]
        + [_number_problem(number) for number in (_REAL_QID, _IMMUNITY, _BORN, _INCARNATION)]
        + [(_not_utf8(), Reason.BAD_HEADER, F.lit("a header is not UTF-8"))]
        + [_duplicate_problem(h.HALF_HEADERS)]
        + [(_has(name), Reason.DELAY_NOT_SUPPORTED, F.lit(name)) for name in h.DELAY_HEADERS]
        + [(F.col("body_bytes") > config.max_body_bytes, Reason.BODY_TOO_LARGE, body_size)]
    )
    op = _first(
        _key_problems()
        + [(~_has(name), Reason.MISSING_HEADER, F.lit(name)) for name in (h.ACTION, h.PGROUP)]
        + [(_is_empty(h.PGROUP), Reason.BAD_HEADER, F.lit(f"{h.PGROUP} is empty or null"))]
        + [(_is_null(name), Reason.BAD_HEADER, F.lit(f"{name} is null")) for name in (h.ACTION, h.FROM_CHECK, h.REMARK)]
        + [(~F.is_valid_utf8(_text(name)), Reason.BAD_HEADER, F.lit(f"{name} is not UTF-8")) for name in h.OP_HEADERS]
        + [_number_problem(number) for number in (_INCARNATION, _CHECK_TIMES)]
        + [_duplicate_problem((*h.OP_HEADERS, h.SIGNATURE) if config.is_signed else h.OP_HEADERS)]
        + [(_action().isNull(), Reason.UNKNOWN_ACTION, F.concat(F.lit("ACTION is "), F.substring(_text(h.ACTION), 1, 100)))]
    )
    tick = _first([(condition, Reason.BAD_TICK, F.lit(detail)) for condition, detail in _tick_problems()])
    is_pointer = F.coalesce(_text(h.HALF_LOST).rlike(_POINTER), F.lit(False))
    lost = _first([*_key_problems(), (~is_pointer, Reason.BAD_HEADER, F.lit(h.HALF_LOST)), _duplicate_problem((h.HALF_LOST,))])
    return F.when(kind == EventKind.HALF, half).when(kind == EventKind.OP, op).when(kind == EventKind.TICK, tick).otherwise(lost)


def _first(problems: list[tuple[Column, Reason, Column]]) -> Column:
    cases = F.when(F.lit(False), F.struct(F.lit("").alias("reason"), F.lit("").alias("detail")))
    for condition, reason, detail in problems:
        cases = cases.when(condition, F.struct(F.lit(str(reason)).alias("reason"), detail.alias("detail")))
    return cases


def _key_problems() -> list[tuple[Column, Reason, Column]]:
    length = F.length("key")
    return [
        (F.col("key").isNull() | (length == 0), Reason.MISSING_KEY, F.lit("the record key is the transaction id")),
        (length > h.MAX_KEY_BYTES, Reason.KEY_TOO_LONG, F.concat(length, F.lit(f" bytes, at most {h.MAX_KEY_BYTES}"))),
        (~F.is_valid_utf8("id"), Reason.KEY_NOT_UTF8, F.lit("the record key is not UTF-8")),
    ]


def _number_problem(number: _Number) -> tuple[Column, Reason, Column]:
    return number.is_bad(), Reason.BAD_HEADER, F.lit(f"{number.name} is not a number from {number.low} to {number.high}")


def _duplicate_problem(names: tuple[str, ...]) -> tuple[Column, Reason, Column]:
    twice = [_has(name) & (F.array_position("reversed_names", name) + _place(name) != F.size("headers") + 1) for name in names]
    named = [F.when(is_twice, F.lit(name)) for is_twice, name in zip(twice, names, strict=True)]
    return reduce(or_, twice), Reason.DUPLICATE_HEADER, F.concat_ws(" ", *named)


def _tick_problems() -> list[tuple[Column, str]]:
    parsed = _tick_json()
    bad_json = parsed.isNull() | parsed["corrupt"].isNotNull()
    return [
        (F.col("key").isNotNull(), "a tick has no key"),
        (_TICK.is_bad(), f"{_TICK.name} is not a number"),
        (~_has(h.PARTITIONS) | _PARTITIONS.is_bad(), f"{_PARTITIONS.name} is not a positive number"),
        (_duplicate_problem((h.TICK, h.PARTITIONS))[0], "a header occurs twice"),
        (F.col("partition") >= _PARTITIONS.value(), f"{_PARTITIONS.name} is not above the tick's own partition"),
        (F.col("body_bytes") > 65_536, "the value is over 64 KiB"),
        ((F.col("body_bytes") > 0) & bad_json, 'the value is not {"absent_groups": [...]}'),
    ]


def _tick_json() -> Column:
    options = {"columnNameOfCorruptRecord": "corrupt", "allowSingleQuotes": "false"}
    return F.from_json(F.col("tick_value").cast("string"), "absent_groups array<string>, corrupt string", options)


def _not_utf8() -> Column:
    """Return True if a header's value or name is not UTF-8.

    Values are joined to test them all at once: a comma between two of them completes no broken sequence. Spark has
    replaced the bytes of a name that were not UTF-8.
    """
    bad_value = ~F.is_valid_utf8(F.expr("array_join(CAST(headers.value AS array<string>), ',')"))
    return bad_value | F.array_join("headers.key", ",").contains("\N{REPLACEMENT CHARACTER}")


def _action() -> Column:
    action = F.when(F.lit(False), F.lit(""))
    for name, meaning in _ACTIONS.items():
        action = action.when(_text(h.ACTION) == name, F.lit(meaning))
    return action


def _signature(config: DecoderConfig) -> Column:
    """Return an op's signature as text; null if there is none, or it is not UTF-8."""
    if not config.is_signed:
        return F.lit(None).cast("string")
    is_op = (F.col("record_kind") == EventKind.OP) & F.col("problem").isNull()
    return F.when(is_op & F.is_valid_utf8(_text(h.SIGNATURE)), _text(h.SIGNATURE))


def _place(name: str) -> Column:
    """Return the position of a header's first occurrence, from 1; 0 if the record does not have it."""
    return F.col(_place_name(name))


def _text(name: str) -> Column:
    return F.col(_text_name(name))


def _has(name: str) -> Column:
    return _place(name) > 0


def _place_name(name: str) -> str:
    return f"place_of_{name}"


def _text_name(name: str) -> str:
    return f"text_of_{name}"


def _is_null(name: str) -> Column:
    return _has(name) & _text(name).isNull()


def _is_empty(name: str) -> Column:
    return F.coalesce(_text(name), F.lit("")) == ""
