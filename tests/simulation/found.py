"""The shortest histories that showed defects before they were mended. A test shows that they show none any more."""

from typing import NamedTuple

from tests.simulation.history import Fate
from tests.simulation.world import Action


class Found(NamedTuple):
    """A history, what it is about, and the rule that it broke."""

    about: str
    rule: str
    actions: tuple[Action, ...]


def _send(
    dt_ms: int, group: str, transaction_id: str, fate: Fate, way: str, *, delay_ms: int, immunity_s: int = 0, size: int = 0
) -> Action:
    arguments = {"group": group, "transaction_id": transaction_id, "fate": fate, "way": way, "delay_ms": delay_ms}
    return Action("send", dt_ms, {**arguments, "immunity_s": immunity_s, "size": size})


FOUND = (
    Found(
        "a replayed message, adopted",
        "lost after an adoption",
        (
            Action("start", 0, {"adopt": True}),
            _send(0, "g1", "t5", Fate.COMMIT, "dies after", delay_ms=500),
            Action("wait", 7000, {"ms": 31000, "steps": 4}),
            Action("new_checkpoint", 0, {}),
            Action("wait", 100, {"ms": 65000, "steps": 2}),
            Action("replay", 1000, {}),
        ),
    ),
    Found(
        "a stop longer than half_retention",
        "R8 no last call",
        (
            _send(0, "g2", "t3", Fate.NEVER, "op", delay_ms=500),
            Action("kill", 7000, {}),
            Action("start", 1000, {}),
            Action("wait", 3000, {"ms": 9000000, "steps": 1}),
        ),
    ),
    Found(
        "a batch repeated under other settings",
        "R1 two fates",
        (
            Action("set", 7000, {"name": "resolution.max_body_bytes", "value": 50}),
            Action("start", 0, {}),
            _send(3000, "g2", "t21", Fate.COMMIT, "dies before", delay_ms=0, size=100),
            Action("kill", 7000, {}),
            Action("lose_commit", 0, {}),
        ),
    ),
    Found(
        "a batch repeated under other settings",
        "R1 twice",
        (
            Action("start", 1000, {}),
            Action("half", 0, {"group": "g2", "transaction_id": "t0", "incarnation": 1, "size": 4}),
            Action("kill_at", 100, {"step": 12}),
            _send(0, "g1", "t0", Fate.NEVER, "unsure", delay_ms=40000, size=100),
            _send(7000, "g2", "t4", Fate.COMMIT, "unknown", delay_ms=4000, immunity_s=1, size=4),
            Action("kill_at", 0, {"step": 20}),
            _send(7000, "g2", "t10", Fate.COMMIT, "dies before", delay_ms=9000, size=4),
            Action("wait", 7000, {"ms": 7000, "steps": 4}),
            Action("scale_service", 3000, {"group": "g1", "instances": 2}),
            Action("scale_service", 0, {"group": "g2", "instances": 1}),
            _send(3000, "g1", "t12", Fate.COMMIT, "op", delay_ms=40000),
            Action("set", 7000, {"name": "resolution.transactionCheckMax", "value": 1}),
            Action("start", 0, {}),
            Action("half", 100, {"group": "g2", "transaction_id": "t14", "incarnation": 0, "size": 4}),
        ),
    ),
    Found(
        "checks that nobody could answer yet",
        "R15 behind",
        (
            Action("start", 0, {}),
            _send(0, "g2", "t9", Fate.COMMIT, "op", delay_ms=9000),
            _send(1000, "g2", "t11", Fate.ROLLBACK, "dies before", delay_ms=0),
            Action("wait", 0, {"ms": 130000, "steps": 4}),
            Action("replay", 3000, {}),
            Action("start", 1000, {"adopt": True}),
            _send(3000, "g2", "t18", Fate.NEVER, "unsure", delay_ms=0, immunity_s=20, size=4),
            Action("wait", 0, {"ms": 31000, "steps": 1}),
        ),
    ),
    Found(
        "an aborted Kafka transaction",
        "aborted",
        (
            Action("begin_tx", 1000, {}),
            _send(1000, "g2", "t11", Fate.ROLLBACK, "dies before", delay_ms=0),
        ),
    ),
    Found(
        "a frozen job that wakes",
        "R1 twice",
        (
            _send(1000, "g1", "t4", Fate.COMMIT, "op", delay_ms=40000, size=4),
            Action("freeze_at", 100, {"step": 1}),
            Action("start", 1000, {"adopt": True}),
            Action("new_checkpoint", 1000, {}),
            Action("wait", 7000, {"ms": 130000, "steps": 4}),
            Action("start", 0, {"adopt": True}),
        ),
    ),
    Found(
        "a checkpoint restored from a backup",
        "lost",
        (
            Action("start", 0, {}),
            Action("back_up", 7000, {}),
            _send(1000, "g2", "t5", Fate.COMMIT, "unsure", delay_ms=4000, size=100),
            Action("settle", 7000, {"transaction_id": "t5", "action": "COMMIT"}),
            _send(3000, "g2", "t6", Fate.COMMIT, "dies after", delay_ms=0, size=100),
            Action("kill", 1000, {}),
            Action("restore", 100, {}),
        ),
    ),
    Found(
        "a checkpoint restored from a backup",
        "R17",
        (
            Action("start", 0, {}),
            Action("back_up", 7000, {}),
            _send(7000, "g1", "t9", Fate.COMMIT, "unknown", delay_ms=9000, immunity_s=1, size=4),
            _send(7000, "g2", "t10", Fate.ROLLBACK, "op", delay_ms=40000),
            Action("kill", 1000, {}),
            Action("restore", 100, {}),
        ),
    ),
    Found(
        "quarantine after an adoption",
        "quarantine twice",
        (
            Action(
                "broken",
                100,
                {"topic": "op", "key": b"t0", "value": None, "headers": (("ACTION", b"COMMIT"), ("PGROUP", b"")), "flaw": "bad_header"},
            ),
            Action("start", 0, {}),
            Action("new_checkpoint", 7000, {}),
        ),
    ),
    Found(
        "the bookmark",
        "bookmark",
        (
            Action("start", 1000, {}),
            _send(7000, "g1", "t2", Fate.COMMIT, "op", delay_ms=4000, size=100),
            Action("new_checkpoint", 0, {}),
            Action("kill_at", 3000, {"step": 3}),
            _send(0, "g2", "t11", Fate.COMMIT, "op", delay_ms=0, immunity_s=1, size=4),
        ),
    ),
    Found(
        "R5",
        "R5 unheard",
        (
            Action("set", 0, {"name": "resolution.transactionTimeOut", "value": 600000}),
            Action("start", 1000, {}),
            _send(1000, "g1", "t1", Fate.COMMIT, "op", delay_ms=510000, size=4),
            Action("wait", 0, {"ms": 470000, "steps": 470}),
            Action("kill", 10000, {}),
            Action("new_checkpoint", 0, {}),
            Action("set", 0, {"name": "resolution.transactionTimeOut", "value": 6000}),
            Action("set", 0, {"name": "kafka.max_offsets_per_trigger", "value": 200}),
            Action("start", 0, {"adopt": True}),
            Action("wait", 0, {"ms": 20000, "steps": 200}),
        ),
    ),
    *(
        Found(
            f"decision 6, a copy from before {what}",
            "lost",
            (
                Action("kill_at", 0, {"step": step}),
                Action("start", 0, {}),
                Action("back_up", 0, {}),
                Action("start", 0, {}),
                _send(1000, "g1", "t1", Fate.COMMIT, "op", delay_ms=0),
                Action("kill", 1000, {}),
                _send(1000, "g1", "t2", Fate.COMMIT, "op", delay_ms=0),
                Action("restore", 100, {}),
                Action("start", 1000, {}),
                Action("wait", 0, {"ms": 31000, "steps": 4}),
            ),
        )
        for step, what in ((1, "the tables"), (5, "the first batch"))
    ),
    Found(
        "a former job's ticks, tables lost",
        "R5 unheard",
        (
            Action("set", 0, {"name": "resolution.transactionTimeOut", "value": 600_000}),
            Action("start", 1_000, {}),
            _send(1_000, "g1", "t1", Fate.COMMIT, "op", delay_ms=510_000, size=4),
            Action("wait", 0, {"ms": 470_000, "steps": 470}),
            Action("kill", 10_000, {}),
            Action("lose_tables", 0, {}),
            Action("set", 0, {"name": "resolution.transactionTimeOut", "value": 6_000}),
            Action("set", 0, {"name": "kafka.max_offsets_per_trigger", "value": 200}),
            Action("start", 0, {}),
            Action("wait", 0, {"ms": 20_000, "steps": 200}),
        ),
    ),
    Found(
        "decision 6, a killed start whose tables another checkpoint took",
        "lost",
        (
            Action("kill_at", 7_000, {"step": 2}),
            Action("start", 7_000, {"adopt": True}),
            Action("back_up", 1_000, {}),
            Action("new_checkpoint", 7_000, {}),
            Action("start", 7_000, {"adopt": True}),
            Action("kill", 0, {}),
            Action("restore", 0, {}),
            _send(7_000, "g2", "t14", Fate.COMMIT, "op", delay_ms=9_000, size=4),
            Action("start", 100, {"adopt": True}),
        ),
    ),
    Found(
        "decision 6, a half in two partitions",
        "R11 twice",
        (
            Action("start", 1_000, {}),
            _send(7_000, "g2", "t0", Fate.ROLLBACK, "op", delay_ms=500, size=4),
            _send(0, "g2", "t1", Fate.COMMIT, "op", delay_ms=0, immunity_s=20),
            Action("add_partition", 3_000, {"topic": "half"}),
            Action("half", 1_000, {"group": "g2", "transaction_id": "t1", "incarnation": 0, "size": 4}),
            Action("set", 0, {"name": "kafka.max_offsets_per_trigger", "value": 12}),
            Action("freeze_at", 3_000, {"step": 9}),
            Action("new_checkpoint", 7_000, {}),
            _send(0, "g1", "t13", Fate.NEVER, "op", delay_ms=0, size=4),
            Action("start", 0, {"adopt": True}),
        ),
    ),
    Found(
        "unread checks, a clock that is ahead",
        "R8 unheard",
        (
            _send(0, "g2", "t2", Fate.COMMIT, "dies after", delay_ms=9_000, immunity_s=1, size=4),
            _send(3_000, "g2", "t3", Fate.NEVER, "op", delay_ms=500),
            _send(100, "g2", "t6", Fate.COMMIT, "unsure", delay_ms=40_000),
            _send(0, "g2", "t7", Fate.ROLLBACK, "dies before", delay_ms=0, immunity_s=20),
            Action("scale_service", 3_000, {"group": "g2", "instances": 1}),
            _send(100, "g2", "t14", Fate.ROLLBACK, "dies after", delay_ms=500, immunity_s=300, size=100),
            Action("broker_clock", 0, {"broker": 1, "ms": 20_000}),
            Action("set", 1_000, {"name": "resolution.half_retention", "value": 100_000}),
            Action("scale_service", 7_000, {"group": "g2", "instances": 1}),
            Action("set", 7_000, {"name": "resolution.transactionCheckInterval", "value": 4_000}),
            Action("wait", 1_000, {"ms": 130_000, "steps": 1}),
            Action("start", 0, {}),
            Action("wait", 0, {"ms": 65_000, "steps": 4}),
        ),
    ),
    Found(
        "a check of a former run, by a broker's clock that is ahead",
        "R8 unheard",
        (
            _send(3_000, "g1", "t0", Fate.COMMIT, "dies before", delay_ms=4_000, size=100),
            Action("stick", 0, {"group": "g1", "stuck": True}),
            Action("start", 100, {}),
            Action("expire", 7_000, {}),
            Action("scale_service", 0, {"group": "g1", "instances": 1}),
            Action("broker_clock", 100, {"broker": 1, "ms": 200_000}),
            Action("wait", 100, {"ms": 9_000_000, "steps": 1}),
            Action("kill", 7_000, {}),
            Action("wait", 0, {"ms": 31_000, "steps": 2}),
            Action("start", 3_000, {}),
        ),
    ),
    Found(
        "what a clock that was ahead said stands",
        "R8 unheard",
        (
            Action("start", 0, {}),
            Action("new_checkpoint", 1_000, {}),
            _send(3_000, "g1", "t4", Fate.NEVER, "dies after", delay_ms=4_000),
            Action("stick", 0, {"group": "g1", "stuck": True}),
            Action("add_partition", 1_000, {"topic": "check"}),
            Action("scale_service", 1_000, {"group": "g1", "instances": 1}),
            Action("lag", 3_000, {"topic": "op", "partition": 0, "batches": 2}),
            Action("kill", 7_000, {}),
            Action("broker_clock", 7_000, {"broker": 1, "ms": 200_000}),
            Action("wait", 100, {"ms": 9_000_000, "steps": 1}),
            Action("start", 100, {"adopt": True}),
            Action("broker_clock", 7_000, {"broker": 1, "ms": 0}),
            Action("wait", 0, {"ms": 130_000, "steps": 4}),
        ),
    ),
    Found(
        "put-offs in a backlog",
        "R8 no last call",
        (
            _send(3_000, "g1", "t0", Fate.NEVER, "op", delay_ms=0, size=100),
            _send(3_000, "g2", "t2", Fate.COMMIT, "unsure", delay_ms=40_000),
            Action("begin_tx", 0, {}),
            _send(3_000, "g1", "t3", Fate.COMMIT, "op", delay_ms=40_000, size=4),
            Action("start", 0, {}),
            _send(100, "g1", "t4", Fate.ROLLBACK, "op", delay_ms=500, immunity_s=300),
            _send(7_000, "g2", "t5", Fate.COMMIT, "dies after", delay_ms=40_000, size=100),
            Action("wait", 0, {"ms": 2_500_000, "steps": 1}),
            Action("kill", 0, {}),
            _send(100, "g1", "t6", Fate.COMMIT, "unknown", delay_ms=40_000, immunity_s=1),
            Action("wait", 0, {"ms": 31_000, "steps": 2}),
            Action("set", 0, {"name": "kafka.max_offsets_per_trigger", "value": 12}),
            Action("start", 100, {}),
            Action("start", 0, {}),
            Action("scale_service", 1_000, {"group": "g2", "instances": 1}),
            _send(100, "g2", "t12", Fate.COMMIT, "unknown", delay_ms=0, size=100),
            Action("wait", 100, {"ms": 31_000, "steps": 4}),
            Action("add_partition", 100, {"topic": "half"}),
            Action("kill", 7_000, {}),
            Action("end_tx", 3_000, {"commit": False}),
            _send(3_000, "g1", "t13", Fate.ROLLBACK, "dies after", delay_ms=0, immunity_s=300),
            Action("start", 1_000, {}),
            Action("wait", 0, {"ms": 130_000, "steps": 4}),
        ),
    ),
    Found(
        "a verdict that a slow clock has dated before its half",
        "R2",
        (
            Action("broker_clock", 7_000, {"broker": 0, "ms": 200_000}),
            Action("broker_clock", 0, {"broker": 1, "ms": 200_000}),
            Action("start", 7_000, {}),
            Action("wait", 1_000, {"ms": 9_000_000, "steps": 1}),
            _send(0, "g1", "t12", Fate.COMMIT, "op", delay_ms=0, immunity_s=20, size=100),
            Action("kill", 0, {}),
            Action("broker_clock", 7_000, {"broker": 0, "ms": 0}),
            _send(1_000, "g1", "t15", Fate.COMMIT, "op", delay_ms=500, size=4),
            Action("expire", 0, {}),
            Action("new_checkpoint", 100, {}),
        ),
    ),
    Found(
        "a replay that a slow clock has dated before the discard",
        "replay",
        (
            Action("start", 1_000, {}),
            Action("new_checkpoint", 0, {}),
            Action("half", 0, {"group": "other", "transaction_id": "t0", "incarnation": 0, "size": 4}),
            Action("start", 7_000, {}),
            Action("wait", 1_000, {"ms": 130_000, "steps": 1}),
            Action("set", 7_000, {"name": "resolution.transactionTimeOut", "value": 60_000}),
            _send(7_000, "g2", "t4", Fate.COMMIT, "op", delay_ms=500, immunity_s=20, size=100),
            Action("wait", 0, {"ms": 31_000, "steps": 4}),
            Action("wait", 3_000, {"ms": 31_000, "steps": 2}),
            Action("broker_clock", 0, {"broker": 1, "ms": -5_000}),
            Action("replay", 3_000, {}),
            Action("replay", 0, {}),
        ),
    ),
)
