"""Faults of the files: the checkpoint, the state in it, and the tables."""

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from deltalake import DeltaTable

from halfway.schemas.tables import Table
from tests.chaos.faults import CannotBeMadeError, Fault
from tests.chaos.waiting import ChaosError, until
from tests.chaos.world import World

DISK_BYTES = 512 * 1024 * 1024


def newest_commit_removed(world: World, chance: Random) -> None:
    """Remove the newest file of `commits` after a batch, so that the job repeats the whole batch."""
    world.job.wait_for_batches(chance.randint(1, 3))
    world.job.kill()
    commits = world.job.checkpoint / "commits"
    newest = commits / str(world.job.last_batch())
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)


def checkpoint_lost(world: World, chance: Random) -> None:
    """Delete the checkpoint. A new one takes the tables over by --adopt."""
    world.job.wait_for_batches(chance.randint(1, 3))
    world.job.kill()
    shutil.rmtree(world.job.checkpoint)
    world.new_checkpoint()


def checkpoint_lost_rate_limit(world: World, chance: Random) -> None:
    """Delete the checkpoint, and let the job read everything again in many batches, with the horizon of that time."""
    checkpoint_lost(world, chance)
    world.topics.read_on()
    records = 2 * len(world.topics.halves) + len(world.topics.checks)
    world.job.start({"kafka.max_offsets_per_trigger": max(100, records // 4)})


def state_truncated(kind: str, world: World, chance: Random) -> None:
    """Cut the newest files of a kind, `delta` or `snapshot`, in half. The job must refuse them and name --adopt."""
    if kind == "snapshot":
        until(lambda: bool(state_files(world, kind)) or not world.job.is_running(), "a snapshot of the state")
    world.job.wait_for_batches(chance.randint(1, 3))
    world.job.kill()
    files = state_files(world, kind)
    if not files:
        raise ChaosError(f"there is no {kind} of the state")
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    before = world.job.last_batch()
    world.job.start()
    until(lambda: not world.job.is_running() or world.job.last_batch() > before + 1, "a batch, or a refusal")
    if world.job.is_running():
        return
    if "--adopt" not in world.job.last_words():
        raise ChaosError(f"the job refuses a damaged state without naming --adopt: {world.job.last_words()}")
    world.new_checkpoint()


def state_files(world: World, kind: str) -> list[Path]:
    """Return the newest file of a kind, `delta` or `snapshot`, of each state store."""
    stores = [folder for folder in (world.job.checkpoint / "state" / "0").glob("*") if folder.is_dir() and folder.name.isdecimal()]
    newest = [max(store.glob(f"[0-9]*.{kind}"), key=lambda file: int(file.name.partition(".")[0]), default=None) for store in stores]
    return [file for file in newest if file is not None]


def fill(ballast: Path) -> None:
    """Fill a disk to which others write at the same time."""
    with ballast.open("wb") as file:
        while (disk := os.fstatvfs(file.fileno())).f_bavail:
            with suppress(OSError):  # another writer took some of the room
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, disk.f_bavail // 2) * disk.f_frsize)


def disk_full(what: str, world: World, chance: Random) -> None:
    """Fill a disk until the job has ended for that, and then free it again."""
    disk = world.disks.get(what)
    if disk is None:
        raise CannotBeMadeError("there is no separate disk, because this machine does not allow user namespaces")
    world.wait_for_transactions(chance.randint(1, 20))
    ballast = disk / "ballast"
    fill(ballast)
    try:
        until(lambda: not world.job.is_running(), "the job's end on a full disk", 60)
        if "the disk is full that holds" not in world.job.last_words():
            raise ChaosError(f"the job does not report the full disk: {world.job.last_words()}")
        world.job.wait_for_the_end()
    finally:
        ballast.unlink()


def second_job(world: World, chance: Random) -> None:
    """Start a second job on the same checkpoint. It must be refused, and the first one must go on."""
    world.wait_for_transactions(chance.randint(1, 20))
    done = world.job.run_command("resolve")
    if done.returncode != 1 or "another job is running" not in done.stderr:
        raise ChaosError(f"a second job was not refused: code {done.returncode}, {done.stderr[-300:]}")
    world.job.wait_for_batches(1)


def compacted_by_delta_rs(world: World, chance: Random) -> None:
    """Compact and vacuum the tables with delta-rs while the job appends to them."""
    for _ in range(chance.randint(1, 3)):
        for table in Table:
            delta = DeltaTable(str(world.warehouse / table))
            delta.optimize.compact()
            delta.vacuum(dry_run=False)
        world.job.wait_for_batches(1)


def optimize(world: World) -> None:
    """Compact the tables by `halfway optimize`. The job goes on."""
    done = world.job.run_command("optimize", limit_s=150)
    if done.returncode:
        raise ChaosError(f"halfway optimize: {done.stderr[-500:]}")
    world.job.wait_for_batches(1)


def compacted_by_halfway(world: World, chance: Random) -> None:
    """Compact the tables by `halfway optimize` while the job appends to them."""
    world.wait_for_transactions(chance.randint(1, 20))
    optimize(world)


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
