"""What signing costs: transactions decoded a second, and signed a second by a client, with and without signatures.

`python -m benchmarks.signing` measures the two places where signatures are made and verified, on one core, with halves
of 1 KiB. It needs neither Kafka nor Spark. In the job, Spark's JVM makes the digests of the bodies.
"""

import json
import sys
from collections.abc import Callable
from time import perf_counter

import pyarrow as pa

from halfway.clients.messages import HalfMessage
from halfway.schemas import headers as h
from halfway.schemas.events import RECORD_SCHEMA
from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.records import OpHeaders, Record, encode_key
from halfway.schemas.signing import Keyring, sha256_of
from halfway.transforms.decoding import DecoderConfig, decode

TRANSACTIONS = 4_000
AT_MS = 1_700_000_000_000
TOPICS = {Source.HALF: "transactions.half", Source.OP: "transactions.op"}
KEYS = Keyring({"shop": [b"k" * 32]}, required=True, cluster="prod")


def transaction(number: int, keyring: Keyring | None) -> list[tuple[Source, Record]]:
    """Return a half and its COMMIT, as a client makes them."""
    message = HalfMessage(
        transaction_id=f"{number:032x}", topic="orders", body=bytes(1024), producer_group="shop", tags="placed", born_at_ms=AT_MS
    ).signed(TOPICS[Source.HALF], keyring, AT_MS)
    op = OpHeaders(action=LocalTransactionState.COMMIT, producer_group="shop", half_signature=message.signature)
    headers = op.signed(message.transaction_id, TOPICS[Source.OP], keyring).to_headers()
    return [(Source.HALF, message.to_record()), (Source.OP, Record(encode_key(message.transaction_id), None, headers))]


def to_arrow(records: list[tuple[Source, Record]]) -> pa.RecordBatch:
    """Return RECORD_SCHEMA, as the JVM hands it over."""
    rows = [
        {
            "source": int(source),
            "partition": 0,
            "offset": offset,
            "at_ms": AT_MS,
            "timestamp_type": 1,
            "key": record.key,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "value_bytes": len(record.value or b""),
            "tick_value": None,
            "value_sha256": sha256_of(record.value),
        }
        for offset, (source, record) in enumerate(records)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=RECORD_SCHEMA)


def per_second(work: Callable[[], object]) -> int:
    """Return the transactions a second of the fastest of three runs."""
    fastest_s = float("inf")
    for _ in range(3):
        started_s = perf_counter()
        work()
        fastest_s = min(fastest_s, perf_counter() - started_s)
    return round(TRANSACTIONS / fastest_s)


def main() -> None:
    """Print the figures as JSON."""
    figures: dict[str, int] = {}
    for name, keyring in (("unsigned", None), ("signed", KEYS)):
        made = [record for number in range(TRANSACTIONS) for record in transaction(number, keyring)]
        batch = to_arrow(made)
        config = DecoderConfig(4 * 1024 * 1024, h.SIGNED_WINDOW_MS, keyring, TOPICS)
        broken = decode(batch, config).events.filter(pa.compute.equal(decode(batch, config).events["event"], 5)).num_rows
        assert broken == 0, "every record is good"
        figures[f"client_{name}"] = per_second(lambda keyring=keyring: [transaction(number, keyring) for number in range(TRANSACTIONS)])
        figures[f"decoder_{name}"] = per_second(lambda batch=batch, config=config: decode(batch, config))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
