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


FLOOD = 20_000


@pytest.mark.timeout(300)
def test_a_flood_of_ids_into_one_bucket_takes_some_bytes_each_and_ends() -> None:
    """Anyone can choose ids of one bucket. They are asked about, discarded, and forgotten."""
    bucket = Bucket()
    halves = [half(f"{number:032x}", offset=number) for number in range(FLOOD)]
    bucket, outcomes, _ = bucket.after(to_batch([*halves, tick(1)]), RULES)
    assert (outcomes, bucket.entries.num_rows) == ([], FLOOD)
    assert len(bucket.encode()[1]) < 100 * FLOOD
    at_ms, asked = 1, 0
    while bucket.pending().num_rows:
        at_ms += RULES.half_retention_ms + 1
        bucket, outcomes, _ = bucket.after(to_batch([tick(at_ms)]), RULES)
        assert len(outcomes) == FLOOD
        asked += outcomes[0].kind.name == "CHECK"
    assert 0 < asked <= RULES.check_max
    bucket, _, _ = bucket.after(to_batch([tick(at_ms + RULES.resolved_retention_ms + 1)]), RULES)
    assert bucket.entries.num_rows == 0
    assert len(bucket.encode()[1]) < 10_000


@pytest.mark.timeout(300)
def test_names_that_nobody_has_any_more_leave_the_state() -> None:
    """Each half of a flood may have the longest group and topic that the contract allows, and no two the same."""
    bucket, count = Bucket(), 5_000
    # As long as an entry stays, the names of the others leave only where they are looked for.
    stays = half("stays", 1)._replace(immunity_ms=RULES.half_retention_ms)
    bucket, _, _ = bucket.after(to_batch([stays, tick(1)]), RULES)
    for _ in range(3):
        at_ms = (bucket.clock.horizon_ms() or 0) + 1
        records = [half(f"t{n}", at_ms, group=f"{n:0255}")._replace(topic=f"{n + count:0255}") for n in range(count)]
        ops = [commit(f"t{n}", at_ms, group=f"{n:0255}") for n in range(count)]
        bucket, outcomes, _ = bucket.after(to_batch([*records, *ops, tick(at_ms)]), RULES)
        assert len(outcomes) == count
        assert len(bucket.encode()[1]) < count * (2 * 255 + 100)
        at_ms += RULES.resolved_retention_ms + 1
        bucket, _, _ = bucket.after(to_batch([tick(at_ms)]), RULES)
        # The names go when the next entry comes.
        bucket, _, _ = bucket.after(to_batch([half("last", at_ms), commit("last", at_ms)]), RULES)
        assert len(bucket.encode()[1]) < 20_000
        assert bucket.pending()["transaction_id"].to_pylist() == ["stays"]
