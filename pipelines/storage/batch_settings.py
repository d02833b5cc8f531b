"""Keeps the settings that decide outcomes with the batches that run under them, in a file of the checkpoint (R16).

Spark repeats a batch that was planned and not committed, and the tables may hold a part of it. It must then run under
the settings that it first ran under, whatever they are now.
"""

from typing import Any

from pyspark.sql import SparkSession

from halfway.pipelines.storage.file_systems import write_json
from halfway.pipelines.storage.manifest import checkpoint_file, read_checkpoint_file
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, HadoopFiles
from halfway.schemas.errors import OwnershipError
from halfway.schemas.settings import ResolutionSettings, Settings, StorageSettings

BATCH_SETTINGS_FILE = "batch_settings.json"
_DECIDES_NOTHING = {"tick_interval"}


def settings_of_batches(spark: SparkSession, settings: Settings) -> list[tuple[int, ResolutionSettings]]:
    """Return the settings of each batch that this run may run, and record those of its new batches.

    Call it before the query starts.

    Returns:
        (first batch, settings), in order: those of the last planned batch if they differ, and the present ones.

    Raises:
        OwnershipError: the batch to repeat began under other signing keys, which are not recorded, or the file is
            damaged, or missing.
    """
    storage = settings.storage
    files = HadoopFiles(spark, storage)
    planned = max(files.batches(OFFSETS), default=-1)
    stored = _read(spark, storage)
    kept = [each for each in stored if each["since_batch"] <= planned][-1:]
    is_to_repeat = planned >= 0 and planned not in files.batches(COMMITS)
    if is_to_repeat and not kept:
        raise OwnershipError(
            f"{checkpoint_file(storage, BATCH_SETTINGS_FILE)} is missing, which says under which settings batch {planned} began, and it is "
            "to be repeated: put the file back, or start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
        )
    now = {"since_batch": planned + 1, "signing": settings.kafka.signing.fingerprint(), **_deciding(settings.resolution)}
    if is_to_repeat and kept[0]["signing"] != now["signing"]:
        raise OwnershipError(
            f"batch {planned} of {storage.checkpoint} began under other kafka.signing settings and is to be repeated: set them back, run "
            "`halfway resolve --available-now` once, and change them then"
        )
    by_batch = kept if kept and {**kept[0], "since_batch": None} == {**now, "since_batch": None} else [*kept, now]
    if by_batch != stored:
        write_json(spark, checkpoint_file(storage, BATCH_SETTINGS_FILE), {"batches": by_batch})
    names = _deciding(settings.resolution).keys()
    deciding = [{name: each[name] for name in names & each.keys()} for each in by_batch]
    return [(each["since_batch"], settings.resolution.model_copy(update=update)) for each, update in zip(by_batch, deciding, strict=True)]


def _read(spark: SparkSession, storage: StorageSettings) -> list[dict[str, Any]]:
    content = read_checkpoint_file(spark, storage, BATCH_SETTINGS_FILE)
    return list(content["batches"]) if content else []


def _deciding(resolution: ResolutionSettings) -> dict[str, int]:
    return resolution.model_dump(exclude=_DECIDES_NOTHING)
