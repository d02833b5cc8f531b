"""The fuzzer's own signatures are those of the product, and its forgeries are none."""

from dataclasses import replace

import pytest

from halfway.schemas.signing import Keyring, Signable, sha256_of
from tests.fuzz.generator import Generator, NewRecord
from tests.fuzz.judge import Record
from tests.fuzz.signing import Forger, Signing

SIGNING = Signing.of("halves", "ops")


def keyring() -> Keyring:
    keys = {group: [key.encode() for key in keys] for group, keys in SIGNING.keys.items()}
    return Keyring(keys, required=False, cluster=SIGNING.cluster, job_keys=[SIGNING.job_key.encode()], topics=SIGNING.topics)


def test_it_signs_as_the_product_does() -> None:
    record = NewRecord(True, b"id", b"body", [("REAL_TOPIC", b"orders"), ("PGROUP", b"g"), ("own", None)], 0)
    signable = Signable("halves", b"id", sha256_of(b"body"), record.headers)
    assert SIGNING.signature(SIGNING.keys["g"][0], record).decode() == keyring().sign("g", signable)
    tick = NewRecord(False, None, None, [("TICK", b"5"), ("PARTITIONS", b"2")], 5, 1)
    assert SIGNING.signature(SIGNING.job_key, tick).decode() == keyring().sign_as_job(
        Signable("ops", None, sha256_of(None), tick.headers, partition=1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_records_of_a_seed_are_the_same_and_control_transactions_are_signed_well(seed: int) -> None:
    def made() -> tuple[Generator, list[NewRecord]]:
        generator = Generator(seed, 4, 2_000)
        return generator, list(Forger(generator, SIGNING, seed).records(3_000))

    (generator, records), (_, again) = made(), made()
    assert records == again
    judged = [(each, SIGNING.refuses(Record(each.of_half, 0, *each[1:5]))) for each in records if (each.key or b"").startswith(b"control-")]
    halves = {each.key for each, is_forged in judged if each.of_half and not is_forged}
    assert halves == {key.encode() for key in generator.control}
    assert sum(is_forged for _, is_forged in judged) > 50


def test_headers_that_say_nothing_may_be_any_bytes() -> None:
    """A million records had an op of a group without a key whose REAL_TOPIC is no UTF-8."""
    op = Record(False, 0, b"id", None, [("ACTION", b"COMMIT"), ("PGROUP", b"keyless"), ("REAL_TOPIC", b"\xf5")], 0)
    notice = Record(True, 0, b"id", None, [("HALF_LOST", b"0:1"), ("PGROUP", b"\xf5")], 0)
    signed = replace(notice, headers=[*notice.headers, ("SIGNATURE", SIGNING.signature(SIGNING.job_key, notice))])
    assert (SIGNING.refuses(op), SIGNING.refuses(notice), SIGNING.refuses(signed)) == (False, True, False)
