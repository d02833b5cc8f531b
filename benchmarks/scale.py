"""Benchmarks of a drain on one core, all cores and several executors: the share of each step, and of what is serial."""

import json
import os
import re
import statistics
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from benchmarks.backlog import WARM_UP, drain
from benchmarks.rig import Figures, Rig, in_own_process
from tests.support.standalone_cluster import StandaloneCluster

_AMOUNT = 0.7
"""The share of the amount of `drain`. It leaves two warm batches. One core takes twice as long as two."""
_STEPS = {"start": "source", "run": "source", "call": "operator"}
"""The step by the first word of a stage's name. Stages with other names fetch bodies and write."""


def stages(rig: Rig) -> Figures:
    """Measure a drain, the share of each step in the time of its tasks, and the time in which no task runs.

    The line that follows from this time, `tx_per_s_at`, is Amdahl's law for batches of this size: what no task does
    takes as long on any number of cores, and the rest of the job's core-seconds is divided among them. A cluster has no
    such line: its executors are no processes of the job, whose core-seconds are those of the driver alone.
    """
    rig.ui = True
    figures = drain(rig)
    done = _stages(rig)
    spent_s = {"source": 0.0, "operator": 0.0, "fetch_and_write": 0.0}
    for stage in done:
        spent_s[_step(stage)] += stage["executorRunTime"] / 1000
    if not all(spent_s.values()):
        raise RuntimeError(f"a step has no stage. Spark may have changed the names of stages: {spent_s}")
    all_s = sum(spent_s.values())
    batch_s, serial_s = _serial(done)
    share = {step: round(seconds / all_s, 2) for step, seconds in spent_s.items()}
    found = {"tx_per_s": figures["tx_per_s"], "right": figures["right"]}
    found |= {"share": share, "batch_s": round(batch_s, 2), "serial_s": round(serial_s, 2)}
    if not rig.spark.sparkContext.master.startswith("local"):
        return found
    tx_of_batch = figures["tx_per_s"] * batch_s
    parallel_s = figures["core_ms_per_tx"]["job"] / 1000 * tx_of_batch - serial_s
    return {**found, "tx_per_s_at": {str(cores): round(tx_of_batch / (serial_s + parallel_s / cores)) for cores in (2, 16, 64, 256)}}


def _serial(done: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a warm batch, and those of them in which no stage runs (medians)."""
    by_batch: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for stage in done:
        if batch := re.search(r"batch = (\d+)", stage.get("description") or ""):
            by_batch[int(batch[1])].append((_seconds(stage["submissionTime"]), _seconds(stage["completionTime"])))
    starts = {number: min(spans)[0] for number, spans in by_batch.items()}
    # The first batches run on a cold JVM. The last one has no next one to end at, and is not full.
    warm = [(number, starts[after] - starts[number]) for number, after in pairwise(sorted(starts)) if number >= WARM_UP][:-1]
    if not warm:
        raise RuntimeError("there is no warm batch: measure with a larger --scale")
    return statistics.median(took for _, took in warm), statistics.median(took - _covered(by_batch[number]) for number, took in warm)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    covered, until = 0.0, 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _seconds(at: str) -> float:
    return datetime.strptime(at.replace("GMT", "+0000"), "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()


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
    """Measure a drain on one core, on all cores, and on 2, 4 and 8 executors of one core each on a standalone cluster.

    More executors than cores are no faster. They show what more tasks cost the driver.
    """
    cores = sorted(os.sched_getaffinity(0))
    figures = {"one_core": _stages_on(rig, "local[1]", cores[:1], 2), "all_cores": _stages_on(rig, "local[*]", cores, 2)}
    for name, workers in (("two_executors", 2), ("four_executors", 4), ("eight_executors", 8)):
        folder = rig.folder / name
        folder.mkdir()
        with StandaloneCluster(folder, workers) as cluster:
            figures[name] = _stages_on(rig, cluster.master, cores, workers)
    return figures


def _stages_on(rig: Rig, master: str, cores: list[int], tasks: int) -> Figures:
    environ = {"SPARK_MASTER": master, "SPARK_EXECUTOR_MEMORY": "1g", "HALFWAY_BENCH_TASKS": str(tasks)}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return in_own_process(stages.__name__, rig.scale * _AMOUNT, environ)
    finally:
        os.sched_setaffinity(0, before)
