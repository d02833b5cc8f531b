"""Locates Halfway's files on this machine, and locks files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENV_HOME = "HALFWAY_HOME"


def home() -> Path:
    """Return the folder for JARs, broker data and logs: `HALFWAY_HOME`, or `.halfway` in the current directory."""
    return Path(os.environ.get(ENV_HOME) or ".halfway").absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on a file, and hold it until the block ends. The kernel drops it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
