"""One benchmark, once, in a process of its own: `python -m benchmarks.one NAME SCALE FILE`."""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.bench import BENCHMARKS, PARTS
from benchmarks.rig import Rig


def main() -> None:
    """Run it, and write its figures."""
    name, scale, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder), float(scale)) as rig:
        Path(out).write_text(json.dumps((BENCHMARKS | PARTS)[name](rig)))


if __name__ == "__main__":
    main()
