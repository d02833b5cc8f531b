"""What a topic must keep and take, without Kafka."""

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_rules import TopicReport, new_topic_config, report_on

DAY_MS = 86_400_000
OWN = {"kafka.bootstrap_servers": "127.0.0.1:1", "kafka.check_topics": {"billing": "billing.check"}}
SETTINGS = load_settings(environ={}, overrides=OWN)
HALF_RETENTION_MS = SETTINGS.resolution.half_retention
CHECK_TOPICS = (SETTINGS.kafka.check_topic, "billing.check")


def report(topic: str, **changed: object) -> TopicReport:
    """Report on a topic as `topics create` makes it, but for what is `changed`."""
    own = {name.replace("_", "."): str(value) for name, value in changed.items()}
    return report_on(SETTINGS, topic, 1, {**new_topic_config(SETTINGS, topic), "min.insync.replicas": "1", **own})


@pytest.mark.parametrize("topic", SETTINGS.kafka.job_topics())
def test_each_new_topic_keeps_its_records_until_a_half_expires_and_takes_nothing_that_was_made_small(topic: str) -> None:
    new = new_topic_config(SETTINGS, topic)
    assert (new["retention.ms"], new["compression.type"]) == (str(7 * DAY_MS), "uncompressed")
    assert (report(topic).notes, report(topic).problems) == ((), ())


@pytest.mark.parametrize("topic", SETTINGS.kafka.job_topics())
def test_a_topic_that_takes_what_was_made_small_is_noted(topic: str) -> None:
    [note] = report(topic, compression_type="producer").notes
    assert "a small compressed batch may hold any amount of data" in note
    assert f"--topic {topic} --add-config compression.type=uncompressed`" in note


def test_what_create_time_allows_is_noted() -> None:
    half_topic, create_time = SETTINGS.kafka.half_topic, {"message_timestamp_type": "CreateTime"}
    [note] = report(half_topic, **create_time, message_timestamp_after_max_ms=3_600_000).notes
    assert note.startswith("CreateTime: producers and the job set the record times by their clocks")
    for topic, is_noted in ((half_topic, True), (SETTINGS.kafka.op_topic, True), (CHECK_TOPICS[0], False)):
        _, *notes = report(topic, **create_time, message_timestamp_after_max_ms=2**63 - 1).notes
        assert len(notes) == is_noted
        assert all(f"--topic {topic} --add-config message.timestamp.after.max.ms=3600000`" in note for note in notes)


@pytest.mark.parametrize("topic", CHECK_TOPICS)
@pytest.mark.parametrize(("retention_ms", "is_noted"), [(HALF_RETENTION_MS - 1, True), (HALF_RETENTION_MS, False), (-1, False)])
def test_r15_a_check_topic_that_loses_requests_before_a_half_expires_is_noted(topic: str, retention_ms: int, is_noted: bool) -> None:
    found = report(topic, retention_ms=retention_ms)
    assert found.problems == ()
    assert len(found.notes) == is_noted
    if is_noted:
        assert f"keeps check requests for {retention_ms} ms, shorter than half_retention ({HALF_RETENTION_MS} ms)" in found.notes[0]
        assert f"--topic {topic} --add-config retention.ms={7 * DAY_MS}`" in found.notes[0]
