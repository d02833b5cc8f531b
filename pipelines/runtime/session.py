"""The Spark session: taken as it is on a cluster, made here on a machine of its own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from halfway.pipelines.runtime.jars import class_archive, class_path, ensure_jars
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import home
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import Settings

REQUIRED_CONF = {
    "spark.sql.session.timeZone": "UTC",
    # The horizon needs no batch without data: time is an event.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # 50 by default: an append would cost 3 s for a log of a few files.
    "spark.databricks.delta.snapshotPartitions": "1",
    # It plans again after each stage: of use for long queries, and a tenth of a second for each of ours.
    "spark.sql.adaptive.enabled": "false",
    # INT96 by default, which readers without Spark take for nanoseconds: a time after 2262 would silently be another one.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # The outcomes are kept for the seconds that a batch takes: to compress them costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Values that never repeat: Parquet would build a dictionary of them, and then throw it away.
    "parquet.enable.dictionary#transaction_id": "false",
    "parquet.enable.dictionary#keys": "false",
    "parquet.enable.dictionary#body": "false",
    "parquet.enable.dictionary#half_offset": "false",
}
"""What the job sets on any session, because it would be wrong or slow otherwise."""

_LOCAL_CONF = {
    # The default one starts a process, of 8 ms, four times for each commit on a local disk: `readlink`, to find out what it renames.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "4g",
    # A job for throughput: G1, the default, takes a tenth more of the CPU for shorter pauses, which no batch notices.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.ui.showConsoleProgress": "false",
    # Spark's own rule, and what it does not know: a private key in PEM, and the login of which only the value has a telling word.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore[.]key|PRIVATE KEY",
    # A streaming job makes a dozen Spark jobs a batch: what the UI remembers must not grow for hours.
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "200",
    "spark.ui.retainedTasks": "2000",
    "spark.sql.ui.retainedExecutions": "50",
    "spark.sql.streaming.ui.retainedProgressUpdates": "50",
}


_SMALL_CONF = {
    "spark.master": "local[1]",
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    # It ends before well optimised code would have paid for its making, and for its threads.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
"""For commands that look on beside a running job: one core, and a heap that grows no further than large bodies need."""
_FLOODING_LOGGER = "org.apache.kafka.clients.consumer.internals.FetchCollector"
"""Of a topic that is gone it tells 4,000 times a second, 2 MB, until Spark gives its records up; the job then says so in a line."""
_QUIET_ARCHIVE = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def spark_session(settings: Settings, *, ui: bool = False, small: bool = False, archive_classes: Path | None = None) -> SparkSession:
    """Return the session to run in.

    One that this process has is taken, as on Databricks. Under spark-submit it is made as the cluster says. Otherwise a local one
    is started on all cores (or `SPARK_MASTER`), on loopback, with the JARs of `conf/ivy.xml`; if it is to be `small`, on one core.
    Where it is to `archive_classes`, its JVM writes the archive when it ends.

    Raises:
        SetupError: if Java or the JARs are missing, or Spark is only there by Spark Connect.
    """
    spark = running_session()
    if spark is None:
        spark = SparkSession.builder.getOrCreate() if is_submitted() else _local_session(ui, small, archive_classes)
    refuse_connect(spark)
    for name, value in REQUIRED_CONF.items():
        spark.conf.set(name, value)
    spark.conf.set("spark.sql.shuffle.partitions", str(settings.state.shuffle_partitions))
    return spark


def refuse_connect(spark: SparkSession) -> None:
    """Refuse a session of Spark Connect: the job counts by accumulators, and writes beside its checkpoint by the driver's JVM.

    Raises:
        SetupError: if it is one.
    """
    if not hasattr(spark, "_jvm"):
        raise SetupError(
            "this is Spark Connect, as on Databricks' serverless compute and in its standard access mode: run on a job cluster in "
            "dedicated access mode (data_security_mode: DATA_SECURITY_MODE_DEDICATED)"
        )


def running_session() -> SparkSession | None:
    """Return the Spark that this process has, None if it has none; Spark's own active session is a thread's."""
    return None if SparkContext._active_spark_context is None else SparkSession.builder.getOrCreate()


@contextmanager
def own_session() -> Iterator[None]:
    """Stop a Spark that is started in this block, so that executors and ports are free at once; one that was there before stays."""
    before = running_session()
    try:
        yield
    finally:
        running = running_session()
        if before is None and running is not None:
            running.stop()


def is_submitted() -> bool:
    """Whether a cluster runs this process, under spark-submit or on Databricks: it brings its own Java and JARs."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or "DATABRICKS_RUNTIME_VERSION" in os.environ


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Give a JVM that starts meanwhile stderr for its stdout: what Spark prints there is no part of a command's output."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _local_session(ui: bool, small: bool, archive_classes: Path | None) -> SparkSession:
    java = find_java()
    os.environ.setdefault("JAVA_HOME", str(Path(java).resolve().parent.parent))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = ensure_jars("spark")
    conf = {**_LOCAL_CONF, **(_SMALL_CONF if small else {"spark.master": os.environ.get("SPARK_MASTER", "local[*]")})}
    # On the JVM's own class path, not in a class loader of Spark's: of that one's classes there can be no archive.
    conf["spark.driver.extraClassPath"] = class_path(jars)
    if conf["spark.master"].partition("[")[0] != "local":  # executors are processes of their own, also of a local-cluster[...]
        conf["spark.jars"] = ",".join(map(str, jars))
    conf["spark.driver.extraJavaOptions"] += f" {_archive_option(java, archive_classes)}"
    # Nothing goes there; Spark makes the folder all the same, in the current directory if none is named.
    conf["spark.sql.warehouse.dir"] = str(home() / "spark-warehouse")
    conf.setdefault("spark.ui.enabled", str(ui).lower())
    builder = SparkSession.builder.appName("halfway")
    for name, value in conf.items():
        builder = builder.config(name, value)
    with _stdout_is_stderr():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(os.environ.get("HALFWAY_SPARK_LOG", "WARN"))
    jvm: Any = spark._jvm
    log4j = jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel(_FLOODING_LOGGER, log4j.Level.ERROR)
    return spark


def _archive_option(java: Path, to_make: Path | None) -> str:
    """Return what tells the JVM of its class archive. It finds out itself whether that fits, and says nothing if it does not."""
    if to_make is not None:
        return f'-XX:ArchiveClassesAtExit="{to_make}" {_QUIET_ARCHIVE}'
    archive = class_archive(java)
    return f'-XX:SharedArchiveFile="{archive}" -Xshare:auto {_QUIET_ARCHIVE}' if archive.is_file() else ""
