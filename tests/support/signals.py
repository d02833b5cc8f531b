"""Lets a command that starts other processes stop them when it is told to end."""

import signal
import sys


def end_at_sigterm() -> None:
    """Raise SystemExit at SIGTERM, so that `with` and `finally` stop what was started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
