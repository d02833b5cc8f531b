"""A local single-node Kafka for development and tests: real, of Maven artifacts, on loopback, as a process of its own."""

import logging
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from confluent_kafka import KafkaException

from halfway.conf.loader import conf_file
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.runtime.jars import class_path, ensure_jars
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import home, locked
from halfway.schemas.errors import BrokerError, SetupError

HOST = "127.0.0.1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
MIN_FREE_BYTES = 1024**3
PORTS = range(20_000, 32_768)
"""Below the ports that outgoing connections get, so that no client takes a stopped broker's: not even, by calling it, itself."""
_HEAP = "-Xms256m -Xmx1g"  # Kafka's own KAFKA_HEAP_OPTS overrides it
_FORMAT_LIMIT_S = 60
_PORT_TRIES = 3
_PORT_LIMIT_S = 5.0
_POLL_S = 0.1
_NOISE = ("\tat ", "\t...", "Error: Could not create the Java", "Error: A fatal exception has occurred")
_TELLING = re.compile(r"ERROR|FATAL|Caused by|Exception|Error:|OutOfMemory")

log = logging.getLogger(__name__)


class BrokerStatus(TypedDict):
    """What `broker status --json` prints; the address is None for a broker never started."""

    running: bool
    bootstrap_servers: str | None


class _PortLostError(BrokerError):
    """Somebody took a port between our choice and Kafka's bind."""


class LocalBroker:
    """One Kafka node (KRaft, broker and controller in one) with data, logs and pid under `directory`.

    It keeps its address over restarts. Any process may call any method, not only the one that started the broker, and
    several at once.
    """

    def __init__(self, directory: Path) -> None:
        """Name the broker that lives in `directory`; nothing is touched before `start`."""
        self.directory = directory.resolve()
        self.log_file = self.directory / "broker.log"
        self._properties = self.directory / "server.properties"
        self._pid_file = self.directory / "broker.pid"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, port: int | None = None, limit_s: float = START_LIMIT_S) -> bool:
        """Start the broker and wait until it answers; return False if it was running already.

        Args:
            port: the port to listen on from now on; None for the one it had, or else a free one.
            limit_s: how long it may take to answer, in seconds. One that does not is stopped again.

        Raises:
            SetupError: Java or a JAR is missing, the port is taken, or the disk is nearly full.
            BrokerError: it ended or did not answer in time, or runs already on another port than `port`.
        """
        with locked(self.directory / ".lock"):
            if self.pid() is not None:
                if port not in (None, self._port()):
                    raise BrokerError(f"the broker runs already on port {self._port()}: `halfway broker stop` first")
                if self._answers_before(lambda: self.pid() is None, limit_s):
                    return False
            self._check_disk()
            command = [str(find_java()), *self._jvm_options(), "-cp", class_path(ensure_jars("kafka"))]
            self._start_on(port or self._port(), command, limit_s)
            return True

    def stop(self) -> bool:
        """Stop the broker, by force after 30 s; return False if it was not running.

        Raises:
            BrokerError: if it lives on even so.
        """
        with locked(self.directory / ".lock"):
            pid = self.pid()
            if pid is None:
                return False
            self._end(pid)
            return True

    def status(self) -> BrokerStatus:
        """Tell whether the broker's process lives, and its address, which it keeps while it is stopped."""
        port = self._port()
        return {"running": self.pid() is not None, "bootstrap_servers": f"{HOST}:{port}" if port else None}

    def pid(self) -> int | None:
        """Return the id of the broker's process, or None; never that of a stranger who got a dead broker's id."""
        try:
            pid = int(self._pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if str(self._properties) in _command_line(pid) else None

    def _port(self) -> int | None:
        """Return the port of the last start, which the properties remember."""
        try:
            match = re.search(r"^listeners=BROKER://[^:]+:(\d+)", self._properties.read_text(), re.MULTILINE)
        except FileNotFoundError:
            return None
        return int(match[1]) if match else None

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < MIN_FREE_BYTES:
            raise SetupError(f"{self.directory} has only {free // 1024**2} MiB free, the broker needs 1024: make room there")

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
            _wait_until_free(port)
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
        """Write the properties that Kafka starts with: those of `conf/broker.properties`, and what is this machine's."""
        own = {**self._own_properties(port, free_port(but=port)), "log.dirs": str(self.directory / "data")}
        lines = "".join(f"{name}={value}\n" for name, value in own.items())
        _write(self._properties, f"{conf_file('broker.properties').read_text()}\n# This machine's\n{lines}")

    # A broker with other listeners, such as the one with TLS and passwords that the tests have, overrides these three.

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:
        """Return node, listeners and quorum; the listener for clients comes first."""
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
        """Return further options of Kafka's command that formats the data folder."""
        return []

    def _client_options(self) -> dict[str, str]:
        """Return librdkafka's options, but the address, for the client that asks whether the broker answers."""
        return {}

    def _format(self, command: list[str]) -> None:
        """Format the data folder if it is new. Kafka writes `meta.properties` last and in one step: what has it is whole."""
        if (self.directory / "data" / "meta.properties").exists():
            return
        java, *options = command
        cluster_id = urlsafe_b64encode(b"\x01" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        tool = [java, "-XX:TieredStopAtLevel=1", *options, "kafka.tools.StorageTool"]
        try:
            done = subprocess.run(
                [*tool, "format", "--cluster-id", cluster_id, "--config", str(self._properties), *self._format_options()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_FORMAT_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerError(f"formatting the broker's data folder took more than {_FORMAT_LIMIT_S} s; try again") from None
        if done.returncode != 0:
            raise BrokerError(f"cannot format the broker's data folder: {_last_telling_line(done.stdout + done.stderr)}")

    def _launch(self, command: list[str], limit_s: float) -> None:
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with (self.directory / "broker.out").open("w") as output:
            child = self._child = subprocess.Popen(
                [*command, "kafka.Kafka", str(self._properties)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _write(self._pid_file, str(child.pid))
        try:
            if not self._answers_before(lambda: child.poll() is not None, limit_s):
                raise self._why_it_ended()
        except BaseException:
            self._end(child.pid)
            raise
        log.info("event=broker_started pid=%d port=%d", child.pid, self._port())

    def _answers_before(self, ended: Callable[[], bool], limit_s: float) -> bool:
        """Wait until the broker answers; False if it ended before it did."""
        address = f"{HOST}:{self._port()}"
        quick = {"reconnect.backoff.ms": "50", "reconnect.backoff.max.ms": "200"}
        client = Admin({"bootstrap.servers": address, **quick, **self._client_options()})
        if not _until(lambda: ended() or _answers(client), limit_s):
            raise BrokerError(f"the broker at {address} does not answer after {limit_s:g} s; see {self.log_file}")
        return not ended()

    def _why_it_ended(self) -> BrokerError:
        said = "".join(file.read_text(errors="replace") for file in (self.log_file, self.directory / "broker.out") if file.exists())
        error = _PortLostError if "Address already in use" in said else BrokerError
        return error(f"the broker ended while starting: {_last_telling_line(said)}; see broker.log and broker.out in {self.directory}")

    def _end(self, pid: int) -> None:
        """End process `pid`, which `pid()` or `_launch` has named as ours, and wait until it let go of its files and ports."""
        if self._child is not None and self._child.pid == pid and self._child.poll() is not None:
            # Ended and collected: the id may be a stranger's by now.
            self._pid_file.unlink(missing_ok=True)
            return
        for number, limit_s in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, 10.0)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
            if self._wait_for_end(pid, limit_s):
                break
        else:
            raise BrokerError(f"the broker (pid {pid}) does not end, not even by SIGKILL")
        self._pid_file.unlink(missing_ok=True)

    def _wait_for_end(self, pid: int, limit_s: float) -> bool:
        if self._child is not None and self._child.pid == pid:
            try:
                self._child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        return _ended(pid, limit_s)


def local_broker() -> LocalBroker:
    """Return the development broker of this project, which lives under `<home>/broker/`."""
    return LocalBroker(home() / "broker")


def free_port(but: int | None = None) -> int:
    """Return a port of `PORTS` that nobody listens on at the moment, other than `but`.

    Raises:
        SetupError: if no free one is found.
    """
    for port in random.sample(PORTS, 200):
        if port != but and _is_free(port):
            return port
    raise SetupError(f"no free port between {PORTS.start} and {PORTS.stop - 1}: end some servers on this machine")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _wait_until_free(port: int) -> None:
    """Wait a moment for `port`, which a broker killed just now holds a little longer, and refuse one that stays taken."""
    if not _until(lambda: _is_free(port), _PORT_LIMIT_S):
        raise SetupError(f"port {port} is taken by another process: end that, or choose one with `halfway broker start --port N`")


def _answers(client: Admin) -> bool:
    """Tell whether a broker answers and has taken up its work: a fenced one is not in its own metadata."""
    try:
        return bool(client.list_topics(timeout=0.5).brokers)
    except KafkaException:
        return False


def _command_line(pid: int) -> list[str]:
    """Return the arguments of process `pid`; none if it has ended, also where nobody has collected its exit code yet."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            return []
    shown = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.split()


def _ended(pid: int, limit_s: float) -> bool:
    """Wait until process `pid`, not a child of ours, has ended with all its threads."""
    if sys.platform != "linux":
        return _until(lambda: not _command_line(pid), limit_s)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def _until(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _last_telling_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["it says nothing"])[-1]
