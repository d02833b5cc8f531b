"""Reads the results of `halfway demo` from the Delta tables, the op and check topics, and the job's status.

The tables are read with delta-rs, as any reader without Spark would read them.
"""

import json
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any, cast

import pyarrow
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.pipelines.demo.traffic import RecordPosition
from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, admin_client, librdkafka_log, partition_counts
from halfway.pipelines.storage.delta_tables import table_path
from halfway.pipelines.storage.file_systems import local_path
from halfway.pipelines.storage.manifest import STATUS_FILE, checkpoint_file
from halfway.schemas.errors import HalfwayError, KafkaUnavailableError, SetupError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import CheckHeaders, OpHeaders, RecordError, decode_key
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.tables import Table

try:
    from deltalake import DeltaTable, QueryBuilder
    from deltalake.exceptions import DeltaError, TableNotFoundError

    _HAS_DELTALAKE = True
except ImportError:
    _HAS_DELTALAKE = False

Row = dict[str, Any]

_MESSAGE_COLUMNS = ("transaction_id", "topic", "tags", "keys", "body", "producer_group", "check_times")
_COLUMNS = {
    Table.MESSAGES: _MESSAGE_COLUMNS,
    Table.DISCARDED: (*_MESSAGE_COLUMNS, "reason"),
    Table.QUARANTINE: ("transaction_id", "source_topic", "source_partition", "source_offset", "reason"),
}
_BATCH_RECORDS = 1_000
_POLL_S = 0.1


def read_status(storage: StorageSettings) -> dict[str, Any]:
    """Return the status that the job wrote after its last batch; empty before the first batch.

    Raises:
        SetupError: the checkpoint is not on this machine.
    """
    path = local_path(checkpoint_file(storage, STATUS_FILE))
    if path is None:
        raise SetupError(
            f"the demo reads the job's status from the checkpoint, and {storage.checkpoint} is not a folder on this machine: "
            "run it with --set storage.checkpoint=FOLDER --set storage.warehouse=FOLDER"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content


class TableWatch:
    """Reads the demo's rows of a table when it has a new version, and only from the files that may hold them."""

    def __init__(self, storage: StorageSettings, prefix: str) -> None:
        """Prepare to read the rows whose transaction id begins with `prefix`.

        Raises:
            SetupError: the package deltalake is missing.
        """
        if not _HAS_DELTALAKE:
            raise SetupError("the demo reads the tables with the package deltalake, which is missing: pip install 'halfway[tables]'")
        self._storage = storage
        self._prefix = prefix
        self._tables: dict[Table, DeltaTable] = {}
        self._rows: dict[Table, tuple[int, RecordPosition | None, list[Row]]] = {}

    def rows(self, table: Table, keyless: RecordPosition | None = None) -> list[Row]:
        """Return the current rows; an empty list if the table does not exist yet.

        Args:
            table: the table.
            keyless: the position of the demo's record without an id, for the quarantine.

        Raises:
            HalfwayError: the table cannot be read.
        """
        try:
            return self._read(table, keyless)
        except TableNotFoundError:
            return []
        except (DeltaError, OSError) as error:
            raise HalfwayError(f"cannot read the table {table_path(self._storage, table)}: {error}") from None

    def _read(self, table: Table, keyless: RecordPosition | None) -> list[Row]:
        opened = self._tables.get(table)
        if opened is None:
            opened = self._tables[table] = DeltaTable(table_path(self._storage, table))
        else:
            opened.update_incremental()
        version, of_keyless, rows = self._rows.get(table, (-1, None, []))
        if version != opened.version() or of_keyless != keyless:
            # Use delta-rs' own engine: Arrow's dataset threads would call back into Python here, and abort a process
            # that ends meanwhile (delta-rs issue 2184).
            query = f"SELECT {', '.join(_COLUMNS[table])} FROM rows WHERE {self._wanted(keyless)}"
            found = QueryBuilder().register("rows", opened).execute(query)
            rows = pyarrow.table(found.read_all()).to_pylist()
            self._rows[table] = (opened.version(), keyless, rows)
        return rows

    def _wanted(self, keyless: RecordPosition | None) -> str:
        """Return the SQL condition for the demo's rows: a range, because file statistics cannot serve LIKE."""
        after = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        wanted = f"transaction_id >= {_quoted(self._prefix)} AND transaction_id < {_quoted(after)}"
        if keyless is None:
            return wanted
        topic, partition, offset = keyless
        place = f"source_topic = {_quoted(topic)} AND source_partition = {partition} AND source_offset = {offset}"
        return f"({wanted}) OR ({place})"


class TopicWatch:
    """Reads the demo's records of the op and check topics, from the ends that the topics have at its construction."""

    def __init__(self, settings: Settings, prefix: str) -> None:
        """Connect and read the ends of the topics, before the demo sends anything.

        Raises:
            KafkaUnavailableError: Kafka cannot be reached.
        """
        self._kafka = settings.kafka
        self._prefix = prefix.encode()
        self.checks: defaultdict[str, set[int]] = defaultdict(set)
        """The numbers of the checks, by transaction id."""
        self.rollbacks: dict[tuple[str, str], int] = {}
        """The time of the first ROLLBACK, by transaction id and group."""
        self.last_op_ms = 0
        self._read_to: dict[tuple[str, int], int] = {}
        topics = (self._kafka.op_topic, self._kafka.check_topic)
        options = {
            "group.id": "halfway-demo-watch",  # Required, but never joined: partitions are assigned and no offset is committed.
            "enable.auto.commit": "false",
            "enable.partition.eof": "true",
            "auto.offset.reset": "earliest",
        }
        self._consumer = Consumer({**self._kafka.as_librdkafka_dict(), **options}, logger=librdkafka_log)
        try:
            places = [(topic, n) for topic, count in partition_counts(admin_client(settings.kafka), topics).items() for n in range(count)]
            self._read_to = {place: self._end(place) for place in places}
            self._consumer.assign([TopicPartition(*place, end) for place, end in self._read_to.items()])
        except KafkaException as error:
            self._consumer.close()
            raise KafkaUnavailableError(f"cannot read {', '.join(topics)}: {error.args[0].str()}") from None

    def poll(self, limit_s: float) -> None:
        """Read new records, and wait for them up to `limit_s`.

        Raises:
            KafkaUnavailableError: a topic cannot be read.
        """
        for record in self._consumer.consume(_BATCH_RECORDS, limit_s):
            place, offset = (cast(str, record.topic()), cast(int, record.partition())), cast(int, record.offset())
            error = record.error()
            if error is None:
                self._read_to[place] = offset + 1
                # Skip records that break the contract: the job quarantines them.
                with suppress(RecordError, UnicodeDecodeError):
                    self._note(record)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._read_to[place] = offset
            elif error.fatal() or not error.retriable():
                raise KafkaUnavailableError(f"cannot read {place[0]}: {error.str()}")

    def read_to_end(self) -> bool:
        """Read up to the current ends of the topics. Return False if that takes more than 10 s.

        Raises:
            KafkaUnavailableError: a topic cannot be read.
        """
        deadline_s = time.monotonic() + REQUEST_LIMIT_S
        try:
            ends = {place: self._end(place) for place in self._read_to}
        except KafkaException:
            return False
        while any(self._read_to[place] < end for place, end in ends.items()):
            if time.monotonic() > deadline_s:
                return False
            self.poll(_POLL_S)
        return True

    def close(self) -> None:
        """Close the connection to Kafka."""
        self._consumer.close()

    def _end(self, place: tuple[str, int]) -> int:
        _, end = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=REQUEST_LIMIT_S)
        return int(end)

    def _note(self, record: Message) -> None:
        key = record.key()
        if key is None or not key.startswith(self._prefix):
            return
        transaction_id, headers = decode_key(key), record.headers() or []
        if record.topic() == self._kafka.check_topic:
            self.checks[transaction_id].add(CheckHeaders.from_headers(cast(Any, headers)).check_times)
            return
        op = OpHeaders.from_headers(cast(Any, headers))
        at_ms = record.timestamp()[1]
        self.last_op_ms = max(self.last_op_ms, at_ms)
        if op.action is LocalTransactionState.ROLLBACK:
            self.rollbacks.setdefault((transaction_id, op.producer_group), at_ms)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
