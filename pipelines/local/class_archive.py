"""Creates the class archives: Spark, and the local broker, load their classes from one mapped file, not from 300 JARs.

`make jars` creates them once for each set of versions. Without them everything works, but a start takes 7 s longer
(docs/performance.md). The JVM compares an archive with the JARs, and ignores one that does not match.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import end_process
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.runtime.jars import JarSet, class_archive, ensure_jars
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import allow_no_other_to_write, home, locked
from halfway.pipelines.runtime.session import own_session, spark_session
from halfway.pipelines.runtime.signals import ended_by_signals
from halfway.schemas import headers as h
from halfway.schemas.errors import HalfwayError, SetupError
from halfway.schemas.settings import Settings

_ARCHIVED: tuple[JarSet, ...] = ("spark", "kafka")
_LIMIT_S = 600
_STOP_LIMIT_S = 60


def ensure_class_archives() -> None:
    """Create the class archives for this Spark, this Kafka and this Java if one is missing. Takes about a minute.

    Raises:
        SetupError: Java or the JARs are missing, or the job that loads the classes fails. The message names its log.
    """
    java = find_java()
    archives = []
    for conf in _ARCHIVED:
        ensure_jars(conf)
        archives.append(class_archive(java, conf))
    folder = home() / "jars"
    with locked(folder / ".archive.lock"):
        if all(archive.is_file() for archive in archives):
            return
        sys.stderr.write("archiving the classes that Spark and Kafka load, once, for faster starts; this takes about a minute ...\n")
        for archive in archives:
            for old in archive.parent.glob("*.jsa"):
                old.unlink()
        partial = [archive.with_suffix(".partial") for archive in archives]
        _make_in_own_process(partial, folder / "classes.log")
        for written, archive in zip(partial, archives, strict=True):
            written.rename(archive)


def _make_in_own_process(archives: Sequence[Path], log: Path) -> None:
    command = [sys.executable, "-m", "halfway.pipelines.local.class_archive", *map(str, archives)]
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_MASTER"}
    with log.open("w") as output:
        # In its own session: a Ctrl-C reaches only this process, which then ends that one, its broker and its Spark.
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True)
    try:
        code = job.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"the job that loads the classes took more than {_LIMIT_S} s; see {log}") from None
    finally:
        if job.poll() is None:
            end_process(job.pid, job, _STOP_LIMIT_S)
    if code != 0:
        raise SetupError(f"the job that loads the classes failed (exit code {code}); see {log}")
    if not all(archive.is_file() for archive in archives):
        raise SetupError(f"this Java wrote no archive; see {log}")


def _run_a_job(of_spark: Path, of_kafka: Path) -> None:
    """Run the job on a few records in this process. Spark's JVM and the broker's write their archives when they end."""
    with tempfile.TemporaryDirectory(prefix="halfway-classes-") as folder:
        broker = LocalBroker(Path(folder) / "broker", of_kafka)
        broker.start()
        try:
            settings = load_settings(environ={}, overrides=_overrides(Path(folder), broker))
            create_topics(settings, 1)
            _send_some(settings)
            with own_session():
                ResolveJob(settings).run(lambda: spark_session(settings, archive_classes=of_spark))
        finally:
            broker.stop()


def _overrides(folder: Path, broker: LocalBroker) -> dict[str, object]:
    return {
        "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
        "storage.warehouse": str(folder / "warehouse"),
        "storage.checkpoint": str(folder / "checkpoint"),
        "trigger.available_now": True,
        **{f"resolution.{name}": 1 for name in ("transactionTimeOut", "transactionCheckInterval", "tick_interval")},
    }


def _send_some(settings: Settings) -> None:
    """Send a half that is committed, one that is asked about, and one that is quarantined."""
    group: h.HeaderList = [(h.PGROUP, b"archive")]
    kafka, writer = settings.kafka, RecordWriter(settings.kafka)
    for key in (b"committed", b"asked"):
        writer.put(kafka.half_topic, key, b"body", [*group, (h.REAL_TOPIC, b"archive")])
    writer.put(kafka.half_topic, b"broken", b"body", group)
    writer.put(kafka.op_topic, b"committed", None, [*group, (h.ACTION, h.LocalTransactionState.COMMIT.encode())])
    writer.flush()


def main(arguments: Sequence[str]) -> int:
    """Create the archives if one is missing. A failure only prints a warning, because the archives are optional.

    Args:
        arguments: none, or the two paths to which Spark and the broker of a job in this process write their archives.
    """
    allow_no_other_to_write()
    if arguments:
        of_spark, of_kafka = map(Path, arguments)
        with ended_by_signals():
            _run_a_job(of_spark, of_kafka)
        return 0
    try:
        with ended_by_signals():
            ensure_class_archives()
    except HalfwayError as error:
        sys.stderr.write(f"warning: no class archive, so Spark and Kafka start more slowly: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
