"""A start whose folders cannot be written is refused before Kafka is asked and Spark starts."""

from pathlib import Path
from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.schemas.errors import SetupError


@pytest.mark.parametrize("name", ["warehouse", "checkpoint"])
@pytest.mark.parametrize("place", ["{}/file", "{}/file/below", "/proc/nope"])
def test_a_folder_that_cannot_be_written_is_named_with_its_setting(name: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = {"storage.warehouse": f"{tmp_path}/warehouse", "storage.checkpoint": f"{tmp_path}/checkpoint"}
    wrong = {f"storage.{name}": place.format(tmp_path)}
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1", **folders, **wrong})
    no_spark: Any = None
    with pytest.raises(SetupError, match=rf"storage\.{name} .* cannot be written \(.*set storage\.{name} to another folder"):
        ResolveJob(settings).run(no_spark)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
