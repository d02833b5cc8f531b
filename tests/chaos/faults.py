"""Faults of the job's own processes, of the broker and of the services. Each makes one, and leaves what is down to `World.recover`.

Moments are counted in transactions or batches, drawn by the seed.
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

from tests.chaos.launcher import Step
from tests.chaos.world import ChaosError, World, until
from tests.fuzz.auditor import Findings

LONGER_THAN_ALL_S = 20.0
"""Longer than transactionTimeOut and all checks together, than the services' session and their time to send."""


class Fault(NamedTuple):
    """A fault that may be made. `share`: how often among a hundred."""

    name: str
    make: Callable[[World, Random], tuple[float, Findings] | None]
    """Returns recovery and findings if it had a world of its own."""
    share: int


class CannotBeMadeError(ChaosError):
    """This machine does not let us make that fault."""


def driver_at(step: Step, world: World, chance: Random) -> None:
    """Kill -9 of the job's process group at a step of a batch."""
    world.arm(step, chance.randint(1, 3), "die")
    world.wait_for_step()
    wait_for_the_end(world)


def driver_anywhere(world: World, chance: Random) -> None:
    """Kill -9 of the job's process group, wherever it is."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.signal_job(signal.SIGKILL)
    wait_for_the_end(world)


def driver_again(world: World, chance: Random) -> None:
    """Kill -9 in the middle of a batch, and again in the same batch when it is repeated."""
    driver_at(Step.AFTER_MESSAGES, world, chance)
    world.arm(chance.choice([Step.BEFORE_PERSIST, Step.AFTER_COUNT, Step.BEFORE_COMMIT]), 1, "die")
    world.start_job()
    world.wait_for_step()
    wait_for_the_end(world)


def driver_starting(world: World, chance: Random) -> None:
    """Kill -9, and again while it is starting."""
    world.signal_job(signal.SIGKILL)
    wait_for_the_end(world)
    world.start_job()
    until(lambda: bool(python_and_java(world)[1]) or not world.job_runs(), "the job's JVM")
    world.wait_for_transactions(chance.randint(1, 60))
    world.signal_job(signal.SIGKILL)
    wait_for_the_end(world)


def worker(world: World, chance: Random) -> None:
    """Kill -9 of every Python worker that Spark starts in the time of a batch: one of them is at work."""
    world.wait_for_transactions(chance.randint(1, 20))
    killed, goal = 0, world.batches() + 1
    deadline_s = time.monotonic() + LONGER_THAN_ALL_S
    while world.job_runs() and (not killed or world.batches() < goal) and time.monotonic() < deadline_s:
        for pid in python_and_java(world)[0]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(0.1)
    if not killed:
        raise ChaosError("there was no Python worker")


def job_frozen(world: World, chance: Random) -> None:
    """SIGSTOP of the whole job for longer than every time-out."""
    world.wait_for_transactions(chance.randint(1, 10))
    world.signal_job(signal.SIGSTOP)
    time.sleep(LONGER_THAN_ALL_S)
    world.signal_job(signal.SIGCONT)


def broker_killed(world: World, chance: Random) -> None:
    """Kill -9 of the broker, wherever it is."""
    world.wait_for_transactions(chance.randint(1, 20))
    kill_broker(world)


def broker_at(step: Step, world: World, chance: Random) -> None:
    """Kill -9 of the broker while the job is at a step of a batch; it comes back while the batch waits for it."""
    world.arm(step, chance.randint(1, 3), "wait")
    world.wait_for_step()
    kill_broker(world)
    world.go()
    time.sleep(1.0)


def broker_away_at_start(world: World, chance: Random) -> None:
    """The job is started while there is no broker: it must say so and end, or wait."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.stop_job()
    kill_broker(world)
    world.start_job()
    deadline_s = time.monotonic() + LONGER_THAN_ALL_S
    while world.job_runs() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    if not world.job_runs() and "error: Kafka cannot be reached" not in world.job_log():
        raise ChaosError(f"a start without Kafka does not say so: {world.last_words()}")


def broker_frozen(world: World, chance: Random) -> None:
    """SIGSTOP of the broker for longer than every time-out: connections stay, and nobody answers."""
    world.wait_for_transactions(chance.randint(1, 10))
    pid = world.broker.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_ALL_S)
    finally:
        os.kill(pid, signal.SIGCONT)


def broker_long_away(world: World, chance: Random) -> None:
    """With a backlog and a rate limit, no broker for longer than all checks take: no check and no discard may come of it."""
    world.stop_job()
    world.wait_for_transactions(chance.randint(60, 120))
    world.start_job({"kafka.max_offsets_per_trigger": 400})
    world.wait_for_batches(chance.randint(1, 2))
    kill_broker(world)
    time.sleep(LONGER_THAN_ALL_S)


def client_killed(world: World, chance: Random) -> None:
    """Kill -9 of a service, wherever it is."""
    world.wait_for_transactions(chance.randint(1, 20))
    world.kill_client(chance.choice(world.groups))


def clients_killed(world: World, chance: Random) -> None:
    """Kill -9 of all services at once; they are back after some seconds."""
    world.wait_for_transactions(chance.randint(1, 20))
    for group in world.groups:
        world.kill_client(group)
    time.sleep(chance.uniform(0.0, 4.0))


def everything_killed(world: World, chance: Random) -> None:
    """Kill -9 of broker, job and services together: the machine is gone, but for its disk."""
    world.wait_for_transactions(chance.randint(1, 20))
    kill_broker(world)
    world.signal_job(signal.SIGKILL)
    for group in world.groups:
        world.kill_client(group)
    wait_for_the_end(world)


def kill_broker(world: World) -> None:
    pid = world.broker.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: world.broker.pid() is None, "the broker's end")


def wait_for_the_end(world: World) -> None:
    assert world.job is not None
    world.job.wait(60)
    world.disarm()


def python_and_java(world: World) -> tuple[list[int], list[int]]:
    """The job's Python workers (not the process that forks them), and its JVMs."""
    assert world.job is not None
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            lines[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    of_job = [pid for pid in parents if world.job.pid in ancestors(pid, parents)]
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
    Fault("driver killed before persist", partial(driver_at, Step.BEFORE_PERSIST), 4),
    Fault("driver killed after count", partial(driver_at, Step.AFTER_COUNT), 4),
    Fault("driver killed after messages", partial(driver_at, Step.AFTER_MESSAGES), 5),
    Fault("driver killed after discarded", partial(driver_at, Step.AFTER_DISCARDED), 4),
    Fault("driver killed after quarantine", partial(driver_at, Step.AFTER_QUARANTINE), 4),
    Fault("driver killed before checks", partial(driver_at, Step.BEFORE_CHECKS), 4),
    Fault("driver killed after checks", partial(driver_at, Step.AFTER_CHECKS), 4),
    Fault("driver killed before the batch is committed", partial(driver_at, Step.BEFORE_COMMIT), 4),
    Fault("driver killed anywhere", driver_anywhere, 5),
    Fault("driver killed twice in one batch", driver_again, 2),
    Fault("driver killed while it starts", driver_starting, 2),
    Fault("python workers killed", worker, 5),
    Fault("job frozen", job_frozen, 2),
    Fault("broker killed", broker_killed, 6),
    Fault("broker killed in mid-batch", partial(broker_at, Step.AFTER_COUNT), 3),
    Fault("broker killed at the check write", partial(broker_at, Step.BEFORE_CHECKS), 3),
    Fault("broker away at job start", broker_away_at_start, 2),
    Fault("broker frozen", broker_frozen, 2),
    Fault("broker long away, backlog, rate limit", broker_long_away, 2),
    Fault("service killed", client_killed, 6),
    Fault("all services killed", clients_killed, 4),
    Fault("everything killed", everything_killed, 3),
]
