"""Small files beside the checkpoint, on whatever file system that is: Hadoop's own client, which Spark has."""

import json
from typing import Any

from pyspark.sql import SparkSession


def read_json(spark: SparkSession, uri: str) -> dict[str, Any] | None:
    """Return the JSON object at `uri`, or None if there is no such file. A Spark log's leading version line is passed over."""
    path, file_system = _open(spark, uri)
    if not file_system.exists(path):
        return None
    stream = file_system.open(path)
    try:
        text = bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()
    content: dict[str, Any] = json.loads(text)
    return content


def write_json(spark: SparkSession, uri: str, content: dict[str, Any]) -> None:
    """Put a JSON object at `uri`, whole or not at all."""
    part, file_system = _open(spark, f"{uri}.part")
    stream = file_system.create(part, True)
    try:
        stream.write(json.dumps(content, sort_keys=True).encode())
    finally:
        stream.close()
    jvm: Any = spark.sparkContext._jvm
    context = jvm.org.apache.hadoop.fs.FileContext.getFileContext(part.toUri(), spark.sparkContext._jsc.hadoopConfiguration())
    overwrite = jvm.org.apache.hadoop.fs.Options.Rename.OVERWRITE
    gateway: Any = spark.sparkContext._gateway
    options = gateway.new_array(jvm.org.apache.hadoop.fs.Options.Rename, 1)
    options[0] = overwrite
    context.rename(part, _open(spark, uri)[0], options)


def has_files(spark: SparkSession, uri: str) -> bool:
    """Whether `uri` is a folder with something in it."""
    path, file_system = _open(spark, uri)
    return bool(file_system.exists(path)) and len(file_system.listStatus(path)) > 0


def _open(spark: SparkSession, uri: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm
    path = jvm.org.apache.hadoop.fs.Path(uri)
    return path, path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
