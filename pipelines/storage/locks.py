"""Locks on a local disk: a checkpoint has one job and one replay or erasure at most, a table one committer.

The kernel drops a lock when its process dies.

On HDFS and ADLS Spark notices a second writer of the checkpoint with its first batch. There and on GCS Delta refuses
the second of two commits to a table. S3 refuses neither (docs/cluster.md).
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from halfway.pipelines.storage.file_systems import local_path
from halfway.schemas.errors import CheckpointInUseError
from halfway.schemas.settings import StorageSettings

LOCK_FILE = ".halfway.lock"
_REPLAY_LOCK_FILE = ".replay.lock"
_LOCK_POLL_S = 0.01
# A compaction of a large table holds the lock for minutes. Any process that can open the file may hold it for ever.
_COMMIT_LIMIT_S = 1800.0

log = logging.getLogger(__name__)


def job_lock(storage: StorageSettings) -> AbstractContextManager[None]:
    """Hold the checkpoint against a second job until the block ends.

    Raises:
        CheckpointInUseError: another job holds it.
    """
    if folder := local_path(storage.checkpoint):
        folder.mkdir(parents=True, exist_ok=True)
    advice = "stop it first, or give this one a checkpoint, a warehouse and topics of its own"
    return _held(storage, LOCK_FILE, f"another job is running on the checkpoint {storage.checkpoint}: {advice}")


def replay_lock(storage: StorageSettings) -> AbstractContextManager[None]:
    """Hold the checkpoint against replays and erasures, but not against the job, until the block ends.

    Makes no checkpoint: the commands after it must find that there is none.

    Raises:
        CheckpointInUseError: a replay or an erasure holds it.
    """
    return _held(
        storage, _REPLAY_LOCK_FILE, f"a replay or an erasure is running on the checkpoint {storage.checkpoint}: wait until it is done"
    )


def is_in_use(storage: StorageSettings) -> bool | None:
    """Return True if a job on this machine is running on the checkpoint. Writes nothing.

    Returns:
        None if the checkpoint is not on a local disk, or this user may not read its lock.
    """
    folder = local_path(storage.checkpoint)
    if folder is None:
        return None
    try:
        with (folder / LOCK_FILE).open() as lock:
            return not _lock_at_once(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError:
        return None


@contextmanager
def commit_lock(warehouse: Path | None, table: str, limit_s: float = _COMMIT_LIMIT_S) -> Iterator[None]:
    """Wait until no other process commits to a table, and keep others from it until the block ends.

    A commit is a file that must not exist before. On a local disk Delta checks for it and then renames, so that of two
    commits at once the second would replace the first, rows and all. If a signal interrupts the block, the lock is kept
    until the process ends: the JVM may be in the middle of its commit.

    Args:
        warehouse: the folder on a local disk that holds the tables; None elsewhere, where nothing is locked.
        table: the table's name.
        limit_s: how long to wait.

    Raises:
        CheckpointInUseError: another process has held the lock for longer; the message names it.
    """
    if warehouse is None:
        yield
        return
    warehouse.mkdir(parents=True, exist_ok=True)
    with (warehouse / f".{table}.lock").open("a+") as lock:
        if not _lock_at_once(lock):
            log.warning("event=table_in_use table=%s process=%r effect=waiting", table, _holder(lock))
            deadline_s = monotonic() + limit_s
            while not _lock_at_once(lock):
                if monotonic() > deadline_s:
                    raise CheckpointInUseError(
                        f"process {_holder(lock)} has been committing to the table {table} in {warehouse} for more than {limit_s:.0f} s: "
                        "if it is frozen, end it (kill -9) and start again"
                    )
                sleep(_LOCK_POLL_S)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            os.dup(lock.fileno())
            raise


def _lock_at_once(lock: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(lock.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: IO[str]) -> str:
    """Return the id of the process that has locked a file."""
    lock.seek(0)
    return lock.read() or "unknown"


@contextmanager
def _held(storage: StorageSettings, name: str, refusal: str) -> Iterator[None]:
    folder = local_path(storage.checkpoint)
    if folder is None or not folder.is_dir():
        yield
        return
    with (folder / name).open("a") as lock:
        if not _locked(lock):
            raise CheckpointInUseError(refusal)
        yield


def _locked(lock: IO[str]) -> bool:
    """Take the lock; try twice, because `is_in_use` holds it for a moment."""
    if _lock_at_once(lock):
        return True
    sleep(0.2)
    return _lock_at_once(lock)
