"""Defines where a relay is, and the records that keep it: one for the relay, and one for each topic that is stopped.

They are in the relay's own topic, which is compacted, and are written in the Kafka transaction of the messages that
they count.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

from halfway.clients.reading.committed import CommittedMessage
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import RelayError

_OF_TOPIC = "/"
_ALL = 2**31
"""Above every partition: all of a batch."""
_MESSAGE = re.compile(r"(-?\d{1,10})\.(\d{1,19})")


class TablePosition(NamedTuple):
    """A message in the order of the table, or the end of a batch: everything up to here was sent.

    Its text is `EPOCH.BATCH`, or `EPOCH.BATCH:OP_PARTITION.OP_OFFSET` within a batch.

    Attributes:
        epoch: of the batch.
        batch_id: of the batch.
        op_partition: of the message's COMMIT. A row of an earlier version has none: its half takes its place, with a
            negative partition, because such rows are first in the order.
        op_offset: like op_partition.
    """

    epoch: int
    batch_id: int
    op_partition: int = _ALL
    op_offset: int = 0

    def __str__(self) -> str:
        """Return the text, which `parse` reads."""
        batch = str(Bookmark(self.epoch, self.batch_id))
        return batch if self.op_partition == _ALL else f"{batch}:{self.op_partition}.{self.op_offset}"

    @classmethod
    def of(cls, message: CommittedMessage) -> Self:
        """Return the position of a message."""
        if message.op_partition is None or message.op_offset is None:
            return cls(*message.bookmark, message.half_partition - _ALL, message.half_offset)
        return cls(*message.bookmark, message.op_partition, message.op_offset)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a position from its text.

        Raises:
            ValueError: the text has another form.
        """
        batch, is_within, message = text.strip().partition(":")
        found = _MESSAGE.fullmatch(message)
        if is_within and found is None:
            raise ValueError(f"{message!r} is no message of a batch: give the OP_PARTITION.OP_OFFSET of its row, such as 3.500")
        return cls(*Bookmark.parse(batch), *((int(found[1]), int(found[2])) if found else ()))

    @property
    def bookmark(self) -> Bookmark:
        """Return the bookmark to read on from: after it come all messages that were not sent, and some that were."""
        return Bookmark(self.epoch, self.batch_id if self.op_partition == _ALL else self.batch_id - 1)


START = TablePosition(0, -1)
"""Before the first message of a table."""


class Refusal(StrEnum):
    """Why a topic takes no message."""

    NO_TOPIC = "no_topic"
    NO_RIGHT = "no_right"
    TOO_LARGE = "too_large"
    OWN_TOPIC = "own_topic"
    UNAVAILABLE = "unavailable"
    OTHER = "other"


class Stop(NamedTuple):
    """A topic that has refused a message. What it has not got yet waits for it in the table."""

    after: TablePosition | None
    """The topic has every message up to here; None if it has none."""
    transaction_id: str
    """The message."""
    refusal: Refusal
    cause: str


BEFORE_THE_FIRST = "before the first batch"
"""Where a relay is whose `after` is None."""


@dataclass(frozen=True)
class RelayPositions:
    """How far a relay is in a table."""

    table: str
    """The id of the table."""
    after: TablePosition | None = None
    """Every topic that is not stopped has every message up to here; None if it has none."""
    stopped: Mapping[str, Stop] = field(default_factory=dict)
    """By the topic that messages name."""
    lost: int = 0
    """How many stops the relay's topic has lost, for example because its `cleanup.policy` was `delete`."""

    def with_stops(self, stops: Mapping[str, Stop | None]) -> Self:
        """Return the positions with topics stopped, or with None not stopped any more. Copies them once at most."""
        changed = {named: stop for named, stop in stops.items() if stop != self.stopped.get(named)}
        if not changed:
            return self
        stopped = dict(self.stopped)
        for named, stop in changed.items():
            if stop is None:
                del stopped[named]
            else:
                stopped[named] = stop
        return replace(self, stopped=stopped)


class PositionRecord(NamedTuple):
    """A record of the relay's own topic. A value of None deletes what had the key."""

    key: bytes
    value: bytes | None


def changes(relay: str, before: RelayPositions | None, now: RelayPositions, named: Iterable[str]) -> list[PositionRecord]:
    """Return the records that make `now` of `before`.

    Args:
        relay: the name of the relay.
        before: what is written; None if nothing is.
        now: what is to be written.
        named: the topics whose stops may differ.
    """
    records = []
    old = None if before is None else _of_relay(before)
    if _of_relay(now) != old:
        records.append(PositionRecord(relay.encode(), _of_relay(now)))
    stopped = {} if before is None else before.stopped
    for name in sorted(named):
        stop = now.stopped.get(name)
        if stop != stopped.get(name):
            content = None if stop is None else _to_json({**stop._asdict(), "after": _text(stop.after)})
            records.append(PositionRecord(f"{relay}{_OF_TOPIC}{name}".encode(), content))
    return records


def _of_relay(positions: RelayPositions) -> bytes:
    return _to_json({"table": positions.table, "after": _text(positions.after), "stopped": len(positions.stopped)})


def positions_of(records: Iterable[tuple[bytes | None, bytes | None]]) -> dict[str, RelayPositions]:
    """Return the positions of each relay, from keys and values of the whole topic, in order.

    Raises:
        RelayError: a record is not a relay's.
    """
    latest: dict[str, bytes] = {}
    for key, value in records:
        name = (key or b"").decode(errors="replace")
        if value is None:
            latest.pop(name, None)
        else:
            latest[name] = value
    try:
        bookmarks = {name: json.loads(value) for name, value in latest.items() if _OF_TOPIC not in name}
        stopped: dict[str, dict[str, Stop]] = {relay: {} for relay in bookmarks}
        for name, value in latest.items():
            relay, is_stop, named = name.partition(_OF_TOPIC)
            if is_stop and relay in stopped:
                content = json.loads(value)
                stop = Stop(_reached(content["after"]), content["transaction_id"], Refusal(content["refusal"]), content["cause"])
                stopped[relay][named] = stop
        return {relay: _positions(content, stopped[relay]) for relay, content in bookmarks.items()}
    except (ValueError, KeyError, TypeError):
        raise RelayError(
            "the relay's topic holds a record that no relay of this version has written: name another kafka.relay_topic"
        ) from None


def _positions(bookmark: Mapping[str, Any], stopped: Mapping[str, Stop]) -> RelayPositions:
    lost = int(bookmark["stopped"]) - len(stopped)
    return RelayPositions(str(bookmark["table"]), _reached(bookmark["after"]), stopped, lost)


def _to_json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode()


def _text(reached: TablePosition | None) -> str | None:
    return None if reached is None else str(reached)


def _reached(text: str | None) -> TablePosition | None:
    return None if text is None else TablePosition.parse(text)
