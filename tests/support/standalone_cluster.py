"""A standalone Spark cluster on this machine, started from pip's PySpark: a master and workers, each one process."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from halfway.pipelines.local.processes import free_port
from halfway.pipelines.runtime.java import find_java
from tests.support.waiting import until

HOST = "127.0.0.1"
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


def children(pid: int) -> list[int]:
    """Return the descendants of a process that are alive."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    direct = [child for child, parent in parents.items() if parent == pid]
    return [found for child in direct for found in (child, *children(child))]


class StandaloneCluster:
    """A master and workers with one core each. `with` starts them, and stops them and all their descendants."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._web_port = free_port()
        self.master = f"spark://{HOST}:{free_port()}"
        self._count = workers
        self._master: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        port = self.master.rpartition(":")[2]
        self._master = self._start("master", ["--host", HOST, "--port", port, "--webui-port", str(self._web_port)])
        try:
            until(lambda: self._state() is not None, "the master", 60)
            for number in range(self._count):
                options = ["--host", HOST, "--cores", "1", "--memory", "3g", "--webui-port", str(free_port())]
                options += ["--work-dir", str(self._folder / f"work-{number}"), self.master]
                self.workers.append(self._start("worker", options))
            until(lambda: (self._state() or {}).get("aliveworkers") == self._count, "the workers", 60)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def kill(self, worker: int) -> list[int]:
        """Kill a worker, its executor and the executor's Python processes by SIGKILL; return their process ids."""
        process = self.workers[worker]
        doomed = [process.pid, *children(process.pid)]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        process.wait(30)
        return doomed

    def _start(self, what: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
        java_home = find_java().resolve().parent.parent
        # With SPARK_LOCAL_IP the web interfaces, too, listen on this machine alone.
        environ = {**os.environ, "SPARK_LOCAL_IP": HOST, "JAVA_HOME": str(java_home), "SPARK_DAEMON_MEMORY": "256m"}
        for name in ("PYTHONPATH", "SPARK_HOME"):
            environ.pop(name, None)
        name = f"org.apache.spark.deploy.{what}.{what.capitalize()}"
        with (self._folder / f"{what}-{len(self.workers)}.log").open("wb") as log:
            # In its own folder, because Python would import modules that it finds in the repository.
            return subprocess.Popen(
                [str(_SPARK_CLASS), name, *options], cwd=self._folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _state(self) -> dict[str, object] | None:
        """Return the master's state; None while it does not answer, or answers with an empty page, as it does first."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._web_port}/json/", timeout=5) as answer:
                state: dict[str, object] = json.load(answer)
        except (OSError, json.JSONDecodeError):
            return None
        return state

    def _stop(self) -> None:
        for process in (*self.workers, self._master):
            if process is None or process.poll() is not None:
                continue
            below = children(process.pid)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            for pid in below:
                until(lambda pid=pid: not _lives(pid), f"the end of process {pid}", 30)  # type: ignore[misc]


def _lives(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
