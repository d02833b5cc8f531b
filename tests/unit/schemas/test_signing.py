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
from halfway.schemas.records import OpHeaders
from halfway.schemas.settings import SigningSettings
from halfway.schemas.signing import Keyring, signature_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "contract.md").read_text()
KEY, OLD = "0123456789abcdef0123456789abcdef", "an old key of the group, 32 bytes."
OP = ("order-7", "COMMIT", "order-service", 0)


def keyring(*keys: str, required: bool = False) -> Keyring:
    return Keyring({"order-service": [key.encode() for key in keys]}, required=required)


def test_the_vectors_of_the_page_are_right() -> None:
    vectors = re.findall(r"^\| `([^`]+)` \| `(COMMIT|ROLLBACK|UNKNOWN)` \| `([^`]+)` \| (\d+) \| `([0-9a-f]{64})` \|$", PAGE, re.MULTILINE)
    assert len(vectors) == 3
    assert KEY in PAGE
    for transaction_id, action, group, incarnation, signature in vectors:
        fields = [text.encode() for text in ("halfway-op-1", transaction_id, action, group, incarnation)]
        signed = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        assert hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest() == signature
        assert signature_of(KEY.encode(), transaction_id, action, group, int(incarnation)) == signature
    [byte_by_byte] = re.findall(r"```text\nsigned\n(.*?)```", PAGE, re.DOTALL)
    in_hex = "".join(re.findall(r"^  ((?:[0-9a-f]{2} )+)", byte_by_byte, re.MULTILINE))
    assert hmac.new(KEY.encode(), bytes.fromhex(in_hex), hashlib.sha256).hexdigest() == vectors[0][-1]


def test_a_keyring_accepts_the_signature_of_another_with_the_same_key() -> None:
    assert keyring(KEY).problem(*OP, keyring(KEY).sign(*OP)) is None


@pytest.mark.parametrize(
    "other",
    [("order-8", *OP[1:]), ("order-7", "ROLLBACK", *OP[2:]), (*OP[:3], 1), ("order-7C", "OMMIT", *OP[2:])],
    ids=["another id", "another action", "another incarnation", "the same letters"],
)
def test_a_signature_is_for_one_op_only(other: tuple[str, str, str, int]) -> None:
    assert "does not fit" in (keyring(KEY).problem(*other, keyring(KEY).sign(*OP)) or "")


def test_a_signature_is_for_one_group_only() -> None:
    both = Keyring({"a": [KEY.encode()], "b": [KEY.encode()]}, required=False)
    assert both.problem("x", "COMMIT", "b", 0, both.sign("x", "COMMIT", "a", 0))


@pytest.mark.parametrize("signature", [None, "", "00", "ä" * 64, keyring(KEY).sign(*OP).upper()])  # type: ignore[union-attr]
def test_invalid_signatures(signature: str | None) -> None:
    assert keyring(KEY).problem(*OP, signature)


def test_keys_are_changed_without_a_gap() -> None:
    """Add the new key second, let it sign, then remove the old one. Each step verifies what its neighbours sign."""
    steps = [keyring(OLD), keyring(OLD, KEY), keyring(KEY, OLD), keyring(KEY)]
    for before, after in pairwise(steps):
        assert after.problem(*OP, before.sign(*OP)) is None
        assert before.problem(*OP, after.sign(*OP)) is None
    assert steps[3].problem(*OP, steps[0].sign(*OP))


def test_a_group_without_a_key_need_not_sign_unless_signatures_are_required() -> None:
    other = ("order-7", "COMMIT", "other", 0)
    assert keyring(KEY).sign(*other) is None
    assert keyring(KEY).problem(*other, None) is None
    assert keyring(KEY, required=True).problem(*other, None) == "there is no key for group other"


def test_an_op_is_signed_in_its_header() -> None:
    op = OpHeaders(action=LocalTransactionState.COMMIT, producer_group="order-service").signed("order-7", keyring(KEY))
    assert dict(op.to_headers())["SIGNATURE"].decode() == signature_of(KEY.encode(), *OP)
    assert "SIGNATURE" not in dict(OpHeaders(action=LocalTransactionState.COMMIT, producer_group="g").signed("x", None).to_headers())


def test_a_keyring_shows_no_key_and_can_be_sent_to_the_workers() -> None:
    own = keyring(KEY)
    assert KEY not in f"{own!r}{own}"
    assert pickle.loads(pickle.dumps(own)).sign(*OP) == own.sign(*OP)


def signing(environ: dict[str, str] | None = None, **overrides: object) -> SigningSettings:
    return load_settings(
        environ=environ or {}, overrides={f"kafka.signing.{name}": value for name, value in overrides.items()}
    ).kafka.signing


def test_keys_come_from_the_file_or_as_json_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"kafka: {{signing: {{keys: {{Order.Service: {KEY}, b: [{KEY}, '{OLD}']}}}}}}")
    from_file = load_settings(path, environ={}).kafka.signing
    assert {group: len(keys) for group, keys in from_file.keys.items()} == {"Order.Service": 1, "b": 2}
    assert signing({"HALFWAY__KAFKA__SIGNING__KEYS": f'{{"Order.Service": "{KEY}", "b": ["{KEY}", "{OLD}"]}}'}) == from_file
    for shown in (repr(from_file), str(from_file.model_dump()), from_file.model_dump_json()):
        assert KEY not in shown


def test_without_keys_nothing_is_signed() -> None:
    assert signing().keyring() is None
    assert signing(keys="").keyring() is None


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ('{"shop": "short"}', "a key of shop is shorter than 32 bytes"),
        ('{"shop": []}', "at least 1"),
        ("hunter2", "dictionary"),
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
