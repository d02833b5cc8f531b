"""Benchmarks of a drain on one core, all cores and two executors, with the share of each step."""

import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

from benchmarks.backlog import drain
from benchmarks.rig import Figures, Rig, in_own_process
from tests.support.standalone_cluster import StandaloneCluster

_AMOUNT = 0.7
"""The share of the amount of `drain`. It leaves two warm batches. One core takes twice as long as two."""
_STEPS = {"start": "source", "run": "source", "call": "operator"}
"""The step by the first word of a stage's name. Stages with other names fetch bodies and write."""


def stages(rig: Rig) -> Figures:
    """Measure a drain, and the share of each step in the time of its tasks, without the driver and idle cores."""
    rig.ui = True
    figures = drain(rig)
    rates = {"tx_per_s": figures["tx_per_s"], "right": figures["right"]}
    spent_s = {"source": 0.0, "operator": 0.0, "fetch_and_write": 0.0}
    for stage in _stages(rig):
        spent_s[_step(stage)] += stage["executorRunTime"] / 1000
    if not all(spent_s.values()):
        raise RuntimeError(f"a step has no stage. Spark may have changed the names of stages: {spent_s}")
    all_s = sum(spent_s.values())
    return {**rates, "share": {step: round(seconds / all_s, 2) for step, seconds in spent_s.items()}}


def _stages(rig: Rig) -> list[dict[str, Any]]:
    context = rig.spark.sparkContext
    address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages?status=complete"
    with urllib.request.urlopen(address, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def _step(stage: Mapping[str, Any]) -> str:
    """Return the step of a stage.

    Spark names a stage after its caller. The source's caller is the start of the query, and in later batches the
    thread's `run`. The operator's caller is the callback for the count.
    """
    return _STEPS.get(stage["name"].partition(" ")[0], "fetch_and_write")


def scale(rig: Rig) -> Figures:
    """Measure a drain on one core, on all cores, and on two executors of one core each on a standalone cluster."""
    cores = sorted(os.sched_getaffinity(0))
    figures = {"one_core": _stages_on(rig, "local[1]", cores[:1]), "all_cores": _stages_on(rig, "local[*]", cores)}
    folder = rig.folder / "cluster"
    folder.mkdir()
    with StandaloneCluster(folder) as cluster:
        figures["two_executors"] = _stages_on(rig, cluster.master, cores)
    return figures


def _stages_on(rig: Rig, master: str, cores: list[int]) -> Figures:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return in_own_process(stages.__name__, rig.scale * _AMOUNT, {"SPARK_MASTER": master, "SPARK_EXECUTOR_MEMORY": "2g"})
    finally:
        os.sched_setaffinity(0, before)
