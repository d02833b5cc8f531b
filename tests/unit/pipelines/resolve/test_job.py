"""Starts that are refused before anything is connected."""

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.schemas.errors import OwnershipError


def test_adopting_from_the_latest_record_is_refused() -> None:
    settings = load_settings(environ={}, overrides={"kafka.starting_offsets": "latest"})
    with pytest.raises(OwnershipError, match=r"^--adopt reads .* from the earliest record, .* set kafka.starting_offsets to earliest$"):
        ResolveJob(settings, adopt=True).run(lambda: pytest.fail("Spark was started"))
