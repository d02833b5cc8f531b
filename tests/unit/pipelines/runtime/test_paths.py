"""Locks on files end in an error after a time: any process that can read the file can hold one."""

import fcntl
from pathlib import Path

import pytest

from halfway.pipelines.runtime.paths import locked
from halfway.schemas.errors import SetupError


def test_a_lock_that_a_reader_holds_is_refused_after_a_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / ".lock"
    with locked(path):
        pass
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(SetupError, match=r"another process has held the lock .* names it; end it"), locked(path, limit_s=0):
            pass
    with locked(path, limit_s=0):
        pass


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path, told = tmp_path / "file" / "broker" / ".lock", r"cannot write .*: Not a directory: .* or set HALFWAY_HOME$"
    with pytest.raises(SetupError, match=told), locked(path):
        pass
