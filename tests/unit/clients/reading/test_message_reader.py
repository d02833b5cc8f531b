"""What a reader yields, in which order and in which pieces, whatever lies in which file."""

import asyncio
import random
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from deltalake.fs import DeltaStorageHandler
from pyspark.sql.pandas.types import to_arrow_schema

from halfway.clients.reading import message_files, message_merge, message_reader
from halfway.clients.reading.committed import MessageBatch
from halfway.clients.reading.message_files import MessageFiles
from halfway.clients.reading.message_reader import MessageReader
from halfway.clients.reading.message_rows import MESSAGE_SCHEMA, Wanted, complete
from halfway.conf.loader import load_settings
from halfway.schemas.bookmark import BEGINNING, Bookmark
from halfway.schemas.errors import TableError
from halfway.schemas.tables import MESSAGES_SCHEMA
from tests.support.message_tables import append, row
from tests.support.waiting import until


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "warehouse" / "messages"


def ids(batches: list[MessageBatch]) -> list[list[str]]:
    return [[message.transaction_id for message in batch.messages] for batch in batches]


def test_the_columns_are_those_that_the_job_writes() -> None:
    written = {field.name: field.type for field in to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")}
    large = {"tags": pa.large_string(), "keys": pa.large_string(), "body": pa.large_binary()}
    large["properties"] = pa.map_(large["keys"], large["keys"])
    assert {**written, **large} == {field.name: field.type for field in MESSAGE_SCHEMA}


def test_messages_are_typed_and_in_order(table: Path) -> None:
    append(table, [row((0, 1), 5), row((0, 1), 2, op_partition=1), row((0, 1), 4)])
    append(table, [row((0, 0), 3, keys="k", tags=None, queue_id=7)])
    [batch] = MessageReader(str(table)).read()
    assert [message.transaction_id for message in batch.messages] == ["t3", "t4", "t5", "t2"]
    assert batch.bookmark == Bookmark(0, 1)
    first = batch.messages[0]
    assert (first.topic, first.queue_id, first.tags, first.keys, first.body) == ("orders", 7, None, "k", b"3")
    assert (first.properties, first.op_offset, first.bookmark) == ({"trace": "x"}, 3, Bookmark(0, 0))
    assert first.committed_at.isoformat() == "2023-11-14T22:13:20+00:00"
    assert "trace" not in repr(first)
    assert batch.to_arrow().schema == MESSAGE_SCHEMA
    assert batch.to_arrow()["transaction_id"].to_pylist() == ["t3", "t4", "t5", "t2"]


def test_reading_on_yields_exactly_what_came_later(table: Path) -> None:
    for epoch, batch_id in [(0, 0), (0, 1), (0, 9), (1, 0), (1, 1)]:
        append(table, [row((epoch, batch_id), 10 * epoch + batch_id)])
    reader = MessageReader(load_settings(environ={}, overrides={"storage.warehouse": str(table.parent)}).storage, max_rows=1)
    assert ids(list(reader.read())) == [["t0"], ["t1"], ["t9"], ["t10"], ["t11"]]
    for after, left in [((0, 0), 4), ((0, 5), 3), ((0, 9), 2), ((0, 99), 2), ((1, 0), 1), ((1, 1), 0), ((2, 0), 0)]:
        assert len(list(reader.read(Bookmark(*after)))) == left


@pytest.mark.parametrize("seed", range(20))
def test_any_layout_of_files_gives_the_same_whole_batches(table: Path, seed: int) -> None:
    """A compaction may put any rows into any file. Row groups are small, so that files are read piece by piece."""
    chance = random.Random(seed)
    rows = [row((epoch, batch_id), number) for epoch in (0, 1) for batch_id in range(8) for number in range(chance.randrange(1, 6))]
    shuffled = chance.sample(rows, len(rows)) if seed % 2 else rows
    cuts = sorted(chance.sample(range(1, len(rows)), 4))
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        append(table, shuffled[begin:end], row_group=3)
    if seed % 3 == 0:
        DeltaTable(table).optimize.compact(writer_properties=WriterProperties(max_row_group_size=3))
    assert max(pq.ParquetFile(file).num_row_groups for file in table.glob("*.parquet")) > 1
    limit = chance.randrange(1, 12)
    reader = MessageReader(str(table), max_rows=limit)
    batches = list(reader.read())
    read = [(message.bookmark, message.op_offset) for batch in batches for message in batch.messages]
    assert read == sorted((Bookmark(each["epoch"], each["batch_id"]), each["op_offset"]) for each in rows)
    for batch in batches:
        places = [message.bookmark for message in batch.messages]
        assert batch.bookmark == places[-1]
        assert len(places) <= limit or len(set(places)) == 1
        rest = [(message.bookmark, message.op_offset) for later in reader.read(batch.bookmark) for message in later.messages]
        assert rest == [each for each in read if each[0] > batch.bookmark]


def test_files_that_overlap_do_not_come_into_memory_together(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty files has a row of each of fifty batches, as after a compaction by size."""
    held: list[int] = []
    add = message_merge._Buffer.add

    def spy(self: message_merge._Buffer, rows: pa.Table) -> None:
        add(self, rows)
        held.append(self._rows.num_rows)

    monkeypatch.setattr(message_merge._Buffer, "add", spy)
    for file in range(20):
        append(table, [row((0, batch_id), file) for batch_id in range(50)])
    batches = list(MessageReader(str(table), max_rows=40).read())
    assert {len(batch) for batch in batches} <= {20, 40}
    read = [(message.bookmark.batch_id, message.op_offset) for batch in batches for message in batch.messages]
    assert read == [(batch_id, file) for batch_id in range(50) for file in range(20)]
    assert max(held) <= 4 * 40 + 50
    rare = list(MessageReader(str(table), max_rows=40, topic="other").read())
    assert [(len(batch), batch.bookmark.batch_id) for batch in rare] == [(0, 49)]


def test_a_batch_is_limited_in_bytes_too(table: Path) -> None:
    append(table, [row((0, number // 2), number, body=bytes(1000)) for number in range(8)])
    assert [len(batch) for batch in MessageReader(str(table), max_bytes=5_000).read()] == [4, 4]
    assert [len(batch) for batch in MessageReader(str(table), max_bytes=1).read()] == [2, 2, 2, 2]


def test_topic_and_tags_select_and_the_bookmark_gets_on(table: Path) -> None:
    tags = ["paid", "sent", None, "back"]
    append(table, [row((0, 0), number, tags=tag) for number, tag in enumerate(tags)])
    append(table, [row((0, 1), 9, topic="stock")])
    append(table, [row((0, 2), 10, topic="other")])

    def read(topic: str | None = None, tags: str | None = None) -> list[tuple[list[str], str]]:
        batches = MessageReader(str(table), topic=topic, tags=tags).read()
        return [([message.transaction_id for message in batch.messages], str(batch.bookmark)) for batch in batches]

    assert read() == [(["t0", "t1", "t2", "t3", "t9", "t10"], "0.2")]
    assert read("stock") == [(["t9"], "0.2")]
    assert read("orders", "paid || back") == [(["t0", "t3"], "0.2")]
    assert read("orders", "*") == [(["t0", "t1", "t2", "t3"], "0.2")]
    assert read("nothing") == [([], "0.2")]


def test_a_rare_topic_gets_on_through_a_long_table(table: Path) -> None:
    for batch_id in range(5):
        append(table, [row((0, batch_id), number) for number in range(100)])
    batches = list(MessageReader(str(table), topic="rare", max_rows=1).read())
    assert [(len(batch), batch.bookmark.batch_id) for batch in batches] == [(0, number) for number in range(5)]


def test_follow_goes_on_until_stopped(table: Path) -> None:
    append(table, [row((0, 0), 0)])
    reader = MessageReader(str(table))
    seen: list[str] = []
    follow = reader.follow(poll_s=0.01)
    for number in range(1, 4):
        seen += [message.transaction_id for message in next(follow).messages]
        append(table, [row((0, number), number)])
    seen += [message.transaction_id for message in next(follow).messages]
    assert seen == ["t0", "t1", "t2", "t3"]
    threading.Timer(0.05, reader.stop).start()
    assert list(follow) == []


def test_follow_for_asyncio(table: Path) -> None:
    append(table, [row((0, 0), 0)])
    reader = MessageReader(str(table))

    async def read() -> list[Bookmark]:
        seen = []
        async for batch in reader.follow_async(poll_s=0.01):
            seen.append(batch.bookmark)
            if len(seen) == 3:
                reader.stop()
            else:
                append(table, [row((0, len(seen)), len(seen))])
        return seen

    assert asyncio.run(asyncio.wait_for(read(), 30)) == [(0, 0), (0, 1), (0, 2)]


def test_a_reader_follows_again_after_a_task_has_left(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is cancelled, or has seen enough, ends what it follows, and nothing else."""
    append(table, [row((0, 0), 0)])
    reader = MessageReader(str(table))
    looks: list[bool] = []
    has_changed = MessageFiles.has_changed

    def look(files: MessageFiles) -> bool:
        looks.append(has_changed(files))
        return looks[-1]

    monkeypatch.setattr(MessageFiles, "has_changed", look)

    async def first(after: Bookmark | None = None) -> Bookmark:
        async for batch in reader.follow_async(after, poll_s=0.01):
            return batch.bookmark
        raise AssertionError("it has ended")

    async def read() -> list[Bookmark]:
        seen = [await first()]
        waiting = asyncio.create_task(first(seen[0]))
        await asyncio.to_thread(until, lambda: len(looks) >= 2, "the task has waited, and looked again", 20)
        waiting.cancel()
        append(table, [row((0, 1), 1)])
        return [*seen, await first(seen[0])]

    assert asyncio.run(asyncio.wait_for(read(), 30)) == [(0, 0), (0, 1)]
    assert next(reader.follow()).bookmark == Bookmark(0, 1), "a thread follows beside it"
    reader.stop()
    assert list(reader.follow()) == []


def test_followers_that_wait_take_no_thread_of_the_loop(table: Path) -> None:
    """The loop's threads are few, `cores + 4`, and the producer of the same service starts and ends in one."""
    append(table, [row((0, 0), 0)])

    async def read() -> list[Bookmark]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        reader = MessageReader(str(table))
        seen: list[Bookmark] = []

        async def follow() -> None:
            async for batch in reader.follow_async(poll_s=0.01):
                seen.extend([batch.bookmark])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(follow())
            while len(seen) < 4:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(int, "7") == 7
            append(table, [row((0, 1), 1)])
            while len(seen) < 8:
                await asyncio.sleep(0.01)
            reader.stop()
        return seen

    assert asyncio.run(asyncio.wait_for(read(), 30)) == [(0, 0)] * 4 + [(0, 1)] * 4


def test_a_table_that_is_made_anew_with_more_commits_is_not_followed(table: Path) -> None:
    """The next commit after the one that was read is then another table's."""
    for batch in range(4):
        append(table, [row((0, batch), batch)])
    found: list[MessageBatch] = []
    reader = MessageReader(str(table))
    followed = reader.follow(poll_s=0.01)
    found.append(next(followed))
    shutil.rmtree(table)
    for batch in range(8):
        append(table, [row((0, batch), 1000 + batch)])
    with pytest.raises(TableError, match="was recreated"):
        found.extend(followed)
    assert ids(found) == [["t0", "t1", "t2", "t3"]]


def test_a_follower_reads_the_commits_that_are_new_and_not_the_whole_log(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(table, [row((0, 0), 0)])
    opened = MagicMock(side_effect=MessageFiles.open)
    reader = MessageReader(str(table))
    monkeypatch.setattr(reader, "_open_files", opened)
    followed = reader.follow(poll_s=0.01)
    for batch in range(5):
        assert next(followed).bookmark == (0, batch)
        append(table, [row((0, batch + 1), batch + 1)])
    assert opened.call_count == 1


def _clustered(rows: pa.Table, table: Path) -> None:
    write_deltalake(table, rows, mode="overwrite", partition_by=["topic"], schema_mode="overwrite")


def _replaced(rows: pa.Table, table: Path) -> None:
    DeltaTable.create(table, rows.schema, mode="overwrite")
    append(table, [row((0, batch), 1000 + batch) for batch in range(3)])


@pytest.mark.parametrize("change", [_clustered, _replaced])
def test_what_a_reader_would_refuse_is_refused_while_it_follows(change: Callable[[pa.Table, Path], None], table: Path) -> None:
    """Read on by its new commits alone, it would leave messages out."""
    for batch in range(3):
        append(table, [row((0, batch), batch)])
    followed = MessageReader(str(table), topic="orders").follow(poll_s=0.01)
    next(followed)
    append(table, [row((0, 3), 3)])
    change(DeltaTable(table).to_pyarrow_table(), table)
    with pytest.raises(TableError, match=r"partitioned|was recreated"):
        list(followed)


def test_a_table_that_is_made_anew_is_not_read_on(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches begin again at 0.0, so that a bookmark of the former table would leave them out."""
    monkeypatch.setattr(message_reader, "_OPEN_AGAIN_S", 0.1)
    append(table, [row((0, 5), 5)])
    reader = MessageReader(str(table))
    follow = reader.follow(poll_s=0.01)
    assert next(follow).bookmark == Bookmark(0, 5)
    table.rename(table.with_name("former"))
    for number in range(3):
        append(table, [row((0, number), number)])
    with pytest.raises(TableError, match="was recreated"):
        next(follow)
    with pytest.raises(TableError, match="was recreated"):
        list(reader.read())


def test_files_that_were_deleted_while_a_reader_was_busy_are_found_again(table: Path) -> None:
    for number in range(4):
        append(table, [row((0, number), number)])
    batches = MessageReader(str(table), max_rows=1).read()
    seen = [next(batches).bookmark.batch_id]
    now = DeltaTable(table)
    now.optimize.compact()
    now.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    seen += [batch.bookmark.batch_id for batch in batches]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_a_shallow_clone_is_called_so(table: Path, scheme: str) -> None:
    append(table, [row((0, 1), 1)])
    clone = table.with_name("clone")
    shutil.copytree(table / "_delta_log", clone / "_delta_log")
    [file] = table.glob("*.parquet")
    for commit in (clone / "_delta_log").glob("*.json"):
        commit.write_text(commit.read_text().replace(f'"path":"{file.name}"', f'"path":"{scheme}{file}"'))
    with pytest.raises(TableError, match="is a shallow clone, whose files are elsewhere: read it with Spark"):
        list(MessageReader(str(clone)).read())


def test_what_cannot_be_read_is_refused_with_what_to_do(table: Path) -> None:
    with pytest.raises(TableError, match=rf"there is no table {table} yet: run `halfway resolve`"):
        list(MessageReader(str(table)).read())
    write_deltalake(str(table), MESSAGE_SCHEMA.empty_table().drop_columns(["op_partition", "op_offset"]))
    with pytest.raises(TableError, match=r"earlier version, without op_offset, op_partition: start the job, `halfway resolve`, once"):
        list(MessageReader(str(table)).read())
    storage = load_settings(environ={}, overrides={"storage.catalog_schema": "payments"}).storage
    with pytest.raises(TableError, match="in the catalog, in payments"):
        MessageReader(storage)
    for tags in ("", "a ||", "a && b"):
        with pytest.raises(ValueError, match="is no tag and no list of tags"):
            MessageReader(str(table), tags=tags)
    with pytest.raises(ValueError, match="at least 1"):
        MessageReader(str(table), max_rows=0)


def test_what_is_no_place_and_no_bookmark_is_refused_with_what_to_give(table: Path) -> None:
    given: Any = load_settings(environ={})
    with pytest.raises(TypeError, match=r"reads storage settings, as load_settings\(\).storage"):
        MessageReader(given)
    text: Any = "0.3"
    for read in (MessageReader(str(table)).read, MessageReader(str(table)).follow):
        with pytest.raises(TypeError, match=r"'0.3' is no Bookmark: Bookmark.parse"):
            next(read(text))


def test_the_end_is_that_of_the_last_message_whatever_lies_in_which_file(table: Path) -> None:
    append(table, [])
    reader = MessageReader(str(table))
    assert reader.end() == BEGINNING < Bookmark(0, 0)
    append(table, [row((0, 7), 1, topic="other"), row((0, 5), 2)])
    assert reader.end() == Bookmark(0, 7)
    append(table, [row((1, 3), 3)])
    assert reader.end() == Bookmark(1, 3)
    DeltaTable(table).optimize.compact()
    assert reader.end() == Bookmark(1, 3), "the statistics of a file with two epochs do not tell it"


@pytest.mark.parametrize(("after", "warns"), [((0, 1), False), ((0, 2), True), ((1, 0), True)])
def test_a_bookmark_ahead_of_the_table_is_logged_once(
    table: Path, caplog: pytest.LogCaptureFixture, after: tuple[int, int], warns: bool
) -> None:
    append(table, [row((0, 1), 1)])
    told = f"event=bookmark_ahead_of_table bookmark={after[0]}.{after[1]} end=0.1"
    assert list(MessageReader(str(table)).read(Bookmark(*after))) == []
    assert caplog.text.count(told) == warns
    caplog.clear()
    steps = MessageReader(str(table))._steps(Bookmark(*after))
    assert [next(steps) for _ in range(3)] == [None] * 3
    append(table, [row((2, 0), 2)])
    assert next(filter(None, steps)).bookmark == Bookmark(2, 0)
    assert caplog.text.count(told) == warns


def test_an_empty_table_has_no_batch(table: Path) -> None:
    append(table, [])
    assert list(MessageReader(str(table)).read()) == []


def test_a_message_that_was_erased_is_left_out(table: Path) -> None:
    append(table, [row((0, 0), 1, body=None, properties=None), row((0, 0), 2), row((0, 1), 3, body=None, properties=None)])
    batches = list(MessageReader(str(table), max_rows=1).read())
    assert [each for each in ids(batches) if each] == [["t2"]]
    assert batches[-1].bookmark == Bookmark(0, 1), "nothing is waited for"


def test_a_message_that_is_erased_during_a_long_read_is_left_out(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_reader, "_OPEN_AGAIN_S", 0)
    for batch_id in range(4):
        append(table, [row((0, batch_id), batch_id)])
    reading = MessageReader(str(table), max_rows=1).read()
    assert ids([next(reading)]) == [["t0"]]
    DeltaTable(str(table)).update(updates={"body": "NULL"}, predicate="transaction_id = 't2'")
    append(table, [row((0, 4), 4)])
    left = list(reading)
    assert ids(left) == [["t1"], ["t3"]], "and what came after the read began is for the next one"
    assert left[-1].bookmark == Bookmark(0, 3)


def test_a_long_read_outlasts_any_number_of_vacuums(table: Path) -> None:
    for batch_id in range(14):
        append(table, [row((0, batch_id), batch_id)])
    read = []
    for batch in MessageReader(str(table), max_rows=1).read():
        read.append(batch)
        for later in range(batch.bookmark.batch_id + 1, 14):
            DeltaTable(str(table)).update(updates={"check_times": "check_times + 1"}, predicate=f"batch_id = {later}")
        DeltaTable(str(table)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert ids(read) == [[f"t{batch_id}"] for batch_id in range(14)]


def test_a_look_for_news_reads_no_file_whose_epochs_are_mixed(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `--adopt` and a compaction: the file's largest batch is of the former epoch."""
    for at in [(0, 8_000), (0, 9_000), (1, 0)]:
        append(table, [row(at, sum(at))])
    DeltaTable(str(table)).optimize.compact()
    append(table, [row((1, 1), 2)])
    read: list[int] = []
    rows = message_files.RowGroup.rows
    monkeypatch.setattr(message_files.RowGroup, "rows", lambda group: read.append(1) or rows(group))
    assert ids(list(MessageReader(str(table)).read(after=Bookmark(1, 0)))) == [["t2"]]
    assert len(read) == 1
    assert len(DeltaTable(str(table)).file_uris()) == 2


@pytest.mark.parametrize("column", ["topic", "epoch", "batch_id"])
def test_a_partitioned_copy_of_the_table_is_refused(table: Path, column: str) -> None:
    """Its files lack the column, so that all of its messages would be passed over in silence."""
    write_deltalake(str(table), pa.Table.from_pylist([row((1, 1), 1)], schema=MESSAGE_SCHEMA), partition_by=[column])
    with pytest.raises(TableError, match="is partitioned"):
        MessageReader(str(table)).end()


def test_tags_keys_and_properties_count_for_the_size_of_a_batch(table: Path) -> None:
    long = "y" * 32_000
    for batch_id in range(10):
        own = [{"properties": [("p", long)]}, {"keys": long}, {"tags": long}, {"properties": [(long, None)]}]
        append(table, [row((0, batch_id), 4 * batch_id + number, **changes) for number, changes in enumerate(own)])
    sizes = [len(batch) for batch in MessageReader(str(table), max_bytes=300_000).read()]
    assert sizes == [8, 8, 8, 8, 8]


def test_the_size_of_a_row_is_computed_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each small file that is added, all that waits would be looked at again."""
    for batch_id in range(20):
        append(table, [row((0, batch_id), batch_id)])
    sized: list[int] = []
    bytes_of = message_merge._bytes_of
    monkeypatch.setattr(message_merge, "_bytes_of", lambda rows: sized.append(rows.num_rows) or bytes_of(rows))
    assert sum(len(batch) for batch in MessageReader(str(table)).read()) == 20
    assert sum(sized) == 20


@pytest.mark.long  # It takes 5 GB.
def test_a_batch_may_have_more_bytes_than_offsets_of_32_bits_can_tell() -> None:
    """A backlog of 200,000 messages of 11 KiB in one batch of the job."""
    buffer = message_merge._Buffer(None, Wanted(None, frozenset(), 10_000, 64 * 2**20))
    rows = complete(pa.Table.from_pylist([row((0, 7), number, body=bytes(2**20)) for number in range(128)], schema=MESSAGE_SCHEMA))
    for _ in range(17):
        buffer.add(rows)
    [batch] = buffer.rest()
    assert len(batch) == 17 * 128
    assert pc.sum(pc.binary_length(batch.to_arrow()["body"])).as_py() == 17 * 2**27


def test_what_shows_a_reader_shows_no_credentials(table: Path) -> None:
    append(table, [row((0, 0), 0)])
    assert "hunter2" not in repr(MessageFiles.open(str(table), {"AWS_SECRET_ACCESS_KEY": "hunter2"}))


UNREACHABLE = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "max_retries": "0"}


@pytest.mark.parametrize("login", ["user:hunter2", "user:hun@hunter2"])
def test_a_store_that_does_not_answer_is_one_line_without_its_login(table: Path, login: str) -> None:
    options = {**UNREACHABLE, "AWS_ENDPOINT_URL": f"http://{login}@127.0.0.1:1"}
    append(table, [row((0, 0), 0)])
    opened = MessageFiles.open(str(table), {})
    opened._log = pa_fs.PyFileSystem(DeltaStorageHandler("s3://bucket/messages", options))
    for look in (MessageReader("s3://bucket/messages", storage_options=options).end, opened.has_changed):
        with pytest.raises(TableError) as caught:
            look()
        assert re.match("the table [^ ]*/messages cannot be read: ", str(caught.value))
        assert "hunter2" not in str(caught.value)
        assert str(caught.value).isprintable()


def test_an_error_while_reading_is_one_line_without_a_login(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("\x1b[31mno answer from\nhttp://user:hunter2@store/messages")

    append(table, [row((0, 0), 0)])
    monkeypatch.setattr(message_files.RowGroup, "rows", fail)
    with pytest.raises(TableError, match=r"cannot be read: no answer from http://store/messages$"):
        list(MessageReader(str(table)).read())


def test_what_arrow_cannot_read_is_one_line(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented")

    append(table, [row((0, 0), 0)])
    monkeypatch.setattr(message_files.RowGroup, "rows", fail)
    with pytest.raises(TableError, match="cannot be read: Nested data conversions not implemented"):
        list(MessageReader(str(table)).read())


def test_the_login_in_the_address_of_a_table_is_not_said() -> None:
    with pytest.raises(TableError) as caught:
        MessageReader("https://user:hunter2@127.0.0.1:1/messages").end()
    assert "hunter2" not in str(caught.value)
    assert "https://127.0.0.1:1/messages" in str(caught.value)
