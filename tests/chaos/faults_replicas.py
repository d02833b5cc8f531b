"""Faults of the nodes of a replicated Kafka: three nodes with three replicas, of which two must have each record.

As long as two nodes run, services and job must go on. Each fault begins with every replica in sync, and with the
leaders spread as the topics were made.
"""

import time
from functools import partial
from random import Random
from signal import SIGKILL
from typing import NamedTuple

from confluent_kafka import Consumer

from tests.chaos.faults import LONGER_THAN_ALL_S, CannotBeMadeError, Fault
from tests.chaos.launcher import Step
from tests.chaos.waiting import ChaosError
from tests.chaos.world import World
from tests.support.kafka_cluster import KafkaNode, can_put_clocks_wrong
from tests.support.partition_records import end_of, records_of

HOUR_S = 3600
_CLOCK_TOLERANCE_S = 120
_GOES_ON_TRANSACTIONS = 10


class Leader(NamedTuple):
    """A partition of one of the world's topics, and the node that leads it."""

    topic: str
    partition: int
    node: KafkaNode


def a_leader(world: World, chance: Random, *kinds: str) -> Leader:
    """Choose a partition of the half, op or check topic, when every replica is in sync."""
    world.kafka.wait_until_in_sync()
    topic = getattr(world.settings.kafka, f"{chance.choice(kinds or ('half', 'op', 'check'))}_topic")
    partition = chance.randint(0, 1)
    return Leader(topic, partition, world.kafka.leader(topic, partition))


def followers(world: World, leader: Leader, chance: Random) -> list[KafkaNode]:
    """Return the other nodes, in random order."""
    others = [node for node in world.kafka.nodes if node is not leader.node]
    chance.shuffle(others)
    return others


def goes_on(world: World) -> None:
    """Wait until services and job have gone on, without starting anything again."""
    world.wait_for_transactions(_GOES_ON_TRANSACTIONS)
    world.job.wait_for_batches(3)


def leader_killed(world: World, chance: Random) -> None:
    """Kill the leader of a partition at any moment."""
    leader = a_leader(world, chance)
    world.wait_for_transactions(chance.randint(1, 20))
    leader.node.kill()
    goes_on(world)


def leader_killed_at(step: Step, world: World, chance: Random) -> None:
    """Kill the leader of a partition while the job is at a step of a batch."""
    leader = a_leader(world, chance, "check" if step is Step.BEFORE_CHECKS else "half")
    world.job.arm(step, chance.randint(1, 3), "wait")
    world.job.wait_for_step()
    leader.node.kill()
    world.job.go_on()
    goes_on(world)


def leader_and_driver_killed_at(step: Step, world: World, chance: Random) -> None:
    """Kill the leader of a partition and then the job, at a step of a batch. The job repeats it with two nodes."""
    leader = a_leader(world, chance)
    world.job.arm(step, chance.randint(1, 3), "wait")
    world.job.wait_for_step()
    leader.node.kill()
    world.job.signal(SIGKILL)
    world.job.wait_for_the_end()
    world.job.start()
    world.wait_for_transactions(_GOES_ON_TRANSACTIONS)
    # A start waits 10 s for Kafka, and a failover takes about as long: a supervisor starts the job again.
    if not world.job.is_running():
        world.job.start()
    world.job.wait_for_batches(3)


def leader_moved(world: World, chance: Random) -> None:
    """Move leaders away from a node that stops in good order, and back while all three run."""
    leader = a_leader(world, chance)
    leader.node.stop()
    world.wait_for_transactions(chance.randint(1, 10))
    leader.node.start_node()
    world.kafka.wait_until_in_sync()
    goes_on(world)


def leader_frozen(world: World, chance: Random) -> None:
    """Freeze the leader of a partition for longer than its session and every time-out of the job and the services."""
    leader = a_leader(world, chance)
    world.wait_for_transactions(chance.randint(1, 10))
    leader.node.freeze()
    try:
        time.sleep(LONGER_THAN_ALL_S)
        goes_on(world)
    finally:
        leader.node.thaw()


def clock_off(off_s: int, world: World, chance: Random) -> None:
    """Let a node whose clock is off lead a partition of the half or op topic. Time may stand still, commits may not."""
    if not can_put_clocks_wrong():
        raise CannotBeMadeError("a process gets a wrong clock on Linux with a C compiler (cc) only")
    leader = a_leader(world, chance, "half", "op")
    restart(leader.node, off_s)
    try:
        world.kafka.wait_until_in_sync()
        world.wait_for_transactions(chance.randint(20, 40))
        found_s = last_time_s(world, leader) - time.time()
        if abs(found_s - off_s) > _CLOCK_TOLERANCE_S:
            raise ChaosError(f"the last record of {leader.topic} {leader.partition} is {found_s:.0f} s off, not {off_s}")
        goes_on(world)
    finally:
        restart(leader.node, 0)
    world.kafka.wait_until_in_sync()


def restart(node: KafkaNode, clock_off_s: int) -> None:
    """Restart a node with a clock that is off."""
    node.stop()
    node.clock_off_s = clock_off_s
    node.start_node()


def last_time_s(world: World, leader: Leader) -> float:
    """Return the time of the last record of a partition, in seconds since 1970. A running job writes a tick there."""
    with Consumer({"bootstrap.servers": world.kafka.bootstrap_servers, "group.id": "auditor"}) as consumer:
        end = end_of(consumer, leader.topic, leader.partition)
        *_, last = records_of(consumer, leader.topic, leader.partition, end - 1)
        return last.timestamp()[1] / 1000


def follower_lags(world: World, chance: Random) -> None:
    """Freeze a follower until it is out of sync, let it go on, and kill the leader before it has caught up."""
    leader = a_leader(world, chance)
    slow = followers(world, leader, chance)[0]
    slow.freeze()
    try:
        world.kafka.wait_until_out_of_sync(slow, leader.topic, leader.partition)
        world.wait_for_transactions(chance.randint(10, 30))
    finally:
        slow.thaw()
    leader.node.kill()
    goes_on(world)


def rolling_restart(world: World, chance: Random) -> None:
    """Restart one node after the other in good order, the next one when every replica is in sync."""
    world.kafka.wait_until_in_sync()
    for node in chance.sample(world.kafka.nodes, len(world.kafka.nodes)):
        node.stop()
        world.wait_for_transactions(chance.randint(1, 5))
        node.start_node()
        world.kafka.wait_until_in_sync()
    goes_on(world)


def two_killed(world: World, chance: Random) -> None:
    """Kill two nodes. Nothing is acknowledged any more, and the job must wait, or end and start again."""
    leader = a_leader(world, chance)
    other = followers(world, leader, chance)[0]
    world.wait_for_transactions(chance.randint(1, 20))
    leader.node.kill()
    other.kill()
    time.sleep(chance.choice([2.0, LONGER_THAN_ALL_S]))


def unclean_election(world: World, chance: Random) -> None:
    """Let a node that has missed records come up before those that have them. It must not become the leader."""
    leader = a_leader(world, chance)
    stale = followers(world, leader, chance)[0]
    stale.kill()
    world.kafka.wait_until_out_of_sync(stale, leader.topic, leader.partition)
    world.wait_for_transactions(chance.randint(10, 30))
    world.kafka.kill()
    # Two controllers are a majority. One of these two brokers has missed what was acknowledged meanwhile. The partition
    # has no leader if the other one was not in sync either.
    world.kafka.start_nodes([stale, chance.choice([node for node in world.kafka.nodes if node is not stale])])
    time.sleep(chance.uniform(0.0, 8.0))
    if world.kafka.leads(stale, leader.topic, leader.partition):
        raise ChaosError(f"a broker that has missed records leads {leader.topic} {leader.partition}")


def disk_lost(world: World, chance: Random) -> None:
    """Delete all that a killed node has stored. When it is in sync again, kill another one, so that its copy counts."""
    leader = a_leader(world, chance)
    world.wait_for_transactions(chance.randint(1, 20))
    leader.node.kill()
    leader.node.lose_disk()
    world.wait_for_transactions(chance.randint(1, 10))
    leader.node.start_node()
    world.kafka.wait_until_in_sync()
    followers(world, leader, chance)[0].kill()
    goes_on(world)


REPLICA_FAULTS = [
    Fault("leader killed", leader_killed, 6),
    Fault("leader killed in mid-batch", partial(leader_killed_at, Step.AFTER_COUNT), 4),
    Fault("leader killed at the check write", partial(leader_killed_at, Step.BEFORE_CHECKS), 4),
    Fault("leader killed, driver killed before persist", partial(leader_and_driver_killed_at, Step.BEFORE_PERSIST), 3),
    Fault("leader killed, driver killed after messages", partial(leader_and_driver_killed_at, Step.AFTER_MESSAGES), 4),
    Fault("leader killed, driver killed after checks", partial(leader_and_driver_killed_at, Step.AFTER_CHECKS), 3),
    Fault("leader moved", leader_moved, 4),
    Fault("leader frozen", leader_frozen, 4),
    Fault("leader with a clock an hour ahead", partial(clock_off, HOUR_S), 3),
    Fault("leader with a clock an hour behind", partial(clock_off, -HOUR_S), 3),
    Fault("follower lags, then leader killed", follower_lags, 4),
    Fault("rolling restart", rolling_restart, 3),
    Fault("two of three killed", two_killed, 4),
    Fault("stale replica comes up first", unclean_election, 4),
    Fault("disk of a replica lost", disk_lost, 4),
]
