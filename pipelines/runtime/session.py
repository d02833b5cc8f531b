"""Provides the Spark session: the cluster's, or a local one on a single machine."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.core import context
from pyspark.errors import AnalysisException, PythonException
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from halfway.conf.loader import conf_file
from halfway.pipelines.runtime.guard import OUTLIVES_BY_S
from halfway.pipelines.runtime.jars import class_archive, class_path, ensure_jars, make_archive, use_archive
from halfway.pipelines.runtime.java import SHORT_LIVED_JVM, find_java
from halfway.pipelines.runtime.jvm import end_jvm, guard_jvm, jvm_has_ended
from halfway.pipelines.runtime.paths import home
from halfway.pipelines.runtime.signals import deferred_signals
from halfway.schemas.errors import SetupError, SparkFailedError
from halfway.schemas.settings import Settings

REQUIRED_CONF = {
    "spark.sql.session.timeZone": "UTC",
    # Ticks are data, so that the horizon needs no batch without data (decision 1).
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # `pending`, `status` and the notebooks read its files. Databricks has another default since runtime 17.3.
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    # Delta uses 50 snapshot partitions by default, which makes each append take 3 s.
    "spark.databricks.delta.snapshotPartitions": "1",
    # Adaptive execution plans again after each stage. That helps long queries, and costs each short one a tenth of a
    # second.
    "spark.sql.adaptive.enabled": "false",
    # Spark writes INT96 by default. Readers without Spark take it for nanoseconds, and silently misread times after
    # 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # The outcomes are cached for the seconds that a batch takes: compressing them costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # These values never repeat: Parquet would build a dictionary and then discard it.
    "parquet.enable.dictionary#transaction_id": "false",
    "parquet.enable.dictionary#keys": "false",
    "parquet.enable.dictionary#body": "false",
    "parquet.enable.dictionary#half_offset": "false",
}
"""What the job sets on every session. Without these values the job would be wrong or slow."""

_LOCAL_CONF = {
    # The default log store starts `readlink` four times for each commit on a local disk, 8 ms each.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Hadoop's client does not look at the umask of its process.
    "spark.hadoop.fs.permissions.umask-mode": "077",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "4g",
    # G1, the default collector, spends a tenth more CPU on short pauses, and a batch job gains nothing from them.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.ui.showConsoleProgress": "false",
    # Spark's own pattern, and what it misses: a private key in PEM, and the JAAS login, whose name has no telltale
    # word.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore[.]key|PRIVATE KEY",
    # Spark uploads the state's first snapshots after a minute. By default it warns of each partition that has none
    # after 50 batches; here after 500.
    "spark.sql.streaming.stateStore.multiplierForMinVersionDiffToLog": "50",
    # A streaming job runs a dozen Spark jobs a batch: the UI's memory must not grow for hours.
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
    "spark.driver.extraJavaOptions": f"{SHORT_LIVED_JVM} -XX:+UseSerialGC",
}
"""For commands beside a running job: one core, and a heap that large bodies fit into."""


def spark_session(
    settings: Settings, *, ui: bool = False, small: bool = False, beside_job: bool = False, archive_classes: Path | None = None
) -> SparkSession:
    """Return the session to run in.

    Takes the session that this process has, as on Databricks. Under spark-submit, makes one as the cluster is
    configured. Otherwise starts a local one on loopback, with the JARs of `conf/ivy.xml`.

    Args:
        settings: the job's settings.
        ui: serve Spark's UI, on a local session.
        small: use one core instead of all cores (or `SPARK_MASTER`).
        beside_job: end its JVM at once if this process is killed, and not within 10 s: this process's locks are gone
            then, which keep the job from a commit at the same time.
        archive_classes: where the JVM of a local session writes its class archive when it ends.

    Raises:
        SetupError: Java or the JARs are missing, or the session is Spark Connect's.
    """
    spark = running_session()
    if spark is None:
        spark = SparkSession.builder.getOrCreate() if is_submitted() else _local_session(ui, small, beside_job, archive_classes)
    refuse_connect(spark)
    for name, value in REQUIRED_CONF.items():
        spark.conf.set(name, value)
    spark.conf.set("spark.sql.shuffle.partitions", str(settings.state.shuffle_partitions))
    return spark


def refuse_connect(spark: SparkSession) -> None:
    """Refuse a Spark Connect session.

    The job uses accumulators, and writes files beside its checkpoint through the driver's JVM.

    Raises:
        SetupError: the session is Spark Connect's.
    """
    if not hasattr(spark, "_jvm"):
        raise SetupError(
            "this is Spark Connect, as on Databricks' serverless compute and in its standard access mode: run on a job cluster in "
            "dedicated access mode (data_security_mode: DATA_SECURITY_MODE_DEDICATED)"
        )


def running_session() -> SparkSession | None:
    """Return the session of this process, or None. Spark's own `getActiveSession` knows only the thread's."""
    return None if SparkContext._active_spark_context is None else SparkSession.builder.getOrCreate()


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise an error of Spark or a store in one line, while the JVM runs that has its text. It has pages of Java.

    What is most often a defect of ours passes as it is: a column that does not exist, a function that fails.

    Raises:
        SparkFailedError: Spark's first line, or that its JVM has ended: each request to it fails with another error.
    """
    try:
        yield
    except Exception as error:
        if jvm_has_ended():
            raise SparkFailedError("Spark's JVM has ended: it was killed, as for want of memory, or has said why before") from error
        if not isinstance(error, Py4JJavaError | CapturedException) or isinstance(error, AnalysisException | PythonException):
            raise
        told = str(error.java_exception if isinstance(error, Py4JJavaError) else error)
        raise SparkFailedError(f"Spark has failed: {told.strip().partition(chr(10))[0]}") from error


@contextmanager
def own_session() -> Iterator[None]:
    """Stop a session that starts within the block, and its JVM. Leave an earlier session running.

    Raises:
        SparkFailedError: as `spark_errors`.
    """
    before = running_session()
    try:
        with spark_errors():
            yield
    finally:
        running = None if jvm_has_ended() else running_session()
        if before is None and running is not None:
            # Spark reports each thread that it interrupts by a page of Java. The command's own error comes last.
            running.sparkContext.setLogLevel("OFF")
            running.stop()
            end_jvm()


def is_submitted() -> bool:
    """Return True under spark-submit and on Databricks, where the cluster brings its own Java and JARs."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or "DATABRICKS_RUNTIME_VERSION" in os.environ


@contextmanager
def redirected(target: int, *descriptors: int) -> Iterator[None]:
    """Let these file descriptors write to `target` until the block ends. A JVM that starts in it inherits them."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in descriptors}
    try:
        for number in descriptors:
            os.dup2(target, number)
        yield
    finally:
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)


def _local_session(ui: bool, small: bool, beside_job: bool, archive_classes: Path | None) -> SparkSession:
    java = find_java()
    os.environ.setdefault("JAVA_HOME", str(java.resolve().parent.parent))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = ensure_jars("spark")
    conf = {**_LOCAL_CONF, **(_SMALL_CONF if small else {"spark.master": os.environ.get("SPARK_MASTER", "local[*]")})}
    # The JVM's own class path: the class archive cannot hold classes of Spark's class loader.
    conf["spark.driver.extraClassPath"] = class_path(jars)
    # Executors run in their own processes, also those of local-cluster[...].
    if conf["spark.master"].partition("[")[0] == "local":
        # The driver listens on loopback, for every user of the machine. Spark makes a secret by itself only here.
        conf["spark.authenticate"] = "true"
        # A machine that stood still for two minutes would lose its only executor, which cannot register again: after
        # sixty heartbeats, with a page of errors each, Spark would end the JVM.
        conf["spark.storage.blockManagerHeartbeatTimeoutMs"] = "365d"
    else:
        conf["spark.jars"] = ",".join(map(str, jars))
    archive_options = make_archive(archive_classes) if archive_classes is not None else use_archive(class_archive(java))
    options = [f"-Dlog4j2.configurationFile={conf_file('log4j2.properties')}", *archive_options]
    conf["spark.driver.extraJavaOptions"] += "".join(f' "{option}"' for option in options)
    # Nothing is written there, but Spark creates the folder, in the current directory by default.
    conf["spark.sql.warehouse.dir"] = str(home() / "spark-warehouse")
    conf.setdefault("spark.ui.enabled", str(ui).lower())
    spark_conf = SparkConf().setAppName("halfway").setAll(list(conf.items()))
    with redirected(2, 1):  # Spark's lines must not mix with a command's output.
        # A JVM whose launch is interrupted stays for ever: PySpark removes the folder in which it is to write its port,
        # and a thread of its server outlives the failure.
        with deferred_signals():
            SparkContext._ensure_initialized(conf=spark_conf)
            guard_jvm(0.0 if beside_job else OUTLIVES_BY_S)
        with _without_sparks_ctrl_c():
            return SparkSession.builder.config(conf=spark_conf).getOrCreate()


@contextmanager
def _without_sparks_ctrl_c() -> Iterator[None]:
    """Keep the command's handler of Ctrl-C while a context is made: PySpark sets its own.

    That one asks the JVM to cancel its jobs, which fails while another request waits for its answer.
    """
    former = context.signal
    context.signal = SimpleNamespace(SIGINT=former.SIGINT, signal=lambda *_: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        context.signal = former
