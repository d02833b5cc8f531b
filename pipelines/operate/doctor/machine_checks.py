"""Checks this machine for `halfway doctor`: Python, Java, JARs, disk, the metrics port."""

import platform
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata, util

import pyspark

from halfway.pipelines.operate.doctor.finding import Finding, Health, errors_as_findings
from halfway.pipelines.runtime.jars import jars_present
from halfway.pipelines.runtime.java import MIN_VERSION, find_java
from halfway.pipelines.runtime.session import is_submitted
from halfway.pipelines.storage.file_systems import local_path, nearest_existing
from halfway.schemas.errors import MissingPackageError
from halfway.schemas.settings import MetricsSettings, StorageSettings

MIN_FREE_BYTES = 1024**3
LITTLE_FREE_BYTES = 5 * 1024**3
_ASK_LIMIT_S = 2.0


def machine_findings() -> Iterator[Finding]:
    """Check Python, Java and the JARs."""
    yield from errors_as_findings("python", _python)
    yield from errors_as_findings("java", _java)
    yield from errors_as_findings("jars", _jars)


def _python() -> Iterator[Finding]:
    packages = [f"pyspark {pyspark.__version__}"]
    for name in ("delta-spark", "confluent-kafka"):
        with suppress(metadata.PackageNotFoundError):  # On a cluster Delta's package is in its JAR, and not installed.
            packages.append(f"{name} {metadata.version(name)}")
    yield Finding("python", Health.OK, f"Python {platform.python_version()}, {', '.join(packages)}")


def _java() -> Iterator[Finding]:
    yield Finding("java", Health.OK, f"{find_java()} is Java {MIN_VERSION} or newer")


def _jars() -> Iterator[Finding]:
    if is_submitted():
        yield Finding("jars", Health.OK, "the cluster provides its own")
        return
    jars = jars_present("spark")
    if jars:
        yield Finding("jars", Health.OK, f"{len(jars)} of Spark's connectors in {jars[0].parent}")
    else:
        remedy = "the first start downloads them from Maven Central (23 MB); `python -m halfway.pipelines.runtime.jars spark` does it now"
        yield Finding("jars", Health.WARNING, f"Spark's connectors are not downloaded yet: {remedy}")


def disk_findings(storage: StorageSettings) -> Iterator[Finding]:
    """Check the free space for tables and checkpoint, if they are on this machine."""
    warehouse = [] if storage.catalog_schema else [("warehouse", storage.warehouse)]
    for name, uri in (*warehouse, ("checkpoint", storage.checkpoint)):
        folder = local_path(uri)
        if folder is None:
            continue
        free = shutil.disk_usage(nearest_existing(folder)).free
        text = f"{free / 1024**3:.1f} GiB free for the {name} {folder}"
        if free < MIN_FREE_BYTES:
            remedy = f"free some space, or stop the job, move the folder to another disk, and set storage.{name}"
            yield Finding("disk", Health.PROBLEM, f"only {text}: {remedy}")
        elif free < LITTLE_FREE_BYTES:
            yield Finding("disk", Health.WARNING, f"only {text}: free some space soon")
        else:
            yield Finding("disk", Health.OK, text)


def metrics_findings(settings: MetricsSettings) -> Iterator[Finding]:
    """Check that the job can serve its metrics."""
    if not settings.port:
        yield Finding("metrics", Health.OK, "off: metrics.port is 0")
        return
    if util.find_spec("prometheus_client") is None:
        yield Finding("metrics", Health.PROBLEM, str(MissingPackageError("metrics.port", "prometheus-client", "metrics")))
        return
    place = f"http://{settings.host}:{settings.port}/metrics"
    try:
        with socket.create_server((settings.host, settings.port)):
            yield Finding("metrics", Health.OK, f"{place} is free for the job")
    except OSError as error:
        if _serves_our_metrics(settings):
            yield Finding("metrics", Health.OK, f"a job serves them at {place}")
        else:
            why = error.strerror or str(error)
            yield Finding("metrics", Health.PROBLEM, f"cannot serve {place} ({why}): set metrics.port to a free one, or to 0")


def _serves_our_metrics(settings: MetricsSettings) -> bool:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    try:
        with urllib.request.urlopen(f"http://{host}:{settings.port}/metrics", timeout=_ASK_LIMIT_S) as answer:
            return b"halfway_start_timestamp_seconds" in answer.read()
    except (OSError, ValueError, urllib.error.URLError):
        return False
