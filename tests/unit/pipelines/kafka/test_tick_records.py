"""Ticks as the job writes them, read by the decoder: a signature covers all that they say."""

from typing import Any

import pytest

from halfway.pipelines.kafka.tick_records import write_ticks
from halfway.schemas import headers as h
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.schemas.tick_value import TickValue


class Written:
    """Collects records instead of sending them."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None, bytes | None, h.HeaderList, int]] = []

    def put(self, topic: str, key: bytes | None, value: bytes | None, headers: h.HeaderList, *, partition: int, **_: Any) -> None:
        self.records.append((topic, key, value, headers, partition))

    def flush(self) -> None:
        """Nothing waits."""


@pytest.mark.parametrize("value", [None, TickValue(("away",), "own", 7).to_bytes()])
def test_the_job_signs_each_tick_with_all_that_it_says(value: bytes | None) -> None:
    keyring = Keyring({}, required=False, cluster="c", job_keys=[b"j" * 32])
    written: Any = Written()
    write_ticks(written, {"halves": 2}, value, keyring=keyring)
    assert [(topic, key, partition) for topic, key, _, _, partition in written.records] == [("halves", None, 0), ("halves", None, 1)]
    for topic, key, said, headers, partition in written.records:
        signature = (dict(headers)[h.SIGNATURE] or b"").decode()
        assert said == value
        assert keyring.problem_of_job(Signable(topic, key, sha256_of(said), headers, partition), signature) is None
        for other in (TickValue((), "own", 7), TickValue(("away",), "own", 8), TickValue(("away",), "other", 7)):
            assert keyring.problem_of_job(Signable(topic, key, sha256_of(other.to_bytes()), headers, partition), signature) is not None


def test_ticks_are_not_signed_without_a_key_of_the_job() -> None:
    for keyring in (None, Keyring({"g": [b"k" * 32]}, required=False, cluster="c")):
        written: Any = Written()
        write_ticks(written, {"halves": 1}, keyring=keyring)
        assert [name for name, _ in written.records[0][3]] == [h.TICK, h.PARTITIONS]
