"""Which checks are open, which were answered, and how far each partition is done. No Kafka and no clock; safe for threads."""

import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest

REMEMBERED_ANSWERS = 10_000


@dataclass(eq=False, slots=True)
class Progress:
    """How far one partition is done: offsets in the order they came, some done before those in front of them."""

    position: int | None = None
    committed: int | None = None
    is_live: bool = True
    _open: deque[int] = field(default_factory=deque)
    _done: set[int] = field(default_factory=set)

    def begin(self, offset: int) -> None:
        """Take note of a record; one that is here already, or done, is not taken twice."""
        last = self._open[-1] if self._open else (self.position or 0) - 1
        if offset > last:
            self._open.append(offset)

    def finish(self, offset: int) -> None:
        """Take note that a record is done, and move `position`, the offset to commit, over all that are done in a row."""
        if self._open and offset >= self._open[0]:
            self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self.position = self._open.popleft() + 1
            self._done.discard(self.position - 1)


@dataclass(eq=False, slots=True)
class Task:
    """A check on its way: the records that asked it, and the answer once the listener gave one."""

    request: CheckRequest
    sources: list[tuple[Progress, int]]
    answer: Answer | None = None


class Ledger:
    """What one instance knows of the checks it read."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()
        self._progress: dict[int, Progress] = {}
        self._open: dict[str, Task] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._put_off: deque[tuple[float, Task]] = deque()
        self._is_ending = False
        self._gave_up = False

    def read(self, partition: int, offset: int, request: CheckRequest | None) -> Task | None:
        """Take note of a record.

        Args:
            partition: where it lies.
            offset: where it lies.
            request: the check; None for a record that is none of this group's.

        Returns:
            The check to answer, unless it was answered, or is being answered: a check that is read twice is not asked twice.
        """
        with self._lock:
            progress = self._progress.setdefault(partition, Progress())
            progress.begin(offset)
            if request is None or request.check_id in self._answered:
                progress.finish(offset)
                return None
            if request.check_id in self._open:
                self._open[request.check_id].sources.append((progress, offset))
                return None
            task = self._open[request.check_id] = Task(request, [(progress, offset)])
            return task

    def open_checks(self) -> int:
        """Return how many checks were read and are not answered."""
        with self._lock:
            return len(self._open)

    def is_wanted(self, task: Task) -> bool:
        """Tell whether a check is still this instance's: its partition may have gone to another."""
        with self._lock:
            return any(progress.is_live for progress, _ in task.sources)

    def forget(self, task: Task) -> None:
        """Leave a check that was not begun to whoever reads it next."""
        with self._lock:
            self._open.pop(task.request.check_id, None)

    def answered(self, task: Task) -> None:
        """Take note that a check's answer is acknowledged."""
        with self._lock:
            self._open.pop(task.request.check_id, None)
            self._answered[task.request.check_id] = None
            if len(self._answered) > REMEMBERED_ANSWERS:
                self._answered.popitem(last=False)
            for progress, offset in task.sources:
                progress.finish(offset)

    def put_off(self, task: Task, due_s: float) -> None:
        """Keep an answer that did not get out until `due_s`; give it up if this instance ends."""
        with self._lock:
            if self._is_ending:
                self._give_up(task)
            else:
                self._put_off.append((due_s, task))

    def due(self, now_s: float) -> list[Task]:
        """Return the answers whose time to be sent again has come."""
        with self._lock:
            found = []
            while self._put_off and self._put_off[0][0] <= now_s:
                found.append(self._put_off.popleft()[1])
            return found

    def end(self) -> None:
        """Give up what was put off: the next instance is asked."""
        with self._lock:
            self._is_ending = True
            for _, task in self._put_off:
                self._give_up(task)
            self._put_off.clear()

    def is_complete(self) -> bool:
        """Tell whether every answer that was begun is out."""
        with self._lock:
            return not self._open and not self._gave_up

    def to_commit(self) -> dict[int, int]:
        """Return the offsets to commit by partition, where they moved since the last call."""
        with self._lock:
            moved = {}
            for partition, progress in self._progress.items():
                if progress.position is not None and progress.position != progress.committed:
                    progress.committed = moved[partition] = progress.position
            return moved

    def commit_failed(self, partition: int) -> None:
        """Have a partition's offset committed again."""
        with self._lock:
            if partition in self._progress:
                self._progress[partition].committed = None

    def revoke(self, partitions: Collection[int]) -> None:
        """Forget partitions: their next owner asks again what is open here; what a listener says even so does no harm (R2)."""
        with self._lock:
            for partition in partitions:
                progress = self._progress.pop(partition, None)
                if progress:
                    progress.is_live = False

    def _give_up(self, task: Task) -> None:
        self._open.pop(task.request.check_id, None)
        self._gave_up = True
