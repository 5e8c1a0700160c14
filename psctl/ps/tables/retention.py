"""Which rows a table takes and keeps: admission by count or probability, expiry by age, eviction by last use.

All decisions are functions of the entries that were applied, in their order, so all replicas make the same ones, and so
does a run that continues from a checkpoint. Reads are no entries: the use of a row is a push (or start, or call) to it.

Counts of keys without a row are kept in a count-min sketch (Cormode and Muthukrishnan 2005) with conservative updates
(Estan and Varghese 2002) and of constant size; a count is never too small. Before cells fill up, all are halved
(TinyLFU; Einziger and others 2017).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from psctl.ps.table_messages import Admission, TableSpec
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import Keys, mix

DEPTH = 4
"""Counters of a key."""

CELLS = 1 << 17
"""Counters in each of the sketch's rows: 512 KiB a shard, so 1 in 10^5 of counts is too large by 1 at 10^6 counts."""

HALVED_AFTER = 8 * CELLS
"""Counts after which all counters are halved."""

MOST_COUNT = 255
"""Largest count of a counter."""

SPARE = 16
"""An eviction makes room for one row in so many, so that it is not repeated at every push."""

CLOCK_BITS = 32
"""Low bits of a row's last use: the number of the push, below the clock."""

SWEEPS = 8
"""Sweeps for expired rows within the age at which they expire."""


class Sketch:
    """Counts keys in constant memory.

    Args:
        cells: the counters; None: all zero.
        counted: counts since the last halving.
    """

    def __init__(self, cells: npt.NDArray[np.uint8] | None = None, counted: int = 0) -> None:
        self.cells = np.zeros((DEPTH, CELLS), dtype=np.uint8) if cells is None else cells
        self.counted = counted

    def add(self, keys: Keys) -> Array:
        """Count keys, each given once; return their counts, which are at most MOST_COUNT."""
        hashed = mix(keys)
        low, high = hashed & np.uint64(0xFFFFFFFF), hashed >> np.uint64(32)
        places = [((low + np.uint64(row) * high) % np.uint64(CELLS)).view(np.int64) for row in range(DEPTH)]
        least: Array = np.minimum.reduce([row.take(at) for row, at in zip(self.cells, places, strict=True)])
        np.add(least, 1, out=least, where=least < MOST_COUNT)
        for row, at in zip(self.cells, places, strict=True):
            np.maximum.at(row, at, least)
        self.counted += len(keys)
        if self.counted >= HALVED_AFTER:
            self.cells >>= 1
            self.counted //= 2
        return np.asarray(least)

    def merge(self, other: Sketch) -> None:
        """Add the counts of another shard's sketch, whose keys are others."""
        room = MOST_COUNT - self.cells
        self.cells += np.minimum(room, other.cells)
        self.counted += other.counted


def admitted(admission: Admission, keys: Keys, sketch: Sketch) -> npt.NDArray[np.bool_]:
    """Return which of the keys without a row get one, each given once."""
    found = np.ones(len(keys), dtype=bool)
    if admission.probability < 1.0:
        seed = np.int64(mix(np.array([admission.seed], dtype=np.int64)).view(np.int64)[0])
        share = (mix(keys ^ seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found &= share < admission.probability
    if admission.count > 1:
        asked = np.flatnonzero(found)
        found[asked] = sketch.add(keys.take(asked)) >= admission.count
    return found


def use_at(clock: int, number: int) -> int:
    """Return the value that stands for a use in this clock by the push of this number; later uses have larger ones."""
    return (clock << CLOCK_BITS) | (number & ((1 << CLOCK_BITS) - 1))


def expired(uses: Keys, clock: int, age: int) -> Keys:
    """Return the indices of rows whose last use is at least `age` clocks ago."""
    return np.flatnonzero(uses < use_at(max(0, clock - age + 1), 0)) if clock >= age else np.empty(0, dtype=np.int64)


def is_sweep(before: int, clock: int, age: int) -> bool:
    """Return whether rows are searched for expired ones when the clock becomes `clock`."""
    every = max(1, age // SWEEPS)
    return clock // every > before // every


def evicted(uses: Keys, keys: Array, count: int) -> Keys:
    """Return the indices of the `count` rows with the oldest uses; of equal ones the smaller keys."""
    if count >= len(uses):
        return np.arange(len(uses))
    bound = np.partition(uses, count - 1)[count - 1]
    older, equal = np.flatnonzero(uses < bound), np.flatnonzero(uses == bound)
    return np.concatenate([older, equal.take(np.argsort(keys.take(equal))[: count - len(older)])])


def row_limit(spec: TableSpec, row_cost: int, shards: int) -> int | None:
    """Return the most rows of one shard of a table; None: there is no limit.

    Args:
        row_cost: bytes of a row with all that is kept for it.
        shards: of the store.
    """
    return max(1, spec.capacity // shards // row_cost) if spec.capacity else None
