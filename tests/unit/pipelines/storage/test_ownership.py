"""A checkpoint of another format is refused by name, whatever else its manifest holds."""

from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.manifest import Manifest
from halfway.pipelines.storage.ownership import Ownership, verify_ownership
from halfway.schemas.errors import OwnershipError

THIS = {"format_version": 1, "buckets": 64, "half_topic": "transactions.half", "op_topic": "transactions.op"}


def verify(content: dict[str, Any]) -> None:
    found = Ownership(Manifest.from_json(content), query_id=None, has_run=False, tables={})
    verify_ownership(load_settings(environ={}), found, adopt=False)


@pytest.mark.parametrize("more", [{"adopted": None}, {"adopted": ["0"]}, {"buckets": "many"}, {"bucket_keys": 3}], ids=str)
def test_a_manifest_of_another_format_is_refused_and_not_interpreted(more: dict[str, Any]) -> None:
    with pytest.raises(OwnershipError, match="the state's format = 2, not 1"):
        verify({**THIS, "format_version": 2, **more})


def test_an_early_manifest_has_numbered_buckets_and_adopted_nothing() -> None:
    manifest = Manifest.from_json(THIS)
    assert (manifest.bucket_keys, manifest.adopted) == (tuple(range(64)), {})
    verify(THIS)


def test_a_manifest_without_buckets_is_refused() -> None:
    with pytest.raises(OwnershipError, match=r"state\.buckets = None, not 64"):
        verify({name: value for name, value in THIS.items() if name != "buckets"})
