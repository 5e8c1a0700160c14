"""Which rows of a table have changed since a cut, in one byte a row: for checkpoints that hold changes alone.

Cuts are numbered. A row has the number of the first cut after its last change, relative to the oldest cut that is still
known; a removed row leaves its key in a list. When 255 cuts are known, the older half is forgotten. So is each cut
since which more rows were removed than the table has: a copy of all rows takes fewer bytes then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import NO_KEYS, Keys

MOST_CUTS = 255
"""Cuts that are known at once."""

FEWEST_REMOVED = 1 << 12
"""Removed keys that are kept in any case."""


class RowChanges:
    """The changes of one table.

    Args:
        count: its rows, which count as unchanged.
    """

    def __init__(self, count: int) -> None:
        self._numbers = np.zeros(count, dtype=np.uint8)  # by slot; 0: no change after the cut `_first`
        self._now, self._first = 1, 0
        self._complete_after = 0  # removed keys after this cut are all in the list
        self._removed: list[tuple[int, Keys]] = []
        self._removed_count = 0

    def note_changed(self, slots: Keys, count: int) -> None:
        """Note that these rows have changed; the table has `count`."""
        if len(self._numbers) < count:
            grown = np.zeros(count + count // 4, dtype=np.uint8)
            grown[: len(self._numbers)] = self._numbers
            self._numbers = grown
        self._numbers[slots] = self._now - self._first

    def note_removed(self, keys: Keys, moved: Keys, to: Keys, count: int) -> None:
        """Note that rows were removed.

        Args:
            keys: of the removed rows.
            moved, to: slots of the rows that moved into theirs: from, to.
            count: of the rows that are left.
        """
        self._numbers[to] = self._numbers[moved]
        self._removed.append((self._now, keys))
        self._removed_count += len(keys)
        if self._removed_count > max(count, FEWEST_REMOVED):
            self._removed, self._removed_count = [], 0
            self._complete_after = self._now

    def cut(self) -> int:
        """Return the number of a new cut, between all changes so far and all later ones."""
        number, self._now = self._now, self._now + 1
        if self._now - self._first > MOST_CUTS:
            self._forget_half()
        return number

    def _forget_half(self) -> None:
        shift = MOST_CUTS // 2
        self._first += shift
        self._numbers = np.where(self._numbers > shift, self._numbers - np.uint8(shift), np.uint8(0))
        self.forget_removed(self._first)

    def forget_removed(self, cut: int) -> None:
        """Forget the keys that were removed before a cut; changes since an earlier one are no longer known."""
        self._complete_after = max(cut, self._complete_after)
        self._removed = [(number, keys) for number, keys in self._removed if number > cut]
        self._removed_count = sum(len(keys) for _, keys in self._removed)

    def is_known(self, cut: int) -> bool:
        """Whether the changes since a cut are known."""
        return cut >= max(self._first, self._complete_after)

    def changed_since(self, cut: int, count: int) -> Keys:
        """Return the slots of the rows that have changed since a known cut, of `count`."""
        return np.flatnonzero(self._numbers[:count] > cut - self._first)

    def removed_since(self, cut: int) -> Keys:
        """Return the keys of rows that were removed since a known cut; some may have a row again."""
        found = [keys for number, keys in self._removed if number > cut]
        return np.concatenate(found) if found else NO_KEYS


class RowSet(msgspec.Struct, frozen=True):
    """Rows of a table in one part of a checkpoint.

    `removed`: keys whose earlier rows do not count; `whole`: no earlier row counts.
    """

    keys: Keys
    removed: Keys = NO_KEYS
    whole: bool = False


def newest_rows(parts: Sequence[RowSet]) -> list[Keys]:
    """Return for each part the indices of its rows that count: of each key the newest, where that was not removed.

    Args:
        parts: in the order in which they were written; the removals of a part precede its rows.
    """
    found: list[Keys] = []
    seen: list[Array] = []
    over = False
    for part in reversed(parts):
        if over:
            found.append(NO_KEYS)
            continue
        if seen:
            found.append(np.flatnonzero(~np.isin(part.keys, np.concatenate(seen))))
        else:
            found.append(np.arange(len(part.keys)))
        seen += [part.keys, part.removed]
        over = part.whole
    return found[::-1]
