"""Measures the memory of this process and its descendants from /proc (Linux)."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_PROCESSES = Path("/proc")


class PeakMemory:
    """Samples memory twice a second inside a `with` block.

    `peak_mib` stays None on systems without /proc/*/smaps_rollup.
    """

    def __init__(self, without: int | None = None) -> None:
        """Exclude the process `without`, such as the broker, and its descendants."""
        self._without, self._stopped = without, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
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
    """Return resident memory in MiB.

    Args:
        without: a process to exclude with its descendants.
        root: the process to start from; this process by default.

    Returns:
        Memory of `driver` (the root), of `jvm` and `workers` (its descendants), and of `all`. None if the system does
        not report it.
    """
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
        # Pss counts a shared page in proportion. Python workers are forks that share most of their pages.
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
