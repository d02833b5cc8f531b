"""Entries that a batch leaves untouched. `test_protocol_properties.py` compares all entries with the core's state."""

import pytest

from halfway.transforms.bucket import Bucket
from tests.support.scenario import RULES, commit, half, tick, to_batch


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
