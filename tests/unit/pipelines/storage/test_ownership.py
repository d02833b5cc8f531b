"""A checkpoint of another format is refused by name, whatever else its manifest holds."""

from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage import manifest as manifest_module
from halfway.pipelines.storage.delta_tables import Owner
from halfway.pipelines.storage.manifest import Manifest, read_manifest
from halfway.pipelines.storage.ownership import Ownership, verify_ownership
from halfway.schemas.errors import OwnershipError
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.schemas.tables import Table

THIS = {
    "format_version": FORMAT_VERSION,
    "query_id": "mine",
    "epoch": 0,
    "buckets": 64,
    "half_topic": "transactions.half",
    "op_topic": "transactions.op",
    "halves_since_ms": 0,
    "taken_at": {"half": {"0": 7}},
    "remembered_ms": 60_000,
    "bucket_keys": list(range(64)),
    "bucket_secret": "00" * 16,
    "topic_ids": {"transactions.half": "h1", "transactions.op": "o1"},
    "starting_offsets": "earliest",
}


MINE, OTHERS, ANEW = Owner("mine", 2), Owner("another", 1), Owner("anew", 3)


def ownership(
    *owners: Owner | None, query_id: str | None = "mine", last_batch_id: int | None = None, has_manifest: bool = True
) -> Ownership:
    """Return what a checkpoint and tables with these owners say; a table whose owner is None does not exist."""
    tables = {table: owner for table, owner in zip(Table, owners, strict=True) if owner is not None}
    return Ownership(Manifest.from_json(THIS) if has_manifest else None, query_id, last_batch_id, tables)


EPOCHS = {
    "nothing yet": (ownership(None, None, None, query_id=None), 0),
    "tables of nobody": (ownership(Owner(None), Owner(None), Owner(None), query_id=None), 0),
    "copies of tables": (ownership(Owner("not named", 3), Owner("not named", 1), Owner(None), query_id=None), 4),
    "tables of another": (ownership(OTHERS, OTHERS, OTHERS, query_id=None), 2),
    "a start that was killed after the first table": (ownership(MINE, OTHERS, OTHERS), 2),
    "a start that was killed after the last table": (ownership(MINE, MINE, MINE, has_manifest=False), 2),
    "two starts that were killed": (ownership(Owner("third", 3), MINE, OTHERS, query_id="fourth"), 4),
}


@pytest.mark.parametrize("case", EPOCHS)
def test_epoch(case: str) -> None:
    found, epoch = EPOCHS[case]
    assert found.next_epoch(found.query_id or "new") == epoch


def test_a_first_start_is_done_again_until_it_has_come_to_its_end() -> None:
    assert ownership(MINE, MINE, MINE).complete_manifest is not None
    for unfinished in (ownership(MINE, MINE, OTHERS), ownership(MINE, None, MINE), ownership(MINE, MINE, MINE, has_manifest=False)):
        assert unfinished.complete_manifest is None
    again = ownership(ANEW, ANEW, ANEW, query_id="anew")  # Its manifest is of a start before it lost its tables.
    assert again.complete_manifest is None


def test_what_a_start_is_refused_for() -> None:
    settings = load_settings(environ={})
    for refused, adopt, what in [
        (ownership(MINE, OTHERS, OTHERS), False, "belongs to another checkpoint"),
        (ownership(OTHERS, OTHERS, OTHERS, last_batch_id=3), True, "--adopt needs a new checkpoint"),
        (ownership(MINE, MINE, None, last_batch_id=3), True, "quarantine` is missing"),
        (ownership(MINE, MINE, Owner(None), last_batch_id=3), True, "quarantine` has no owner"),
        (ownership(MINE, MINE, MINE, last_batch_id=3, has_manifest=False), False, "its file halfway.json is missing"),
        (ownership(ANEW, ANEW, ANEW, query_id="anew", last_batch_id=3), False, "its files halfway.json and metadata are of different"),
        (ownership(MINE, MINE, MINE, query_id=None, last_batch_id=3), False, "its file metadata is missing: put its own back"),
    ]:
        with pytest.raises(OwnershipError, match=what):
            verify_ownership(settings, refused, {}, adopt=adopt)
    for accepted, adopt in [
        (ownership(MINE, OTHERS, OTHERS), True),
        (ownership(MINE, MINE, OTHERS, has_manifest=False), True),
        (ownership(MINE, MINE, MINE, has_manifest=False), False),
        (ownership(MINE, MINE, MINE, last_batch_id=3), True),
    ]:
        verify_ownership(settings, accepted, {}, adopt=adopt)


def verify(content: dict[str, Any], **topic_ids: str) -> None:
    found = Ownership(Manifest.from_json(content), query_id=None, last_batch_id=None, tables={})
    ids = {f"transactions.{name}": topic_id for name, topic_id in topic_ids.items()}
    verify_ownership(load_settings(environ={}), found, ids, adopt=False)


def test_another_topic_of_the_same_name_is_refused() -> None:
    verify(THIS, half="h1", op="o1")
    verify({**THIS, "topic_ids": {}}, half="h2", op="o2")
    for ids in ({"half": "h2", "op": "o1"}, {"half": "h1", "op": "o2"}):
        with pytest.raises(OwnershipError, match=r"is not the one that the checkpoint .* has read: .* --adopt"):
            verify(THIS, **ids)


@pytest.mark.parametrize("more", [{"taken_at": None}, {"taken_at": ["0"]}, {"buckets": "many"}, {"bucket_keys": 3}], ids=str)
def test_a_manifest_of_another_format_is_refused_and_not_interpreted(more: dict[str, Any]) -> None:
    refusal = rf"format 1, and .* version of Halfway has {FORMAT_VERSION}: go on with the version that wrote it"
    with pytest.raises(OwnershipError, match=refusal) as caught:
        verify({**THIS, "format_version": 1, **more})
    assert "or start a new checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_manifest_of_this_format_is_read() -> None:
    manifest = Manifest.from_json(THIS)
    assert (manifest.bucket_keys, manifest.taken_at) == (tuple(range(64)), {"half": {0: 7}})
    verify(THIS)


DAMAGES: list[dict[str, Any]] = [
    {"bucket_keys": ["0); DROP TABLE messages; --"] * 64},
    {"bucket_keys": [0] * 64},
    {"bucket_keys": [1, 2]},
    {"bucket_keys": 3},
    {"buckets": None},
    {"buckets": "many"},
    {"epoch": "0 OR TRUE"},
    {"taken_at": {"half": {"zero": 7}}},
    {"taken_at": ["0"]},
    {"half_topic": 7},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_manifest_is_refused_in_one_line(damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "read_json", lambda *_: {**THIS, **damage})
    storage, spark = load_settings(environ={}).storage, cast(SparkSession, None)
    with pytest.raises(OwnershipError, match=r"halfway\.json is damaged: restore it, or start a new checkpoint"):
        read_manifest(spark, storage)
