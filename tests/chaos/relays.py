"""The relays of a chaos world, each in its own process, and the judgement of what they have written."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import NewTopic

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.kafka.topic_setup import create_relay_topic
from halfway.schemas.tables import Table
from tests.chaos.auditor import Findings
from tests.chaos.evidence import query
from tests.chaos.plans import digest
from tests.chaos.waiting import ChaosError, until
from tests.support.commands import as_options, halfway_command
from tests.support.kafka_topics import patient_admin
from tests.support.paths import ROOT
from tests.support.relay_world import committed_records

_NAMED = "orders"
_PARTITIONS = 2
_TIMEOUT = "5s"


class Relayed(NamedTuple):
    """A row of `messages`, or a record of the real topic, where all rows have the partition 0."""

    transaction_id: str
    partition: int
    body_digest: str


class Relays:
    """Relays of one name, of which one is active. Each is started again when it has ended, as a supervisor does."""

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        """Take the options of the job of a world. Does not start anything."""
        name = f"{folder.parent.name}-{folder.name}"
        self._folder, self._warehouse, self._runs, self._has_begun = folder, folder / "warehouse", 0, False
        self.topic = f"{name}-real"
        self._options = {
            **options,
            "kafka.relay_topic": f"{name}-relay",
            "relay.name": name,
            "relay.topics": f'{{"{_NAMED}": "{self.topic}"}}',
            "relay.transaction_timeout": _TIMEOUT,
        }
        self._settings = load_settings(environ={}, overrides=self._options)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.wanted = 1
        """How many run."""

    def make_topics(self) -> None:
        """Create the real topic and the relays' own."""
        client = patient_admin(self._settings.kafka)
        client.create_topics([NewTopic(self.topic, _PARTITIONS, 1)])[self.topic].result()
        until(lambda: self.topic in partition_counts(client, [self.topic]), self.topic)
        create_relay_topic(self._settings, 1)

    def start_what_is_down(self) -> None:
        """Start relays until as many run as are wanted. There is nothing to relay before the first message."""
        self._processes = [process for process in self._processes if process.poll() is None]
        while len(self._processes) < self.wanted and (self._warehouse / Table.MESSAGES).exists():
            self._runs += 1
            begin = [] if self._has_begun else ["--begin", "earliest"]
            command = halfway_command("relay", *as_options(self._options), *begin)
            with (self._folder / f"relay-{self._runs:03}.log").open("wb") as log:
                started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            self._processes.append(started)
            if not self._has_begun:
                self._wait_for_the_bookmark(started)

    def _wait_for_the_bookmark(self, first: "subprocess.Popen[bytes]") -> None:
        until(lambda: bool(self.records()) or first.poll() is not None, "the first relayed message")
        if first.poll() is not None:
            raise ChaosError(f"the relay ended: {self.last_words()}")
        self._has_begun = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each relay that runs."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def close(self) -> None:
        """End all relays."""
        self.wanted = 0
        for number in (signal.SIGCONT, signal.SIGKILL):
            self.signal(number)
        for process in self._processes:
            process.wait(30)

    def last_words(self) -> str:
        """Return the last line of the last relay."""
        lines = (self._folder / f"relay-{self._runs:03}.log").read_text(errors="replace").splitlines()
        return (lines or ["it printed nothing"])[-1][:500]

    def rows(self) -> list[Relayed]:
        """Return the messages of the table, in its order."""
        columns = "transaction_id, body, epoch, batch_id, op_partition, op_offset"
        found = query(self._warehouse, Table.MESSAGES, columns)
        found.sort(key=lambda row: (row["epoch"], row["batch_id"], row["op_partition"], row["op_offset"]))
        return [Relayed(row["transaction_id"], 0, digest(row["body"])) for row in found]

    def records(self) -> list[Relayed]:
        """Return what consumers with `read_committed` get from the real topic, by partition and offset."""
        found = committed_records(self._settings.kafka.servers(), self.topic)
        return [Relayed((each.key() or b"").decode(), each.partition() or 0, digest(each.value() or b"")) for each in found]

    def judge(self) -> Findings:
        """Wait until all messages were relayed, and judge what the real topic holds."""
        wanted = len(self.rows())

        def has_all() -> bool:
            self.start_what_is_down()
            with suppress(KafkaException, AssertionError):
                return len(self.records()) >= wanted
            return False

        with suppress(ChaosError):
            until(has_all, "every message in the real topic")
        return relay_findings(self.rows(), self.records())


def relay_findings(rows: Sequence[Relayed], records: Sequence[Relayed]) -> Findings:
    """Compare the real topic with the table: each message once, whole, and in each partition in the table's order."""
    findings, place = Findings(), {row.transaction_id: number for number, row in enumerate(rows)}
    counted = Counter(record.transaction_id for record in records)
    findings.twice += [f"{name} was relayed {times} times" for name, times in counted.items() if times > 1]
    findings.lost += [f"{row.transaction_id} is in messages, and was not relayed" for row in rows if row.transaction_id not in counted]
    last: dict[int, int] = {}
    for record in records:
        name = record.transaction_id
        if name not in place:
            findings.wrong.append(f"{name} was relayed, and is not in messages")
            continue
        if record.body_digest != rows[place[name]].body_digest:
            findings.wrong.append(f"{name} was relayed with another body")
        if place[name] < last.get(record.partition, -1):
            findings.wrong.append(f"{name} was relayed out of order")
        last[record.partition] = place[name]
    return findings
