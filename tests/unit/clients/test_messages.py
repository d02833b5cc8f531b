"""The client without Kafka: messages and records, listeners' answers, progress in a partition, refused arguments."""

import threading
import unicodedata
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.clients.listener import MAX_REMARK_BYTES, ask, log_unknown, remark_of
from halfway.clients.messages import refuse_reserved
from halfway.clients.open_checks import PartitionProgress
from halfway.schemas.errors import ProducerClosedError, SendError, SettingsError
from halfway.schemas.headers import DELAY_HEADERS, MAX_INCARNATION, MAX_INT, MAX_NAME_BYTES
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import RESERVED_NAMES, RecordError
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import Listener

NOWHERE = KafkaSettings(bootstrap_servers="127.0.0.1:1")

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
REQUIRED = TEXT.filter(bool)
NAME = REQUIRED.filter(lambda text: len(text.encode()) <= MAX_NAME_BYTES)
FIELDS = {
    "transaction_id": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    "topic": NAME,
    "body": st.binary(),
    "producer_group": NAME.filter(lambda name: "\0" not in name),
    "queue_id": st.integers(-MAX_INT - 1, MAX_INT),
    "tags": st.none() | TEXT,
    "keys": st.none() | TEXT,
    "properties": st.dictionaries(TEXT.filter(lambda name: name not in RESERVED_NAMES and not {"\ufffd", "\0"} & set(name)), TEXT),
    "immunity_s": st.none() | st.integers(1, MAX_INT),
    "born_at_ms": st.none() | st.integers(0, 2_000_000_000_000),
    "incarnation": st.integers(0, MAX_INCARNATION),
}


class Never:
    """A listener that must not be called."""

    def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:
        raise AssertionError(message, arg)

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        raise AssertionError(message)


@given(st.builds(HalfMessage, **FIELDS))
def test_half_message_round_trip(message: HalfMessage) -> None:
    assert HalfMessage.from_record(*message.to_record()) == message


@given(st.builds(CheckRequest, check_times=st.integers(1, MAX_INT), check_id=REQUIRED, **FIELDS))
def test_check_request_round_trip(request: CheckRequest) -> None:
    assert CheckRequest.from_record(*request.to_record()) == request


def test_a_body_is_bytes_whatever_buffer_was_sent() -> None:
    for body in (bytearray(b"3 apples"), memoryview(b"3 apples")):
        message = HalfMessage(transaction_id="t", topic="orders", body=body, producer_group="g")  # type: ignore[arg-type]
        assert (type(message.body), message.body) == (bytes, b"3 apples")


class Topic(str, Enum):  # noqa: UP042  # whose text is not that of its value, as a StrEnum's is
    """How a service may name its topics."""

    ORDERS = "orders"


def test_a_member_of_an_enumeration_is_its_text() -> None:
    """`f"{Topic.ORDERS}"` is `Topic.ORDERS`, by which `ListenerByTopic` would find no listener."""
    message = HalfMessage(transaction_id="t", topic=Topic.ORDERS, body=b"", producer_group="g", tags=Topic.ORDERS)
    assert f"{message.topic}:{message.tags}" == "orders:orders"


def test_a_group_that_is_a_member_of_an_enumeration_is_its_text() -> None:
    """The halves would name it, and the consumer group would be another one, which the job takes for away (R15)."""
    producer: TransactionProducer[None] = TransactionProducer(NOWHERE, Topic.ORDERS, Listener())
    assert f"{producer._instance.group}" == "orders"


def test_a_str_as_body_is_refused_with_what_to_send() -> None:
    with pytest.raises(TypeError, match=r"the body is a str, and Kafka stores bytes: send `text.encode\(\)`"):
        HalfMessage(transaction_id="t", topic="orders", body="3 apples", producer_group="g")  # type: ignore[arg-type]


@pytest.mark.parametrize(("body", "kind"), [(None, "None"), (7, "an int"), (["3 apples"], "a list")])
def test_another_body_is_refused_with_what_it_is(body: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"the body is {kind}, and Kafka stores bytes$"):
        HalfMessage(transaction_id="t", topic="orders", body=body, producer_group="g")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"keys": ["order-1"]}, "keys: Input should be a valid string, not a list"),
        ({"topic": None}, "real_topic: Input should be a valid string, not None"),
        ({"immunity_s": "60"}, "immunity_s: Input should be a valid integer, not a str"),
        ({"queue_id": "3"}, "queue_id: Input should be a valid integer, not a str"),
        ({"immunity_s": 6.5}, "immunity_s: Input should be a valid integer, not a float"),
        ({"properties": {"n": 1}}, "n: Input should be a valid string, not an int"),
        # What no UTF-8 can say: as the name of a header it would kill the process.
        ({"properties": {"\ud800": "red"}}, "\ufffd\ufffd\ufffd: it has a lone surrogate"),
        ({"properties": {"colour": "\ud800"}}, "colour: it has a lone surrogate"),
        ({"topic": "\ud800"}, "real_topic: it has a lone surrogate"),
        ({"tags": "red\udfff"}, "tags: it has a lone surrogate"),
        ({"keys": "\udc80"}, "keys: it has a lone surrogate"),
    ],
)
def test_a_field_that_no_header_can_hold_is_refused_with_its_name(field: dict[str, Any], told: str) -> None:
    message = HalfMessage(**{"transaction_id": "t", "topic": "orders", "body": b"", "producer_group": "g", **field})
    with pytest.raises(RecordError) as caught:
        message.to_record()
    assert str(caught.value) == f"bad_header: {told}"


def test_null_value_is_an_empty_body() -> None:
    headers = [("REAL_TOPIC", b"orders"), ("PGROUP", b"shop")]
    assert HalfMessage.from_record(b"t1", None, headers).body == b""


def test_repr_shows_neither_body_nor_properties() -> None:
    message = HalfMessage(transaction_id="t1", topic="orders", body=b"s3cret", producer_group="shop", properties={"token": "s3cret"})
    assert "s3cret" not in repr(message)
    assert "t1" in repr(message)


@pytest.mark.parametrize("name", DELAY_HEADERS)
def test_delays_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: a transactional message cannot be delayed, RocketMQ loses"):
        refuse_reserved({"colour": "red", name: "3"})


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES - set(DELAY_HEADERS)), "", "a\0b"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="property"):
        refuse_reserved({name: "3"})


@pytest.mark.parametrize("name", [b"CHECK_ID", b"", 7])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    """The name of a header is made from bytes, so that it would be a reserved one."""
    with pytest.raises(TypeError, match=r"the name of a property is an? (bytes|int), and not a str"):
        refuse_reserved({name: "3"})


def test_a_remark_has_what_the_database_says_and_neither_statement_nor_parameters() -> None:
    """SQLAlchemy's text has both, and a remark is a record that others read."""

    def listener() -> None:
        with sqlalchemy.create_engine("sqlite://").begin() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE customers (card TEXT PRIMARY KEY)"))
            for _ in range(2):
                connection.execute(sqlalchemy.text("INSERT INTO customers VALUES (:card)"), {"card": "4111-1111"})

    assert ask(listener).remark == "IntegrityError: UNIQUE constraint failed: customers.card"


class Base(DeclarativeBase):
    """Base of the tables here."""


class Customer(Base):
    """A row with personal data."""

    __tablename__ = "customers"
    card: Mapped[str] = mapped_column(primary_key=True)


def test_nor_do_what_sqlalchemy_says_of_a_session_after_an_error_that_was_caught_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The text of a PendingRollbackError quotes the error before it, statement and parameters included."""

    def listener() -> None:
        with Session(sqlalchemy.create_engine("sqlite://")) as session:
            session.execute(sqlalchemy.text("CREATE TABLE customers (card TEXT PRIMARY KEY)"))
            session.execute(sqlalchemy.insert(Customer), [{"card": "4111-1111"}])
            session.add(Customer(card="4111-1111"))
            with pytest.raises(IntegrityError):
                session.flush()
            session.execute(sqlalchemy.text("SELECT 1"))

    answer = ask(listener)
    assert (answer.remark or "").startswith("PendingRollbackError: This Session's transaction has been rolled back")
    log_unknown(HalfMessage(transaction_id="t", topic="orders", body=b"", producer_group="g"), 0, answer)
    assert "PendingRollbackError" in caplog.text
    for told in (answer.remark, caplog.text):
        assert "4111" not in str(told)
        assert "INSERT" not in str(told)


@given(st.text())
def test_remark_is_one_short_clean_line(text: str) -> None:
    remark = remark_of(text * 3)
    assert len(remark.encode()) <= MAX_REMARK_BYTES
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in remark)


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("no stock\n  left\t\x07!", "no stock left !"),
        ("a" * 2000, "a" * 1024),
        ("a" + "ä" * 1000, "a" + "ä" * 511),
        ("\ud800x", "x"),
        ("", ""),
    ],
)
def test_remarks(text: str, remark: str) -> None:
    assert remark_of(text) == remark


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def _raise(error: BaseException) -> Callable[[], None]:
    def method() -> None:
        raise error

    return method


@pytest.mark.parametrize(
    ("method", "remark"),
    [
        (lambda: None, "the listener returned None, not a LocalTransactionState"),
        (lambda: "COMMIT", "the listener returned a str, not a LocalTransactionState"),
        (lambda: True, "the listener returned a bool, not a LocalTransactionState"),
        (_raise(ValueError("no\nstock")), "ValueError: no stock"),
        (_raise(_MuteError()), "_MuteError: (it has no text)"),
    ],
)
def test_anything_but_a_state_counts_as_unknown(method: Callable[[], LocalTransactionState | None], remark: str) -> None:
    answer = ask(method)
    assert (answer.state, answer.remark) == (LocalTransactionState.UNKNOWN, remark)


class _MuteSendError(_MuteError, SendError):
    pass


def _caused_by(cause: BaseException) -> SendError:
    error = SendError("Kafka is away")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_whole"),
    [(SendError("Kafka is away"), False), (_caused_by(ConnectionError("db refused")), True), (_MuteSendError(), False)],
)
def test_what_led_to_an_error_of_halfway_in_a_listener_is_logged(
    error: Exception, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of one without a cause says it all. It may have none, and the answer goes on."""
    answer = ask(_raise(error))
    log_unknown(HalfMessage(transaction_id="t", topic="orders", body=b"", producer_group="g"), 0, answer)
    assert ("db refused" in caplog.text) == ("Traceback" in caplog.text) == is_whole
    assert f"error={type(error).__name__}" in caplog.text


@pytest.mark.parametrize("state", list(LocalTransactionState))
def test_states_are_returned_as_they_are(state: LocalTransactionState) -> None:
    assert ask(lambda: state) == (state, None, None)


def test_ctrl_c_in_a_listener_is_not_an_answer() -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(_raise(KeyboardInterrupt()))


@given(st.lists(st.integers(0, 30), unique=True).map(sorted), st.data())
def test_position_never_passes_an_open_record(offsets: list[int], data: st.DataObject) -> None:
    progress, done, begun = PartitionProgress(0), set[int](), list[int]()
    waiting, expected = list(offsets), 0

    def finish(offset: int) -> int:
        progress.finish(offset)
        done.add(offset)
        return next((each for each in begun if each not in done), begun[-1] + 1)

    while len(done) < len(offsets):
        if waiting and (not set(begun) - done or data.draw(st.booleans())):
            begun.append(waiting.pop(0))
            progress.begin(begun[-1])
        else:
            offset = data.draw(st.sampled_from(sorted(set(begun) - done)))
            expected = finish(offset)
        again = data.draw(st.sampled_from(begun))
        progress.begin(again)
        if again in done:
            expected = finish(again)
        assert progress.position == expected


def test_making_a_producer_starts_nothing() -> None:
    before = threading.enumerate()
    producer = TransactionProducer(NOWHERE, "shop", Never())
    assert threading.enumerate() == before
    assert producer.close() is True
    assert producer.close() is True
    for use in (producer.start, lambda: producer.send_in_transaction("orders", b"")):
        with pytest.raises(ProducerClosedError, match="'shop'"):
            use()


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": ""},
        {"transaction_id": ""},
        {"transaction_id": "a" * 256},
        {"properties": {"DELAY": "3"}},
        {"properties": {"PGROUP": "other"}},
        {"properties": {"HALF_LOST": "0:1"}},
        {"properties": {"colour": 3}},
        {"queue_id": 2**31},
        {"queue_id": "1x"},
        {"immunity_s": 0},
        {"incarnation": -1},
        {"tags": 5},
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(wrong: dict[str, object]) -> None:
    before = threading.enumerate()
    producer = TransactionProducer(NOWHERE, "shop", Never())
    arguments: dict[str, object] = {"topic": "orders", "body": b"", **wrong}
    with pytest.raises(ValueError, match=r"."):
        producer.send_in_transaction(**arguments)  # type: ignore[arg-type]
    assert threading.enumerate() == before


def test_a_body_must_be_bytes() -> None:
    with pytest.raises(TypeError):
        TransactionProducer(NOWHERE, "shop", Never()).send_in_transaction("orders", "text")  # type: ignore[arg-type]


def test_wrong_settings_of_a_producer_are_refused() -> None:
    with pytest.raises(RecordError) as caught:
        TransactionProducer(NOWHERE, "", Never())
    assert caught.value.reason is Reason.BAD_HEADER
    with pytest.raises(SettingsError):
        TransactionProducer(KafkaSettings(), "shop", Never())
    for wrong in ("max_in_flight", "send_timeout_ms", "check_threads", "max_open_checks", "max_body_bytes"):
        with pytest.raises(ValueError, match="at least 1"):
            TransactionProducer(NOWHERE, "shop", Never(), **{wrong: 0})


def test_body_over_the_limit_is_not_sent() -> None:
    with TransactionProducer(NOWHERE, "shop", Never(), max_body_bytes=10) as producer, pytest.raises(SendError, match="11 bytes"):
        producer.send_in_transaction("orders", b"x" * 11)


def test_a_null_property_is_read_as_the_job_reads_it() -> None:
    headers: list[tuple[str, bytes | None]] = [("REAL_TOPIC", b"t"), ("PGROUP", b"g"), ("null", None)]
    check = [*headers, ("TRANSACTION_CHECK_TIMES", b"1"), ("CHECK_ID", b"x")]
    assert HalfMessage.from_record(b"id", b"", headers).properties == {"null": None}
    assert CheckRequest.from_record(b"id", b"", check).properties == {"null": None}


class FormError(Exception):
    """As those of forms: its `exceptions` are no exceptions."""

    exceptions = {"email": "no address"}  # noqa: RUF012


def test_an_exception_with_attributes_of_its_own_is_a_remark() -> None:
    def listener() -> None:
        raise FormError("no address")

    assert ask(listener).remark == "FormError: no address"


@pytest.mark.parametrize("settings", ["127.0.0.1:9092", {"bootstrap_servers": "127.0.0.1:9092"}, None])
def test_a_producer_takes_settings_of_kafka_alone(settings: Any) -> None:
    with pytest.raises(TypeError, match=r"a producer takes KafkaSettings, such as load_settings\(\).kafka, not "):
        TransactionProducer(settings, "shop", Listener())
