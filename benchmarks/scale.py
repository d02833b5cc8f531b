"""Benchmarks of a drain on more or less of a machine, and which of its steps take the time."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.backlog import drain
from benchmarks.rig import ROOT, Figures, Rig
from tests.cluster.standalone import StandaloneCluster

_AMOUNT = 0.4
"""Of the amount of `drain`: one core takes twice as long."""


def stages(rig: Rig) -> Figures:
    """A drain, and the shares of its tasks' time by step; the rest of the cores' time is the driver's, or nobody's."""
    rig.ui = True
    figures = drain(rig)
    told = {"tx_per_s": figures["tx_per_s"], "right": figures["right"]}
    spent_s = {"source": 0.0, "operator": 0.0, "fetch_and_write": 0.0}
    for stage in _stages(rig):
        spent_s[_step(stage)] += stage["executorRunTime"] / 1000
    all_s = sum(spent_s.values())
    return {**told, "share": {step: round(seconds / all_s, 2) for step, seconds in spent_s.items()}}


def _stages(rig: Rig) -> list[dict[str, Any]]:
    context = rig.spark.sparkContext
    address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages?status=complete"
    with urllib.request.urlopen(address, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def _step(stage: Mapping[str, Any]) -> str:
    """Which step a stage is part of: the batch's first action, which counts, reads and resolves; all later ones fetch and write."""
    if not stage["name"].startswith("collect"):
        return "fetch_and_write"
    return "operator" if stage["shuffleReadRecords"] else "source"


def scale(rig: Rig) -> Figures:
    """The same drain on one core, on all cores, and on two executors of a core each on a standalone cluster."""
    cores = sorted(os.sched_getaffinity(0))
    figures = {
        "one_core": _in_own_process(rig, "one", "local[1]", cores[:1]),
        "all_cores": _in_own_process(rig, "all", "local[*]", cores),
    }
    folder = rig.folder / "cluster"
    folder.mkdir()
    with StandaloneCluster(folder) as cluster:
        figures["two_executors"] = _in_own_process(rig, "two", cluster.master, cores)
    return figures


def _in_own_process(rig: Rig, name: str, master: str, cores: list[int]) -> Figures:
    out = rig.folder / f"{name}.json"
    environ = {**os.environ, "SPARK_MASTER": master, "SPARK_EXECUTOR_MEMORY": "2g"}
    command = [sys.executable, "-m", "benchmarks.one", "stages", str(rig.scale * _AMOUNT), str(out)]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environ, check=True)
    finally:
        os.sched_setaffinity(0, before)
    figures: Figures = json.loads(Path(out).read_text())
    return figures
