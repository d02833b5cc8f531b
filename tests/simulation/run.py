"""Runs histories and makes failing ones short."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import NamedTuple

from tests.simulation.checker import Finding, judge
from tests.simulation.generator import generate
from tests.simulation.world import Action, World

# What a thousand jobs warn of, as they should.
logging.getLogger("halfway").addHandler(logging.NullHandler())

FULL = 100
"""Every so many histories, one goes through packs, buckets and the state's bytes."""


class Failure(NamedTuple):
    """A seed whose history shows a defect."""

    seed: int
    is_full: bool
    findings: list[Finding]
    actions: list[Action]


def findings_of(actions: Sequence[Action], *, is_full: bool = False) -> list[Finding]:
    """Return what a history of these actions shows."""
    return judge(World(actions, is_full=is_full).run())


def run_seed(seed: int, *, is_full: bool = False) -> Failure | None:
    """Run the history of a seed. Return it if it shows a defect."""
    actions = generate(seed)
    is_full = is_full or seed % FULL == 0
    found = findings_of(actions, is_full=is_full)
    return Failure(seed, is_full, found, actions) if found else None


def run_seeds(seeds: Sequence[int], jobs: int = 1, play: Callable[[int], Failure | None] = run_seed) -> Iterator[Failure]:
    """Run the histories of seeds in several processes. Yield the failures in the order of the seeds."""
    if jobs == 1:
        yield from filter(None, map(play, seeds))
        return
    with get_context("spawn").Pool(jobs, initializer=_leave_modules_to_themselves) as pool:
        yield from filter(None, pool.imap(play, seeds, chunksize=25))


def _leave_modules_to_themselves() -> None:
    """Keep Python's cycle collector from what is imported: a seventh of the time went to it."""
    gc.freeze()


def shortest(failure: Failure) -> Failure:
    """Drop actions as long as the first finding's rule is still broken: halves of the list first, single ones last."""
    rule, actions = failure.findings[0].rule, failure.actions
    found = failure.findings
    size = len(actions) // 2
    while size:
        begin = 0
        while begin < len(actions):
            fewer = [*actions[:begin], *actions[begin + size :]]
            left = [finding for finding in findings_of(fewer, is_full=failure.is_full) if finding.rule == rule]
            if left:
                actions, found = fewer, left
            else:
                begin += size
        size //= 2
    return failure._replace(findings=found, actions=actions)


def describe(failure: Failure) -> str:
    """Return a failure as a text that can be read and run again."""
    lines = [f"seed {failure.seed}: {len(failure.actions)} actions", *(f"  {action}" for action in failure.actions)]
    return "\n".join([*lines, *(f"  -> {finding}" for finding in failure.findings)])
