"""Checks tables and checkpoint for `halfway doctor`: they can be written, and they belong together.

Local folders are read as plain files, because Spark takes 10 s to start. Other places are read with Spark.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from halfway.pipelines.kafka.admin import admin_client, topic_ids
from halfway.pipelines.operate.doctor.finding import Finding, Health, errors_as_findings
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.file_systems import local_path, verify_folder_writable, verify_local_folder_writable
from halfway.pipelines.storage.lineage import TableHistory, history_of, verify_histories
from halfway.pipelines.storage.local_ownership import local_folder, local_history, read_local_ownership, reading
from halfway.pipelines.storage.locks import is_in_use
from halfway.pipelines.storage.ownership import Ownership, read_ownership, verify_ownership
from halfway.pipelines.storage.state_reader import CheckpointFiles, HadoopFiles, LocalFiles
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.tables import Table


def storage_findings(settings: Settings) -> Iterator[Finding]:
    """Check the warehouse, the checkpoint and their ownership."""
    schema = settings.storage.catalog_schema
    if schema:
        yield Finding("warehouse", Health.UNKNOWN, f"the tables are in the schema {schema}, whose catalog grants the rights to them")
    else:
        yield from errors_as_findings("warehouse", lambda: _writable("warehouse", settings.storage.warehouse, settings))
    yield from errors_as_findings("checkpoint", lambda: _writable("checkpoint", settings.storage.checkpoint, settings))
    yield from errors_as_findings("ownership", lambda: _ownership(settings))


def _writable(name: str, uri: str, settings: Settings) -> Iterator[Finding]:
    folder = local_path(uri)
    if folder is None:
        verify_folder_writable(spark_session(settings), uri)
        yield Finding(name, Health.OK, f"{uri} can be written")
        return
    verify_local_folder_writable(f"storage.{name}", folder)
    if name == "checkpoint" and is_in_use(settings.storage):
        yield Finding(name, Health.OK, f"{folder} is in use: a job is running on it, and a second one would be refused")
    else:
        yield Finding(name, Health.OK, f"{folder} can be written" + ("" if folder.exists() else "; the job creates it"))


def _ownership(settings: Settings) -> Iterator[Finding]:
    storage = settings.storage
    files: CheckpointFiles
    history: Callable[[StorageSettings, str, Table], TableHistory]
    if storage.catalog_schema or any(local_path(uri) is None for uri in (storage.warehouse, storage.checkpoint)):
        spark = spark_session(settings)
        found, files, history = read_ownership(spark, storage), HadoopFiles(spark, storage), partial(history_of, spark)
    else:
        found, files, history = read_local_ownership(storage), LocalFiles(local_folder(storage.checkpoint)), local_history
    verify_ownership(settings, found, _topic_ids(settings.kafka, found), adopt=False)
    if found.query_id is not None and found.tables.keys() == set(Table):
        with reading(storage):
            verify_histories(files, storage, found.query_id, partial(history, storage, found.query_id))
    new = not found.tables and found.last_batch_id is None
    yield Finding("ownership", Health.OK, "empty: the first start creates them" if new else "checkpoint and tables belong together")


def _topic_ids(kafka: KafkaSettings, found: Ownership) -> Mapping[str, str]:
    """Return Kafka's ids of the checkpoint's topics; none if there is nothing to compare, or Kafka does not say."""
    if found.manifest is None or not found.manifest.topic_ids:
        return {}
    with suppress(HalfwayError):  # `kafka_findings` says so
        return topic_ids(admin_client(kafka), (kafka.half_topic, kafka.op_topic))
    return {}
