"""`python -m tests.chaos` makes faults and counts what they do (docs/reliability.md).

The exit code is 1 if anything is lost, twice or wrong.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.chaos.runner import FAULTS, Part, draw, run_faults, say, table_of, write_json
from tests.support.signals import end_at_sigterm

_INSIDE = "HALFWAY_CHAOS_INSIDE"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Make faults, and count what is lost, twice or wrong.")
    parser.add_argument("--faults", type=int, default=100, help="number of faults (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same faults at the same moments (default 1)")
    parser.add_argument("--only", default="", help="make these faults in this order; separate their names by semicolons")
    parser.add_argument(
        "--brokers", default="1", help="worlds side by side, by their number of brokers: 1, 3, or 1,3 for two worlds (default 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="file for the figures (default build/chaos.json)")
    parser.add_argument("--keep", action="store_true", help="keep logs and tables")
    options = parser.parse_args()
    enter_namespace()
    # The first process of a namespace ignores a signal without a handler. The handler ends what this process started.
    end_at_sigterm()
    brokers = [int(size) if size in map(str, FAULTS) else parser.error(f"--brokers {size}: 1 or 3") for size in options.brokers.split(",")]
    chosen = [name.strip() for name in options.only.split(";") if name.strip()]
    parts = chosen_parts(chosen, brokers, parser) if chosen else draw(options.faults, brokers, random.Random(options.seed))
    folder = Path(tempfile.mkdtemp(prefix="halfway-chaos-"))
    for part in parts:
        say(f"seed {options.seed}: {len(part.faults)} faults in a world of {part.brokers} broker{'s'[: part.brokers - 1]}, in {folder}")
    run = run_faults(parts, options.seed, folder)
    Console(width=120).print(table_of(run))
    write_json(run, options.out)
    if run.ok and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if run.ok else 1


def chosen_parts(names: Sequence[str], brokers: Sequence[int], parser: argparse.ArgumentParser) -> list[Part]:
    """Return the faults with these names for a single world."""
    if len(brokers) > 1:
        parser.error("--only makes its faults in one world: --brokers 1 or --brokers 3")
    by_name = {fault.name: fault for fault in FAULTS[brokers[0]]}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        parser.error(f"no fault of this world is called {', '.join(unknown)}; there are: {'; '.join(by_name)}")
    return [Part(brokers[0], [by_name[name] for name in names])]


def enter_namespace() -> None:
    """Start this command again in its own namespaces, if the machine allows that.

    There it can mount small disks and fill them, and no process outlives it.
    """
    if os.environ.get(_INSIDE) or shutil.which("unshare") is None:
        return
    unshare = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(unshare[0], [*unshare, sys.executable, "-m", "tests.chaos", *sys.argv[1:]], {**os.environ, _INSIDE: "1"})


if __name__ == "__main__":
    sys.exit(main())
