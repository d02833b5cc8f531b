"""What becomes of a check whose answer cannot be sent."""

import time
from collections.abc import Callable

import pytest

from halfway import CheckRequest, LocalTransactionState, SendError
from halfway.clients.check_threads import Answers, CheckThreads
from halfway.clients.listener import Answer
from halfway.clients.open_checks import OpenChecks
from halfway.schemas.headers import check_id
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import RecordError
from tests.support.waiting import until

REQUEST = CheckRequest(
    transaction_id="t1", topic="orders", body=b"", producer_group="shop", check_times=1, check_id=check_id("t1", 0, 0, 1)
)


def answered_by(send: Callable[..., None]) -> tuple[CheckThreads, OpenChecks]:
    """Return a thread that answers one check, and what it knows of that."""
    open_checks = OpenChecks(max_open=10)
    open_checks.assign({0: 0})
    threads = CheckThreads("shop", Answers(lambda _: Answer(LocalTransactionState.COMMIT), send), open_checks, 1)
    threads.start()
    task = open_checks.add(0, 0, REQUEST)
    assert task is not None
    threads.put(task)
    return threads, open_checks


def test_an_answer_that_can_be_no_record_is_given_up_so_that_it_holds_up_no_other_check(caplog: pytest.LogCaptureFixture) -> None:
    """Its check would stay open for ever, and the group would count as behind (R15). The job asks again, and counts."""

    def send(*_: object) -> None:
        raise RecordError(Reason.HEADERS_TOO_LARGE, "32774 bytes, at most 32767")

    threads, open_checks = answered_by(send)
    until(lambda: open_checks.count() == 0, "the check is done")
    threads.dismiss()
    assert open_checks.to_commit() == {0: 1}
    assert "event=answer_refused transaction_id='t1'" in caplog.text


def test_an_answer_that_kafka_does_not_take_now_is_sent_later(caplog: pytest.LogCaptureFixture) -> None:
    failures = [SendError("the queue is full")]

    def send(_: CheckRequest, __: Answer, on_delivered: Callable[[None], None]) -> None:
        if failures:
            raise failures.pop()
        on_delivered(None)

    threads, open_checks = answered_by(send)
    until(lambda: "event=answer_not_sent" in caplog.text, "it is to be resent")
    assert open_checks.to_commit() == {}
    [task] = open_checks.due(time.monotonic() + 10)
    threads.put(task)
    until(lambda: open_checks.count() == 0, "the check is done")
    threads.dismiss()
    assert open_checks.to_commit() == {0: 1}
