"""The bookmark of a reader: where in the history of a table it is (docs/reading.md)."""

import re
from typing import NamedTuple, Self

_TEXT = re.compile(r"(\d{1,10})\.(-1|\d{1,19})")


class Bookmark(NamedTuple):
    """A place in a table's history: the rows with a greater bookmark are exactly those that were appended later.

    Bookmarks are ordered, and their text is `EPOCH.BATCH`.

    Attributes:
        epoch: 0 for a table's first checkpoint, and one more with each `--adopt`.
        batch_id: the number of the batch; each checkpoint numbers its own from 0.
    """

    epoch: int
    batch_id: int

    def __str__(self) -> str:
        """Return `EPOCH.BATCH`, which `parse` reads."""
        return f"{self.epoch}.{self.batch_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a bookmark from its text.

        Raises:
            ValueError: the text is no `EPOCH.BATCH`, or a number is too large for the columns.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None or int(found[1]) >= 2**31 or int(found[2]) >= 2**63:
            raise ValueError(f"{text!r} is no bookmark: give EPOCH.BATCH as a reader has printed or kept it, such as 0.1234")
        return cls(int(found[1]), int(found[2]))


BEGINNING = Bookmark(0, -1)
"""The bookmark before the first row of a table."""
