"""Checks that look as the job's, and are not: for a service that has a key of its group."""

from typing import NamedTuple

from halfway.schemas.headers import CHECK_ID, CHECK_SIGNATURE, SIGNATURE, TRANSACTION_CHECK_TIMES, check_id
from halfway.schemas.signing import Signable, sha256_of, signature_of
from tests.support.job_world import Headers, half_headers

CLUSTER = "test"


class Check(NamedTuple):
    """A check request as it is in the topic."""

    key: bytes
    body: bytes
    headers: Headers


def genuine_check(topic: str, group: str, key: str, name: str = "genuine", body: bytes = b"body", number: int = 1) -> Check:
    """Return a check that the job, or another instance of the group, has signed."""
    own = half_headers(PGROUP=group.encode())
    own += [(TRANSACTION_CHECK_TIMES, b"%d" % number), (CHECK_ID, check_id(name, 0, 0, number).encode())]
    return Check(name.encode(), body, [*own, (CHECK_SIGNATURE, _signature(topic, name.encode(), body, own, key))])


def forged_checks(topic: str, group: str, key: str, others_key: str) -> dict[str, Check]:
    """Return checks that nobody who has the key has sent to this topic, each by what is wrong with it."""
    genuine = genuine_check(topic, group, key)
    *own, signature = genuine.headers

    def signed_as(content: bytes | None, of: Check = genuine) -> Check:
        return Check(of.key, of.body, [*of.headers[:-1], (CHECK_SIGNATURE, content)])

    def by(other: str, cluster: str = CLUSTER, of_topic: str = topic) -> Check:
        return signed_as(_signature(of_topic, genuine.key, genuine.body, own, other, cluster))

    as_a_half = [*own, (SIGNATURE, _signature(topic, genuine.key, genuine.body, own, key))]
    return {
        "not signed": Check(genuine.key, genuine.body, own),
        "signed with another group's key": by(others_key),
        "signed for another topic": by(key, of_topic=f"{topic}.own"),
        "signed for another cluster": by(key, cluster="prod"),
        "signed with a text": signed_as(b"yes"),
        "signed with nothing": signed_as(b""),
        "signed with null": signed_as(None),
        "signed with what is no text": signed_as(b"\xff" * 64),
        "signed in upper case": signed_as((signature[1] or b"").upper()),
        "signed with zeros": signed_as(b"0" * 64),
        "signed in the header of halves": Check(genuine.key, genuine.body, as_a_half),
        "the signature of another body": signed_as(signature[1], genuine_check(topic, group, key, body=b"other")),
        "the signature of another id": signed_as(signature[1], genuine_check(topic, group, key, name="other")),
        "the signature of another number": signed_as(signature[1], genuine_check(topic, group, key, number=2)),
        "one header more": Check(genuine.key, genuine.body, [("own", b"x"), *genuine.headers]),
    }


def _signature(topic: str, name: bytes, body: bytes, headers: Headers, key: str, cluster: str = CLUSTER) -> bytes:
    signable = Signable(topic, name, sha256_of(body), headers, signature_header=CHECK_SIGNATURE)
    return signature_of(key.encode(), cluster, signable).encode()
