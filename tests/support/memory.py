"""How much memory this process and all that it has started take, as the system counts it."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_PROCESSES = Path("/proc")


class Footprint:
    """Looks twice a second while the block runs; `peak_mib` is None on systems that do not tell."""

    def __init__(self, without: int | None = None) -> None:
        """`without` is a process whose memory is none of the job's, such as the broker."""
        self._without, self._stopped = without, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="footprint", daemon=True)
        self.peak_mib: dict[str, int] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            found = memory_mib(self._without)
            if found is not None:
                known = self.peak_mib or {}
                self.peak_mib = {name: max(known.get(name, 0), mib) for name, mib in (known | found).items()}


def memory_mib(without: int | None = None, root: int | None = None) -> dict[str, int] | None:
    """Resident memory in MiB of this process (or of `root`), the JVMs and the other processes below it, and of all together."""
    if not (_PROCESSES / "self" / "smaps_rollup").exists():
        return None
    parents: dict[int, int] = {}
    for folder in _PROCESSES.glob("[0-9]*"):
        status = _fields(folder / "status")
        if "PPid" in status:
            parents[int(folder.name)] = int(status["PPid"])
    own = root or int(_fields(_PROCESSES / "self" / "status")["Pid"])
    sizes = {"driver": 0, "jvm": 0, "workers": 0}
    for number in parents:
        if without in (number, *_ancestors(number, parents)) or own not in (number, *_ancestors(number, parents)):
            continue
        folder = _PROCESSES / str(number)
        # Proportional: workers are forks and share most of their pages.
        kib = int(_fields(folder / "smaps_rollup").get("Pss", "0 kB").split()[0])
        is_java = _fields(folder / "status").get("Name") == "java"
        sizes["driver" if number == own else "jvm" if is_java else "workers"] += kib // 1024
    return {**sizes, "all": sum(sizes.values())}


def _ancestors(number: int, parents: dict[int, int]) -> list[int]:
    found = []
    while number in parents:
        number = parents[number]
        found.append(number)
    return found


def _fields(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
