"""Signatures, compared with one computed from the words of docs/contract.md; their keys, which are never shown."""

import hashlib
import hmac
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.schemas.errors import SettingsError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import HalfHeaders, OpHeaders
from halfway.schemas.settings import SigningSettings
from halfway.schemas.signing import Keyring, Signable, binding_of, sha256_of, signature_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "contract.md").read_text()
KEY, OLD = "0123456789abcdef0123456789abcdef", "an old key of the group, 32 bytes."
RECORD = Signable("transactions.op", b"order-7", sha256_of(None), [("ACTION", b"COMMIT"), ("PGROUP", b"order-service")])
Fields = list[bytes | None]


def keyring(*keys: str, required: bool = False, cluster: str = "prod") -> Keyring:
    return Keyring({"order-service": [key.encode() for key in keys]}, required=required, cluster=cluster)


def vectors() -> dict[str, tuple[bytes, str]]:
    """Return name → (signed bytes, signature) of the page's vectors."""
    found = re.findall(r"```text\nsigned: ([a-z ]+)\n(.*?)\nsignature\n  ([0-9a-f]{64})\n```", PAGE, re.DOTALL)
    in_hex = {name: "".join(re.findall(r"^  ((?:[0-9a-f]{2}(?: |$))+)", text, re.MULTILINE)) for name, text, _ in found}
    return {name: (bytes.fromhex(in_hex[name]), signature) for name, _, signature in found}


def signed_bytes(cluster: str, record: Signable) -> bytes:
    """Return what docs/contract.md says that is signed."""
    place = b"" if record.partition is None else b"%d" % record.partition
    fields: Fields = [b"halfway-1", cluster.encode(), record.topic.encode(), place, record.key or b"", record.value_sha256]
    for name, value in record.headers:
        fields += [name.encode(), value]
    return b"".join(b"\xff\xff\xff\xff" if field is None else len(field).to_bytes(4, "big") + field for field in fields)


HALF = [
    ("REAL_TOPIC", b"orders"),
    ("PGROUP", b"order-service"),
    ("SIGNED_AT", b"1763720000000"),
    ("colour", "röt".encode()),
    ("empty", None),
]
SHOWN = {
    "half": Signable("transactions.half", b"order-7", sha256_of(b'{"order": 7}'), HALF),
    "op": RECORD._replace(headers=[*RECORD.headers, ("HALF_SIGNATURE", b"")]),
    "tick": Signable("transactions.half", None, sha256_of(b""), [("TICK", b"1763720000000"), ("PARTITIONS", b"4")], 1),
}


def test_the_vectors_of_the_page_are_right() -> None:
    assert KEY in PAGE
    shown = dict(SHOWN)
    shown["op"] = RECORD._replace(headers=[*RECORD.headers, ("HALF_SIGNATURE", vectors()["half"][1].encode())])
    assert set(vectors()) == set(shown)
    for name, (signed, signature) in vectors().items():
        assert signed == signed_bytes("prod", shown[name]), name
        assert hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest() == signature
        assert signature_of(KEY.encode(), "prod", shown[name]) == signature


@pytest.mark.parametrize(
    "other",
    [
        RECORD._replace(key=b"order-8"),
        RECORD._replace(topic="transactions.half"),
        RECORD._replace(partition=0),
        RECORD._replace(value_sha256=sha256_of(b"x")),
        RECORD._replace(headers=RECORD.headers[:1]),
        RECORD._replace(headers=[*RECORD.headers, ("x", None)]),
        RECORD._replace(headers=[("ACTION", b"COMMITP"), ("GROUP", b"order-service")]),
    ],
)
def test_a_signature_is_for_one_record_only(other: Signable) -> None:
    signature = keyring(KEY).sign("order-service", RECORD)
    assert "does not fit" in (keyring(KEY).problem("order-service", other, signature) or "")


def test_a_signature_is_for_one_cluster_only() -> None:
    assert keyring(KEY, cluster="staging").problem("order-service", RECORD, keyring(KEY).sign("order-service", RECORD))


def test_a_null_header_is_not_an_empty_one() -> None:
    assert signature_of(b"", "", RECORD._replace(headers=[("x", None)])) != signature_of(b"", "", RECORD._replace(headers=[("x", b"")]))


@pytest.mark.parametrize("signature", [None, "", "00", "ä" * 64, (keyring(KEY).sign("order-service", RECORD) or "").upper()])
def test_invalid_signatures(signature: str | None) -> None:
    assert keyring(KEY).problem("order-service", RECORD, signature)


def test_keys_are_changed_without_a_gap() -> None:
    """Add the new key second, let it sign, then remove the old one. Each step verifies what its neighbours sign."""
    steps = [keyring(OLD), keyring(OLD, KEY), keyring(KEY, OLD), keyring(KEY)]
    for before, after in pairwise(steps):
        assert after.problem("order-service", RECORD, before.sign("order-service", RECORD)) is None
        assert before.problem("order-service", RECORD, after.sign("order-service", RECORD)) is None
    assert steps[3].problem("order-service", RECORD, steps[0].sign("order-service", RECORD))


def test_a_group_without_a_key_need_not_sign_unless_signatures_are_required() -> None:
    assert keyring(KEY).sign("other", RECORD) is None
    assert keyring(KEY).problem("other", RECORD, None) is None
    assert keyring(KEY, required=True).problem("other", RECORD, None) == "there is no key for group other"


def test_only_the_job_signs_as_the_job() -> None:
    job = Keyring({}, required=False, job_keys=[KEY.encode(), OLD.encode()])
    assert job.problem_of_job(RECORD, job.sign_as_job(RECORD)) is None
    assert job.problem_of_job(RECORD, None) == "the record is not signed"
    assert keyring(KEY).sign_as_job(RECORD) is None
    assert job.problem_of_job(RECORD, keyring(KEY).sign("order-service", RECORD)), "the same key, and another cluster"


def test_halves_and_ops_are_signed_in_their_headers() -> None:
    half = HalfHeaders(real_topic="orders", producer_group="order-service", properties={"own": "x", "null": None})
    own = half.signed(b"order-7", b"body", "halves", keyring(KEY), 1_763_720_000_000)
    assert own.signed_at_ms == 1_763_720_000_000
    signable = Signable("halves", b"order-7", sha256_of(b"body"), own.to_headers())
    assert keyring(KEY).problem("order-service", signable, own.signature) is None
    op = OpHeaders(action=LocalTransactionState.COMMIT, producer_group="order-service", half_signature=own.signature)
    own_op = op.signed("order-7", "ops", keyring(KEY))
    signable = Signable("ops", b"order-7", sha256_of(None), own_op.to_headers())
    assert keyring(KEY).problem("order-service", signable, own_op.signature) is None
    for unsigned in (
        half.signed(b"x", b"", "halves", None, 0),
        OpHeaders(action=LocalTransactionState.COMMIT, producer_group="g").signed("x", "ops", keyring(KEY)),
    ):
        assert not {"SIGNATURE", "SIGNED_AT"} & dict(unsigned.to_headers()).keys()


def test_a_binding_tells_halves_apart() -> None:
    assert binding_of(None) == 0
    assert len({binding_of(text) for text in ("", "00", "01")} | {0}) == 4


def test_a_keyring_shows_no_key_and_can_be_sent_to_the_workers() -> None:
    own = keyring(KEY)
    assert KEY not in f"{own!r}{own}"
    assert pickle.loads(pickle.dumps(own)).sign("order-service", RECORD) == own.sign("order-service", RECORD)


def signing(environ: dict[str, str] | None = None, **overrides: object) -> SigningSettings:
    own = {"cluster": "prod", **overrides}
    return load_settings(environ=environ or {}, overrides={f"kafka.signing.{name}": value for name, value in own.items()}).kafka.signing


def test_keys_come_from_the_file_or_as_json_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"kafka: {{signing: {{cluster: prod, keys: {{Order.Service: {KEY}, b: [{KEY}, '{OLD}']}}, job_keys: ['{OLD}']}}}}")
    from_file = load_settings(path, environ={}).kafka.signing
    assert {group: len(keys) for group, keys in from_file.keys.items()} == {"Order.Service": 1, "b": 2}
    of_groups = {"HALFWAY__KAFKA__SIGNING__KEYS": f'{{"Order.Service": "{KEY}", "b": ["{KEY}", "{OLD}"]}}'}
    for of_job in (OLD, f'["{OLD}"]'):
        assert signing({**of_groups, "HALFWAY__KAFKA__SIGNING__JOB_KEYS": of_job}) == from_file
    assert from_file.keyring_of_job() is not None
    for shown in (repr(from_file), str(from_file.model_dump()), from_file.model_dump_json()):
        assert KEY not in shown
        assert OLD not in shown


def test_without_keys_nothing_is_signed() -> None:
    assert signing().keyring() is None
    assert signing(keys="{}").keyring() is None


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ('{"shop": "short"}', "one of keys is shorter than 32 bytes"),
        ('{"shop": []}', "at least 1"),
        ("hunter2", "expected"),
        ("{hunter2", "expected"),
    ],
)
def test_wrong_keys_are_refused_and_not_shown(keys: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        signing(keys=keys)
    assert "hunter2" not in str(caught.value)


def test_a_group_needs_a_key_if_signatures_are_required() -> None:
    with pytest.raises(SettingsError, match="no key for group shop"):
        signing(required=True).keyring_of("shop")


def test_the_job_needs_a_key_of_its_own_and_the_cluster_a_name() -> None:
    with pytest.raises(SettingsError, match=r"kafka\.signing has no job_keys"):
        signing(keys={"shop": KEY}).keyring_of_job()
    assert signing().keyring_of_job() is None
    with pytest.raises(SettingsError, match="cluster is missing"):
        signing(keys={"shop": KEY}, cluster=None)
    with pytest.raises(SettingsError, match="one of job_keys is shorter than 32 bytes"):
        signing(job_keys="short")
    with pytest.raises(SettingsError, match="required refuses what accept_unsigned accepts"):
        signing(required=True, accept_unsigned=True)


def test_every_setting_of_signing_changes_the_fingerprint() -> None:
    each = [
        {},
        {"cluster": "b"},
        {"keys": {"g": KEY}},
        {"job_keys": KEY},
        {"topics": {"g": ["t"]}},
        {"required": True},
        {"accept_unsigned": True},
    ]
    assert len({signing(**own).fingerprint() for own in each}) == len(each)
