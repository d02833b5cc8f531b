"""Runs one benchmark once: `python -m benchmarks.run_one NAME SCALE FILE`."""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.bench import BENCHMARKS, PARTS
from benchmarks.rig import Rig
from tests.support.signals import end_at_sigterm


def main() -> None:
    """Run the benchmark, and write its figures to the file."""
    end_at_sigterm()
    name, scale, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder), float(scale)) as rig:
        Path(out).write_text(json.dumps((BENCHMARKS | PARTS)[name](rig)))


if __name__ == "__main__":
    main()
