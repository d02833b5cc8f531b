"""Which records of the check topic a service takes for checks of the job, without Kafka."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from halfway.clients.check_records import CheckRecords
from halfway.conf.loader import load_settings
from tests.support.forged_checks import CLUSTER, Check, forged_checks, genuine_check

KEY, OLD, OTHER = (f"{name} key of thirty-two bytes or more" for name in ("the", "an old", "another's"))
TOPIC, GROUP = "check", "shop"
OWN = {"kafka.bootstrap_servers": "127.0.0.1:1", "kafka.check_topic": TOPIC}
SIGNING = {"kafka.signing.cluster": CLUSTER, "kafka.signing.keys": {GROUP: [KEY, OLD]}}
FORGED = forged_checks(TOPIC, GROUP, KEY, OTHER)


def taken(check: Check, **signing: Any) -> list[str]:
    """Return the ids of the transactions that the listener would be asked about."""
    settings, record = load_settings(environ={}, overrides={**OWN, **signing}).kafka, MagicMock()
    record.key.return_value, record.value.return_value, record.headers.return_value = check
    request = CheckRecords(settings, GROUP).request_of(record)
    return [] if request is None else [request.transaction_id]


@pytest.mark.parametrize("key", [KEY, OLD])
def test_a_check_that_the_job_has_signed_is_answered(key: str) -> None:
    assert taken(genuine_check(TOPIC, GROUP, key), **SIGNING) == ["genuine"]


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_check_is_skipped(what: str, caplog: pytest.LogCaptureFixture) -> None:
    assert taken(FORGED[what], **SIGNING) == []
    assert "event=check_skipped" in caplog.text


@pytest.mark.parametrize("what", FORGED)
def test_while_not_everybody_signs_only_a_wrong_signature_is_refused(what: str) -> None:
    is_unsigned = what in ("not signed", "signed in the header of halves", "signed with nothing")
    found = taken(FORGED[what], **SIGNING, **{"kafka.signing.accept_unsigned": True})
    assert found == (["genuine"] if is_unsigned else [])


def test_a_service_without_a_key_looks_at_no_signature() -> None:
    assert taken(FORGED["signed with a text"]) == ["genuine"]
