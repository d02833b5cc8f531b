"""Faults of what lies on disks: the checkpoint, the state in it, the tables."""

import os
import shutil
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from deltalake import DeltaTable

from halfway.schemas.tables import Table
from tests.chaos.faults import CannotBeMadeError, Fault, wait_for_the_end
from tests.chaos.world import ROOT, ChaosError, World, until

DISK_BYTES = 512 * 1024 * 1024


def newest_commit_removed(world: World, chance: Random) -> None:
    """The last batch was done, and the checkpoint does not know it: the batch is repeated whole."""
    world.wait_for_batches(chance.randint(1, 3))
    world.kill_job()
    commits = world.checkpoint / "commits"
    newest = commits / str(world.batches())
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)


def checkpoint_lost(world: World, chance: Random) -> None:
    """The checkpoint is gone; the tables are taken over by --adopt."""
    world.wait_for_batches(chance.randint(1, 3))
    world.kill_job()
    shutil.rmtree(world.checkpoint)
    world.new_checkpoint()


def checkpoint_lost_rate_limit(world: World, chance: Random) -> None:
    """The checkpoint is gone, and what it had read is read again in many batches, with the time of then."""
    checkpoint_lost(world, chance)
    world.topics.read_on()
    records = 2 * len(world.topics.halves) + len(world.topics.checks)
    world.start_job({"kafka.max_offsets_per_trigger": max(100, records // 4)})


def state_truncated(kind: str, world: World, chance: Random) -> None:
    """The newest file of the state is cut off in the middle: the job must refuse it, and the way out is --adopt."""
    if kind == "snapshot":
        until(lambda: bool(state_files(world, kind)) or not world.job_runs(), "a snapshot of the state")
    world.wait_for_batches(chance.randint(1, 3))
    world.kill_job()
    files = state_files(world, kind)
    if not files:
        raise ChaosError(f"there is no {kind} of the state")
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    before = world.batches()
    world.start_job()
    until(lambda: not world.job_runs() or world.batches() > before + 1, "a batch, or a refusal")
    if world.job_runs():
        return
    if "--adopt" not in world.last_words():
        raise ChaosError(f"a damaged state is refused without the way out: {world.last_words()}")
    world.new_checkpoint()


def state_files(world: World, kind: str) -> list[Path]:
    """The newest file of this kind of each store."""
    stores = [folder for folder in (world.checkpoint / "state" / "0").glob("*") if folder.is_dir() and folder.name.isdecimal()]
    newest = [max(store.glob(f"[0-9]*.{kind}"), key=lambda file: int(file.name.partition(".")[0]), default=None) for store in stores]
    return [file for file in newest if file is not None]


def fill(ballast: Path) -> None:
    """Take all the room that is left on a disk to which others write meanwhile."""
    with ballast.open("wb") as file:
        while (disk := os.fstatvfs(file.fileno())).f_bavail:
            with suppress(OSError):  # somebody else took some of it
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, disk.f_bavail // 2) * disk.f_frsize)


def disk_full(what: str, world: World, chance: Random) -> None:
    """No room on the disk until the job has noticed; then there is again."""
    disk = world.disks.get(what)
    if disk is None:
        raise CannotBeMadeError("no disk of its own: user namespaces are not allowed here")
    world.wait_for_transactions(chance.randint(1, 20))
    ballast = disk / "ballast"
    fill(ballast)
    try:
        until(lambda: not world.job_runs(), "the job's end on a full disk", 60)
        if "No space left on device" not in world.job_log():
            raise ChaosError(f"a full disk is not named: {world.last_words()}")
        wait_for_the_end(world)
    finally:
        ballast.unlink()


def second_job(world: World, chance: Random) -> None:
    """A second job on the same checkpoint is refused, and the first goes on."""
    world.wait_for_transactions(chance.randint(1, 20))
    done = subprocess.run(
        world.command("resolve", launcher=False),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode != 1 or "another job is running" not in done.stderr:
        raise ChaosError(f"a second job was not refused: code {done.returncode}, {done.stderr[-300:]}")
    world.wait_for_batches(1)


def compacted_by_delta_rs(world: World, chance: Random) -> None:
    """Somebody compacts and vacuums the tables while the job appends to them."""
    for _ in range(chance.randint(1, 3)):
        for table in Table:
            delta = DeltaTable(str(world.warehouse / table))
            delta.optimize.compact()
            delta.vacuum(dry_run=False)
        world.wait_for_batches(1)


def optimize(world: World) -> None:
    """Compact the tables as an operator does."""
    command = world.command("optimize", launcher=False)
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=150)
    if done.returncode:
        raise ChaosError(f"halfway optimize: {done.stderr[-500:]}")


def compacted_by_halfway(world: World, chance: Random) -> None:
    """`halfway optimize` while the job appends."""
    world.wait_for_transactions(chance.randint(1, 20))
    optimize(world)
    time.sleep(0.5)


STORAGE_FAULTS = [
    Fault("newest file of commits removed", newest_commit_removed, 5),
    Fault("checkpoint lost", checkpoint_lost, 3),
    Fault("checkpoint lost, rate limit", checkpoint_lost_rate_limit, 2),
    Fault("state delta truncated", partial(state_truncated, "delta"), 2),
    Fault("state snapshot truncated", partial(state_truncated, "snapshot"), 1),
    Fault("disk full under the checkpoint", partial(disk_full, "checkpoints"), 2),
    Fault("disk full under the tables", partial(disk_full, "warehouse"), 2),
    Fault("second job on the checkpoint", second_job, 3),
    Fault("compacted by delta-rs", compacted_by_delta_rs, 3),
    Fault("compacted by halfway optimize", compacted_by_halfway, 2),
]
