"""What a client without Kafka logs: an error once, and then at growing intervals."""

import logging

import pytest
from confluent_kafka import KafkaError

from halfway.clients.kafka.client_log import ClientLog

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN)
LOST = KafkaError(KafkaError._TRANSPORT)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def after(log: ClientLog, clock: Clock, seconds: float, caplog: pytest.LogCaptureFixture, error: KafkaError = DOWN) -> list[str]:
    """Report an error each tenth of a second, and return what is logged."""
    caplog.clear()
    for _ in range(round(10 * seconds)):
        log.error(error)
        clock.now_s = round(clock.now_s + 0.1, 1)
    return [record.getMessage().partition(" error=")[0] for record in caplog.records]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> ClientLog:
    return ClientLog(clock)


def line(times: int) -> str:
    return f"event=kafka_error code=_ALL_BROKERS_DOWN times={times}"


def test_an_error_that_goes_on_is_logged_at_growing_intervals(log: ClientLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lines = after(log, clock, 75, caplog)
    assert lines == [line(times) for times in (1, 100, 200, 400)]
    assert len(after(log, clock, 7_200, caplog)) == pytest.approx(7_200 / 600, abs=4)


def test_each_code_is_logged(log: ClientLog, caplog: pytest.LogCaptureFixture) -> None:
    log.error(DOWN)
    log.error(LOST)
    log.error(DOWN)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["_ALL_BROKERS_DOWN", "_TRANSPORT"]


@pytest.mark.parametrize(("quiet_s", "is_new"), [(60.0, False), (60.1, True)])
def test_an_error_after_a_quiet_minute_is_new(
    quiet_s: float, is_new: bool, log: ClientLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log.error(DOWN)
    log.error(DOWN)
    clock.now_s += quiet_s
    caplog.clear()
    log.error(DOWN)
    assert [record.getMessage().partition(" error=")[0] for record in caplog.records] == [line(1 if is_new else 2)]


def test_lines_of_librdkafka_are_logged_so_too(log: ClientLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(50):
        log.log(logging.ERROR, "%s [%s] %s", "FAIL", "halfway#producer-1", "Connection refused")
    log.log(logging.INFO, "%s [%s] %s", "REQTMOUT", "halfway#producer-1", "Timed out")
    assert [record.getMessage() for record in caplog.records] == [
        "FAIL [halfway#producer-1] Connection refused",
        "REQTMOUT [halfway#producer-1] Timed out",
    ]
