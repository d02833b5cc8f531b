"""Locks on a local disk: a process that holds one is named, and a look at one writes nothing."""

import errno
import os
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.locks import LOCK_FILE, commit_lock, is_in_use, job_lock
from halfway.schemas.errors import CheckpointInUseError


def test_a_commit_lock_that_stays_held_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    with commit_lock(tmp_path, "messages"):
        with commit_lock(tmp_path, "discarded", limit_s=0):  # another table
            pass
        refused = pytest.raises(CheckpointInUseError, match=rf"process {os.getpid()} has been committing .* messages .* end it")
        with refused, commit_lock(tmp_path, "messages", limit_s=0):
            pass
    with commit_lock(tmp_path, "messages", limit_s=0):
        pass


def test_a_commit_lock_that_ctrl_c_interrupts_is_kept_until_the_process_ends(tmp_path: Path) -> None:
    """The JVM may be in the middle of the commit, and a job that commits meanwhile might lose its rows."""
    with pytest.raises(KeyboardInterrupt), commit_lock(tmp_path, "messages"):
        raise KeyboardInterrupt
    with pytest.raises(CheckpointInUseError), commit_lock(tmp_path, "messages", limit_s=0):
        pass


def test_a_look_for_a_job_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = load_settings(environ={}, overrides={"storage.checkpoint": str(tmp_path / "c")}).storage
    assert is_in_use(storage) is False
    assert not (tmp_path / "c").exists()
    with job_lock(storage):
        assert is_in_use(storage) is True
    (tmp_path / "c" / LOCK_FILE).chmod(0o400)
    assert is_in_use(storage) is False
    elsewhere = load_settings(environ={}, overrides={"storage.checkpoint": "s3a://bucket/c"}).storage
    assert is_in_use(elsewhere) is None

    def refuse(path: Path, mode: str = "r") -> None:
        assert mode == "r"
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert is_in_use(storage) is None
