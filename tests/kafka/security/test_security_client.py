"""Commands and the client report why Kafka refuses them, with TLS, passwords and ACLs."""

import logging
import re
import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from halfway import SendError, TransactionProducer
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import COMMIT, GROUP, Listener, gets_through
from tests.support.secure_broker import Right, SecureBroker
from tests.support.secure_world import HALF, LIMIT_S, OP, SECRET, USERS, Configure, TakeAway, named, refused, rights_of, settings_in
from tests.support.waiting import until


class LogLines(logging.Handler):
    """Collects the lines of the client's log, with the tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def client_log() -> Iterator[list[str]]:
    handler = LogLines()
    logging.getLogger("halfway.clients").addHandler(handler)
    yield handler.lines
    logging.getLogger("halfway.clients").removeHandler(handler)


def send(kafka: KafkaSettings, listener: Listener) -> None:
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=int(LIMIT_S * 1000)) as producer:
        producer.send_in_transaction("orders", b"body", arg=COMMIT)


def test_a_client_that_may_not_write_halves_runs_no_local_transaction(without: TakeAway, configure: Configure) -> None:
    without("client", Right(ResourceType.TOPIC, HALF, AclOperation.WRITE))
    listener = Listener()
    with pytest.raises(SendError, match=f"may not Write topic {HALF}: `kafka-acls.sh"):
        send(settings_in(configure("client")).kafka, listener)
    assert listener.executed == []


def test_a_client_that_may_write_nothing_reports_it(without: TakeAway, configure: Configure, client_log: list[str]) -> None:
    for topic in (HALF, OP):
        without("client", Right(ResourceType.TOPIC, topic, AclOperation.WRITE))
    started = time.monotonic()
    with pytest.raises(SendError, match=f"may not Write topic {HALF}: `kafka-acls.sh"):
        send(settings_in(configure("client")).kafka, Listener())
    assert time.monotonic() - started < LIMIT_S
    assert not any("Traceback" in line for line in client_log)


def test_a_client_that_may_not_write_ops_reports_it(without: TakeAway, configure: Configure, client_log: list[str]) -> None:
    without("client", Right(ResourceType.TOPIC, OP, AclOperation.WRITE))
    send(settings_in(configure("client")).kafka, Listener())
    [line] = [line for line in client_log if line.startswith("event=op_not_sent")]
    assert f"may not Write topic {OP}" in line


def test_a_client_that_gets_its_rights_later_begins_then(without: TakeAway, configure: Configure, secure_broker: SecureBroker) -> None:
    """Kafka refuses an idempotent producer that may write nothing, and librdkafka then declares it dead."""
    client = [Right(ResourceType.TOPIC, topic, AclOperation.WRITE) for topic in (HALF, OP)]
    for right in client:
        without("client", right)
    listener, kafka = Listener(), settings_in(configure("client")).kafka
    with TransactionProducer(kafka, GROUP, listener) as producer:
        for _ in range(2):
            with pytest.raises(SendError, match=f"may not Write topic {HALF}: `kafka-acls.sh"):
                producer.send_in_transaction("orders", b"")
        for right in client:
            secure_broker.allow(USERS["client"], [right])

        until(lambda: gets_through(producer), "the producer sends", LIMIT_S)
    assert len(listener.executed) == 1


CLIENT_READS = [right for right in rights_of("client") if right.operation is AclOperation.READ]


@pytest.mark.parametrize("right", CLIENT_READS, ids=lambda right: right.name)
def test_a_client_that_may_not_read_checks_reports_it(right: Right, without: TakeAway, configure: Configure, client_log: list[str]) -> None:
    without("client", right)
    with TransactionProducer(settings_in(configure("client")).kafka, GROUP, Listener()):
        until(lambda: any(named(right) in line and "kafka-acls.sh" in line for line in client_log), "the missing right in the log", LIMIT_S)


LOGIN = "Kafka rejects this login"
FAULTS: dict[str, tuple[str, dict[str, object], str]] = {
    "wrong password": ("", {"password": "wr0ng"}, LOGIN),
    "unknown user": ("", {"user": "nobody"}, LOGIN),
    "no authority": ("", {"ca": None}, "issuer certificate): check kafka.security.ca"),
    "expired": ("expired", {}, "certificate has expired"),
    "another host": ("elsewhere", {}, "not valid for '127.0.0.1'"),
    "TLS on a plain port": ("plain", {}, "does not use TLS, but kafka.security.protocol is SASL_SSL"),
    "no TLS on a TLS port": ("", {"protocol": "PLAINTEXT", "sasl_mechanism": None, "user": None, "password": None}, "set SSL or SASL_SSL"),
    "no such authority": ("", {"ca": "/none.pem"}, "ssl.ca.location failed"),
}
by_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


def faulty(secure_broker: SecureBroker, fault: tuple[str, dict[str, object], str]) -> dict[str, object]:
    listener, changed, _ = fault
    address = {"kafka.bootstrap_servers": secure_broker.address(listener)} if listener else {}
    return {**address, **{f"kafka.security.{name}": value for name, value in changed.items()}}


@by_fault
def test_a_command_reports_why_it_cannot_connect(
    secure_broker: SecureBroker, configure: Configure, fault: tuple[str, dict[str, object], str]
) -> None:
    config = configure("job", **faulty(secure_broker, fault))
    for command in (("resolve",), ("topics", "create"), ("commit", "x", "--group", "g")):
        assert fault[2] in refused(config, *command)


def test_a_command_without_a_user_is_asked_whether_the_port_wants_one(configure: Configure) -> None:
    nobody = {f"kafka.security.{name}": None for name in ("sasl_mechanism", "user", "password")}
    config = configure("job", **nobody, **{"kafka.security.protocol": "SSL"})
    assert "is kafka.security.protocol (SSL) the port's, or does it want a user?" in refused(config, "topics", "create")


@by_fault
def test_a_client_reports_why_it_cannot_connect(
    secure_broker: SecureBroker, configure: Configure, fault: tuple[str, dict[str, object], str]
) -> None:
    listener, kafka = Listener(), settings_in(configure("client", **faulty(secure_broker, fault))).kafka

    def refuse(producer: TransactionProducer) -> None:
        started = time.monotonic()
        with pytest.raises(SendError, match=re.escape(fault[2])) as caught:
            producer.send_in_transaction("orders", b"body", arg=COMMIT)
        assert time.monotonic() - started < LIMIT_S
        assert SECRET not in str(caught.value)

    if "ssl.ca.location" in fault[2]:
        with pytest.raises(KafkaUnavailableError, match=re.escape(fault[2])):
            TransactionProducer(kafka, GROUP, listener).start()
        return
    with TransactionProducer(kafka, GROUP, listener) as producer:
        refuse(producer)
        refuse(producer)
    assert listener.executed == []
