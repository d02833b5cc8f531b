"""Small files beside the checkpoint, on whatever file system that is: a local one, or by Hadoop's own client, which Spark has."""

import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from halfway.schemas.errors import SetupError


def local_path(uri: str) -> Path | None:
    """Return the path of a local URI, None for another file system's; for those who ask without a Spark."""
    parsed = urlparse(uri)
    return Path(parsed.path if parsed.scheme else uri) if parsed.scheme in ("", "file") else None


def on_local_disk(spark: SparkSession, uri: str) -> Path | None:
    """Return the path on this machine's disk that Spark takes `uri` for, None if it is another file system's.

    Without a scheme it is Hadoop's `fs.defaultFS` that decides, which on a cluster is seldom this disk.
    """
    path, file_system = _open(spark, uri)
    return Path(path.toUri().getPath()) if file_system.getUri().getScheme() == "file" else None


def read_json(spark: SparkSession, uri: str) -> dict[str, Any] | None:
    """Return the JSON object at `uri`, or None if there is no such file."""
    text = read_text(spark, uri)
    content: dict[str, Any] | None = None if text is None else json.loads(text)
    return content


def read_text(spark: SparkSession, uri: str) -> str | None:
    """Return the text at `uri`, or None if there is no such file."""
    local = on_local_disk(spark, uri)
    if local is not None:
        return local.read_text() if local.exists() else None
    path, file_system = _open(spark, uri)
    if not file_system.exists(path):
        return None
    stream = file_system.open(path)
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def write_json(spark: SparkSession, uri: str, content: dict[str, Any]) -> None:
    """Put a JSON object at `uri`, whole or not at all."""
    data = json.dumps(content, sort_keys=True).encode()
    local = on_local_disk(spark, uri)
    if local is not None:
        # Hadoop's client starts six processes for it, of 8 ms each: `chmod`, and `readlink` to find out what it renames.
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f"{local.name}.part")
        part.write_bytes(data)
        part.replace(local)
        return
    path, file_system = _open(spark, uri)
    try:
        context = _jvm(spark).org.apache.hadoop.fs.FileContext.getFileContext(path.toUri(), _hadoop_conf(spark))
    except Py4JJavaError as error:
        if "UnsupportedFileSystemException" not in str(error):
            raise
        # No atomic rename there. Such file systems are object stores, where a file appears when it is closed, whole.
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
    """Return the names of what is in the folder `uri`; none if there is no such folder."""
    path, file_system = _open(spark, uri)
    return [entry.getPath().getName() for entry in file_system.listStatus(path)] if file_system.exists(path) else []


def has_files(spark: SparkSession, uri: str) -> bool:
    """Whether `uri` is a folder with something in it."""
    return bool(names_in(spark, uri))


def check_writable(spark: SparkSession, uri: str) -> None:
    """Write a small file below `uri` and remove it again.

    Raises:
        SetupError: if that fails; whatever the file system says is in the message.
    """
    try:
        path, file_system = _open(spark, f"{uri.rstrip('/')}/.halfway-doctor-{uuid.uuid4().hex}")
        file_system.create(path, True).close()
        file_system.delete(path, False)
    except Py4JJavaError as error:
        cause = str(error.java_exception).splitlines()[0]
        raise SetupError(f"{uri} cannot be written ({cause}): give the job's user access, or set another place") from None


def _open(spark: SparkSession, uri: str) -> tuple[Any, Any]:
    path = _jvm(spark).org.apache.hadoop.fs.Path(uri)
    return path, path.getFileSystem(_hadoop_conf(spark))


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


def _hadoop_conf(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()
