"""Records that are read back come in portions that fit into memory, whatever is large in them."""

import pytest

from halfway.pipelines.resolve import read_back
from halfway.schemas.events import StoredRecord

LARGE = b"x" * 600
RECORDS = {
    "body": StoredRecord(b"id", LARGE, []),
    "key": StoredRecord(LARGE, None, []),
    "header": StoredRecord(b"id", b"", [("own", None), ("own", LARGE)]),
    "name": StoredRecord(None, None, [("n" * 600, b"")]),
    "number of headers": StoredRecord(None, None, [("", None)] * 6),
}


@pytest.mark.parametrize("large", RECORDS)
def test_a_portion_ends_when_its_records_are_large(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "FLUSH_BYTES", 1_000)
    small = StoredRecord(None, None, None)
    sent = [RECORDS[large], None, small, RECORDS[large], small]
    assert list(read_back._in_portions(sent)) == [sent[:4], sent[4:]]
