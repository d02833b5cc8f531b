"""R14, `bad_signature`: only a holder of the group's key can settle its transactions."""

from pathlib import Path

import yaml

from halfway import TransactionProducer
from halfway.schemas.signing import signature_of
from halfway.schemas.tables import Table
from tests.support.client_world import COMMIT, UNKNOWN, Listener
from tests.support.commands import facts, invoke
from tests.support.job_world import MakeWorld
from tests.support.waiting import until

KEY, OLD, OTHER = (f"{name} key of thirty-two bytes or more" for name in ("the", "an old", "another's"))
CLIENT = "signing-client"
"""A group for these tests alone. Its consumer group stays in the broker, and later tests find it absent (R15)."""
KEYS = {"g": [KEY, OLD], "h": [OTHER], CLIENT: [KEY, OLD]}


def signed(transaction_id: str, action: str = "COMMIT", group: str = "g", incarnation: int = 0, key: str = KEY) -> bytes:
    return signature_of(key.encode(), transaction_id, action, group, incarnation).encode()


def test_r14_an_op_counts_only_with_its_groups_signature(world: MakeWorld) -> None:
    w = world(**{"kafka.signing.keys": KEYS})
    good = {"signed": signed("signed"), "by the old key": signed("by the old key", key=OLD)}
    bad = {
        "unsigned": None,
        "another's key": signed("another's key", key=OTHER),
        "moved from another id": signed("signed"),
        "turned round": signed("turned round", "ROLLBACK"),
        "of another incarnation": signed("of another incarnation", incarnation=1),
        "of another group": signed("of another group", group="h"),
        "no text": b"\xc3(",
        "empty": b"",
    }
    for name, signature in (good | bad).items():
        w.half(name)
        w.op(name, b"COMMIT", 1, SIGNATURE=signature)
    w.half("free")
    w.op("free", b"COMMIT", 1, PGROUP=b"nobody's")
    w.half("rolled back")
    w.op("rolled back", b"ROLLBACK", 1, SIGNATURE=signed("rolled back", "ROLLBACK"))
    [report] = w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == set(good)
    assert report.counts["bad_signature"] == len(bad)
    refused = {row.transaction_id: row for row in w.rows(Table.QUARANTINE)}
    assert {name: row.reason for name, row in refused.items()} == dict.fromkeys(bad, "bad_signature") | {"free": "group_mismatch"}
    assert refused["unsigned"].detail == "the op is not signed"
    assert {header.key: bytes(header.value) for header in refused["moved from another id"].headers}["SIGNATURE"] == signed("signed")
    # A refused op does not change its half, so the right op still settles it. A copy of an accepted op is a duplicate.
    w.op("unsigned", b"COMMIT", 2, SIGNATURE=signed("unsigned"))
    w.op("signed", b"COMMIT", 2, SIGNATURE=signed("signed"))
    [report] = w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {*good, "unsigned"}
    assert report.counts["duplicate_op"] == 1


def test_if_signatures_are_required_a_group_without_a_key_settles_nothing(world: MakeWorld) -> None:
    w = world(**{"kafka.signing.keys": {"g": KEY}, "kafka.signing.required": True})
    w.half("a")
    w.half("b", PGROUP=b"nobody's")
    w.op("a", b"COMMIT", 1, SIGNATURE=signed("a"))
    w.op("b", b"COMMIT", 1, PGROUP=b"nobody's", SIGNATURE=signed("b", group="nobody's"))
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
    [row] = w.rows(Table.QUARANTINE)
    assert (row.reason, row.detail) == ("bad_signature", "there is no key for group nobody's")


def test_the_client_and_the_commands_sign_their_ops(world: MakeWorld, tmp_path: Path) -> None:
    w = world(
        timestamps="LogAppendTime",
        **{"kafka.signing.keys": KEYS, "kafka.signing.required": True, "resolution.tick_interval": 100, "resolution.transactionTimeOut": 1},
    )
    listener = Listener(lambda _, arg: arg)
    with TransactionProducer(w.settings.kafka, CLIENT, listener) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="at-once", arg=COMMIT)
        producer.send_in_transaction("orders", b"", transaction_id="asked", arg=UNKNOWN)
        producer.send_in_transaction("orders", b"", transaction_id="by-hand", arg=UNKNOWN, immunity_s=3600)
        w.resolve()
        until(lambda: len(listener.checked) == 1, "the check")
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"kafka": {"signing": {"keys": KEYS, "required": True}}}))
    assert facts(invoke(w.settings, "commit", "by-hand", "--config", str(path), "--json"))["action"] == "COMMIT"
    keyless = invoke(w.settings, "commit", "x", "--group", "nobody's", "--config", str(path))
    assert (keyless.exit_code, keyless.stderr) == (1, "error: ops must be signed, and kafka.signing.keys has no key for group nobody's\n")
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"at-once", "asked", "by-hand"}
    assert w.rows(Table.QUARANTINE) == []


def test_without_keys_the_job_does_not_read_signatures(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    w.op("a", b"COMMIT", 1, SIGNATURE=b"\xc3( whatever")
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
    assert w.rows(Table.QUARANTINE) == []
