"""Starts services in their own processes: with the client in Python, or with the contract's example client in Java."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.load import GROUP
from benchmarks.rig import ROOT
from halfway.pipelines.local.processes import end_process
from halfway.pipelines.runtime.jars import class_path, ensure_jars
from halfway.pipelines.runtime.java import find_java
from halfway.schemas.settings import KafkaSettings

THREADS = 32
_STOP_S = 30.0
CLIENT_SOURCE = ROOT / "examples" / "java" / "TransactionClient.java"
_SOURCES = (CLIENT_SOURCE, ROOT / "benchmarks" / "java" / "TransactionLoad.java")


class Client(StrEnum):
    """The client of a service. One process in Python cannot use more than one core, so two of them send."""

    PYTHON = "python"
    ASYNCIO = "asyncio"
    JAVA = "java"


def produce(client: Client, kafka: KafkaSettings, classes: Path, seconds: float, per_second: float = 0) -> dict[str, Any]:
    """Run the services that send. Return the number of transactions sent, and the seconds of the slowest service."""
    processes = 1 if client is Client.JAVA else 2
    with ExitStack() as stack:
        services = [service(client, kafka, classes, seconds=seconds, per_second=per_second / processes) for _ in range(processes)]
        running = [stack.enter_context(one) for one in services]
        results = [json.loads(process.communicate()[0]) for process in running]
    return {"transactions": sum(one["transactions"] for one in results), "seconds": max(one["seconds"] for one in results)}


def produce_alone(client: Client, kafka: KafkaSettings, classes: Path, seconds: float, senders: int) -> dict[str, float]:
    """Run one service that sends. Return its transactions, its seconds, and its core-seconds with its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with service(client, kafka, classes, seconds=seconds, threads=senders) as process:
        done = json.loads(process.communicate()[0])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"transactions": done["transactions"], "seconds": done["seconds"], "client_s": used_s}


@contextmanager
def service(
    client: Client, kafka: KafkaSettings, classes: Path, *, seconds: float = 3600, per_second: float = 0, threads: int = THREADS
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service, and end it with the block. Without threads it answers checks. It prints its figures as JSON.

    Args:
        client: the client that the service uses.
        kafka: the broker and the topics.
        classes: the folder for the compiled Java.
        seconds: the time until the service ends by itself.
        per_second: the rate of its transactions. With 0 each thread sends the next one when the last is decided.
        threads: the number of threads that send.
    """
    amounts = [str(seconds), str(per_second), str(threads)]
    if client is Client.JAVA:
        topics = (kafka.half_topic, kafka.op_topic, kafka.check_topic)
        command = [*java_program("TransactionLoad", _SOURCES, classes), kafka.servers(), *topics, f"{GROUP}0", *amounts]
    else:
        command = [sys.executable, "-m", "benchmarks.producer", kafka.model_dump_json(), *amounts]
        command += ["asyncio"] if client is Client.ASYNCIO else []
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            end_process(process.pid, process, _STOP_S)


def java_program(main: str, sources: tuple[Path, ...], classes: Path) -> list[str]:
    """Compile sources on Kafka's own client into `classes`, once, and return the command that runs the class `main`."""
    java, jars = str(find_java()), ensure_jars("kafka")
    if not (classes / f"{main}.class").exists():
        compiler = [java, "-m", "jdk.compiler/com.sun.tools.javac.Main", "-Xlint:all", "-Werror", "-d", str(classes)]
        subprocess.run([*compiler, "-cp", class_path(jars), *map(str, sources)], stdin=subprocess.DEVNULL, check=True)
    return [java, "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", class_path([*jars, classes]), main]
