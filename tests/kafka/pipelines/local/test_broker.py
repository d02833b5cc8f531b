"""The local broker starts, stops, keeps its address and data, and never touches a foreign process."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import ConfigResource, NewTopic, ResourceType

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.local import broker as broker_module
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import PORTS, free_port
from halfway.pipelines.runtime.jars import class_archive, ensure_jars
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import home
from halfway.schemas.errors import BrokerError, SetupError
from halfway.schemas.settings import Settings
from tests.support.commands import halfway_command


@pytest.fixture
def own_home(tmp_path: Path) -> Iterator[Path]:
    """A home folder for one test, with the fetched JARs. Its broker is stopped at the end."""
    ensure_jars("kafka")
    (tmp_path / "jars").symlink_to(home() / "jars")
    yield tmp_path
    LocalBroker(tmp_path / "broker").stop()


@pytest.fixture
def own(own_home: Path) -> LocalBroker:
    """A broker for one test, not started."""
    return LocalBroker(own_home / "broker")


def halfway(own_home: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Run `halfway` in its own process."""
    environ = {**os.environ, "HALFWAY_HOME": str(own_home)}
    command = halfway_command(*arguments)
    return subprocess.Popen(command, env=environ, cwd=own_home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def send(address: str, topic: str, value: bytes, headers: dict[str, bytes] | None = None) -> None:
    """Send one record and wait until it is stored."""
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": address, "message.max.bytes": 16_000_000, "acks": "all"})
    producer.produce(topic, value, partition=0, headers=dict(headers or {}), on_delivery=lambda error, _message: failures.append(error))
    assert producer.flush(30) == 0
    assert failures == [None]


def read_all(address: str, topic: str, count: int) -> list[tuple[bytes | None, dict[str, bytes | None]]]:
    """Read the first `count` records of partition 0."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "test", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        records = consumer.consume(count, timeout=30)
        assert all(record.error() is None for record in records)
        return [(record.value(), dict(record.headers() or [])) for record in records]
    finally:
        consumer.close()


def make_topic(address: str, topic: str) -> None:
    client = Admin({"bootstrap.servers": address})
    client.create_topics([NewTopic(topic, num_partitions=1)])[topic].result()


def address_of(local: LocalBroker) -> str:
    """Return the address of a running broker."""
    status = local.status()
    assert status["running"]
    assert status["bootstrap_servers"] is not None
    return status["bootstrap_servers"]


def take(port: int) -> socket.socket:
    """Listen on `port`, as another program."""
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", port))
    other.listen()
    return other


def test_a_broker_keeps_address_and_data_over_stop_kill_and_restart(own: LocalBroker) -> None:
    assert own.status() == {"running": False, "bootstrap_servers": None}
    assert own.start() is True
    address = address_of(own)
    assert int(address.rpartition(":")[2]) in PORTS
    make_topic(address, "kept")
    send(address, "kept", b"before the stop")
    assert own.start() is False

    assert own.stop() is True
    assert own.status() == {"running": False, "bootstrap_servers": address}
    assert own.stop() is False
    assert own.start() is True
    send(address, "kept", b"before the kill")

    pid = own.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert own.start() is True
    assert own.pid() != pid
    assert address_of(own) == address
    assert [value for value, _headers in read_all(address, "kept", 2)] == [b"before the stop", b"before the kill"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_the_broker_starts_from_its_class_archive(broker: LocalBroker) -> None:
    archive = class_archive(find_java(), "kafka")
    assert archive.is_file(), "run `make jars`"
    assert archive.name in Path(f"/proc/{broker.pid()}/maps").read_text()


def test_two_starts_at_once_start_one_broker_that_outlives_them(own_home: Path) -> None:
    starts = [halfway(own_home, "broker", "start") for _ in range(2)]
    printed = sorted(start.communicate(timeout=60)[0].split(" at ")[0] for start in starts)
    assert printed == ["the broker is running", "the broker was already running"]

    shown, _ = halfway(own_home, "broker", "status", "--json").communicate(timeout=30)
    status = LocalBroker(own_home / "broker").status()
    assert json.loads(shown) == status
    assert status["running"]

    # Without a configured address the commands find the local broker.
    created = halfway(own_home, "topics", "create", "--json")
    facts, _ = created.communicate(timeout=30)
    assert (created.returncode, len(json.loads(facts))) == (0, 3)

    stop = halfway(own_home, "broker", "stop")
    assert stop.communicate(timeout=60) == ("the broker is stopped\n", "")
    assert LocalBroker(own_home / "broker").status() == {**status, "running": False}


def test_a_taken_port_is_refused_and_another_can_be_fixed(own: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "_PORT_LIMIT_S", 0.2)
    first, second = free_port(), free_port()
    own.start(port=first)
    assert address_of(own) == f"127.0.0.1:{first}"
    with pytest.raises(BrokerError, match=f"already running on port {first}"):
        own.start(port=second)
    own.stop()
    with take(first), pytest.raises(SetupError, match=f"port {first} is taken by another process"):
        own.start()
    assert own.status() == {"running": False, "bootstrap_servers": f"127.0.0.1:{first}"}


def test_a_foreign_process_with_the_recorded_pid_is_not_touched(own: LocalBroker) -> None:
    own.directory.mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            (own.directory / "broker.pid").write_text(str(stranger.pid))
            assert own.pid() is None
            assert own.stop() is False
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_broker_that_ends_while_starting_reports_the_cause(own: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    data = own.directory / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=AAAAAAAAAAAAAAAAAAAAAQ\n")
    with pytest.raises(BrokerError, match=r"ended while starting: .*Stored node id 7"):
        own.start()
    monkeypatch.setenv("KAFKA_HEAP_OPTS", "-Xnonsense")
    with pytest.raises(BrokerError, match="ended while starting: Unrecognized option: -Xnonsense"):
        own.start()
    assert own.status()["running"] is False


def test_a_broker_that_does_not_answer_in_time_is_ended(own: LocalBroker) -> None:
    with pytest.raises(BrokerError, match="does not answer after 0 s"):
        own.start(limit_s=0)
    assert own.status()["running"] is False
    assert own.start() is True


def test_a_full_disk_is_refused(own: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(SetupError, match="MiB free"):
        own.start()


def test_the_largest_message_arrives_byte_for_byte(broker: LocalBroker, topics: Callable[..., Settings]) -> None:
    settings = topics(partitions=1)
    body, header = os.urandom(4 * 1024**2), os.urandom(1024**2 - 4096)
    send(address_of(broker), settings.kafka.half_topic, body, {"LARGE": header})
    assert read_all(address_of(broker), settings.kafka.half_topic, 1) == [(body, {"LARGE": header})]


def test_the_broker_is_configured_for_one_node(broker: LocalBroker) -> None:
    node = ConfigResource(ResourceType.BROKER, "1")
    client = Admin({"bootstrap.servers": address_of(broker)})
    config = client.describe_configs([node])[node].result()
    expected = {
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(16 * 1024**2),
        "log.retention.hours": "168",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
    assert {name: config[name].value for name in expected} == expected


def test_the_broker_listens_on_loopback_only(broker: LocalBroker) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but makes the kernel choose the source address
        except OSError:
            pytest.skip("this machine has no address but loopback")
        outer = probe.getsockname()[0]
    port = int(address_of(broker).rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((outer, port), timeout=5)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
