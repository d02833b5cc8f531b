"""Reads the results of `halfway demo` from the Delta tables, the op and check topics, and the job's status.

The tables are read with delta-rs, as any reader without Spark would read them.
"""

from collections import defaultdict
from contextlib import suppress
from typing import Any

import pyarrow
from confluent_kafka import Consumer, Message
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from halfway.pipelines.demo.traffic import RecordPosition
from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, admin_client
from halfway.pipelines.kafka.range_reader import OffsetRange, ranges_consumer, read_ranges, retained
from halfway.pipelines.storage.delta_tables import table_path
from halfway.pipelines.storage.file_systems import local_path
from halfway.pipelines.storage.manifest import STATUS_FILE, checkpoint_file
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import HalfwayError, KafkaUnavailableError, SetupError, TopicError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import CheckHeaders, OpHeaders, RecordError, decode_key, headers_of
from halfway.schemas.settings import KafkaSettings, StorageSettings
from halfway.schemas.tables import Table

Row = dict[str, Any]

_MESSAGE_COLUMNS = ("transaction_id", "topic", "tags", "keys", "body", "producer_group", "check_times")
_COLUMNS = {
    Table.MESSAGES: _MESSAGE_COLUMNS,
    Table.DISCARDED: (*_MESSAGE_COLUMNS, "reason"),
    Table.QUARANTINE: ("transaction_id", "source_topic", "source_partition", "source_offset", "reason"),
}


def read_status(storage: StorageSettings) -> BatchStatus | None:
    """Return the status that the job wrote after its last batch; None before the first batch.

    Raises:
        SetupError: the checkpoint is not on this machine.
    """
    path = local_path(checkpoint_file(storage, STATUS_FILE))
    if path is None:
        raise SetupError(
            f"the demo reads the job's status from the checkpoint, and {storage.checkpoint} is not a folder on this machine: "
            "run it with --set storage.checkpoint=FOLDER --set storage.warehouse=FOLDER"
        )
    return BatchStatus.parse(path.read_text() if path.exists() else None)


class TableWatch:
    """Reads the demo's rows of a table when it has a new version, and only from the files that may hold them."""

    def __init__(self, storage: StorageSettings, prefix: str) -> None:
        """Prepare to read the rows whose transaction id begins with `prefix`."""
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

    def __init__(self, kafka: KafkaSettings, prefix: str) -> None:
        """Connect and read the ends of the topics, before the demo sends anything.

        Raises:
            TopicError: a topic is missing.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        self._kafka = kafka
        self._prefix = prefix.encode()
        self.checks: defaultdict[str, set[int]] = defaultdict(set)
        """The numbers of the checks, by transaction id."""
        self.rollbacks: dict[tuple[str, str], int] = {}
        """The time of the first ROLLBACK, by transaction id and group."""
        self.last_op_ms = 0
        self._client = admin_client(kafka)
        with ranges_consumer(kafka) as consumer:
            self._read_to = {topic: self._ends(consumer, topic) for topic in (kafka.op_topic, *kafka.all_check_topics())}

    def read(self) -> bool:
        """Read all new records. Return False if Kafka does not answer in time."""
        try:
            with ranges_consumer(self._kafka) as consumer:
                for topic, read_to in self._read_to.items():
                    ends = self._ends(consumer, topic)
                    ranges = {partition: OffsetRange(read_to.get(partition, 0), end) for partition, end in ends.items()}
                    for record in read_ranges(consumer, topic, ranges, REQUEST_LIMIT_S):
                        # Skip records that break the contract: the job quarantines them.
                        with suppress(RecordError):
                            self._note(record)
                    read_to.update(ends)
        except (KafkaUnavailableError, TopicError):
            # A broker that has just started knows no topic for a moment.
            return False
        return True

    def _ends(self, consumer: Consumer, topic: str) -> dict[int, int]:
        return {partition: kept.end for partition, kept in retained(consumer, self._client, topic).items()}

    def _note(self, record: Message) -> None:
        key = record.key()
        if key is None or not key.startswith(self._prefix):
            return
        transaction_id, headers = decode_key(key), headers_of(record)
        if record.topic() != self._kafka.op_topic:
            self.checks[transaction_id].add(CheckHeaders.from_headers(headers).check_times)
            return
        op = OpHeaders.from_headers(headers)
        at_ms = record.timestamp()[1]
        self.last_op_ms = max(self.last_op_ms, at_ms)
        if op.action is LocalTransactionState.ROLLBACK:
            self.rollbacks.setdefault((transaction_id, op.producer_group), at_ms)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
