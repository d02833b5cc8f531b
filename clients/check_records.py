"""Takes the checks of one producer group from the records of its check topic (docs/contract.md)."""

import logging

from confluent_kafka import Message

from halfway.clients.messages import CheckRequest
from halfway.schemas.headers import CHECK_SIGNATURE, PGROUP
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import Headers, RecordError, headers_of
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.signing import Signable, sha256_of

log = logging.getLogger(__name__)


class CheckRecords:
    """Reads checks. Skips those of other groups, and those that break the contract or that the job has not signed."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        """Store the group, its topic and its keys."""
        self._group = group
        self._topic, self._keyring = settings.check_topic_of(group), settings.signing.keyring_of(group)

    def request_of(self, message: Message) -> CheckRequest | None:
        """Return the check that a record holds; None if it is for another group or breaks the contract."""
        try:
            headers = headers_of(message)
            if headers is None:
                raise RecordError(Reason.BAD_HEADER, "the name of a header is not UTF-8")
            groups = [value for name, value in headers if name == PGROUP]
            if groups and self._group.encode() not in groups:
                return None
            request = CheckRequest.from_record(message.key(), message.value(), headers)
            self._verify(message, headers)
            return request
        except RecordError as error:
            log.warning("event=check_skipped partition=%s offset=%s detail=%r", message.partition(), message.offset(), str(error))
            return None

    def _verify(self, message: Message, headers: Headers) -> None:
        """Refuse a check that the job has not signed, if this group has a key: anyone may write to the check topic.

        Raises:
            RecordError: it is not signed with a key of this group.
        """
        if self._keyring is None or not self._keyring.has(self._group):
            return
        signable = Signable(self._topic, message.key(), sha256_of(message.value()), headers, signature_header=CHECK_SIGNATURE)
        signature = dict(headers).get(CHECK_SIGNATURE)
        problem = self._keyring.problem(self._group, signable, signature.decode() if signature else None)
        if problem is not None:
            raise RecordError(Reason.BAD_SIGNATURE, problem)
