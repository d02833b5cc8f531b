"""Locates Halfway's files on this machine, says who else may change them, and locks files."""

import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from halfway.schemas.errors import SetupError

ENV_HOME = "HALFWAY_HOME"
# Longer than a fetch of the JARs may take.
_LOCK_LIMIT_S = 2400.0
_LOCK_POLL_S = 0.05
_ROOT = 0
_OTHERS_MAY_WRITE = 0o022


def home() -> Path:
    """Return the folder for JARs, broker data and logs: `HALFWAY_HOME`, or `.halfway` in the current directory.

    Raises:
        SetupError: it is something else than a folder.
    """
    found = Path(os.environ.get(ENV_HOME) or ".halfway").absolute()
    if found.exists() and not found.is_dir():
        raise SetupError(f"{found} is not a folder: set {ENV_HOME} to one, where the JARs and the local broker are")
    return found


def not_permitted(error: PermissionError) -> str:
    """Return what to do about a file that this user may not use, such as one of the job's user.

    Raises:
        PermissionError: the same, if it is of no file, but of a port.
    """
    if error.filename is None:
        raise error
    return f"{error.filename}: {error.strerror}: run this as its user, or give this user the right to it"


def allow_no_other_to_write() -> None:
    """Let this process make files and folders that only their user may change, whatever the umask is."""
    os.umask(os.umask(_OTHERS_MAY_WRITE) | _OTHERS_MAY_WRITE)


def changeable_by_others(file: Path) -> str | None:
    """Return which of a file and its folders, up to `home()`, another user may change, and what to do; None if none.

    Where one of them is a link, the file or folder that it leads to counts, and the folder which that is in.
    """
    folders = [folder for folder in file.parents if folder.is_relative_to(home())] or [file.parent]
    for path in (*reversed(folders), file):
        real = path.resolve()
        for each in (real.parent, real) if path.is_symlink() else (real,):
            if found := _changeable_by_others(each):
                return found
    return None


def _changeable_by_others(path: Path) -> str | None:
    found = path.stat()
    if found.st_uid not in (_ROOT, os.geteuid()):
        owner = str(found.st_uid)
        with suppress(KeyError):
            owner = pwd.getpwuid(found.st_uid).pw_name
        return f"{path} belongs to {owner}: remove it, or set {ENV_HOME} to a folder of your own"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return None  # as /tmp: only its owner may rename or remove what is in it
    if found.st_mode & stat.S_IWOTH:
        who = "everybody"
    elif found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        who = f"the group {found.st_gid}"
        with suppress(KeyError):
            who = f"the group {grp.getgrgid(found.st_gid).gr_name}"
    else:
        return None
    return f"{path} may be changed by {who}: `chmod -R go-w {path}`, or set {ENV_HOME} to a folder of your own"


def _is_private(group: int) -> bool:
    """Return True if a group is this user's alone: their primary group, of their name. Their umask may be 002."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


@contextmanager
def locked(path: Path, limit_s: float = _LOCK_LIMIT_S) -> Iterator[None]:
    """Wait for the lock on a file, and hold it until the block ends. The kernel drops it when the process dies.

    Raises:
        SetupError: another process, which may be any that can read the file, has held it for longer than `limit_s`; or
            the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}: run it in a folder that you can write, or set {ENV_HOME}") from None
    with opened as file:
        deadline_s = monotonic() + limit_s
        while not _lock_at_once(file):
            if monotonic() > deadline_s:
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
