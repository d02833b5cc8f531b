"""`halfway doctor`'s findings: what the job needs, looked at one by one, without changing anything."""

import platform
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

from halfway.pipelines.runtime.jars import jars_present
from halfway.pipelines.runtime.java import MIN_VERSION, find_java
from halfway.pipelines.runtime.session import is_submitted
from halfway.pipelines.storage.file_systems import local_path
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import MetricsSettings, StorageSettings

MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 1024**3
LITTLE_FREE_BYTES = 5 * 1024**3
_ASK_LIMIT_S = 2.0


class State(StrEnum):
    """How something was found. Only a PROBLEM keeps the job from being right."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    """It could not be looked at, from here or because of another problem."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it was found, and where it is wrong, the way out."""

    check: str
    state: State
    text: str


def looked_at(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what `look` finds; an error raised on purpose is a problem, and says itself what to do."""
    try:
        yield from look()
    except HalfwayError as error:
        yield Finding(check, State.PROBLEM, " ".join(str(error).split()))


def machine() -> Iterator[Finding]:
    """Look at Python, Java and the JARs."""
    yield from looked_at("python", _python)
    yield from looked_at("java", _java)
    yield from looked_at("jars", _jars)


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield Finding("python", State.PROBLEM, f"Python {version} is too old: install {wanted} or newer, and make the environment with it")
        return
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("pyspark", "delta-spark", "confluent-kafka"))
    yield Finding("python", State.OK, f"Python {version}, {packages}")


def _java() -> Iterator[Finding]:
    yield Finding("java", State.OK, f"{find_java()} is Java {MIN_VERSION} or newer")


def _jars() -> Iterator[Finding]:
    if is_submitted():
        yield Finding("jars", State.OK, "the cluster brings its own")
        return
    jars = jars_present("spark")
    if jars:
        yield Finding("jars", State.OK, f"{len(jars)} of Spark's connectors in {jars[0].parent}")
    else:
        way_out = "the first start fetches them from Maven Central, 23 MB; to do it now: `python -m halfway.pipelines.runtime.jars spark`"
        yield Finding("jars", State.WARNING, f"Spark's connectors are not there yet: {way_out}")


def disk(storage: StorageSettings) -> Iterator[Finding]:
    """Look at the room where tables and checkpoint are, as far as that is on this machine."""
    warehouse = [] if storage.catalog_schema else [("warehouse", storage.warehouse)]
    for name, uri in (*warehouse, ("checkpoint", storage.checkpoint)):
        folder = local_path(uri)
        if folder is None:
            continue
        free = shutil.disk_usage(existing(folder)).free
        text = f"{free / 1024**3:.1f} GiB free for the {name} {folder}"
        if free < MIN_FREE_BYTES:
            yield Finding("disk", State.PROBLEM, f"only {text}: make room, or set storage.{name} to another disk")
        elif free < LITTLE_FREE_BYTES:
            yield Finding("disk", State.WARNING, f"only {text}: make room soon")
        else:
            yield Finding("disk", State.OK, text)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def metrics(settings: MetricsSettings) -> Iterator[Finding]:
    """Look at whether metrics can be served."""
    if not settings.port:
        yield Finding("metrics", State.OK, "off: metrics.port is 0")
        return
    if util.find_spec("prometheus_client") is None:
        yield Finding("metrics", State.PROBLEM, "prometheus-client is not installed: pip install 'halfway[metrics]'")
        return
    place = f"http://{settings.host}:{settings.port}/metrics"
    try:
        with socket.create_server((settings.host, settings.port)):
            yield Finding("metrics", State.OK, f"{place} is free for the job")
    except OSError as error:
        if _is_ours(settings):
            yield Finding("metrics", State.OK, f"a job serves them at {place}")
        else:
            why = error.strerror or str(error)
            yield Finding("metrics", State.PROBLEM, f"cannot serve {place} ({why}): set metrics.port to a free one, or to 0")


def _is_ours(settings: MetricsSettings) -> bool:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    try:
        with urllib.request.urlopen(f"http://{host}:{settings.port}/metrics", timeout=_ASK_LIMIT_S) as answer:
            return b"halfway_start_timestamp_seconds" in answer.read()
    except (OSError, ValueError, urllib.error.URLError):
        return False
