"""A checkpoint of another format is refused by name, whatever else its manifest holds."""

from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.manifest import Manifest
from halfway.pipelines.storage.ownership import Ownership, verify_ownership
from halfway.schemas.errors import OwnershipError
from halfway.schemas.state_format import FORMAT_VERSION

THIS = {
    "format_version": FORMAT_VERSION,
    "buckets": 64,
    "half_topic": "transactions.half",
    "op_topic": "transactions.op",
    "adopted": {"0": 7},
    "bucket_keys": [3, 1, 2],
}


def verify(content: dict[str, Any]) -> None:
    found = Ownership(Manifest.from_json(content), query_id=None, has_run=False, tables={})
    verify_ownership(load_settings(environ={}), found, adopt=False)


@pytest.mark.parametrize("more", [{"adopted": None}, {"adopted": ["0"]}, {"buckets": "many"}, {"bucket_keys": 3}], ids=str)
def test_a_manifest_of_another_format_is_refused_and_not_interpreted(more: dict[str, Any]) -> None:
    with pytest.raises(
        OwnershipError, match=rf"format 1, and .* version of Halfway has {FORMAT_VERSION}: go on with the version that wrote it"
    ) as caught:
        verify({**THIS, "format_version": 1, **more})
    assert "or start a new checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_manifest_of_this_format_is_read() -> None:
    manifest = Manifest.from_json(THIS)
    assert (manifest.bucket_keys, manifest.adopted) == ((3, 1, 2), {0: 7})
    verify(THIS)


def test_a_manifest_without_buckets_is_refused() -> None:
    with pytest.raises(OwnershipError, match=r"state\.buckets = None, not 64"):
        verify({name: value for name, value in THIS.items() if name != "buckets"})
