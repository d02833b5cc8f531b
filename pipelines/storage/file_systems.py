"""Reads and writes small files: on a local disk directly, elsewhere through Hadoop's client, which Spark has."""

import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from halfway.schemas.errors import SetupError

_APPEARS_WHEN_CLOSED = "fs.capability.outputstream.abortable"
"""Hadoop's name for what object stores do: a file appears, complete, when it is closed."""


def local_path(uri: str) -> Path | None:
    """Return the path of a local URI; None for another file system. Needs no Spark: see `on_local_disk`.

    On Databricks a path without a scheme, such as `/Volumes/…`, is not the machine's: no lock can be held there.
    """
    parsed = urlparse(uri)
    local = ("file",) if "DATABRICKS_RUNTIME_VERSION" in os.environ else ("", "file")
    return Path(parsed.path if parsed.scheme else uri) if parsed.scheme in local else None


def on_local_disk(spark: SparkSession, uri: str) -> Path | None:
    """Return the path on this machine's disk that Spark resolves `uri` to; None for another file system.

    Hadoop's `fs.defaultFS` decides for a URI without a scheme. On a cluster it is seldom this disk.
    """
    path, file_system = _open(spark, uri)
    return Path(path.toUri().getPath()) if file_system.getUri().getScheme() == "file" else None


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists, as far as this user may see."""
    # Path.exists raises where this user may not look.
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110


def verify_local_folder_writable(setting: str, folder: Path) -> None:
    """Refuse a folder on this machine in which this user cannot make a file. Makes no folder.

    Raises:
        SetupError: the message names the setting, and gives the system's reason.
    """
    there = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        way_out = f"let this user write to {there}, or " if there.is_dir() else ""
        what = f"{setting} {folder} cannot be written ({error.strerror})"
        raise SetupError(f"{what}: {way_out}set {setting} to another folder") from None


def read_json(spark: SparkSession, uri: str) -> dict[str, Any] | None:
    """Return the JSON object at `uri`; None if the file does not exist.

    Raises:
        ValueError: the file holds no JSON, such as a part that a power cut has left.
    """
    text = read_text(spark, uri)
    content: dict[str, Any] | None = None if text is None else json.loads(text)
    return content


def read_text(spark: SparkSession, uri: str) -> str | None:
    """Return the text at `uri`; None if the file does not exist.

    What is no UTF-8, as after a power cut, is U+FFFD: what reads the text refuses it as it refuses any other.
    """
    local = on_local_disk(spark, uri)
    if local is not None:
        return local.read_text(errors="replace") if local.exists() else None
    path, file_system = _open(spark, uri)
    if not file_system.exists(path):
        return None
    stream = file_system.open(path)
    try:
        return bytes(stream.readAllBytes()).decode(errors="replace")
    finally:
        stream.close()


def write_json(spark: SparkSession, uri: str, content: dict[str, Any]) -> None:
    """Write a JSON object to `uri` atomically."""
    write_text(spark, uri, json.dumps(content, sort_keys=True))


def write_text(spark: SparkSession, uri: str, text: str) -> None:
    """Write a text to `uri` atomically."""
    data = text.encode()
    local = on_local_disk(spark, uri)
    if local is not None:
        # Hadoop's client starts `chmod` and `readlink` six times for this, 8 ms each.
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f"{local.name}.part")
        part.write_bytes(data)
        part.replace(local)
        return
    path, file_system = _open(spark, uri)
    if file_system.hasPathCapability(path, _APPEARS_WHEN_CLOSED):
        # S3. There a rename deletes the file first: a job that is killed in between would have none.
        _write(file_system, path, data)
        return
    try:
        context = _jvm(spark).org.apache.hadoop.fs.FileContext.getFileContext(path.toUri(), _hadoop_conf(spark))
    except Py4JJavaError as error:
        if "UnsupportedFileSystemException" not in str(error):
            raise
        # This file system has no atomic rename. It is an object store, where a file appears complete when it is closed.
        _write(file_system, path, data)
        return
    part = path.suffix(".part")
    _write(file_system, part, data)
    rename = _jvm(spark).org.apache.hadoop.fs.Options.Rename
    gateway: Any = spark.sparkContext._gateway
    options = gateway.new_array(rename, 1)
    options[0] = rename.OVERWRITE
    context.rename(part, path, options)


def _write(file_system: Any, path: Any, data: bytes) -> None:
    stream = file_system.create(path, True)
    try:
        stream.write(data)
    finally:
        stream.close()


def names_in(spark: SparkSession, uri: str) -> list[str]:
    """Return the names in the folder `uri`; empty if the folder does not exist."""
    path, file_system = _open(spark, uri)
    return [entry.getPath().getName() for entry in file_system.listStatus(path)] if file_system.exists(path) else []


def delete_folder(spark: SparkSession, uri: str) -> None:
    """Delete the folder `uri` and what is in it, if it exists."""
    path, file_system = _open(spark, uri)
    file_system.delete(path, True)


def verify_folder_writable(spark: SparkSession, uri: str) -> None:
    """Write a small file in the folder `uri` and delete it.

    Raises:
        SetupError: the file system refuses; the message gives its reason.
    """
    try:
        path, file_system = _open(spark, f"{uri.rstrip('/')}/.halfway-doctor-{uuid.uuid4().hex}")
        file_system.create(path, True).close()
        file_system.delete(path, False)
    except Py4JJavaError as error:
        raise SetupError(f"{uri} cannot be written ({first_line_of(error)}): give the job's user access, or set another place") from None


def first_line_of(error: Exception) -> str:
    """Return what an error says; Py4J's own first line says only where it came from."""
    text = str(error.java_exception) if isinstance(error, Py4JJavaError) else str(error)
    return text.strip().partition("\n")[0]


def _open(spark: SparkSession, uri: str) -> tuple[Any, Any]:
    path = _jvm(spark).org.apache.hadoop.fs.Path(uri)
    return path, path.getFileSystem(_hadoop_conf(spark))


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


def _hadoop_conf(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()
