"""What a batch was made of, as the tables know it."""

import json

from halfway.pipelines.storage.lineage import BatchOrigin, origin_in


def offsets(**ends: int) -> str:
    return "v1\n{}\n" + json.dumps({"half": {partition[1:]: end for partition, end in ends.items()}})


def test_an_origin_is_the_same_for_the_same_offsets_only() -> None:
    one = BatchOrigin.of("q", 3, offsets(p0=5, p1=7))
    assert one == BatchOrigin.of("q", 3, offsets(p1=7, p0=5))
    assert one != BatchOrigin.of("q", 3, offsets(p0=7, p1=5))
    assert one.read == 12


def test_the_newest_origin_of_the_query_is_found_among_other_commits() -> None:
    older, newest, others = (BatchOrigin.of(query, batch, offsets(p0=batch)) for query, batch in (("q", 1), ("q", 2), ("other", 9)))
    commits = [None, "made by hand", "[1]", '{"batch_id": 1}', others.to_json(), newest.to_json(), older.to_json()]
    assert origin_in(commits, "q") == newest
    assert origin_in(commits[:5], "q") is None
