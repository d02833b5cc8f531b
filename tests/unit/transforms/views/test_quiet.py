"""What `status` and `pending` say of a running job that ends no batch."""

import pytest

from halfway.conf.loader import load_settings
from halfway.schemas.batch_status import BatchStatus
from halfway.transforms.views.quiet import quiet_text


@pytest.mark.parametrize(
    ("changed", "quiet_ms", "is_told"),
    [
        ({}, 11_499, False),
        ({}, 11_500, True),
        ({"trigger.interval": "1m"}, 40_000, False),
        ({"resolution.tick_interval": "30s"}, 40_000, False),
    ],
)
def test_a_job_is_quiet_when_its_next_batch_is_late(changed: dict[str, object], quiet_ms: int, *, is_told: bool) -> None:
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1", **changed})
    told = quiet_text(BatchStatus(batch_id=0, seconds=1.0, written_at_ms=1_000), settings, 1_000 + quiet_ms)
    assert told.startswith("its last batch ended ") == is_told


def test_a_job_without_a_batch_is_starting() -> None:
    settings = load_settings(environ={}, overrides={})
    assert "has ended no batch yet" in quiet_text(None, settings, 1_000)
