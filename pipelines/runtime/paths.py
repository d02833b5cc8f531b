"""Where Halfway keeps what it fetches and makes on this machine."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENV_HOME = "HALFWAY_HOME"


def home() -> Path:
    """Return the folder for JARs, broker data and logs: `HALFWAY_HOME`, or else `.halfway` below the current directory."""
    return Path(os.environ.get(ENV_HOME) or ".halfway").absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, waiting for whoever has it; the kernel lets go of it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
