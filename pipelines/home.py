"""Where Halfway keeps what it fetches and makes on this machine, and where its own configuration files lie."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import SetupError

ENV_HOME = "HALFWAY_HOME"
_PACKAGE = Path(__file__).resolve().parent


def home() -> Path:
    """Return the folder for JARs, broker data and logs: `HALFWAY_HOME`, or else `.halfway` below the current directory."""
    return Path(os.environ.get(ENV_HOME) or ".halfway").absolute()


def conf_file(name: str) -> Path:
    """Return `conf/<name>`: of the current directory, the source tree, or the installed wheel, whichever has it first.

    Raises:
        SetupError: if none of them has it.
    """
    places = (Path.cwd() / "conf", _PACKAGE.parent / "conf", _PACKAGE / "conf")
    for place in places:
        if (place / name).is_file():
            return place / name
    raise SetupError(f"conf/{name} is missing: run in Halfway's source tree, or install its wheel again")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, waiting for whoever has it; the kernel lets go of it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
