"""The rows of a table that have changed since a cut, against sets of Python."""

from __future__ import annotations

import random

import numpy as np

from psctl.ps.tables import row_changes
from psctl.ps.tables.row_changes import RowChanges, RowSet, newest_rows
from psctl.ps.tables.row_index import KeyIndex


class Followed:
    """Rows that are added, changed and removed, with what has happened since each cut."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers, self.index = numbers, KeyIndex()
        self.index.add(np.arange(20))
        self.changes = RowChanges(20)
        self.since: dict[int, tuple[set[int], set[int]]] = {}  # by cut: changed, removed

    def keys(self) -> list[int]:
        return self.index.keys[: len(self.index)].tolist()

    def change(self) -> None:
        keys = np.array(self.numbers.sample(range(60), self.numbers.randrange(1, 6)))
        slots = self.index.find(keys)
        slots[slots < 0] = self.index.add(keys[slots < 0])
        self.changes.note_changed(slots, len(self.index))
        for changed, _ in self.since.values():
            changed.update(keys.tolist())

    def remove(self) -> None:
        count = self.numbers.randrange(len(self.index) + 1)
        slots = np.array(self.numbers.sample(range(len(self.index)), min(count, 5)), dtype=np.int64)
        if not len(slots):
            return
        keys = self.index.keys.take(slots)
        moved, to = self.index.remove(slots)
        self.changes.note_removed(keys, moved, to, len(self.index))
        for changed, removed in self.since.values():
            changed.difference_update(keys.tolist())
            removed.update(keys.tolist())

    def check(self) -> int:
        known = 0
        for cut, (changed, removed) in self.since.items():
            if self.changes.is_known(cut):
                known += 1
                slots = self.changes.changed_since(cut, len(self.index))
                assert set(self.index.keys.take(slots).tolist()) == changed
                assert set(self.changes.removed_since(cut).tolist()) == removed
        return known


def test_the_changes_since_every_known_cut_are_exact() -> None:
    for seed in range(30):
        followed = Followed(random.Random(seed))
        for _ in range(400):
            act = followed.numbers.random()
            if act < 0.5:
                followed.change()
            elif act < 0.7:
                followed.remove()
            else:
                followed.since[followed.changes.cut()] = (set(), set())
        assert followed.check() == len(followed.since)


def test_cuts_that_are_too_many_are_forgotten_from_the_oldest_on() -> None:
    followed = Followed(random.Random(1))
    for _ in range(1000):
        followed.change()
        followed.remove()
        followed.since[followed.changes.cut()] = (set(), set())
        known = [followed.changes.is_known(cut) for cut in followed.since]
        assert known == sorted(known)
        assert sum(known) >= min(len(known), row_changes.MOST_CUTS // 2)
    assert 127 <= followed.check() <= row_changes.MOST_CUTS


def test_more_removed_rows_than_the_table_has_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(row_changes, "FEWEST_REMOVED", 3)
    changes = RowChanges(10)
    none = np.empty(0, dtype=np.int64)
    first = changes.cut()
    changes.note_removed(np.arange(3), none, none, 3)
    assert changes.removed_since(first).tolist() == [0, 1, 2]
    changes.note_removed(np.arange(3, 5), none, none, 1)
    assert not changes.is_known(first)
    second = changes.cut()
    changes.note_removed(np.array([9]), none, none, 1)
    assert changes.is_known(second)
    assert changes.removed_since(second).tolist() == [9]
    changes.forget_removed(second + 1)
    assert not changes.is_known(second)


def test_of_each_key_the_newest_row_counts_unless_it_was_removed() -> None:
    for seed in range(200):
        numbers = random.Random(seed)
        rows: dict[int, int] = {}
        parts: list[RowSet] = []
        for number in range(numbers.randrange(1, 7)):
            whole = number == 0 or numbers.random() < 0.15
            removed = numbers.sample(range(12), numbers.randrange(5))
            keys = numbers.sample(range(12), numbers.randrange(8))
            rows = {} if whole else {key: at for key, at in rows.items() if key not in removed}
            rows |= dict.fromkeys(keys, number)
            parts.append(RowSet(np.array(keys, dtype=np.int64), np.array(removed, dtype=np.int64), whole))
        found = {
            int(key): number
            for number, (part, at) in enumerate(zip(parts, newest_rows(parts), strict=True))
            for key in part.keys[at]
        }
        assert found == rows
