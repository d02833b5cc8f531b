"""Relays that are killed, frozen, fenced and cut off: each topic still gets each message once, in order."""

import os
import random
import signal
import uuid
from pathlib import Path

import pytest

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.relay.relay_status import relay_states
from tests.support.relay_failpoints import STEPS
from tests.support.relay_world import EARLIEST, RelayWorld, row
from tests.support.waiting import until

FAILPOINTS = "tests.support.relay_failpoints"
ROWS = 7


class Traffic:
    """Batches of messages to two topics, and what each of them must get."""

    def __init__(self, world: RelayWorld) -> None:
        self.world, self.batches = world, 0
        self.topics = {name: world.make_topic(name) for name in ("orders", "stock")}
        self.expected: dict[str, list[str]] = {name: [] for name in self.topics}

    def append(self, batches: int = 1) -> None:
        for _ in range(batches):
            rows = []
            for number in range(ROWS):
                name = ("orders", "stock")[number % 2]
                rows.append(row(f"{self.batches}-{number}", self.topics[name]))
                self.expected[name].append(f"{self.batches}-{number}")
            self.world.append(0, self.batches, rows)
            self.batches += 1

    def until_all(self) -> None:
        until(lambda: self.arrived() == self.expected, "each message", 100, progress=self.arrived)

    def arrived(self) -> dict[str, list[str]]:
        return {name: self.world.ids(name) for name in self.topics}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_relay_that_is_killed_at_any_step_sends_each_message_once(world: RelayWorld) -> None:
    chance, traffic = random.Random(19), Traffic(world)
    traffic.append()
    world.relay(EARLIEST)
    for step in STEPS:
        traffic.append(3)
        # The first record, of a transaction that is aborted, tells a relay how far it has to read.
        times = chance.randint(2, 12) if "produce" in step else 2 if step == "before_begin" else 1
        process = world.start("--available-now", module=(FAILPOINTS, step, str(times), "die"))
        assert process.wait(100) == -signal.SIGKILL, world.log(len(world.processes))
    world.relay()
    assert traffic.arrived() == traffic.expected


@pytest.mark.timeout(400)
def test_another_relay_goes_on_when_the_active_one_is_killed(world: RelayWorld) -> None:
    traffic = Traffic(world)
    traffic.append()
    first = world.start("--begin", "earliest")
    traffic.until_all()
    world.start()
    client = admin_client(world.settings.kafka)
    until(lambda: [each.instances for each in relay_states(client, world.settings.kafka)] == [2], "two instances")
    assert "event=relay_active" not in world.log(2), "one is active, the other stands by"
    os.kill(first.pid, signal.SIGKILL)
    traffic.append(2)
    traffic.until_all()
    assert "event=relay_active" in world.log(2)


@pytest.mark.timeout(400)
def test_a_relay_that_was_frozen_in_a_transaction_stands_by_when_it_wakes(world: RelayWorld) -> None:
    traffic = Traffic(world)
    traffic.append()
    world.relay(EARLIEST)
    traffic.append(2)
    frozen = world.start(module=(FAILPOINTS, "after_produce", "5", "freeze"))
    until(lambda: os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, "the freeze")
    world.start()
    traffic.append(2)
    traffic.until_all()
    os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: "event=relay_interrupted" in world.log(1), "the end of its transaction")
    traffic.append(3)
    traffic.until_all()
    assert frozen.poll() is None, "it stands by"


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_transaction_that_timed_out_is_sent_again_by_the_same_relay(world: RelayWorld) -> None:
    traffic = Traffic(world)
    traffic.append()
    world.relay(EARLIEST)
    traffic.append(2)
    timeout: dict[str, object] = {"relay.transaction_timeout": "1s"}
    frozen = world.start(module=(FAILPOINTS, "before_commit", "1", "freeze"), **timeout)
    until(lambda: os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, "the freeze")
    until(lambda: world.has_no_open_transaction("orders"), "Kafka aborts the transaction", 60)
    os.kill(frozen.pid, signal.SIGCONT)
    traffic.append()
    traffic.until_all()
    assert "event=relay_interrupted" in world.log(1)


@pytest.mark.timeout(400)
def test_a_broker_that_is_restarted_costs_nothing(own_broker: LocalBroker, tmp_path: Path) -> None:
    world = RelayWorld(str(own_broker.status()["bootstrap_servers"]), tmp_path, uuid.uuid4().hex[:8])
    try:
        traffic = Traffic(world)
        traffic.append()
        relay = world.start("--begin", "earliest")
        traffic.until_all()
        port = int(str(own_broker.status()["bootstrap_servers"]).rpartition(":")[2])
        own_broker.stop()
        traffic.append(3)
        own_broker.start(port)
        traffic.append(2)
        traffic.until_all()
        assert relay.poll() is None
        relay.terminate()
        assert relay.wait(60) == 0
        assert "event=relay_stopped" in world.log(1).splitlines()[-1]
    finally:
        world.close()
