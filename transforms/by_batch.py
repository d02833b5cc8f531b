"""Values that differ from batch to batch, for code that runs in Spark's tasks."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from pyspark import TaskContext

_T = TypeVar("_T")
_BATCH_ID = "streaming.sql.batchId"
"""The local property by which Spark tells a task the id of its batch."""


class ByBatch(Generic[_T]):
    """A value for each batch. A batch that is repeated has the value that it had first (R16)."""

    def __init__(self, values: Sequence[tuple[int, _T]]) -> None:
        """Store the values.

        Args:
            values: (first batch, value), in order. Each value counts until the next one begins, the last one for ever.
        """
        self._values = list(values)

    def of(self, batch_id: int) -> _T:
        """Return the value of a batch."""
        return next((value for first, value in reversed(self._values) if first <= batch_id), self._values[0][1])

    def here(self) -> _T:
        """Return the value of the batch that this task belongs to; outside of a batch, the last one."""
        task = TaskContext.get()
        batch_id = task.getLocalProperty(_BATCH_ID) if task is not None else None
        return self._values[-1][1] if batch_id is None else self.of(int(batch_id))
