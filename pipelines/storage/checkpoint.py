"""What belongs together: a checkpoint, its buckets and topics, and the tables (design §1.6)."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import ends_of_halves, owner_of, table_exists, table_name
from halfway.pipelines.storage.file_systems import has_files, local_path, read_json, write_json
from halfway.schemas.errors import CheckpointInUseError, OwnershipError
from halfway.schemas.settings import Settings, StateSettings, StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.schemas.tables import Table

FACTS_FILE = "halfway.json"
STATUS_FILE = "status.json"
LOCK_FILE = ".halfway.lock"
_FROZEN = {
    "format_version": "the state's format",
    "buckets": "state.buckets",
    "half_topic": "kafka.half_topic",
    "op_topic": "kafka.op_topic",
}


@dataclass(frozen=True, slots=True)
class Belongings:
    """What a checkpoint and the tables say of themselves."""

    facts: Mapping[str, Any]
    """Frozen in the checkpoint; empty for a new one."""
    query_id: str | None
    has_run: bool
    tables: Mapping[Table, str | None]
    """Those that exist, with the id of the query that owns each."""


def checkpoint_file(storage: StorageSettings, name: str) -> str:
    """Return where a file of the checkpoint is."""
    return f"{storage.checkpoint.rstrip('/')}/{name}"


def query_id_of(spark: SparkSession, storage: StorageSettings) -> str | None:
    """Return the id of the query whose checkpoint this is, None if it has not started yet."""
    metadata = read_json(spark, checkpoint_file(storage, "metadata"))
    return str(metadata["id"]) if metadata else None


def adopted_by(spark: SparkSession, storage: StorageSettings) -> dict[int, int]:
    """Return up to where, by partition of the half topic, the tables held halves when this checkpoint took them over, if it did."""
    return {int(partition): end for partition, end in facts_of(spark, storage).get("adopted", {}).items()}


def facts_of(spark: SparkSession, storage: StorageSettings) -> dict[str, Any]:
    """Return what is frozen in the checkpoint; empty for a new one."""
    return read_json(spark, checkpoint_file(storage, FACTS_FILE)) or {}


def bucket_keys_of(spark: SparkSession, storage: StorageSettings) -> tuple[int, ...]:
    """Return the keys of the buckets, which Spark groups by; in a checkpoint that names none they are numbered."""
    facts = facts_of(spark, storage)
    return tuple(facts.get("bucket_keys") or range(facts["buckets"]))


def check_ownership(spark: SparkSession, settings: Settings, *, adopt: bool) -> None:
    """Refuse a start whose checkpoint, tables and settings do not belong together. Nothing is changed.

    Raises:
        OwnershipError: with what does not fit, and the way out.
    """
    storage = settings.storage
    owners = {table: owner_of(spark, storage, table) for table in Table}
    found = Belongings(
        facts=facts_of(spark, storage),
        query_id=query_id_of(spark, storage),
        has_run=has_files(spark, checkpoint_file(storage, "commits")),
        tables={table: owner for table, owner in owners.items() if owner is not None or table_exists(spark, storage, table)},
    )
    refuse_strangers(settings, found, adopt=adopt)


def refuse_strangers(settings: Settings, found: Belongings, *, adopt: bool) -> None:
    """Refuse what does not belong together: the rules of `check_ownership`.

    Raises:
        OwnershipError: with what does not fit, and the way out.
    """
    storage, query_id, now = settings.storage, found.query_id, _facts(settings)
    for name, called in _FROZEN.items():
        if found.facts and found.facts.get(name) != now[name]:
            raise OwnershipError(
                f"the checkpoint {storage.checkpoint} was made with {called} = {found.facts.get(name)}, not {now[name]}: set it back, or "
                "start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
            )
    place = "storage.catalog_schema" if storage.catalog_schema else "storage.warehouse"
    for table in Table:
        name, owner = table_name(storage, table), found.tables.get(table)
        if owner is not None and owner != query_id and not adopt:
            raise OwnershipError(
                f"the table {name} belongs to another checkpoint than {storage.checkpoint} (query {owner}): set storage.checkpoint to "
                f"that one, or {place} to a new one; if the old checkpoint is lost, `halfway resolve --adopt` takes the tables over"
            )
        if owner is None and query_id is not None and found.has_run:
            what = "belongs to nobody" if table in found.tables else "is missing"
            raise OwnershipError(
                f"the checkpoint {storage.checkpoint} has run before, but its table {name} {what}: set {place} to where its tables "
                "are, or storage.checkpoint to a new folder to begin again from the topics"
            )
    if adopt and query_id is not None and any(owner not in (None, query_id) for owner in found.tables.values()):
        raise OwnershipError(
            f"--adopt needs a new checkpoint, and {storage.checkpoint} has been used: set storage.checkpoint to a folder that does not "
            "exist yet"
        )


def write_facts(spark: SparkSession, settings: Settings, *, adopt: bool) -> None:
    """Write down, once, what must not change as long as this checkpoint is used.

    If it takes tables over, also how far into the half topic they go: halves before that may be in them.
    """
    if not facts_of(spark, settings.storage):
        adopted = {str(partition): end for partition, end in ends_of_halves(spark, settings.storage).items()} if adopt else {}
        facts = _facts(settings) | {"adopted": adopted, "bucket_keys": _even_keys(spark, settings.state)}
        write_json(spark, checkpoint_file(settings.storage, FACTS_FILE), facts)


def _facts(settings: Settings) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "buckets": settings.state.buckets,
        "half_topic": settings.kafka.half_topic,
        "op_topic": settings.kafka.op_topic,
    }


def _even_keys(spark: SparkSession, state: StateSettings) -> list[int]:
    """Return keys for the buckets that Spark spreads evenly over its tasks.

    It places a group by a hash of its key: of 64 buckets numbered from 0, one of eight tasks would get 12, and all others wait for it.
    """
    room = [len(range(task, state.buckets, state.shuffle_partitions)) for task in range(state.shuffle_partitions)]
    keys: list[int] = []
    begin = 0
    while any(room):
        placed = spark.range(begin, begin + 1024).select("id", F.pmod(F.hash(F.col("id").cast("int")), F.lit(len(room))))
        for key, task in sorted(placed.collect()):
            if room[task]:
                room[task] -= 1
                keys.append(key)
        begin += 1024
    return keys


@contextmanager
def sole_user(storage: StorageSettings) -> Iterator[None]:
    """Hold the checkpoint against a second job; the kernel lets go of it when this process dies, however it dies.

    On other file systems than a local one Spark itself notices a second writer, at its first batch.

    Raises:
        CheckpointInUseError: if another job has it.
    """
    advice = "stop it first, or give this one a checkpoint, a warehouse and topics of its own"
    with _held(storage, LOCK_FILE, f"another job is running on the checkpoint {storage.checkpoint}: {advice}"):
        yield


@contextmanager
def sole_replay(storage: StorageSettings) -> Iterator[None]:
    """Hold the checkpoint against a second replay, but not against the job.

    Raises:
        CheckpointInUseError: if another replay has it.
    """
    with _held(storage, ".replay.lock", f"another replay is running on the checkpoint {storage.checkpoint}: wait until it is done"):
        yield


@contextmanager
def _held(storage: StorageSettings, name: str, refusal: str) -> Iterator[None]:
    folder = local_path(storage.checkpoint)
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as lock:
        if not _locked(lock.fileno()):
            raise CheckpointInUseError(refusal)
        yield


def _locked(file: int) -> bool:
    """Take the lock, in a second try for the case that somebody is just looking whether it is taken."""
    for pause_s in (0.2, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(pause_s)
        else:
            return True
    return False


def is_in_use(storage: StorageSettings) -> bool:
    """Whether a job is running on this checkpoint, as far as this machine can tell."""
    try:
        with sole_user(storage):
            return False
    except CheckpointInUseError:
        return True
