"""The rules of docs/rules.md as one table. The id of a case begins with the number of its rule."""

import re
from typing import Any

import pytest

from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Count, Kind
from halfway.transforms.bucket import Bucket
from halfway.transforms.horizon import NO_TIME, Clock, Tick, read_on
from halfway.transforms.protocol import BucketState, resolve
from tests.support.paths import ROOT
from tests.support.scenario import RULES, commit, half, lost, read, rollback, run, tick, to_batch, told, unknown

DUE = 6_001
"""The first horizon at which a half of time 0 is checked."""

# id, batches, outcomes per batch, phases at the end
CASES: list[tuple[str, list[list[Any]], list[list[str]], dict[str, str]]] = [
    ("R1-commit-in-one-batch", [[half("a"), commit("a", 5)]], [["commit a @5"]], {"a": "COMMITTED"}),
    ("R1-commit-later", [[half("a")], [tick(100)], [commit("a", 5)]], [[], [], ["commit a @5"]], {"a": "COMMITTED"}),
    ("R1-op-first", [[commit("a", 5)], [half("a", 1)]], [[], ["commit a @5"]], {"a": "COMMITTED"}),
    ("R1-op-older-than-half", [[commit("a", 5)], [half("a", 9)]], [[], ["commit a @5"]], {"a": "COMMITTED"}),
    (  # The order of commits holds within a batch: one that waits for its half is overtaken.
        "R1-a-commit-that-waits-for-its-half-is-overtaken",
        [[commit("a", 5, offset=1), half("b"), commit("b", 6, offset=2)], [half("a", 1)]],
        [["commit b @6"], ["commit a @5"]],
        {"a": "COMMITTED", "b": "COMMITTED"},
    ),
    ("R1-rollback", [[half("a"), rollback("a")]], [[]], {"a": "ROLLED_BACK"}),
    ("R1-rollback-first", [[rollback("a")], [half("a")]], [[], []], {"a": "ROLLED_BACK"}),
    ("R2-equal-commit-is-a-duplicate", [[half("a"), commit("a", 1), commit("a", 2)]], [["commit a @1"]], {"a": "COMMITTED"}),
    (
        "R2-rollback-after-commit",
        [[half("a"), commit("a", 1)], [rollback("a", 2)]],
        [["commit a @1"], ["quarantine a conflicting_verdict"]],
        {"a": "COMMITTED"},
    ),
    (
        "R2-commit-after-rollback",
        [[half("a"), rollback("a", 1)], [commit("a", 2)]],
        [[], ["quarantine a conflicting_verdict"]],
        {"a": "ROLLED_BACK"},
    ),
    (
        "R2-order-by-time",
        [[half("a"), rollback("a", 2, partition=0), commit("a", 1, partition=1)]],
        [["commit a @1", "quarantine a conflicting_verdict"]],
        {"a": "COMMITTED"},
    ),
    (
        "R2-order-by-partition",
        [[half("a"), rollback("a", 1, partition=1), commit("a", 1, partition=0)]],
        [["commit a @1", "quarantine a conflicting_verdict"]],
        {"a": "COMMITTED"},
    ),
    (
        "R2-order-by-offset",
        [[half("a"), rollback("a", 1, offset=8), commit("a", 1, offset=7)]],
        [["commit a @1", "quarantine a conflicting_verdict"]],
        {"a": "COMMITTED"},
    ),
    (
        "R2-order-among-waiting",
        [[rollback("a", 2)], [commit("a", 1)], [half("a")]],
        [[], [], ["commit a @1", "quarantine a conflicting_verdict"]],
        {"a": "COMMITTED"},
    ),
    ("R3-unknown-on-pending", [[half("a"), unknown("a")], [commit("a", 3)]], [[], ["commit a @3"]], {"a": "COMMITTED"}),
    ("R3-unknown-without-half", [[unknown("a", 0), tick(100_000)]], [[]], {}),
    ("R3-unknown-on-settled", [[half("a"), commit("a")], [unknown("a", 2)]], [["commit a @1"], []], {"a": "COMMITTED"}),
    (
        "R3-unknown-does-not-move-the-timer",
        [[half("a")], [unknown("a", 5_000)], [tick(DUE)]],
        [[], [], [f"check a #1 @{DUE}"]],
        {"a": "PENDING"},
    ),
    ("R4-before", [[half("a"), tick(5_999)]], [[]], {"a": "PENDING"}),
    ("R4-at", [[half("a"), tick(6_000)]], [[]], {"a": "PENDING"}),
    ("R4-after", [[half("a"), tick(DUE)]], [[f"check a #1 @{DUE}"]], {"a": "PENDING"}),
    ("R4-longer-immunity-at", [[half("a", immunity_ms=10_000), tick(10_000)]], [[]], {"a": "PENDING"}),
    ("R4-longer-immunity-after", [[half("a", immunity_ms=10_000), tick(10_001)]], [["check a #1 @10001"]], {"a": "PENDING"}),
    ("R4-shorter-immunity-at", [[half("a", immunity_ms=1_000), tick(1_000)]], [[]], {"a": "PENDING"}),
    ("R4-shorter-immunity-after", [[half("a", immunity_ms=1_000), tick(1_001)]], [["check a #1 @1001"]], {"a": "PENDING"}),
    ("R4-immunity-beyond-retention-at", [[half("a", immunity_ms=900_000), tick(200_000)]], [[]], {"a": "PENDING"}),
    ("R4-immunity-beyond-retention-after", [[half("a", immunity_ms=900_000), tick(200_001)]], [["check a #1 @200001"]], {"a": "PENDING"}),
    ("R4-immunity-of-68-years", [[half("a", immunity_ms=2**31 * 1000), tick(200_001)]], [["check a #1 @200001"]], {"a": "PENDING"}),
    (
        "R4-read-mark-makes-no-check-due",
        [[half("a"), tick(10)], [read(900_000)], [tick(DUE)]],
        [[], [], [f"check a #1 @{DUE}"]],
        {"a": "PENDING"},
    ),
    ("R4-no-horizon-no-check", [[half("a"), [Tick(Source.HALF, 0, 1, 99_999)]]], [[]], {"a": "PENDING"}),
    ("R4-one-partition-not-heard", [[half("a"), [Tick(Source.HALF, 0, 2, 99_999), Tick(Source.OP, 0, 1, 99_999)]]], [[]], {"a": "PENDING"}),
    ("R5-before-interval", [[half("a"), tick(DUE)], [tick(36_000)]], [[f"check a #1 @{DUE}"], []], {"a": "PENDING"}),
    ("R5-at-interval", [[half("a"), tick(DUE)], [tick(36_001)]], [[f"check a #1 @{DUE}"], ["check a #2 @36001"]], {"a": "PENDING"}),
    (
        "R5-one-check-however-far",
        [[half("a"), tick(150_000)], [tick(179_999)], [tick(180_000)]],
        [["check a #1 @150000"], [], ["check a #2 @180000"]],
        {"a": "PENDING"},
    ),
    (
        "R6-discard-before",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_000)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], []],
        {"a": "PENDING"},
    ),
    (
        "R6-discard-at",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"]],
        {"a": "DISCARDED"},
    ),
    (
        "R6-reason-though-expired",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(300_000)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @300000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R7-immunity-uses-no-check",
        [[half("a", immunity_ms=90_000), tick(40_000)], [tick(80_000)], [tick(90_001)]],
        [[], [], ["check a #1 @90001"]],
        {"a": "PENDING"},
    ),
    (
        "R7-verdict-inside-immunity",
        [[half("a", immunity_ms=90_000), tick(40_000)], [commit("a", 41_000)], [tick(99_000)]],
        [[], ["commit a @41000"], []],
        {"a": "COMMITTED"},
    ),
    (
        "R8-check-at-retention-is-not-the-last-call",
        [[half("a", immunity_ms=900_000), half("b", immunity_ms=170_000), tick(200_000)], [tick(230_000)], [tick(260_000)]],
        [
            ["check b #1 @200000"],
            ["check a #1 @230000", "check b #2 @230000"],
            ["discard a expired #1 @260000", "discard b check_max #2 @260000"],
        ],
        {"a": "DISCARDED", "b": "DISCARDED"},
    ),
    (
        "R8-last-call-after-retention",
        [[half("a", immunity_ms=169_000), tick(169_001)], [tick(200_001)], [tick(230_000)], [tick(230_001)]],
        [["check a #1 @169001"], ["check a #2 @200001"], [], ["discard a check_max #2 @230001"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-never-asked-until-then",
        [[half("a"), tick(900_000)], [tick(930_000)]],
        [["check a #1 @900000"], ["discard a expired #1 @930000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-asked-before-a-long-stop-is-asked-after-it",
        [[half("a"), tick(DUE)], [tick(900_000)], [commit("a", 901_000), tick(930_000)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @900000"], ["commit a @901000"]],
        {"a": "COMMITTED"},
    ),
    (
        "R8-all-checks-made-before-a-long-stop",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(900_000)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @900000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-away-after-a-long-stop-is-waited-for",
        [[half("a"), tick(900_000, away=["g"])], [tick(930_000, away=["g"])], [tick(960_000, away=["g"])]],
        [[], [], ["discard a expired #0 @960000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-back-in-time-gets-the-last-call",
        [[half("a"), tick(900_000, away=["g"])], [tick(930_000, away=["g"])], [tick(960_000)], [tick(990_000)]],
        [[], [], ["check a #1 @960000"], ["discard a expired #1 @990000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-away-after-the-last-call-is-waited-for-too",
        [[half("a"), tick(900_000)], [tick(930_000, away=["g"])], [tick(960_000, away=["g"])], [tick(990_000, away=["g"])]],
        [["check a #1 @900000"], [], [], ["discard a expired #1 @990000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-put-offs-before-the-age-do-not-count",
        [
            [half("a"), tick(170_000, away=["g"])],
            [tick(200_000, away=["g"])],
            [tick(230_000, away=["g"])],
            [tick(260_000, away=["g"])],
            [tick(290_000, away=["g"])],
        ],
        [[], [], [], [], ["discard a expired #0 @290000"]],
        {"a": "DISCARDED"},
    ),
    (
        "R8-away-with-all-checks-made",
        [
            [half("a"), tick(DUE)],
            [tick(36_001)],
            [tick(200_001, away=["g"])],
            [tick(230_001, away=["g"])],
            [tick(260_001, away=["g"])],
        ],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], [], [], ["discard a check_max #2 @260001"]],
        {"a": "DISCARDED"},
    ),
    ("R9-verdict-beats-check", [[half("a")], [commit("a", DUE), tick(DUE)]], [[], [f"commit a @{DUE}"]], {"a": "COMMITTED"}),
    (
        "R9-verdict-beats-discard",
        [[half("a"), tick(DUE)], [tick(36_001)], [rollback("a", 66_001), tick(66_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], []],
        {"a": "ROLLED_BACK"},
    ),
    (
        "R6-read-mark-makes-no-discard-due",
        [[half("a"), tick(DUE)], [tick(36_001)], [read(900_000)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], []],
        {"a": "PENDING"},
    ),
    ("R9-waiting-verdict-beats-check", [[commit("a", 1)], [half("a"), tick(6_001)]], [[], ["commit a @1"]], {"a": "COMMITTED"}),
    ("R10-at", [[commit("a", 100), tick(6_100)]], [[]], {}),
    ("R10-after", [[commit("a", 100), tick(6_101)]], [["quarantine a orphan_op"]], {}),
    (
        "R10-each",
        [[commit("a", 100), rollback("a", 200), tick(6_101)], [tick(6_201)]],
        [["quarantine a orphan_op"], ["quarantine a orphan_op"]],
        {},
    ),
    ("R10-half-in-time", [[commit("a", 100), tick(6_100)], [half("a", 50), tick(6_101)]], [[], ["commit a @100"]], {"a": "COMMITTED"}),
    ("R10-read-mark-at", [[commit("a", 100), tick(200)], [read(6_100)]], [[], []], {}),
    ("R10-read-mark-after", [[commit("a", 100), tick(200)], [read(6_101)]], [[], ["quarantine a orphan_op"]], {}),
    ("R10-no-horizon-no-orphan", [[commit("a", 100), read(900_000)], [half("a")]], [[], ["commit a @100"]], {"a": "COMMITTED"}),
    ("R11-at", [[half("a"), commit("a", 10)], [tick(60_010)], [commit("a", 11)]], [["commit a @10"], [], []], {"a": "COMMITTED"}),
    ("R11-after-is-forgotten", [[half("a"), commit("a", 10)], [tick(60_011)]], [["commit a @10"], []], {}),
    (
        "R11-read-mark-at",
        [[half("a"), commit("a", 10), tick(20)], [read(60_010)], [commit("a", 11)]],
        [["commit a @10"], [], []],
        {"a": "COMMITTED"},
    ),
    ("R11-read-mark-after-is-forgotten", [[half("a"), commit("a", 10), tick(20)], [read(60_011)]], [["commit a @10"], []], {}),
    (
        "R11-read-mark-comes-after-the-records",
        [[half("a"), commit("a", 10), tick(20)], [half("a", 60_009, offset=9), commit("a", 60_010), read(60_011)]],
        [["commit a @10"], []],
        {},
    ),
    ("R11-no-horizon-forgets-nothing", [[half("a"), commit("a", 10), read(900_000)]], [["commit a @10"]], {"a": "COMMITTED"}),
    (
        "R11-producers-times-prove-nothing",
        [[half("a"), commit("a", 10), tick(20)], [half("b", 900_000)]],
        [["commit a @10"], []],
        {"a": "COMMITTED", "b": "PENDING"},
    ),
    (
        "R11-discard-counts-from-its-horizon-not-from-the-read-mark",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001), read(126_001)], [read(126_002)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"], []],
        {},
    ),
    (
        "R11-verdict-for-discarded",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001)], [commit("a", 66_002)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"], ["quarantine a late_verdict"]],
        {"a": "DISCARDED"},
    ),
    (
        "R11-discarded-is-remembered-from-its-horizon",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001)], [tick(126_001)], [tick(126_002)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"], [], []],
        {},
    ),
    (
        "R11-lower-incarnation",
        [[half("a", incarnation=2), commit("a", 3, incarnation=1)]],
        [["quarantine a late_verdict"]],
        {"a": "PENDING"},
    ),
    (
        "R11-lower-incarnation-on-settled",
        [[half("a", incarnation=2), commit("a", 3, incarnation=2)], [commit("a", 4, incarnation=1)]],
        [["commit a @3"], ["quarantine a late_verdict"]],
        {"a": "COMMITTED"},
    ),
    (
        "R11-higher-incarnation-waits",
        [[half("a"), commit("a", 3, incarnation=1)], [tick(6_003)], [tick(6_004)]],
        [[], ["check a #1 @6003"], ["quarantine a orphan_op"]],
        {"a": "PENDING"},
    ),
    (
        "R12-duplicate-while-pending",
        [[half("a")], [half("a", 5_000, offset=9)], [tick(DUE)]],
        [[], [], [f"check a #1 @{DUE}"]],
        {"a": "PENDING"},
    ),
    (
        "R12-duplicate-after-commit",
        [[half("a"), commit("a")], [half("a", 5, offset=9)], [tick(20_000)]],
        [["commit a @1"], [], []],
        {"a": "COMMITTED"},
    ),
    ("R12-id-conflict", [[half("a")], [half("a", group="other")]], [[], ["quarantine a id_conflict"]], {"a": "PENDING"}),
    (
        "R12-id-conflict-before-incarnation",
        [[half("a")], [half("a", group="other", incarnation=3)]],
        [[], ["quarantine a id_conflict"]],
        {"a": "PENDING"},
    ),
    (
        "R12-id-conflict-on-settled",
        [[half("a"), rollback("a")], [half("a", 5, group="other")]],
        [[], ["quarantine a id_conflict"]],
        {"a": "ROLLED_BACK"},
    ),
    ("R12-stale", [[half("a", incarnation=1)], [half("a", incarnation=0)]], [[], ["quarantine a stale_incarnation"]], {"a": "PENDING"}),
    ("R12-refused-while-pending", [[half("a")], [half("a", incarnation=1)]], [[], ["quarantine a incarnation_refused"]], {"a": "PENDING"}),
    (
        "R12-refused-after-commit",
        [[half("a"), commit("a")], [half("a", 5, incarnation=1)]],
        [["commit a @1"], ["quarantine a incarnation_refused"]],
        {"a": "COMMITTED"},
    ),
    (
        "R12-afresh-after-discard",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001)], [half("a", 70_000, incarnation=1), commit("a", 70_001, incarnation=1)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"], ["commit a @70001"]],
        {"a": "COMMITTED"},
    ),
    (
        "R12-afresh-after-discard-by-a-former-checkpoint",
        [[half("a", discarded_ms=66_001), half("a", 70_000, incarnation=1), commit("a", 70_001, incarnation=1)]],
        [["commit a @70001"]],
        {"a": "COMMITTED"},
    ),
    (
        "R12-afresh-after-two-discards-by-a-former-checkpoint",
        [
            [half("a", discarded_ms=10), half("a", 20, incarnation=1, discarded_ms=30)],
            [half("a", 40, incarnation=2), commit("a", 41, incarnation=2)],
        ],
        [[], ["commit a @41"]],
        {"a": "COMMITTED"},
    ),
    (
        "R11-discarded-by-a-former-checkpoint-is-remembered-from-its-horizon",
        [[half("a", discarded_ms=66_001), tick(126_001)], [commit("a", 66_002)], [tick(126_002)]],
        [[], ["quarantine a late_verdict"], []],
        {},
    ),
    (
        "R12-an-id-that-was-used-twice-is-no-conflict-when-a-former-checkpoint-discarded-the-second",
        [[half("a"), half("a", 200_000, group="other", discarded_ms=266_001)]],
        [[]],
        {"a": "PENDING"},
    ),
    (
        "R12-a-copy-that-is-read-before-the-half-that-a-former-checkpoint-discarded-is-discarded-with-it",
        [[half("a", 70_000, partition=1)], [half("a", discarded_ms=66_001)], [commit("a", 70_001)]],
        [[], [], ["quarantine a late_verdict"]],
        {"a": "DISCARDED"},
    ),
    (
        "R12-a-signed-copy-of-what-a-former-checkpoint-discarded-is-known-by-its-signature-whatever-time-it-has",
        [
            [half("a", 1_000, binding=7), half("a", 2_000, partition=1, binding=7, discarded_ms=66_001)],
            [commit("a", 70_001), half("a", 70_002, incarnation=1), commit("a", 70_003, incarnation=1)],
        ],
        [[], ["quarantine a late_verdict", "commit a @70003"]],
        {"a": "COMMITTED"},
    ),
    (
        "R11-a-half-after-the-id-was-free-again-is-no-copy-of-what-a-former-checkpoint-discarded",
        [[half("a", 126_002, partition=1)], [half("a", discarded_ms=66_001)], [commit("a", 126_003)]],
        [[], [], ["commit a @126003"]],
        {"a": "COMMITTED"},
    ),
    (
        "R12-afresh-has-all-its-checks",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001)], [half("a", 70_000, incarnation=1), tick(76_000)], [tick(76_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], ["discard a check_max #2 @66001"], [], ["check a #1 @76001"]],
        {"a": "PENDING"},
    ),
    ("R12-first-by-time", [[half("a", 5, group="late"), half("a", 4)]], [["quarantine a id_conflict"]], {"a": "PENDING"}),
    ("R13-other-group", [[half("a"), commit("a", group="other")]], [["quarantine a group_mismatch"]], {"a": "PENDING"}),
    ("R13-before-R3", [[half("a"), unknown("a", group="other")]], [["quarantine a group_mismatch"]], {"a": "PENDING"}),
    (
        "R13-before-R2",
        [[half("a"), commit("a")], [rollback("a", 2, group="other")]],
        [["commit a @1"], ["quarantine a group_mismatch"]],
        {"a": "COMMITTED"},
    ),
    ("R13-before-R10", [[half("a"), commit("a", group="other", incarnation=7)]], [["quarantine a group_mismatch"]], {"a": "PENDING"}),
    (
        "R13-half-goes-on",
        [[half("a"), commit("a", group="other")], [commit("a", 2)]],
        [["quarantine a group_mismatch"], ["commit a @2"]],
        {"a": "COMMITTED"},
    ),
    (
        "R15-away-puts-off",
        [[half("a"), tick(DUE, away=["g"])], [tick(36_000)], [tick(36_001)]],
        [[], [], ["check a #1 @36001"]],
        {"a": "PENDING"},
    ),
    (
        "R15-away-puts-off-discard",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(66_001, away=["g"])], [tick(96_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], [], ["discard a check_max #2 @96001"]],
        {"a": "DISCARDED"},
    ),
    (
        "R15-others-are-not-put-off",
        [[half("a"), half("b", group="h"), tick(DUE, away=["g"])]],
        [[f"check b #1 @{DUE}"]],
        {"a": "PENDING", "b": "PENDING"},
    ),
    (
        "R5-a-check-that-was-not-sent-in-time-is-waited-for",
        [[half("a"), tick(DUE)], [tick(36_001, asked=DUE - 1)], [tick(39_750, asked=DUE)], [tick(39_751, asked=DUE)]],
        [[f"check a #1 @{DUE}"], [], [], ["check a #2 @39751"]],
        {"a": "PENDING"},
    ),
    (
        "R5-each-partition-says-which-checks-count",
        [[half("a"), tick(DUE)], [tick(36_001), [Tick(Source.OP, 0, 1, 36_002, (), 0)]], [tick(39_752)]],
        [[f"check a #1 @{DUE}"], [], ["check a #2 @39752"]],
        {"a": "PENDING"},
    ),
    (
        "R5-a-partition-beyond-the-count-says-nothing",
        [[half("a"), [Tick(Source.OP, 1, 1, 5, (), 0)], tick(DUE)], [tick(36_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"]],
        {"a": "PENDING"},
    ),
    (
        "R5-a-first-check-waits-for-nothing",
        [[half("a"), tick(DUE, asked=0)]],
        [[f"check a #1 @{DUE}"]],
        {"a": "PENDING"},
    ),
    (
        "R6-no-discard-before-the-last-check-counts",
        [[half("a"), tick(DUE)], [tick(36_001)], [tick(500_000, asked=36_000)], [tick(600_000, asked=36_001)]],
        [[f"check a #1 @{DUE}"], ["check a #2 @36001"], [], ["discard a check_max #2 @600000"]],
        {"a": "DISCARDED"},
    ),
    ("R15-latest-tick-counts", [[half("a"), tick(3_000, away=["g"])], [tick(DUE)]], [[], [f"check a #1 @{DUE}"]], {"a": "PENDING"}),
    ("R15-verdict-while-away", [[half("a"), tick(DUE, away=["g"])], [commit("a", 7_000)]], [[], ["commit a @7000"]], {"a": "COMMITTED"}),
    (
        "R17-lost-counts-as-settled",
        [[half("a", offset=4), tick(DUE)], [lost("a", 6_500, offset=4)], [tick(40_000)]],
        [[f"check a #1 @{DUE}"], ["quarantine a half_lost"], []],
        {"a": "LOST"},
    ),
    (
        "R17-verdict-for-lost",
        [[half("a", offset=4)], [lost("a", 10, offset=4), commit("a", 9)]],
        [[], ["quarantine a half_lost", "quarantine a late_verdict"]],
        {"a": "LOST"},
    ),
    (
        "R17-lost-after-commit",
        [[half("a", offset=4), commit("a")], [lost("a", 10, offset=4)], [rollback("a", 11)]],
        [["commit a @1"], ["quarantine a half_lost"], ["quarantine a late_verdict"]],
        {"a": "LOST"},
    ),
    ("R17-another-half-is-not-meant", [[half("a", offset=4)], [lost("a", 10, offset=3)]], [[], []], {"a": "PENDING"}),
    (
        "R17-forgotten-after-retention",
        [[half("a", offset=4)], [lost("a", 10, offset=4)], [tick(60_010)], [tick(60_011)]],
        [[], ["quarantine a half_lost"], [], []],
        {},
    ),
]


@pytest.mark.parametrize(("batches", "expected", "phases"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rule(batches: list[list[Any]], expected: list[list[str]], phases: dict[str, str]) -> None:
    ended = run(batches)
    assert ended.batches == expected
    assert ended.phases == phases


def test_every_rule_of_the_core_has_a_case() -> None:
    numbers = {case[0].split("-")[0] for case in CASES}
    elsewhere = {"R14", "R16", "R18"}  # decoding, the two tests below, and tests with Kafka
    page = (ROOT / "docs" / "rules.md").read_text()
    assert numbers | elsewhere == set(re.findall(r'^\| <a id="r\d+"></a>(R\d+) ', page, re.MULTILINE))


@pytest.mark.parametrize(
    ("batches", "count", "times"),
    [
        ([[half("a"), commit("a", 1), commit("a", 2), commit("a", 3)]], Count.DUPLICATE_OP, 2),
        ([[unknown("a"), unknown("a", 2)]], Count.UNKNOWN, 2),
        ([[half("a"), half("a", 5, offset=1)]], Count.DUPLICATE_HALF, 1),
        ([[half("a"), tick(DUE, away=["g"])], [tick(36_001, away=["g"])]], Count.PUT_OFF, 2),
        ([[half("a"), rollback("a")]], Count.ROLLED_BACK, 1),
        ([[half("a", offset=1)], [lost("a", offset=1), lost("a", offset=1)]], Count.LOST, 1),
        ([[half("a"), commit("a", 1)], [tick(60_002)], [lost("a", 60_003)]], Count.LOST, 1),
    ],
    ids=["R2-duplicates", "R3-unknowns", "R12-duplicates", "R15-put-off", "R1-rollbacks", "R17-lost-once", "R17-lost-and-forgotten"],
)
def test_what_makes_no_row_is_counted(batches: list[list[Any]], count: Count, times: int) -> None:
    assert run(batches).counts[count] == times


@pytest.mark.parametrize("check_max", [1, 15])
def test_r6_exactly_check_max_checks_without_gaps(check_max: int) -> None:
    rules = RULES._replace(check_max=check_max, half_retention_ms=10**9)
    batches = [[half("a"), tick(DUE)], *[[tick(DUE + 30_000 * n)] for n in range(1, check_max + 3)]]
    checks = [f"check a #{n + 1} @{DUE + 30_000 * n}" for n in range(check_max)]
    assert run(batches, rules).told == [*checks, f"discard a check_max #{check_max} @{DUE + 30_000 * check_max}"]


def test_r8_a_longer_retention_takes_back_what_was_late() -> None:
    """A half that was late under former settings is treated as any other under the present ones."""
    state = run([[half("a"), tick(900_000, away=["g"])], [tick(930_000, away=["g"])]]).state
    longer = RULES._replace(half_retention_ms=10**9)
    away = resolve(state, to_batch([tick(960_000, away=["g"])]), longer)
    assert away.outcomes == []
    present = resolve(away.state, to_batch([tick(990_000)]), longer)
    assert [told(outcome) for outcome in present.outcomes] == ["check a #1 @990000"]
    later = resolve(present.state, to_batch([tick(1_020_000)]), longer)
    assert [told(outcome) for outcome in later.outcomes] == ["check a #2 @1020000"], "the first was no last call"


def test_r5_a_longer_interval_counts_from_the_last_check_on() -> None:
    """A group that was behind under the former interval is not yet under this one: it needs the time to become so."""
    state = run([[half("a"), tick(DUE)], [tick(36_001)]]).state
    longer = RULES._replace(check_interval_ms=90_000)
    early = resolve(state, to_batch([tick(66_001)]), longer)
    assert early.outcomes == []
    due = resolve(early.state, to_batch([tick(126_000)]), longer)
    assert due.outcomes == []
    ended = resolve(due.state, to_batch([tick(126_001)]), longer)
    assert [told(outcome) for outcome in ended.outcomes] == ["discard a check_max #2 @126001"]


def test_r16_same_input_same_outcomes_in_any_order() -> None:
    records = [
        half("a", offset=1),
        half("b", offset=2),
        commit("b", 3),
        commit("a", 4),
        rollback("c", 5),
        tick(20_000),
        half("d", offset=3),
        lost("d", 7, offset=3),
        lost("d", 6, offset=3),
    ]
    forward = resolve(BucketState(), to_batch(records), RULES)
    backward = resolve(BucketState(), to_batch(reversed(records)), RULES)
    assert forward.outcomes == backward.outcomes
    assert forward.state == backward.state


def test_time_never_goes_back_and_waits_for_new_partitions() -> None:
    clock = Clock().after(tick(100), {})
    assert clock.horizon_ms() == 100
    assert clock.after(tick(50), {}).horizon_ms() == 100
    grown = clock.after([Tick(Source.HALF, 0, 2, 200), Tick(Source.OP, 0, 1, 200)], {})
    assert grown.horizon_ms() is None
    assert grown.after([Tick(Source.HALF, 1, 2, 150)], {}).horizon_ms() == 150


def test_the_next_tick_corrects_a_wrong_partition_count() -> None:
    clock = Clock().after(tick(100), {}).after([Tick(Source.OP, 0, 1000, 101)], {})
    assert clock.horizon_ms() is None
    assert clock.after(tick(102), {}).horizon_ms() == 102


def test_the_read_mark_is_the_newest_tick_or_record_of_the_partition_that_is_furthest_behind() -> None:
    clock = Clock().after([Tick(Source.HALF, 0, 2, 100), Tick(Source.HALF, 1, 2, 110), Tick(Source.OP, 0, 1, 120)], {})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 100)
    clock = clock.after([], {(Source.HALF, 0): 500, (Source.OP, 0): 600})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 110), "nothing new was read in the other partition"
    clock = clock.after([], {(Source.HALF, 1): 400})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 400)
    clock = clock.after([Tick(Source.HALF, 1, 2, 390)], {(Source.HALF, 1): 300})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 400), "an older tick or record moves nothing back"


def test_a_new_partition_in_which_only_broken_records_were_read_holds_the_read_mark() -> None:
    """Signed halves that come after them are not refused as too old: nothing is known of that partition yet."""
    ticks = [Tick(Source.HALF, 0, 1, 100), Tick(Source.OP, 0, 1, 100)]
    new = Source.HALF, 1
    clock = Clock().after(ticks, {(Source.HALF, 0): 500, (Source.OP, 0): 500, new: NO_TIME})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 100)
    clock = clock.after([], {(Source.HALF, 0): 900, (Source.OP, 0): 900})
    assert clock.read_mark_ms() == 100
    clock = clock.after([], {new: 300})
    assert clock.read_mark_ms() == 300
    assert clock.after([], {new: NO_TIME}).read_mark_ms() == 300, "broken records prove nothing, and take nothing back"
    assert clock.after([Tick(Source.HALF, 1, 2, 400)], {new: NO_TIME}).read_mark_ms() == 400


def test_later_records_without_a_time_take_none_back() -> None:
    assert read_on({1: 5, 2: NO_TIME}, {1: NO_TIME, 2: 7, 3: NO_TIME}) == {1: 5, 2: 7, 3: NO_TIME}


def test_a_record_is_forgotten_once_a_tick_has_passed_it() -> None:
    clock = Clock().after(tick(100), read(200))
    assert clock.after(tick(200), {}) == Clock().after(tick(200), {})


def test_what_a_clock_that_was_ahead_has_said_stands_until_its_partition_speaks_again() -> None:
    """Time does not go back, but partitions and absent groups are those of now, and an unread partition holds it."""
    ahead = Clock().after([Tick(Source.HALF, 0, 2, 100), Tick(Source.HALF, 1, 2, 900, ("g",)), Tick(Source.OP, 0, 1, 100)], {})
    assert (ahead.horizon_ms(), ahead.absent_groups()) == (100, {"g"})
    same = ahead.after([Tick(Source.HALF, 0, 3, 110), Tick(Source.OP, 0, 1, 110)], {})
    assert (same.horizon_ms(), same.absent_groups()) == (None, {"g"}), "its partition was not read, and a new one was counted"
    right = same.after([Tick(Source.HALF, n, 3, 120, ("h",)) for n in range(3)] + [Tick(Source.OP, 0, 1, 120, ("h",))], {})
    assert (right.horizon_ms(), right.absent_groups(), right.partitions_of(Source.HALF)) == (120, {"h"}, 3)
    others = right.after([*(Tick(Source.HALF, n, 3, 500) for n in (0, 2)), Tick(Source.OP, 0, 1, 500)], {})
    assert others.horizon_ms() == 120, "it was heard at 900 once, and nothing of it was read since 120"


def test_r9_what_a_clock_that_was_ahead_said_before_it_was_right_in_the_same_batch_counts_for_nothing() -> None:
    """The COMMIT waits in a partition that was not read on: the discard has to wait for it."""
    begin = [[half("a")], [tick(DUE)], [tick(36_001)]]
    halves, op = (Tick(source, 0, 1, 70_000) for source in Source)
    ahead_and_right = [Tick(Source.OP, 0, 1, 340_000, ("h",)), Tick(Source.OP, 0, 1, 60_000)]
    ended = run([*begin, [ahead_and_right, [halves]], [[halves]], [commit("a", 65_000), [halves, op]]])
    assert ended.batches[3:] == [[], [], ["commit a @65000"]]
    assert Clock().after([*ahead_and_right, halves], {}).absent_groups() == frozenset()


def test_r15_a_group_that_is_back_is_absent_until_what_it_has_answered_is_read() -> None:
    """A rate limit divides a backlog: the half topic is read up to the return, and the op topic up to before it."""
    begin = [[half("a")], [tick(DUE)], [tick(36_001)]]
    away = Tick(Source.OP, 0, 1, 66_001, ("g",), 66_000)
    back = [Tick(source, 0, 1, 80_000, (), 79_000) for source in Source]
    ended = run([*begin, [[away, back[0]]], [commit("a", 70_000), [back[1]]]])
    assert ended.batches[3:] == [[], ["commit a @70000"]]


def test_an_older_tick_of_another_partition_counts_none_away() -> None:
    """The clock of its broker is ahead of the one whose tick has counted the new partition."""
    clock = Clock().after([Tick(Source.HALF, 0, 1, 100), *(Tick(Source.OP, n, 2, 100) for n in range(2))], {})
    counted = clock.after([Tick(Source.HALF, 0, 1, 120), Tick(Source.OP, 0, 3, 110), Tick(Source.OP, 1, 2, 115)], {})
    assert counted.horizon_ms() is None
    assert counted.after([Tick(Source.OP, 2, 3, 130)], {}).horizon_ms() == 110


def test_horizon_and_read_mark_stand_where_clocks_were_set_back() -> None:
    clock = Clock().after(tick(100), read(5_000))
    clock = clock.after(tick(200), read(200))
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (200, 5_000)
    clock = clock.after(tick(50), read(50))
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (200, 5_000)
    assert clock.after(tick(6_000), {}).read_mark_ms() == 6_000


def test_r11_an_id_is_remembered_also_if_the_clock_was_ahead_before() -> None:
    """Its half is sent again a moment later: a client's retry."""
    ahead = [tick(100), read(900_000)]
    ended = run([ahead, [half("a", 200), commit("a", 210)], [half("a", 220, offset=9), commit("a", 230, offset=9), tick(300)]])
    assert [line for batch in ended.batches for line in batch] == ["commit a @210"]
    assert ended.phases == {"a": "COMMITTED"}


def test_r10_a_verdict_waits_for_its_half_also_if_the_clock_was_ahead_before() -> None:
    ended = run([[tick(100), read(900_000)], [commit("a", 210), tick(300)], [half("a", 200), tick(400)]])
    assert ended.batches == [[], [], ["commit a @210"]]


def test_r11_an_id_is_remembered_while_a_new_partition_is_waited_for() -> None:
    grown = [Tick(Source.HALF, 0, 2, 220), Tick(Source.OP, 0, 1, 220)]
    ended = run([[tick(100), read(900_000)], [grown, half("a", 225), commit("a", 226)], [[Tick(Source.HALF, 1, 2, 240)]]])
    assert ended.phases == {"a": "COMMITTED"}


def test_r11_a_discard_is_remembered_also_if_the_clock_was_ahead_before() -> None:
    ended = run([[tick(100), read(900_000)], [half("a", 200)], *([tick(6_300 + number * 30_000)] for number in range(3))])
    assert ended.phases == {"a": "DISCARDED"}


def test_r8_a_half_from_before_1970_is_asked_about_before_it_is_discarded() -> None:
    """The producers' clocks may say so on a CreateTime topic."""
    old = half("a", -RULES.half_retention_ms - 2)
    ended = run([[old], *([tick(number * 30_000)] for number in range(1, 4))])
    assert ended.told == ["check a #1 @30000", "discard a expired #1 @60000"]


def test_r8_put_offs_in_a_backlog_count_once_the_group_had_time() -> None:
    """The latest tick says that the group is away. The older ones, which move the horizon, were written in no time."""
    expired = RULES.half_retention_ms + 1
    backlog = [[tick(expired + number * 30_000, away=["g"], asked=expired - 2)] for number in range(40)]
    caught_up = [[tick(expired + number * 30_000, away=["g"], asked=expired + (number - 1) * 30_000)] for number in range(40, 60)]
    ended = run([[half("a")], [tick(expired - 1, away=["g"])], *backlog, *caught_up])
    told_at = [number for number, batch in enumerate(ended.batches) if batch]
    assert ended.batches[told_at[0]] == [f"discard a expired #0 @{expired + (40 + RULES.check_max - 1) * 30_000}"]


@pytest.mark.parametrize(("lag", "batches_each"), [(0, 1), (1, 2), (2, 3), (7, 8)])
def test_r8_put_offs_count_also_if_ticks_always_say_what_was_sent_some_batches_ago(lag: int, batches_each: int) -> None:
    """Batches take longer than an interval, or the horizon is far behind: the put-off before never counts by then."""
    expired_ms = RULES.half_retention_ms + 1
    dues_ms = [expired_ms + number * 30_000 for number in range(40)]
    ended = run([[half("a")], *([tick(due_ms, away=["g"], asked=max(0, due_ms - (lag + 1) * 30_000))] for due_ms in dues_ms)])
    assert ended.told == [f"discard a expired #0 @{expired_ms + RULES.check_max * batches_each * 30_000}"]


def test_r8_put_offs_that_were_counted_under_a_shorter_retention_are_not_past_the_age() -> None:
    shorter = RULES._replace(half_retention_ms=60_000)
    away = [tick(60_001 + number * 30_000, away=["g"]) for number in range(20)]
    state = resolve(BucketState(), to_batch([half("a"), *away[:1]]), shorter).state
    state = resolve(state, to_batch([away[1]]), shorter).state
    assert state.transactions["a"].late_put_offs == RULES.check_max
    lines = []
    for ticks in away[2:]:
        resolution = resolve(state, to_batch([ticks]), RULES)
        state, lines = resolution.state, [*lines, *map(told, resolution.outcomes)]
    first_late_ms = next(ticks[0].at_ms for ticks in away if ticks[0].at_ms > RULES.half_retention_ms)
    assert lines == [f"discard a expired #0 @{first_late_ms + RULES.check_max * 30_000}"]


def test_without_a_horizon_there_is_no_read_mark() -> None:
    clock = Clock().after([Tick(Source.HALF, 0, 1, 100)], read(200))
    assert clock.read_mark_ms() is None
    assert clock.after([Tick(Source.OP, 0, 1, 150)], {}).read_mark_ms() == 200


def test_records_of_a_new_partition_hold_the_read_mark_before_its_first_tick() -> None:
    clock = Clock().after(tick(100), {**read(900), (Source.HALF, 1): 300})
    assert (clock.horizon_ms(), clock.read_mark_ms()) == (100, 300)
    counted = clock.after([Tick(source, 0, 2, 1_000) for source in Source], {})
    assert counted.read_mark_ms() is None
    assert counted.after([Tick(source, 1, 2, 1_000) for source in Source], {}).read_mark_ms() == 1_000


def test_r10_a_half_further_behind_in_a_backlog_is_waited_for() -> None:
    ticks = [*(Tick(Source.HALF, partition, 2, 50) for partition in range(2)), Tick(Source.OP, 0, 1, 50)]
    ended = run([[ticks], [commit("a", 100), read(90_000)], [half("a", 90, partition=1), {(Source.HALF, 1): 90_000}]])
    assert ended.batches == [[], [], ["commit a @100"]]
    assert ended.phases == {}, "committed and forgotten in one batch"


@pytest.mark.timeout(5)
def test_a_tick_may_name_any_number_of_partitions() -> None:
    ticks = [Tick(source, 0, 2**31 - 1, 5) for source in Source]
    assert Clock().after(ticks, {}).horizon_ms() is None
    assert Clock().after([*ticks, *(Tick(source, 0, 1, 6) for source in Source)], {}).horizon_ms() == 6


@pytest.mark.timeout(20)
def test_r10_many_verdicts_of_one_id_wait_and_go_in_a_time_that_is_linear() -> None:
    ops = [commit("a", number, offset=number) for number in range(200_000)]
    waiting = resolve(BucketState(), to_batch(ops), RULES)
    assert (len(waiting.state.waiting["a"]), waiting.outcomes) == (len(ops), [])
    horizon_ms = RULES.timeout_ms + len(ops) // 2
    orphaned = resolve(waiting.state, to_batch([tick(horizon_ms)]), RULES)
    assert len(orphaned.outcomes) == len(orphaned.state.waiting["a"]) == len(ops) // 2


@pytest.mark.parametrize("is_first", [False, True])
def test_r1_a_commit_names_its_op(is_first: bool) -> None:
    """Also one that waited for its half, in the state."""
    op = commit("a", 5, partition=3, offset=70)
    bucket, commits = Bucket(), []
    for records in [[op], [half("a")]] if is_first else [[half("a"), op]]:
        bucket, outcomes, _ = Bucket.decode(*bucket.encode()).after(to_batch(records), RULES)
        commits += [outcome for outcome in outcomes if outcome.kind is Kind.COMMIT]
    assert [(outcome.op_partition, outcome.op_offset) for outcome in commits] == [(3, 70)]


def test_r4_a_timeout_beyond_the_retention_counts_as_the_retention() -> None:
    """Kafka may have deleted the body by the time-out."""
    rules = RULES._replace(timeout_ms=2_592_000_000)
    assert rules.first_check_ms(half("a", at_ms=5)) == 5 + RULES.half_retention_ms + 1
