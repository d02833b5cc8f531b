"""Runs the command `halfway`, also for `python -m halfway`. Services do not install what it needs."""

import io
import os
import signal
import sys


def main() -> None:
    """Run the command, or say in one line what to install for it."""
    # Before anything slow is imported: a Ctrl-C ends the process at once, as `kill` does, and not by an exception in
    # the middle of an import. Commands that have something to end set handlers of their own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _ignore_current_directory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        from halfway.pipelines.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        from halfway.schemas.errors import MissingPackageError  # noqa: PLC0415

        sys.exit(f"error: {MissingPackageError('the command', error.name, 'job')}")
    app(prog_name="halfway")


def _ignore_current_directory() -> None:
    """Import nothing from the current directory, here and in the processes that this one starts.

    `python -m` puts it first on the path, so that a file `delta.py` or `yaml.py` in it would hide a package.
    """
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109  # `pathlib` is not imported yet
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    main()
