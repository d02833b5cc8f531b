"""Locates Halfway's files on this machine, and locks files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from halfway.schemas.errors import SetupError

ENV_HOME = "HALFWAY_HOME"
# Longer than a fetch of the JARs may take.
_LOCK_LIMIT_S = 2400.0
_LOCK_POLL_S = 0.05


def home() -> Path:
    """Return the folder for JARs, broker data and logs: `HALFWAY_HOME`, or `.halfway` in the current directory."""
    return Path(os.environ.get(ENV_HOME) or ".halfway").absolute()


@contextmanager
def locked(path: Path, limit_s: float = _LOCK_LIMIT_S) -> Iterator[None]:
    """Wait for the lock on a file, and hold it until the block ends. The kernel drops it when the process dies.

    Raises:
        SetupError: another process, which may be any that can read the file, has held it for longer than `limit_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = monotonic() + limit_s
        while not _lock_at_once(file):
            if monotonic() > deadline:
                raise SetupError(
                    f"another process has held the lock {path} for {limit_s:.0f} s: `lsof {path}` names it; end it, and try again"
                )
            sleep(_LOCK_POLL_S)
        yield


def _lock_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
