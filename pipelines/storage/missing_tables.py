"""Says what it means that a table does not exist: no job has started yet, or its tables are gone or elsewhere."""

from pathlib import Path

from halfway.schemas.errors import HalfwayError, OwnershipError, TableError
from halfway.schemas.settings import StorageSettings

OFFSETS = "offsets"
"""Spark's folder of the checkpoint with a file for each planned batch."""


def missing_table(storage: StorageSettings, name: str, what: str = "is missing", *, has_run: bool) -> HalfwayError:
    """Return the error for a table that does not exist, or has no owner.

    Args:
        storage: where tables and checkpoint are.
        name: the table, as SQL or a reader names it.
        what: what is wrong with it.
        has_run: True if the checkpoint has planned a batch, so that its tables existed.
    """
    place = "storage.catalog_schema" if storage.catalog_schema else "storage.warehouse"
    if not has_run:
        elsewhere = "" if storage.catalog_schema else "; if the job runs in another folder, go there"
        return TableError(f"there is no table {name} yet: run `halfway resolve`, which creates it{elsewhere}, or set {place}")
    return OwnershipError(
        f"the checkpoint {storage.checkpoint} has run before, but its table {name} {what}: set {place} to where its tables are, or "
        "storage.checkpoint to a new folder to start again from the topics"
    )


def verify_table_exists(storage: StorageSettings, name: str) -> None:
    """Refuse a table that this machine's disk does not hold, before Spark starts. Does not look at a table elsewhere.

    Raises:
        TableError: no job has made it yet.
        OwnershipError: it is gone, or the job's tables are elsewhere.
    """
    if storage.catalog_schema:
        return
    table, offsets = _folder(storage.warehouse) / name, _folder(storage.checkpoint) / OFFSETS
    if table.is_absolute() and not (table / "_delta_log").is_dir():
        raise missing_table(storage, str(table), has_run=any(offsets.glob("[0-9]*")))


def _folder(uri: str) -> Path:
    """Return the path of a local URI. What another URI gives is no absolute path."""
    return Path(uri.removeprefix("file:"))
