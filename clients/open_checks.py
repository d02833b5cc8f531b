"""Tracks which checks are open and answered, and the offset to commit in each partition. No Kafka and no clock."""

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest
from halfway.schemas.headers import HEADER_OBJECTS_BYTES

REMEMBERED_ANSWERS = 10_000
REMEMBERED_MS = 60_000
"""A request that recurs within this time, by its record timestamps, is not answered again: a killed job repeats it
sooner. A later one is of a job that has lost its checkpoint and numbers its checks from 1. It is answered: it may be
the last call (R8), and the verdict may be lost with the op topic."""
MAX_OPEN_BYTES = 64 * 1024 * 1024
"""At this sum of bodies and properties the consumer pauses, whatever the number of checks."""


@dataclass(eq=False, slots=True)
class PartitionProgress:
    """The progress in one partition. Records may be done in another order than that of their offsets.

    Attributes:
        position: the offset to commit: all read records before it are done.
        committed: the offset that was committed last, or None.
        is_owned: False once the partition was revoked.
    """

    position: int
    committed: int | None = None
    is_owned: bool = True
    _read_to: int = 0
    _open: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """The offsets of the records that are not done, in order. Those that are done cost no memory, however many."""

    def begin(self, offset: int) -> bool:
        """Add a record. Return False if that offset was passed before: the topic was recreated or truncated."""
        if offset < max(self._read_to, self.position):
            return False
        self._read_to = offset + 1
        self._open[offset] = None
        return True

    def finish(self, offset: int) -> None:
        """Mark a record as done, and advance `position` to the first open record."""
        self._open.pop(offset, None)
        self.position = next(iter(self._open), self._read_to)


class _Identity(NamedTuple):
    """What makes two requests the same. A forged request with the `CHECK_ID` of another id must not replace it."""

    check_id: str
    transaction_id: str
    incarnation: int


@dataclass(eq=False, slots=True)
class CheckTask:
    """An open check: the request, the first record of each partition that holds it, and the answer once it is known."""

    request: CheckRequest
    sources: list[tuple[PartitionProgress, int]]
    at_ms: int
    """The time of the record that was read first."""
    size: int
    """About how much memory the request took when it was read: a listener may change its properties."""
    answer: Answer | None = None


class OpenChecks:
    """The checks that one instance has read. Safe for threads.

    Args:
        max_open: how many checks may be open before the reader should pause.
        max_bytes: how many bytes their bodies and properties may have together before that.
    """

    def __init__(self, max_open: int, max_bytes: int = MAX_OPEN_BYTES) -> None:
        """Start without checks."""
        self._max_open, self._max_bytes = max_open, max_bytes
        self._lock = threading.Lock()
        self._progress: dict[int, PartitionProgress] = {}
        self._open: dict[_Identity, CheckTask] = {}
        self._open_bytes = 0
        self._answered_until_ms: OrderedDict[_Identity, int] = OrderedDict()
        self._to_resend: deque[tuple[float, CheckTask]] = deque()
        self._is_ending = False
        self._gave_up = False

    def assign(self, committed: Mapping[int, int | None]) -> None:
        """Add partitions that this instance owns now. Doing so twice changes nothing.

        A partition without a committed offset gets one, 0: as long as a group has committed nothing, Kafka forgets it
        with its last member, and its checks would count though nobody reads them (R15).

        Args:
            committed: partition → the offset that the group has committed there, or None.
        """
        with self._lock:
            for partition, offset in committed.items():
                self._progress.setdefault(partition, PartitionProgress(offset or 0, offset))

    def add(self, partition: int, offset: int, request: CheckRequest | None, at_ms: int = 0) -> CheckTask | None:
        """Add a record that was read from the check topic.

        An offset that was read before means that the topic was deleted and recreated, or truncated: the partition's
        progress begins again.

        Args:
            partition: the record's partition.
            offset: the record's offset.
            request: the check; None if the record holds no check for this group.
            at_ms: the record's timestamp.

        Returns:
            The check to answer; None if there is none, or if this check is already open or answered.
        """
        with self._lock:
            progress = self._progress.setdefault(partition, PartitionProgress(offset))
            if not progress.begin(offset):
                progress = self._progress[partition] = PartitionProgress(position=offset)
                progress.begin(offset)
            if request is None or at_ms < self._answered_until_ms.get(_identity(request), at_ms):
                progress.finish(offset)
                return None
            if known := self._open.get(_identity(request)):
                if any(each is progress for each, _ in known.sources):
                    progress.finish(offset)  # The first record holds the position.
                else:
                    known.sources.append((progress, offset))
                return None
            task = self._open[_identity(request)] = CheckTask(request, [(progress, offset)], at_ms, _size_of(request))
            self._open_bytes += task.size
            return task

    def count(self) -> int:
        """Return how many checks are open: read and not yet answered."""
        with self._lock:
            return len(self._open)

    def is_full(self) -> bool:
        """Return True if the reader should pause."""
        with self._lock:
            return len(self._open) >= self._max_open or self._open_bytes >= self._max_bytes

    def has_room(self) -> bool:
        """Return True if a reader that has paused should go on: half of the limits is free."""
        with self._lock:
            return len(self._open) <= self._max_open // 2 and self._open_bytes <= self._max_bytes // 2

    def keep_owned(self, task: CheckTask) -> bool:
        """Return True if this instance still owns a partition that the check was read from; otherwise drop the check.

        The offset of a dropped check stays uncommitted, so the partition's owner reads it again. Both happen in one
        step: that owner may be this instance once more, and it would add the record to a check that is dropped next.
        """
        with self._lock:
            if any(progress.is_owned for progress, _ in task.sources):
                return True
            self._close(task)
            return False

    def drop(self, task: CheckTask) -> None:
        """Drop a check that this instance does not answer. Its offset stays uncommitted, so it is read again."""
        with self._lock:
            self._close(task)

    def finish(self, task: CheckTask) -> None:
        """Mark a check as answered: Kafka has acknowledged the answer."""
        with self._lock:
            self._close(task)
            self._answered_until_ms[_identity(task.request)] = task.at_ms + REMEMBERED_MS
            if len(self._answered_until_ms) > REMEMBERED_ANSWERS:
                self._answered_until_ms.popitem(last=False)
            for progress, offset in task.sources:
                progress.finish(offset)

    def resend_later(self, task: CheckTask, due_s: float) -> None:
        """Keep an answer that was not sent, to resend it at `due_s`. After `end`, give it up."""
        with self._lock:
            if self._is_ending:
                self._give_up(task)
            else:
                self._to_resend.append((due_s, task))

    def due(self, now_s: float) -> list[CheckTask]:
        """Remove and return the answers that are due to be resent."""
        with self._lock:
            found = []
            while self._to_resend and self._to_resend[0][0] <= now_s:
                found.append(self._to_resend.popleft()[1])
            return found

    def end(self) -> None:
        """Give up the answers that are to be resent. The group's next instance reads their checks again."""
        with self._lock:
            self._is_ending = True
            for _, task in self._to_resend:
                self._give_up(task)
            self._to_resend.clear()

    def is_complete(self) -> bool:
        """Return True if no check is open and no answer was given up."""
        with self._lock:
            return not self._open and not self._gave_up

    def to_commit(self) -> dict[int, int]:
        """Return partition → offset to commit, of the partitions that advanced since the last call."""
        with self._lock:
            moved = {}
            for partition, progress in self._progress.items():
                if progress.position != progress.committed:
                    progress.committed = moved[partition] = progress.position
            return moved

    def commit_failed(self, partition: int) -> None:
        """Let `to_commit` return a partition's offset again."""
        with self._lock:
            if partition in self._progress:
                self._progress[partition].committed = None

    def revoke(self, partitions: Collection[int]) -> None:
        """Remove lost partitions. Their next owner reads the open checks again. A second answer does no harm (R2)."""
        with self._lock:
            for partition in partitions:
                progress = self._progress.pop(partition, None)
                if progress:
                    progress.is_owned = False

    def _close(self, task: CheckTask) -> None:
        if self._open.get(_identity(task.request)) is task:
            del self._open[_identity(task.request)]
            self._open_bytes -= task.size

    def _give_up(self, task: CheckTask) -> None:
        self._close(task)
        self._gave_up = True


def _size_of(request: CheckRequest) -> int:
    """Return about how much memory a request takes."""
    return len(request.body) + sum(HEADER_OBJECTS_BYTES + len(name) + len(value or "") for name, value in request.properties.items())


def _identity(request: CheckRequest) -> _Identity:
    return _Identity(request.check_id, request.transaction_id, request.incarnation)
