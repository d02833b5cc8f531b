"""The Spark session: taken as it is on a cluster, made here on a machine of its own."""

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from pipelines.home import home
from pipelines.jars import ensure_jars
from pipelines.java import find_java
from schemas.settings import Settings

REQUIRED_CONF = {
    "spark.sql.session.timeZone": "UTC",
    # Of two headers with one name the last is kept (design §2); map_from_entries would fail on them.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # The horizon needs no batch without data: time is an event.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # 50 by default: an append would cost 3 s for a log of a few files.
    "spark.databricks.delta.snapshotPartitions": "2",
}
"""What the job sets on any session, because it would be wrong or slow otherwise."""

_LOCAL_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "4g",
    "spark.ui.showConsoleProgress": "false",
    # A streaming job makes a dozen Spark jobs a batch: what the UI remembers must not grow for hours.
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "200",
    "spark.ui.retainedTasks": "2000",
    "spark.sql.ui.retainedExecutions": "50",
    "spark.sql.streaming.ui.retainedProgressUpdates": "50",
}


def spark_session(settings: Settings, *, ui: bool = False) -> SparkSession:
    """Return the session to run in.

    Under spark-submit or on Databricks it is the one that exists. Otherwise a local one is started on all cores (or
    `SPARK_MASTER`), on loopback, with the JARs of `conf/ivy.xml`.

    Raises:
        SetupError: if Java or the JARs are missing.
    """
    spark = SparkSession.getActiveSession() if _is_submitted() else None
    if spark is None:
        spark = SparkSession.builder.getOrCreate() if _is_submitted() else _local_session(ui=ui)
    for name, value in REQUIRED_CONF.items():
        spark.conf.set(name, value)
    spark.conf.set("spark.sql.shuffle.partitions", str(settings.state.shuffle_partitions))
    return spark


def _is_submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ or "DATABRICKS_RUNTIME_VERSION" in os.environ


def _local_session(*, ui: bool) -> SparkSession:
    java = find_java()
    os.environ.setdefault("JAVA_HOME", str(Path(java).resolve().parent.parent))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = ",".join(str(jar) for jar in ensure_jars("spark"))
    builder = SparkSession.builder.appName("halfway").master(os.environ.get("SPARK_MASTER", "local[*]")).config("spark.jars", jars)
    for name, value in _LOCAL_CONF.items():
        builder = builder.config(name, value)
    # Nothing goes there; Spark makes the folder all the same, in the current directory if none is named.
    builder = builder.config("spark.sql.warehouse.dir", str(home() / "spark-warehouse"))
    spark = builder.config("spark.ui.enabled", str(ui).lower()).getOrCreate()
    spark.sparkContext.setLogLevel(os.environ.get("HALFWAY_SPARK_LOG", "WARN"))
    return spark
