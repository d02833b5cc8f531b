"""Locks on a local disk: a process that holds one is named."""

import os
from pathlib import Path

import pytest

from halfway.pipelines.storage.locks import commit_lock
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
