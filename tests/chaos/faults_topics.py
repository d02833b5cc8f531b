"""Faults of the topics: more partitions, records cut off, a topic deleted. Those that destroy records get a world of their own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from signal import SIGCONT, SIGSTOP

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType

from halfway.pipelines.kafka.admin import admin, partition_counts
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.schemas.tables import Table
from tests.chaos.evidence import ends_of, ids_in, query
from tests.chaos.faults import CannotBeMadeError, Fault
from tests.chaos.world import JVM_OPTIONS, ROOT, ChaosError, World, until
from tests.fuzz.auditor import Findings

_LIMIT_S = 30.0
_MOST_PARTITIONS = 4
_SHORT_WAIT = "-Dspark.network.timeout=30s -Dspark.network.timeoutInterval=30s"
"""For records of a topic that is gone Spark would wait for two minutes, and Kafka's client meanwhile ask for them without a pause."""


@contextmanager
def own_world(parent: World, name: str) -> Iterator[World]:
    """A world beside the one that the run has, which stands still meanwhile."""
    parent.pause_traffic()
    parent.signal_job(SIGSTOP)
    number = len(list(parent.folder.parent.glob(f"{name}-*"))) + 1
    try:
        folder = parent.folder.parent / f"{name}-{number}"
        overrides = {"resolution.transactionCheckMax": 8}
        with World(folder, parent.broker, parent.seed, overrides, jvm_options=f"{JVM_OPTIONS} {_SHORT_WAIT}") as world:
            yield world
    finally:
        parent.signal_job(SIGCONT)
        parent.pause_traffic(False)


def more_partitions(world: World, chance: Random) -> None:
    """Half and op topic get more partitions while the job runs: it must go on, also over a restart."""
    client = admin(world.settings)
    topics = [world.settings.kafka.half_topic, world.settings.kafka.op_topic]
    counts = partition_counts(client, topics)
    topic = min(topics, key=lambda name: counts[name])
    if counts[topic] >= _MOST_PARTITIONS:
        raise CannotBeMadeError(f"both topics have {_MOST_PARTITIONS} partitions already")
    world.wait_for_transactions(chance.randint(1, 20))
    [made] = client.create_partitions([NewPartitions(topic, counts[topic] + 1)]).values()
    made.result(_LIMIT_S)
    world.wait_for_batches(3)


def retention_too_short(world: World, chance: Random) -> None:
    """The half topic is made to keep halves for a shorter time than they may be pending: no start (R17)."""
    name = f"short-{chance.randrange(10**9)}"
    topics: dict[str, object] = {f"kafka.{kind}_topic": f"{name}-{kind}" for kind in ("half", "op", "check")}
    other = World(world.folder.parent / name, world.broker, world.seed, topics)
    other.make_topics()
    config = [ConfigEntry("retention.ms", "3600000", incremental_operation=AlterConfigOpType.SET)]
    resource = ConfigResource(ResourceType.TOPIC, other.settings.kafka.half_topic, incremental_configs=config)
    client = admin(other.settings)
    [altered] = client.incremental_alter_configs([resource]).values()
    altered.result(_LIMIT_S)
    command = other.command("resolve", launcher=False)
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 1 or "shorter than half_retention" not in done.stderr:
        raise ChaosError(f"a start with too short a retention was not refused: code {done.returncode}, {done.stderr[-300:]}")


def pending_halves_gone(parent: World, chance: Random) -> tuple[float, Findings]:
    """Retention has eaten halves that are pending: they are named, each once, and the stream goes on (R17)."""
    with own_world(parent, "gone") as world:
        world.wait_for_transactions(chance.randint(10, 40))
        world.pause_traffic()
        world.wait_for_batches(2)
        world.topics.read_on()
        # No further than the job has read: ticks go on, and it would rightly refuse to pass over one that is deleted.
        topic = world.settings.kafka.half_topic
        cut(world, topic, world.read_to(topic))
        world.pause_traffic(False)
        world.wait_for_transactions(10)
        recovery_s = world.recover()
        if not world.named_lost():
            raise ChaosError("no half was pending when they were deleted")
        return recovery_s, world.settle()


def unread_halves_gone(parent: World, chance: Random) -> tuple[float, Findings]:
    """Halves are deleted before the job, which is down, has read them: it refuses to go on as if nothing were; then --adopt."""
    with own_world(parent, "unread") as world:
        world.stop_job()
        world.wait_for_transactions(chance.randint(20, 60))
        world.pause_traffic()
        share, topic = chance.uniform(0.8, 1.0), world.settings.kafka.half_topic
        world.topics.read_on()
        left = {partition: int(end * share) for partition, end in ends_of(world.settings, topic).items()}
        cut(world, topic, left)
        destroy(world, left)
        world.start_job()
        wait_for_refusal(world)
        world.new_checkpoint()
        world.pause_traffic(False)
        world.wait_for_transactions(10)
        return world.recover(), world.settle()


def topics_deleted(parent: World, chance: Random) -> tuple[float, Findings]:
    """Half and op topic are deleted under the running job, and made anew: it refuses; --adopt takes the tables over."""
    with own_world(parent, "deleted") as world:
        world.wait_for_transactions(chance.randint(20, 60))
        for group in world.groups:
            world.kill_client(group)
        world.wait_for_batches(2)
        destroy(world, None)
        kafka, client = world.settings.kafka, admin(world.settings)
        for deleted in client.delete_topics([kafka.half_topic, kafka.op_topic]).values():
            deleted.result(_LIMIT_S)
        wait_for_refusal(world)
        until(lambda: kafka.half_topic not in partition_counts(client, [kafka.half_topic]), "the topic's end")
        create_topics(world.settings, 2)
        world.topics.forget_place()
        world.new_checkpoint()
        for group in world.groups:
            world.start_client(group)
        world.wait_for_transactions(chance.randint(20, 60))
        return world.recover(), world.settle()


def cut(world: World, topic: str, left: dict[int, int]) -> None:
    """Delete a topic's records before these offsets, by partition."""
    places = [TopicPartition(topic, partition, offset) for partition, offset in left.items()]
    client = admin(world.settings)
    for deleted in client.delete_records(places).values():
        deleted.result(_LIMIT_S)


def destroy(world: World, left: dict[int, int] | None) -> None:
    """Take note whose halves are gone, before `left` or all, and had no row yet: nobody can promise anything about those."""
    world.topics.read_on()
    gone = {half.transaction_id for half in world.topics.halves if left is None or half.offset < left[half.partition]}
    world.destroyed |= gone - ids_in(world.warehouse, Table.MESSAGES) - ids_in(world.warehouse, Table.DISCARDED)
    refused = query(
        world.warehouse, Table.QUARANTINE, "source_partition, source_offset", f"source_topic = '{world.settings.kafka.half_topic}'"
    )
    read = {tuple(row.values()) for row in refused}
    world.topics.garbage = [
        (partition, offset)
        for partition, offset in world.topics.garbage
        if (partition, offset) in read or (left is not None and offset >= left[partition])
    ]


def wait_for_refusal(world: World) -> None:
    # Spark waits two minutes for records of a topic that is gone before it gives up (kafkaConsumer.pollTimeoutMs).
    until(lambda: not world.job_runs(), "the job's refusal", 240)
    if "--adopt" not in world.last_words():
        raise ChaosError(f"lost records are refused without the way out: {world.last_words()}")


TOPIC_FAULTS = [
    Fault("topic gets more partitions", more_partitions, 3),
    Fault("retention.ms too short at start", retention_too_short, 1),
    Fault("pending halves deleted (half_lost)", pending_halves_gone, 2),
    Fault("unread halves deleted", unread_halves_gone, 1),
    Fault("topics deleted", topics_deleted, 1),
]
