"""The bucket's columns: what a batch leaves at rest. That they are the core's state is held in `test_protocol_properties.py`."""

import pytest

from halfway.transforms.bucket import Bucket
from tests.support.scenario import RULES, commit, half, tick, to_batch


@pytest.mark.timeout(60)
def test_verdicts_that_wait_stay_at_rest_while_more_of_their_id_come() -> None:
    bucket, batches, per_batch = Bucket(), 200, 1_000
    for number in range(batches):
        ops = [commit("a", offset=number * per_batch + place) for place in range(per_batch)]
        bucket, outcomes, _ = bucket.after(to_batch(ops), RULES)
        assert outcomes == []
    assert bucket.entries.num_rows == batches * per_batch
    _, outcomes, counts = bucket.after(to_batch([half("a"), tick(1)]), RULES)
    assert [(outcome.kind.name, outcome.decided_ms) for outcome in outcomes] == [("COMMIT", 1)]
    assert counts["duplicate_op"] == batches * per_batch - 1
