"""`halfway erase`: what was sent for a transaction leaves the tables, and everything else goes on."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from delta.exceptions import MetadataChangedException
from deltalake import DeltaTable
from pyspark.sql import Row, SparkSession

from halfway import MessageReader
from halfway.pipelines.operate import erase as operate
from halfway.pipelines.operate import next_halves
from halfway.pipelines.operate.replay import ReplaySelection, replay_discarded
from halfway.pipelines.resolve import sinks
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage import compaction, delta_tables, erasure
from halfway.pipelines.storage.delta_tables import properties_of, read_table, table_name
from halfway.schemas.errors import CheckpointInUseError, NotErasableError, SetupError
from halfway.schemas.headers import Source
from halfway.schemas.tables import ERASURES, Table
from tests.support.commands import facts, invoke
from tests.support.job_process import JobProcess
from tests.support.job_world import MakeWorld, World, half_headers
from tests.support.kafka_topics import MakeTopics
from tests.support.kafka_transaction import Transaction
from tests.support.waiting import until

SECRET = b"s3cret of Ms Doe"
SAID = b'{"asked_ms": 9999999999999, "absent_groups": []}'
SENT: dict[str, bytes | None] = {"TAGS": SECRET, "KEYS": SECRET, "trace": SECRET}


@pytest.fixture
def w(world: MakeWorld) -> World:
    """A committed, a discarded, a quarantined and a pending transaction, each with a secret; and one beside them."""
    made = world(**{"resolution.transactionCheckMax": 1, "resolution.transactionTimeOut": 100, "resolution.transactionCheckInterval": 100})
    for key in ("committed", "discarded", "other"):
        made.half(key, 0, SECRET, **SENT)
    for key in ("committed", "other"):
        made.op(key, b"COMMIT", 1)
    made.half("refused", 0, SECRET, **SENT, INCARNATION=b"x")
    made.tick(150, SAID)
    made.resolve()
    made.half("pending", 600, SECRET, **SENT)
    made.tick(600, SAID)
    made.resolve()
    assert [set(made.by_id(table)) for table in Table] == [{"committed", "other"}, {"discarded"}, {"refused"}]
    return made


def erase(w: World, transaction_id: str, group: str | None = None, *, vacuum: bool = False, dry_run: bool = False) -> operate.Erasure:
    return operate.erase(w.spark, w.settings, transaction_id, group, "as Ms Doe wishes", vacuum=vacuum, dry_run=dry_run)


def files_with(w: World, secret: bytes = SECRET) -> list[Path]:
    """Return the data files that hold the secret, whether they are part of a table or not."""
    found = []
    for path in Path(w.settings.storage.warehouse).rglob("*.parquet"):
        if "_delta_log" not in path.parts:
            rows = w.spark.read.parquet(str(path)).toPandas()
            if secret in str(rows.to_dict("records")).encode():
                found.append(path)
    return found


def without(row: Row, *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.asDict().items() if name not in names}


def without_id(rows: dict[str, Row], transaction_id: str) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name != transaction_id}


SENT_COLUMNS = ("body", "tags", "keys", "properties", "value", "headers", "detail")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_sent_is_erased_and_the_rest_stays(w: World) -> None:
    before = {table: w.by_id(table) for table in Table}
    for table, transaction_id in zip(Table, ("committed", "discarded", "refused"), strict=True):
        assert erase(w, transaction_id, dry_run=True).rows == {str(each): int(each is table) for each in Table}
    assert {table: w.by_id(table) for table in Table} == before
    for number, (table, transaction_id) in enumerate(zip(Table, ("committed", "discarded", "refused"), strict=True)):
        done = erase(w, transaction_id)
        assert done.rows == {str(each): int(each is table) for each in Table}
        assert read_table(w.spark, w.settings.storage, ERASURES).count() == number + 1
        after = w.by_id(table)
        assert {after[transaction_id].asDict().get(name) for name in SENT_COLUMNS} == {None}
        assert without(after[transaction_id], *SENT_COLUMNS) == without(before[table][transaction_id], *SENT_COLUMNS)
        assert without_id(after, transaction_id) == without_id(before[table], transaction_id)
        assert properties_of(w.spark, w.settings.storage, table)["delta.appendOnly"] == "true"
        assert DeltaTable(f"{w.settings.storage.warehouse}/{table}").to_pyarrow_table().num_rows == len(after), "delta-rs reads it too"
    again = erase(w, "committed")
    assert again.rows == {str(table): 0 for table in Table}
    audit = read_table(w.spark, w.settings.storage, ERASURES).orderBy("erased_at").collect()
    assert [(row.transaction_id, row.messages, row.discarded, row.quarantine) for row in audit] == [
        ("committed", 1, 0, 0),
        ("discarded", 0, 1, 0),
        ("refused", 0, 0, 1),
    ]
    assert {(row.remark, "@" in row.erased_by) for row in audit} == {("as Ms Doe wishes", True)}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_pending_unknown_or_of_another_group_stays(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotErasableError, match="pending of the group g is pending: settle it first, with `halfway rollback pending`"):
        erase(w, "pending")
    with pytest.raises(NotErasableError, match="no table holds anything of the transaction nothing: if it was rolled back"):
        erase(w, "nothing")
    with pytest.raises(NotErasableError, match="no table holds anything"):
        erase(w, "committed", "another-group")
    with pytest.raises(NotErasableError, match="no table holds anything of the transaction refused that names the group another-group"):
        erase(w, "refused", "another-group")
    assert erase(w, "refused", "g").rows["quarantine"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(compaction, "local_warehouse", lambda *_: None)
        with pytest.raises(SetupError, match="--vacuum needs tables on a local disk"):
            erase(w, "committed", vacuum=True)
    assert w.by_id(Table.MESSAGES)["committed"].body == SECRET


def test_a_refused_record_whose_headers_could_not_be_stored_is_erased_with_each_group_of_its_id(world: MakeWorld) -> None:
    """Its `PGROUP` may have been the group's, which the table does not tell."""
    w = world()
    for key in ("a", "b"):
        w.produce_odd(key, SECRET, half_headers())
    w.produce(Source.HALF, "many", SECRET, [*half_headers(), *[("h", None)] * 100_001])
    for key, group in (("null", None), ("empty", b"")):
        w.produce(Source.HALF, key, SECRET, [("REAL_TOPIC", b"orders"), ("PGROUP", group)], 50)
    w.tick(100)
    w.resolve()
    assert {w.by_id(Table.QUARANTINE)[key].reason for key in ("null", "empty")} == {"bad_header"}
    refused = w.by_id(Table.QUARANTINE)
    assert [(refused[key].headers, bytes(refused[key].value)) for key in "ab"] == [(None, SECRET)] * 2
    assert (refused["many"].reason, refused["many"].headers) == ("headers_too_large", [])
    for key in ("many", "a", "null", "empty"):
        assert erase(w, key, "g").rows["quarantine"] == 1
    refused = w.by_id(Table.QUARANTINE)
    assert (refused["a"].value, bytes(refused["b"].value)) == (None, SECRET)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_job_has_not_read_yet_is_not_overlooked(w: World) -> None:
    """A replay that was sent a moment ago would bring the body back, also if the job cannot read it yet (R18)."""
    partition = w.by_id(Table.MESSAGES)["committed"].half_partition
    transaction = Transaction(w, "another").half("x", 690, partition)
    assert w.half("committed", 700, SECRET, INCARNATION=b"1")[0] == partition
    with pytest.raises(NotErasableError, match="holds a half of the transaction committed that the job has not read"):
        erase(w, "committed")
    transaction.abort()
    w.half("discarded", 700, SECRET, INCARNATION=b"1")
    w.half("new", 700, SECRET)
    w.produce(Source.HALF, "null", SECRET, [("REAL_TOPIC", b"orders"), ("PGROUP", None)], 700)
    with pytest.raises(NotErasableError, match="holds a half of the transaction null that the job has not read"):
        erase(w, "null", "g")
    w.produce_odd("broken", SECRET, half_headers(PGROUP=b"another"), 700)
    with pytest.raises(NotErasableError, match="holds a half of the transaction broken that the job has not read"):
        erase(w, "broken", "g")
    for transaction_id in ("discarded", "new"):
        with pytest.raises(NotErasableError, match=f"holds a half of the transaction {transaction_id} that the job has not read"):
            erase(w, transaction_id)
    assert w.by_id(Table.DISCARDED)["discarded"].body == SECRET
    with pytest.raises(NotErasableError, match="no table holds anything"):
        erase(w, "new", "another-group")
    for transaction_id, incarnation in (("discarded", b"1"), ("new", b"0")):
        w.op(transaction_id, b"COMMIT", 750, INCARNATION=incarnation)
    w.tick(800, SAID)
    w.resolve()
    assert erase(w, "discarded").rows == {"messages": 1, "discarded": 1, "quarantine": 0}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_replay_that_is_under_way_does_not_bring_back_what_is_erased(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the bodies first, and sends them one after the other."""
    next_headers, refusals = next_halves.next_headers, []

    def erased_meanwhile(*arguments: Any) -> Any:
        try:
            erase(w, "discarded")
        except CheckpointInUseError as error:
            refusals.append(str(error))
        return next_headers(*arguments)

    monkeypatch.setattr(next_halves, "next_headers", erased_meanwhile)
    assert replay_discarded(w.spark, w.settings, ReplaySelection(), lambda _: None).replayed == 1
    w.op("discarded", b"COMMIT", 650, INCARNATION=b"1")
    w.tick(700, SAID)
    w.resolve()
    assert w.by_id(Table.MESSAGES)["discarded"].body == SECRET
    assert refusals, "the body came after an erasure that said that it was done"
    assert erase(w, "discarded").rows == {"messages": 1, "discarded": 1, "quarantine": 0}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_file_holds_it_after_a_vacuum_and_an_erasure_that_was_killed_is_completed(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    held, storage = len(files_with(w)), w.settings.storage

    def killed(*_: object) -> None:
        w.spark.sql(f"ALTER TABLE {table_name(storage, Table.MESSAGES)} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operate, "erase_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            erase(w, "committed")
    assert erase(w, "discarded").files_until_ms is not None
    assert properties_of(w.spark, storage, Table.MESSAGES)["delta.appendOnly"] == "true", "any erasure mends it"
    assert len(files_with(w)) == held, "the replaced files are still there"
    done = facts(invoke(w.settings, "erase", "committed", "--remark", "why", "--json"))
    assert (done["transaction_id"], done["rows"]) == ("committed", {"messages": 1, "discarded": 0, "quarantine": 0})
    kept = {"until_ms": None, "note": "for ever: its retention.ms is -1"}
    kafka = w.settings.kafka
    assert done["topics"] == [{"topic": topic, **kept} for topic in (kafka.half_topic, kafka.check_topic)], "it may have been asked about"
    for transaction_id in ("other", "refused", "discarded"):
        lines = invoke(w.settings, "erase", transaction_id, "--vacuum").stdout.splitlines()
        assert lines[1] == "the files that held it are deleted"
    assert lines[0] == "the tables hold nothing more that was sent for discarded"
    assert f"the topic {w.settings.kafka.check_topic} may hold it for ever: its retention.ms is -1" in lines
    assert files_with(w) == []
    refused = invoke(w.settings, "erase", "pending")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_erased_message_is_not_replayed_delivered_or_streamed_again(w: World, tmp_path: Path) -> None:
    assert streamed(w, tmp_path) == ["committed", "other"]
    erase(w, "discarded")
    erase(w, "committed")
    lines: list[str] = []
    result = replay_discarded(w.spark, w.settings, ReplaySelection(), lines.append)
    assert result.replayed == 0
    assert [line for line in lines if "erased" in line] == ["discarded is not sent: its body was erased (`halfway erase`)"]
    assert [message.transaction_id for batch in MessageReader(w.settings.storage).read() for message in batch.messages] == ["other"]
    other = w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "adopted")})
    w.op("pending", b"COMMIT", 650)
    w.tick(700, SAID)
    w.resolve(w.settings.model_copy(update={"storage": other}), adopt=True)
    bodies = {table: {name: row.body for name, row in w.by_id(table).items()} for table in (Table.MESSAGES, Table.DISCARDED)}
    assert bodies == {Table.MESSAGES: {"committed": None, "other": SECRET, "pending": SECRET}, Table.DISCARDED: {"discarded": None}}
    assert streamed(w, tmp_path) == ["committed", "other", "pending"]


def streamed(w: World, folder: Path) -> list[str]:
    """Let a Delta stream that skips changes read on, and return all that it has read."""
    path = f"{w.settings.storage.warehouse}/{Table.MESSAGES}"
    stream = w.spark.readStream.format("delta").option("skipChangeCommits", "true").load(path)
    writer = stream.select("transaction_id").writeStream.format("json").option("checkpointLocation", str(folder / "reader"))
    writer.trigger(availableNow=True).start(str(folder / "out")).awaitTermination()
    lines = [line for part in (folder / "out").glob("*.json") for line in part.read_text().splitlines()]
    return sorted(json.loads(line)["transaction_id"] for line in lines)


@contextmanager
def _running(w: World, reports: list[BatchReport]) -> Iterator[list[BaseException]]:
    failures: list[BaseException] = []
    job = ResolveJob(w.settings, on_batch=reports.append)

    def run() -> None:
        try:
            job.run(lambda: w.spark)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failures
    finally:
        job.stop()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("locked", [True, False], ids=["local disk", "object store"])
def test_the_job_goes_on_during_erasures(world: MakeWorld, locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks, as in an object store, Delta refuses the later one of two changes that concern each other."""
    refused: list[Table] = []
    if not locked:
        for module in (erasure, delta_tables):
            monkeypatch.setattr(module, "local_warehouse", lambda *_: None)
        monkeypatch.setattr(sinks, "append_once", _overtaken_once(sinks.append_once, refused))
    w = world(**{"trigger.available_now": False, "trigger.interval": 0})
    reports: list[BatchReport] = []
    with _running(w, reports) as failures:
        sent = 0

        def send() -> None:
            nonlocal sent
            number, sent = sent, sent + 1
            w.half(f"t{number}", number, SECRET)
            w.op(f"t{number}", b"COMMIT", number)
            w.tick(number)
            until(lambda: bool(failures) or sum(each.counts["committed"] for each in reports) == sent, "the message")

        send()
        for number in range(3):
            done = threading.Event()

            def go_on(done: threading.Event = done) -> None:
                send()
                # Where nothing keeps the job from appending, a change may be overtaken for as long as it appends.
                while locked and not failures and not done.is_set():
                    send()

            sender = threading.Thread(target=go_on)
            sender.start()
            try:
                until(lambda: _is_erased(w, f"t{number}"), "the commit of the batch that has read it")  # noqa: B023
            finally:
                done.set()
                sender.join()
    assert not failures, failures[0]
    assert bool(refused) is not locked
    rows = w.by_id(Table.MESSAGES)
    assert {name: row.body for name, row in rows.items()} == {f"t{number}": None if number < 3 else SECRET for number in range(sent)}
    assert len({(row.epoch, row.batch_id) for row in rows.values()}) == sent, "each row has its bookmark"


def _is_erased(w: World, transaction_id: str) -> bool:
    try:
        erase(w, transaction_id)
    except NotErasableError:
        return False
    return True


def _overtaken_once(append_once: Callable[..., None], refused: list[Table]) -> Callable[..., None]:
    """Return a function that refuses one append as Delta does if another has changed a table's property meanwhile."""

    def append(rows: Any, storage: Any, table: Table, *arguments: Any, **named: Any) -> None:
        if not refused:
            refused.append(table)
            raise MetadataChangedException("the property delta.appendOnly was changed")
        append_once(rows, storage, table, *arguments, **named)

    return append


@pytest.mark.timeout(700)
@pytest.mark.slow
def test_erasing_beside_the_job_as_a_user_runs_it(topics: MakeTopics, job: JobProcess, spark: SparkSession) -> None:
    w = World(
        spark, topics(overrides={"storage.warehouse": str(job.warehouse), "storage.checkpoint": str(job.options["storage.checkpoint"])})
    )
    job.options |= {f"kafka.{name}": getattr(w.settings.kafka, name) for name in ("half_topic", "op_topic", "check_topic")}
    job.start()

    def deliver(key: str) -> None:
        w.half(key, 0, SECRET)
        w.op(key, b"COMMIT")
        job.until(lambda: key in job.delivered(), key)

    deliver("first")
    until(lambda: invoke(w.settings, "erase", "first", "--vacuum", "--json").exit_code == 0, "the batch's commit")
    deliver("second")
    rows = {row.transaction_id: row.body for row in read_table(spark, w.settings.storage, Table.MESSAGES).collect()}
    assert rows == {"first": None, "second": SECRET}
    assert job.process is not None
    assert job.process.poll() is None
