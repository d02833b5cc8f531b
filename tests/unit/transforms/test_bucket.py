"""Entries that a batch leaves untouched. `test_protocol_properties.py` compares all entries with the core's state."""

import pytest

from halfway.transforms.bucket import Bucket
from tests.support.scenario import RULES, commit, half, read, tick, to_batch


@pytest.mark.timeout(60)
def test_waiting_verdicts_stay_untouched_while_more_of_their_id_arrive() -> None:
    bucket, batches, per_batch = Bucket(), 200, 1_000
    for number in range(batches):
        ops = [commit("a", offset=number * per_batch + place) for place in range(per_batch)]
        bucket, outcomes, _ = bucket.after(to_batch(ops), RULES)
        assert outcomes == []
    assert bucket.entries.num_rows == batches * per_batch
    _, outcomes, counts = bucket.after(to_batch([half("a"), tick(1)]), RULES)
    assert [(outcome.kind.name, outcome.decided_ms) for outcome in outcomes] == [("COMMIT", 1)]
    assert counts["duplicate_op"] == batches * per_batch - 1


def test_a_backlog_without_ticks_leaves_only_the_last_ids_in_the_state() -> None:
    bucket = Bucket().after(to_batch([tick(0)]), RULES)[0]
    step_ms = RULES.resolved_retention_ms // 10
    for number in range(100):
        at_ms = number * step_ms
        records = [half(f"t{number}", at_ms), commit(f"t{number}", at_ms), read(at_ms)]
        bucket, outcomes, _ = Bucket.decode(*bucket.encode()).after(to_batch(records), RULES)
        assert [outcome.kind.name for outcome in outcomes] == ["COMMIT"]
        assert bucket.entries.num_rows <= 11
    assert bucket.clock.horizon_ms() == 0
    assert bucket.totals["committed"] == 100
