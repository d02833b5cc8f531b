"""Faults of the topics: more partitions, deleted records, deleted topics.

A fault that destroys records gets a separate world.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from signal import SIGCONT, SIGSTOP

from confluent_kafka.admin import NewPartitions

from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.schemas.tables import Table
from tests.chaos.auditor import Findings
from tests.chaos.evidence import end_offsets, ids_in, query
from tests.chaos.faults import CannotBeMadeError, Fault
from tests.chaos.waiting import LIMIT_S, ChaosError, until
from tests.chaos.world import JVM_OPTIONS, World
from tests.support.kafka_topics import delete_records, patient_admin, set_topic_config

_MOST_PARTITIONS = 4
_SHORT_WAIT = "-Dspark.network.timeout=30s -Dspark.network.timeoutInterval=30s"
"""By default Spark waits two minutes for records of a deleted topic, while Kafka's client polls without a pause."""


@contextmanager
def own_world(parent: World, name: str) -> Iterator[World]:
    """Start a separate world, and freeze the run's own world meanwhile."""
    parent.pause_traffic()
    parent.job.signal(SIGSTOP)
    number = len(list(parent.folder.parent.glob(f"{name}-*"))) + 1
    try:
        folder = parent.folder.parent / f"{name}-{number}"
        overrides = {"resolution.transactionCheckMax": 8}
        with World(folder, parent.kafka, parent.seed, overrides, jvm_options=f"{JVM_OPTIONS} {_SHORT_WAIT}") as world:
            yield world
    finally:
        parent.job.signal(SIGCONT)
        parent.pause_traffic(False)


def more_partitions(world: World, chance: Random) -> None:
    """Add a partition to the half or op topic while the job runs. The job must go on, also after a restart."""
    client = patient_admin(world.settings.kafka)
    topics = [world.settings.kafka.half_topic, world.settings.kafka.op_topic]
    counts = partition_counts(client, topics)
    topic = min(topics, key=lambda name: counts[name])
    if counts[topic] >= _MOST_PARTITIONS:
        raise CannotBeMadeError(f"both topics have {_MOST_PARTITIONS} partitions already")
    world.wait_for_transactions(chance.randint(1, 20))
    [made] = client.create_partitions([NewPartitions(topic, counts[topic] + 1)]).values()
    made.result(LIMIT_S)
    world.job.wait_for_batches(3)


def retention_too_short(world: World, chance: Random) -> None:
    """Set the half topic's `retention.ms` below `half_retention`. The job must refuse to start (R17)."""
    name = f"short-{chance.randrange(10**9)}"
    topics: dict[str, object] = {f"kafka.{kind}_topic": f"{name}-{kind}" for kind in ("half", "op", "check")}
    other = World(world.folder.parent / name, world.kafka, world.seed, topics)
    other.make_topics()
    set_topic_config(other.settings, other.settings.kafka.half_topic, "retention.ms", 3_600_000)
    done = other.job.run_command("resolve")
    if done.returncode != 1 or "shorter than half_retention" not in done.stderr:
        raise ChaosError(f"a start with too short a retention was not refused: code {done.returncode}, {done.stderr[-300:]}")


def pending_halves_gone(parent: World, chance: Random) -> tuple[float, Findings]:
    """Delete pending halves, as retention does. The job must report each once as `half_lost` and go on (R17)."""
    with own_world(parent, "gone") as world:
        world.wait_for_transactions(chance.randint(10, 40))
        world.pause_traffic()
        world.job.wait_for_batches(2)
        world.topics.read_on()
        # Ticks go on. The job would refuse to pass over a deleted tick that it has not read.
        topic = world.settings.kafka.half_topic
        delete_records(world.settings.kafka, topic, world.job.read_to(topic))
        world.pause_traffic(False)
        world.wait_for_transactions(10)
        recovery_s = world.recover()
        if not world.reported_lost():
            raise ChaosError("no half was pending when they were deleted")
        return recovery_s, world.settle()


def unread_halves_gone(parent: World, chance: Random) -> tuple[float, Findings]:
    """Delete halves that the stopped job has not read. It must refuse to start, and go on after --adopt."""
    with own_world(parent, "unread") as world:
        world.job.stop()
        world.wait_for_transactions(chance.randint(20, 60))
        world.pause_traffic()
        share, topic = chance.uniform(0.8, 1.0), world.settings.kafka.half_topic
        world.topics.read_on()
        left = {partition: int(end * share) for partition, end in end_offsets(world.settings, topic).items()}
        delete_records(world.settings.kafka, topic, left)
        record_destroyed(world, left)
        world.job.start()
        wait_for_refusal(world)
        world.new_checkpoint()
        world.pause_traffic(False)
        world.wait_for_transactions(10)
        return world.recover(), world.settle()


def topics_deleted(parent: World, chance: Random) -> tuple[float, Findings]:
    """Delete and recreate the half and op topics while the job runs. It must refuse that, and go on after --adopt."""
    with own_world(parent, "deleted") as world:
        world.wait_for_transactions(chance.randint(20, 60))
        for group in world.groups:
            world.kill_client(group)
        world.job.wait_for_batches(2)
        record_destroyed(world, None)
        kafka, client = world.settings.kafka, patient_admin(world.settings.kafka)
        for deleted in client.delete_topics([kafka.half_topic, kafka.op_topic]).values():
            deleted.result(LIMIT_S)
        wait_for_refusal(world)
        until(lambda: kafka.half_topic not in partition_counts(client, [kafka.half_topic]), "the topic's end")
        create_topics(world.settings, 2)
        world.topics.forget_positions()
        world.new_checkpoint()
        for group in world.groups:
            world.start_client(group)
        world.wait_for_transactions(chance.randint(20, 60))
        return world.recover(), world.settle()


def record_destroyed(world: World, left: dict[int, int] | None) -> None:
    """Record the ids whose halves are deleted before they had a row, so that the auditor expects nothing of them.

    Args:
        world: the world whose half topic lost records.
        left: by partition the first offset that is left; None if the topic is deleted.
    """
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
    # Spark waits for records of a deleted topic, and a batch is repeated before the job ends.
    until(lambda: not world.job.is_running(), "the job's refusal", 240)
    if "--adopt" not in world.job.last_words():
        raise ChaosError(f"the job refuses lost records without naming --adopt: {world.job.last_words()}")


TOPIC_FAULTS = [
    Fault("topic gets more partitions", more_partitions, 3),
    Fault("retention.ms too short at start", retention_too_short, 1),
    Fault("pending halves deleted (half_lost)", pending_halves_gone, 2),
    Fault("unread halves deleted", unread_halves_gone, 1),
    Fault("topics deleted", topics_deleted, 1),
]
