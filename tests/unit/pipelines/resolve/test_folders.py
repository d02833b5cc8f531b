"""A start whose folders cannot be written is refused before Kafka is asked and Spark starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.operate.doctor.finding import Health
from halfway.pipelines.operate.doctor.storage_checks import storage_findings
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


NOBODY = 65_534


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Give up root's right to look into any folder."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_folder_that_this_user_may_not_even_look_into_is_named_too(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    folders = {f"storage.{name}": f"{closed}/{name}" for name in ("warehouse", "checkpoint")}
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1", **folders})
    no_spark: Any = None
    with an_ordinary_user():
        with pytest.raises(SetupError, match=r"storage\.\w+ .* cannot be written \(Permission denied\)"):
            ResolveJob(settings).run(no_spark)
        told = {(each.check, each.health): each.text for each in storage_findings(settings)}
    for name in ("warehouse", "checkpoint"):
        assert f"storage.{name} {closed}/{name} cannot be written" in told[name, Health.PROBLEM]
    assert f"{closed}/" in told["ownership", Health.PROBLEM]
