"""A Kafka cluster whose nodes a test stops, kills, freezes, and gives a wrong clock or an empty disk."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import ElectionType, KafkaException
from confluent_kafka.admin import TopicDescription

from halfway.pipelines.kafka.admin import Admin, describe_topics
from halfway.pipelines.local.broker import BrokerStatus, LocalBroker
from halfway.pipelines.local.processes import HOST, free_port
from halfway.schemas.errors import KafkaUnavailableError
from tests.support.waiting import until

_REQUEST_S = 5.0
_START_LIMIT_S = 120.0
"""Three nodes that start together on two cores take their time."""
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock.c")


def can_put_clocks_wrong() -> bool:
    """Return True if this machine can build the library that puts the clock of a process wrong."""
    return sys.platform == "linux" and shutil.which("cc") is not None


class Ports(NamedTuple):
    """The ports of one node."""

    broker: int
    controller: int


class KafkaNode(LocalBroker):
    """One node of a cluster, broker and controller in one process."""

    def __init__(self, directory: Path, number: int, all_ports: Sequence[Ports], cluster_id: str) -> None:
        """Store which node it is, counted from 1. Does not start anything."""
        super().__init__(directory)
        self.number, self._all_ports, self._id_of_cluster = number, all_ports, cluster_id
        self.clock_off_s = 0
        """How far the wall clock of its next process is off; see `can_put_clocks_wrong`."""

    def start_node(self) -> None:
        """Start it. Without a majority of the nodes it does not answer."""
        self.start(self._all_ports[self.number - 1].broker, _START_LIMIT_S)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._signal(signal.SIGKILL)
        until(lambda: self.pid() is None, f"the end of node {self.number}")

    def freeze(self) -> None:
        """Stop it by SIGSTOP: its connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen node go on."""
        self._signal(signal.SIGCONT)

    def lose_disk(self) -> None:
        """Delete everything that a node that is down has stored, its part of the controllers' log too."""
        shutil.rmtree(self.directory / "data")

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid()
        assert pid is not None, f"node {self.number} is down"
        os.kill(pid, number)

    def _cluster_id(self) -> str:
        return self._id_of_cluster

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:  # noqa: ARG002  # the cluster chose its ports
        size, own = len(self._all_ports), self._all_ports[self.number - 1]
        in_sync = str(max(1, size - 1))
        voters = (f"{number}@{HOST}:{ports.controller}" for number, ports in enumerate(self._all_ports, 1))
        return super()._own_properties(port, own.controller) | {
            "node.id": str(self.number),
            "controller.quorum.voters": ",".join(voters),
            "default.replication.factor": str(size),
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": str(size),
            "transaction.state.log.replication.factor": str(size),
            "transaction.state.log.min.isr": in_sync,
            # A follower that is slow leaves the replicas in sync after this time, by default 30 s.
            "replica.lag.time.max.ms": "10000",
        }

    def _jvm_options(self) -> list[str]:
        small = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"] if len(self._all_ports) > 1 else []
        return [*super()._jvm_options(), *small]

    def _launch(self, command: list[str], limit_s: float) -> None:
        wrong_clock = []
        if self.clock_off_s:
            library = self.directory / "wrong_clock.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_WRONG_CLOCK), "-ldl"], check=True)
            wrong_clock = ["env", f"LD_PRELOAD={library}", f"CLOCK_OFF_S={self.clock_off_s}"]
        super()._launch([*wrong_clock, *command], limit_s)


class KafkaCluster:
    """Kafka of one node, or of three with three replicas, of which two must have a record before it is acknowledged."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        """Choose the ports. Does not start anything."""
        ports: list[int] = []
        while len(ports) < 2 * size:
            port = free_port()
            ports += [port] if port not in ports else []
        both = [Ports(*pair) for pair in zip(ports[::2], ports[1::2], strict=True)]
        cluster_id = urlsafe_b64encode(b"\x01" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        self.nodes = [KafkaNode(folder / f"node-{number}", number, both, cluster_id) for number in range(1, size + 1)]
        self.bootstrap_servers = ",".join(f"{HOST}:{one.broker}" for one in both)
        self._admin: Admin | None = None

    def start(self) -> None:
        """Start every node that is down, and wait until it answers."""
        self.start_nodes([node for node in self.nodes if node.pid() is None])

    def start_nodes(self, nodes: Collection[KafkaNode]) -> None:
        """Start nodes side by side, because none answers before a majority runs."""
        if nodes:
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(KafkaNode.start_node, nodes))

    def stop(self) -> None:
        """End every node, as an operator does."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(KafkaNode.stop, self.nodes))

    def kill(self) -> None:
        """End every node by SIGKILL at once."""
        running = [node for node in self.nodes if node.pid() is not None]
        for node in running:
            node._signal(signal.SIGKILL)
        until(lambda: all(node.pid() is None for node in running), "the end of all nodes")

    def status(self) -> BrokerStatus:
        """Return whether every node is running, and the address of all."""
        return {"running": all(node.pid() is not None for node in self.nodes), "bootstrap_servers": self.bootstrap_servers}

    # Replicas.

    def leader(self, topic: str, partition: int) -> KafkaNode:
        """Return the node that leads a partition."""
        found: list[KafkaNode] = []

        def is_led() -> bool:
            leader = self._described([topic])[topic].partitions[partition].leader
            found[:] = [node for node in self.nodes if leader is not None and node.number == leader.id]
            return bool(found)

        until(lambda: self._succeeds(is_led), f"a leader of {topic} {partition}")
        return found[0]

    def leads(self, node: KafkaNode, topic: str, partition: int) -> bool:
        """Return True if a node leads a partition, False if another one or none does."""
        found: list[bool] = []

        def is_known() -> bool:
            leader = self._described([topic])[topic].partitions[partition].leader
            found.append(leader is not None and leader.id == node.number)
            return True

        until(lambda: self._succeeds(is_known), f"an answer about {topic} {partition}")
        return found[-1]

    def wait_until_out_of_sync(self, node: KafkaNode, topic: str, partition: int) -> None:
        """Wait until the leader of a partition goes on without a node's replica."""

        def is_out() -> bool:
            return node.number not in {one.id for one in self._described([topic])[topic].partitions[partition].isr}

        until(lambda: self._succeeds(is_out), f"node {node.number} out of sync")

    def wait_until_in_sync(self) -> None:
        """Wait until every node has a replica in sync of every partition, and leads those that it is preferred for."""

        def is_in_sync() -> bool:
            partitions = [one for topic in self._described(self._topics()).values() for one in topic.partitions]
            return all(len(one.isr) == len(self.nodes) for one in partitions)

        until(lambda: self._succeeds(is_in_sync), "every replica in sync")
        self.elect_preferred()

    def elect_preferred(self) -> None:
        """Move each partition to the leader that its topic was made with, if that is in sync."""

        def is_elected() -> bool:
            # confluent-kafka 2.16 takes no time-out here.
            self._client().elect_leaders(ElectionType.PREFERRED).result(_REQUEST_S)
            topics = self._described(self._topics()).values()
            return all(one.leader is not None and one.leader.id == one.replicas[0].id for topic in topics for one in topic.partitions)

        until(lambda: self._succeeds(is_elected), "the preferred leaders")

    def _topics(self) -> list[str]:
        return list(self._client().list_topics(timeout=_REQUEST_S).topics)

    def _described(self, topics: Collection[str]) -> dict[str, TopicDescription]:
        return describe_topics(self._client(), topics) if topics else {}

    def _client(self) -> Admin:
        self._admin = self._admin or Admin({"bootstrap.servers": self.bootstrap_servers, "reconnect.backoff.max.ms": 500})
        return self._admin

    @staticmethod
    def _succeeds(condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except (KafkaException, KafkaUnavailableError, KeyError, TimeoutError):
            return False
