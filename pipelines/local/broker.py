"""Runs a local single-node Kafka for development and tests: from Maven artifacts, on loopback, in its own process."""

import json
import logging
import os
import re
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypedDict

from confluent_kafka import KafkaException

from halfway.conf.loader import conf_file
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.local.processes import HOST, command_line, end_process, free_port, is_free, wait_until
from halfway.pipelines.runtime.jars import class_archive, class_path, ensure_jars, make_archive, use_archive
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import home, locked
from halfway.schemas.errors import BrokerError, SetupError

START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
MIN_FREE_BYTES = 1024**3
_HEAP = "-Xms256m -Xmx1g"  # Kafka's own KAFKA_HEAP_OPTS overrides it.
_FORMAT_LIMIT_S = 60
_PORT_TRIES = 3
_PORT_LIMIT_S = 5.0
_NOISE = ("\tat ", "\t...", "Error: Could not create the Java", "Error: A fatal exception has occurred")
_ERROR_LINE = re.compile(r"ERROR|FATAL|Caused by|Exception|Error:|OutOfMemory")

log = logging.getLogger(__name__)


class BrokerStatus(TypedDict):
    """What `broker status --json` prints. The address is None for a broker that was never started."""

    running: bool
    bootstrap_servers: str | None


class _PortLostError(BrokerError):
    """Another process took the port before Kafka bound it."""


class LocalBroker:
    """One Kafka node (KRaft, broker and controller in one process) with data, logs and pid under `directory`.

    The broker keeps its address over restarts. Any process may call any method, also several processes at once.
    """

    def __init__(self, directory: Path, archive_classes: Path | None = None) -> None:
        """Store the directory. Does not start or change anything.

        Args:
            directory: where the broker keeps its files.
            archive_classes: where its JVM writes its class archive when it ends.
        """
        self.directory = directory.resolve()
        self._archive_classes = archive_classes
        self.log_file = self.directory / "broker.log"
        self._properties = self.directory / "server.properties"
        self._pid_file = self.directory / "broker.pid"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, port: int | None = None, limit_s: float = START_LIMIT_S) -> bool:
        """Start the broker and wait until it answers. Return False if it was already running.

        Args:
            port: the port to listen on from now on; None for the previous one, or a free one at the first start.
            limit_s: how long it may take to answer, in seconds. A broker that takes longer is stopped.

        Raises:
            SetupError: Java or a JAR is missing, the port is taken, the disk is nearly full, or the folder has a comma.
            BrokerError: the broker ended or did not answer in time, or it is already running on another port.
        """
        if "," in str(self.directory):
            raise SetupError(f"the folder {self.directory} has a comma, at which Kafka would part its name: use another one")
        with locked(self.directory / ".lock"):
            if self.pid() is not None:
                if port not in (None, self._port()):
                    raise BrokerError(f"the broker is already running on port {self._port()}: run `halfway broker stop` first")
                if self._answers_before(lambda: self.pid() is None, limit_s):
                    return False
            self._check_disk()
            if port is not None:
                _verify_free(port)  # Before 45 MB are fetched.
            java, jars = find_java(), ensure_jars("kafka")
            archive = [] if self._archive_classes is not None else use_archive(class_archive(java, "kafka"))
            command = [str(java), *self._jvm_options(), *archive, "-cp", class_path(jars)]
            self._start_on(port or self._port(), command, limit_s)
            return True

    def stop(self) -> bool:
        """Stop the broker, by SIGKILL after 30 s. Return False if it was not running.

        Raises:
            BrokerError: the broker did not end.
        """
        if not self.directory.is_dir():
            return False
        with locked(self.directory / ".lock"):
            pid = self.pid()
            if pid is None:
                return False
            self._end(pid)
            return True

    def status(self) -> BrokerStatus:
        """Return whether the broker is running, and its address, which it keeps while it is stopped."""
        port = self._port()
        return {"running": self.pid() is not None, "bootstrap_servers": f"{HOST}:{port}" if port else None}

    def pid(self) -> int | None:
        """Return the id of the broker's process, or None. A process that reuses a dead broker's id does not count."""
        try:
            pid = int(self._pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if str(self._properties) in command_line(pid) else None

    def _port(self) -> int | None:
        """Return the port of the last start, which is kept in the properties file.

        The file of a folder that was copied names the port of the broker that runs in the other one.
        """
        try:
            text = self._properties.read_text()
        except FileNotFoundError:
            return None
        match = re.search(r"^listeners=BROKER://[^:]+:(\d+)", text, re.MULTILINE)
        return int(match[1]) if match and f"\n{self._data_line()}\n" in text else None

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < MIN_FREE_BYTES:
            raise SetupError(f"{self.directory} has only {free // 1024**2} MiB free, and the broker needs 1024: free some space")

    def _jvm_options(self) -> list[str]:
        logger = {
            "logFile": self.log_file,
            "defaultLogLevel": "warn",
            "log.kafka.server.KafkaRaftServer": "info",
            "showDateTime": "true",
            "dateTimeFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
        }
        heap = os.environ.get("KAFKA_HEAP_OPTS", _HEAP).split()
        return [*heap, "-XX:+ExitOnOutOfMemoryError", *(f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in logger.items())]

    def _start_on(self, fixed_port: int | None, command: list[str], limit_s: float) -> None:
        for tries_left in reversed(range(_PORT_TRIES)):
            port = fixed_port or free_port()
            _verify_free(port)
            self._configure(port)
            self._format(command)
            try:
                self._launch(command, limit_s)
            except _PortLostError:
                if not tries_left:
                    raise
            else:
                return

    def _configure(self, port: int) -> None:
        """Write the properties that Kafka starts with: `conf/broker.properties` and those of this machine."""
        own = self._own_properties(port, free_port(but=port))
        lines = "".join(f"{name}={value}\n" for name, value in own.items())
        _write(self._properties, f"{conf_file('broker.properties').read_text()}\n# Of this machine\n{lines}{self._data_line()}\n")

    def _data_line(self) -> str:
        # Java reads ISO-8859-1 and its own escapes, which JSON's are too.
        return f"log.dirs={json.dumps(str(self.directory / 'data'))[1:-1]}"

    # The tests' brokers override the next four methods: one with TLS and passwords, and the nodes of a cluster.

    def _cluster_id(self) -> str:
        """Return the id for a new data folder: 16 bytes in base64, of which the first must not become a hyphen."""
        return urlsafe_b64encode(b"\x01" + uuid.uuid4().bytes[1:]).decode().rstrip("=")

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:
        """Return the properties of node, listeners and quorum. The listener for clients comes first."""
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"BROKER://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": f"BROKER://{HOST}:{port}",
            "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "BROKER",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        }

    def _format_options(self) -> list[str]:
        """Return more options for Kafka's command that formats the data folder."""
        return []

    def _client_options(self) -> dict[str, str]:
        """Return librdkafka options, without the address, for the client that waits until the broker answers."""
        return {}

    def _format(self, command: list[str]) -> None:
        """Format the data folder if it is new. Kafka writes `meta.properties` last and atomically."""
        if (self.directory / "data" / "meta.properties").exists():
            return
        java, *options = command
        tool = [java, "-XX:TieredStopAtLevel=1", *options, "kafka.tools.StorageTool"]
        try:
            done = subprocess.run(
                [*tool, "format", "--cluster-id", self._cluster_id(), "--config", str(self._properties), *self._format_options()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_FORMAT_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerError(f"formatting the broker's data folder took longer than {_FORMAT_LIMIT_S} s; try again") from None
        if done.returncode != 0:
            raise BrokerError(f"cannot format the broker's data folder: {_last_error_line(done.stdout + done.stderr)}")

    def _launch(self, command: list[str], limit_s: float) -> None:
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        # Not in `command`, with which Kafka's storage tool would write an archive of its own first.
        archive = [] if self._archive_classes is None else make_archive(self._archive_classes)
        with (self.directory / "broker.out").open("w") as output:
            child = self._child = subprocess.Popen(
                [*command, *archive, "kafka.Kafka", str(self._properties)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _write(self._pid_file, str(child.pid))
        try:
            if not self._answers_before(lambda: child.poll() is not None, limit_s):
                raise self._start_error()
        except BaseException:
            self._end(child.pid)
            raise
        log.info("event=broker_started pid=%d port=%d", child.pid, self._port())

    def _answers_before(self, ended: Callable[[], bool], limit_s: float) -> bool:
        """Wait until the broker answers. Return False if it ends before.

        Raises:
            BrokerError: the broker did not answer within `limit_s`.
        """
        address = f"{HOST}:{self._port()}"
        quick = {"reconnect.backoff.ms": "50", "reconnect.backoff.max.ms": "200"}
        client = Admin({"bootstrap.servers": address, **quick, **self._client_options()})
        if not wait_until(lambda: ended() or _answers(client), limit_s):
            raise BrokerError(f"the broker at {address} does not answer after {limit_s:g} s; see {self.log_file}")
        return not ended()

    def _start_error(self) -> BrokerError:
        logged = "".join(file.read_text(errors="replace") for file in (self.log_file, self.directory / "broker.out") if file.exists())
        error = _PortLostError if "Address already in use" in logged else BrokerError
        return error(f"the broker ended while starting: {_last_error_line(logged)}; see broker.log and broker.out in {self.directory}")

    def _end(self, pid: int) -> None:
        """End the broker's process `pid`, and wait until it has released its files and ports."""
        child = self._child if self._child is not None and self._child.pid == pid else None
        # Once its exit code is collected, the id may belong to another process.
        is_collected = child is not None and child.poll() is not None
        if not is_collected and not end_process(pid, child, STOP_LIMIT_S):
            raise BrokerError(f"the broker (pid {pid}) does not end, even after SIGKILL")
        self._pid_file.unlink(missing_ok=True)


def local_broker() -> LocalBroker:
    """Return the development broker, which is stored under `<home>/broker/`."""
    return LocalBroker(home() / "broker")


def _answers(client: Admin) -> bool:
    """Return True if a broker answers and has registered. A fenced broker is not in its own metadata."""
    try:
        return bool(client.list_topics(timeout=0.5).brokers)
    except KafkaException:
        return False


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    written = path.with_suffix(path.suffix + ".partial")
    written.write_text(text)
    written.replace(path)


def _last_error_line(text: str) -> str:
    """Return the last line of a log that looks like an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    return (errors or lines or ["its log is empty"])[-1]


def _verify_free(port: int) -> None:
    """Refuse a port that is taken. A broker that was killed a moment ago still holds its own."""
    if not wait_until(partial(is_free, port), _PORT_LIMIT_S):
        raise SetupError(f"port {port} is taken by another process: end it, or choose another port with `halfway broker start --port N`")
