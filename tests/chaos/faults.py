"""Faults of the job's processes, of a single broker and of the services.

Each function makes one fault and leaves what is down to `World.recover`. The seed draws the moment of a fault, in
transactions or batches.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.chaos.auditor import Findings
from tests.chaos.launcher import Step
from tests.chaos.waiting import ChaosError, until
from tests.chaos.world import World

LONGER_THAN_ALL_S = 20.0
"""Longer than transactionTimeOut and all checks together, and than the services' session and send time-outs."""


class Fault(NamedTuple):
    """A fault that a run may draw."""

    name: str
    make: Callable[[World, Random], tuple[float, Findings] | None]
    """Makes the fault. Returns seconds of recovery and findings if the fault had a separate world."""
    share: int
    """How often a run draws the fault, in percent."""


class CannotBeMadeError(ChaosError):
    """This machine does not allow the fault."""


def driver_killed_at(step: Step, world: World, chance: Random) -> None:
    """Kill the job's process group at a step of a batch."""
    world.job.arm(step, chance.randint(1, 3), "die")
    world.job.wait_for_step()
    world.job.wait_for_the_end()


def driver_killed_anywhere(world: World, chance: Random) -> None:
    """Kill the job's process group at any moment."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.job.signal(signal.SIGKILL)
    world.job.wait_for_the_end()


def driver_killed_twice(world: World, chance: Random) -> None:
    """Kill the job in the middle of a batch, and again while it repeats that batch."""
    driver_killed_at(Step.AFTER_MESSAGES, world, chance)
    world.job.arm(chance.choice([Step.BEFORE_PERSIST, Step.AFTER_COUNT, Step.BEFORE_COMMIT]), 1, "die")
    world.job.start()
    world.job.wait_for_step()
    world.job.wait_for_the_end()


def driver_killed_while_starting(world: World, chance: Random) -> None:
    """Kill the job, and again while it is starting."""
    world.job.signal(signal.SIGKILL)
    world.job.wait_for_the_end()
    world.job.start()
    until(lambda: bool(workers_and_jvms(world)[1]) or not world.job.is_running(), "the job's JVM")
    world.wait_for_transactions(chance.randint(1, 60))
    world.job.signal(signal.SIGKILL)
    world.job.wait_for_the_end()


def workers_killed(world: World, chance: Random) -> None:
    """Kill every Python worker that Spark starts during one batch. At least one of them is at work."""
    world.wait_for_transactions(chance.randint(1, 20))
    killed, goal = 0, world.job.last_batch() + 1
    deadline_s = time.monotonic() + LONGER_THAN_ALL_S
    while world.job.is_running() and (not killed or world.job.last_batch() < goal) and time.monotonic() < deadline_s:
        for pid in workers_and_jvms(world)[0]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(0.1)
    if not killed:
        raise ChaosError("there was no Python worker")


def job_frozen(world: World, chance: Random) -> None:
    """Freeze the whole job by SIGSTOP for longer than every time-out."""
    world.wait_for_transactions(chance.randint(1, 10))
    world.job.signal(signal.SIGSTOP)
    time.sleep(LONGER_THAN_ALL_S)
    world.job.signal(signal.SIGCONT)


def broker_killed(world: World, chance: Random) -> None:
    """Kill every broker at any moment."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.kafka.kill()


def broker_killed_at(step: Step, world: World, chance: Random) -> None:
    """Kill the broker while the job is at a step of a batch. The broker comes back while the batch waits for it."""
    world.job.arm(step, chance.randint(1, 3), "wait")
    world.job.wait_for_step()
    world.kafka.kill()
    world.job.go_on()
    time.sleep(1.0)


def broker_away_at_start(world: World, chance: Random) -> None:
    """Start the job without a broker. The job must report that and end, or wait."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.job.stop()
    world.kafka.kill()
    world.job.start()
    deadline_s = time.monotonic() + LONGER_THAN_ALL_S
    while world.job.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    if not world.job.is_running() and "error: Kafka cannot be reached" not in world.job.log():
        raise ChaosError(f"a start without Kafka does not report that: {world.job.last_words()}")


def broker_frozen(world: World, chance: Random) -> None:
    """Freeze the broker by SIGSTOP for longer than every time-out. Its connections stay open, and nothing answers."""
    world.wait_for_transactions(chance.randint(1, 10))
    [node] = world.kafka.nodes
    node.freeze()
    try:
        time.sleep(LONGER_THAN_ALL_S)
    finally:
        node.thaw()


def broker_long_away(world: World, chance: Random) -> None:
    """Kill the broker for longer than all checks take, with a backlog and a rate limit.

    No check and no discard may come of it.
    """
    world.job.stop()
    world.wait_for_transactions(chance.randint(60, 120))
    world.job.start({"kafka.max_offsets_per_trigger": 400})
    world.job.wait_for_batches(chance.randint(1, 2))
    world.kafka.kill()
    time.sleep(LONGER_THAN_ALL_S)


def client_killed(world: World, chance: Random) -> None:
    """Kill a service at any moment."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.kill_client(chance.choice(world.groups))


def clients_killed(world: World, chance: Random) -> None:
    """Kill all services at once. They come back after up to 4 s."""
    world.wait_for_transactions(chance.randint(1, 20))
    for group in world.groups:
        world.kill_client(group)
    time.sleep(chance.uniform(0.0, 4.0))


def everything_killed(world: World, chance: Random) -> None:
    """Kill brokers, job and services together, as when the machine dies and its disk survives."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.kafka.kill()
    world.job.signal(signal.SIGKILL)
    for group in world.groups:
        world.kill_client(group)
    world.job.wait_for_the_end()


def workers_and_jvms(world: World) -> tuple[list[int], list[int]]:
    """Return the pids of the job's Python workers, without the process that forks them, and of its JVMs."""
    assert world.job.process is not None
    job = world.job.process.pid
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            lines[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    of_job = [pid for pid in parents if job in ancestors(pid, parents)]
    daemons = [pid for pid in of_job if "pyspark.daemon" in lines[pid]]
    workers = [pid for pid in daemons if parents[pid] in daemons]
    return workers, [pid for pid in of_job if "java" in lines[pid].partition("\0")[0]]


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found: list[int] = []
    while pid in parents and parents[pid] > 1 and len(found) < 20:
        pid = parents[pid]
        found.append(pid)
    return found


PROCESS_FAULTS = [
    Fault("driver killed before persist", partial(driver_killed_at, Step.BEFORE_PERSIST), 4),
    Fault("driver killed after count", partial(driver_killed_at, Step.AFTER_COUNT), 4),
    Fault("driver killed after messages", partial(driver_killed_at, Step.AFTER_MESSAGES), 5),
    Fault("driver killed after discarded", partial(driver_killed_at, Step.AFTER_DISCARDED), 4),
    Fault("driver killed after quarantine", partial(driver_killed_at, Step.AFTER_QUARANTINE), 4),
    Fault("driver killed before checks", partial(driver_killed_at, Step.BEFORE_CHECKS), 4),
    Fault("driver killed after checks", partial(driver_killed_at, Step.AFTER_CHECKS), 4),
    Fault("driver killed before the batch is committed", partial(driver_killed_at, Step.BEFORE_COMMIT), 4),
    Fault("driver killed anywhere", driver_killed_anywhere, 5),
    Fault("driver killed twice in one batch", driver_killed_twice, 2),
    Fault("driver killed while it starts", driver_killed_while_starting, 2),
    Fault("python workers killed", workers_killed, 5),
    Fault("job frozen", job_frozen, 2),
    Fault("service killed", client_killed, 6),
    Fault("all services killed", clients_killed, 4),
    Fault("everything killed", everything_killed, 3),
]
BROKER_FAULTS = [
    Fault("broker killed", broker_killed, 6),
    Fault("broker killed in mid-batch", partial(broker_killed_at, Step.AFTER_COUNT), 3),
    Fault("broker killed at the check write", partial(broker_killed_at, Step.BEFORE_CHECKS), 3),
    Fault("broker away at job start", broker_away_at_start, 2),
    Fault("broker frozen", broker_frozen, 2),
    Fault("broker long away, backlog, rate limit", broker_long_away, 2),
]
