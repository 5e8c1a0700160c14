"""Rows by 64-bit key: a hash index on arrays, and the rows of one table that a shard (or a cache) holds.

Keys are hashed by the finaliser of splitmix64, which is a bijection: no two keys have the same hash. Its high bits
select the shard, a half-open range of hash values; its low bits select the first place to probe in the index. The index
uses open addressing with linear probing and is half full at most; all keys of a call are looked up together, one probe
of all of them at a time, so Python's loop runs as often as the longest probe, never over keys. Rows are never removed.

Keys and slots are numpy arrays (numpy's calls cost a tenth of torch's on short arrays), rows are torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from psctl.ps.tables.reductions import Array, Lanes, array_of

Keys: TypeAlias = npt.NDArray[np.int64]

NO_KEYS: Keys = np.empty(0, dtype=np.int64)

FIRST_PLACES = 64
"""Places of a new index."""

CACHED_LISTS = 16
"""Most key lists with cached slots in a table."""

SHARD_BITS = 31

FIRST_ONLY: Keys = np.zeros(1, dtype=np.int64)
"""The indices of a list of one key."""

MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
LEAST, MOST = -(1 << 63), (1 << 63) - 1
"""Bounds of a key."""


def mix(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the hash of each key: splitmix64's finaliser on 64-bit integers that wrap around."""
    hashed = keys.view(np.uint64)
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return hashed ^ (hashed >> np.uint64(31))


def mix_one(key: int) -> int:
    """Return the hash of one key: Python's integers take a tenth of an array's time for it."""
    hashed = key & _MASK
    hashed = (hashed ^ (hashed >> 30)) * MULTIPLIERS[0] & _MASK
    hashed = (hashed ^ (hashed >> 27)) * MULTIPLIERS[1] & _MASK
    return hashed ^ (hashed >> 31)


@lru_cache(maxsize=4096)
def salt(table: str) -> int:
    """Return a constant of the table that is mixed into its keys, so that small tables are spread over shards."""
    return int.from_bytes(blake2b(table.encode(), digest_size=8).digest(), "little", signed=True)


def shard_of(table: str, keys: Keys, shards: int) -> Keys:
    """Return the shard of each key: shard i holds the i-th of `shards` equal ranges of hash values."""
    high = mix(keys ^ np.int64(salt(table))) >> np.uint64(64 - SHARD_BITS)
    return (high.view(np.int64) * shards) >> SHARD_BITS


def shard_of_one(table: str, key: int, shards: int) -> int:
    """Return the shard of one key (`shard_of`)."""
    return (mix_one(key ^ salt(table)) >> (64 - SHARD_BITS)) * shards >> SHARD_BITS


def among(keys: Keys, window: range) -> npt.NDArray[np.bool_]:
    """Return which keys are in an ascending range."""
    inside = (keys >= window.start) & (keys < window.stop)
    if window.step > 1:
        past = keys.view(np.uint64) - np.uint64(window.start & _MASK)  # modulo 2^64; correct where the key is inside
        inside &= past % np.uint64(window.step) == 0
    return inside


def ascending(keys: range) -> range:
    """Return the integers of a range that are valid keys, ascending."""
    if not keys:
        return range(0)
    first, last, step = min(keys[0], keys[-1]), max(keys[0], keys[-1]), abs(keys.step)
    if first < LEAST:
        first += -(-(LEAST - first) // step) * step
    last = min(last, MOST)
    return range(first, last + 1, min(step, _MASK)) if first <= last else range(0)


def rounds(keys: Keys) -> Sequence[Keys]:
    """Return the indices of ascending keys in rounds: the first of each key, then the second of each ..."""
    if len(keys) < 2:
        return [FIRST_ONLY] if len(keys) else []
    repeated = keys[1:] == keys[:-1]
    indices = np.arange(len(keys))
    if not repeated.any():
        return [indices]
    first = np.concatenate([[True], ~repeated])
    number = indices - np.maximum.accumulate(np.where(first, indices, 0))
    return [np.flatnonzero(number == each) for each in range(int(number.max()) + 1)]


class KeyIndex:
    """Maps 64-bit keys to slots 0, 1, 2 ... in the order in which keys were added."""

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, dtype=np.int64)
        """By slot; valid up to the number of keys."""
        self._count = 0
        self._places: Keys = np.full(FIRST_PLACES, -1, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Keys) -> Keys:
        """Return the slot of each key, -1 for an absent key."""
        if len(keys) == 1:
            return np.array([self._find_one(int(keys[0]))])
        found = np.full(len(keys), -1, dtype=np.int64)
        if not self._count:
            return found
        at = self._first(keys)
        slots = self._places[at]
        hit = (self.keys[slots] == keys) & (slots >= 0)
        found[hit] = slots[hit]
        left = np.flatnonzero(~hit & (slots >= 0))
        at = at[left]
        while len(left):
            at = (at + 1) & (len(self._places) - 1)
            slots = self._places[at]
            hit = (self.keys[slots] == keys[left]) & (slots >= 0)
            found[left[hit]] = slots[hit]
            going = ~hit & (slots >= 0)
            left, at = left[going], at[going]
        return found

    def _find_one(self, key: int) -> int:
        last = len(self._places) - 1
        at = mix_one(key) & last
        while (slot := int(self._places[at])) >= 0 and self.keys[slot] != key:
            at = (at + 1) & last
        return slot

    def add(self, keys: Keys) -> Keys:
        """Add absent keys, each given once; return their slots, the next free ones."""
        before, self._count = self._count, self._count + len(keys)
        slots = np.arange(before, self._count)
        if len(self.keys) < self._count:
            grown = np.empty(max(FIRST_PLACES, 2 * self._count), dtype=np.int64)
            grown[:before] = self.keys[:before]
            self.keys = grown
        self.keys[before : self._count] = keys
        if 2 * self._count > len(self._places):
            self._places = np.full(1 << (4 * self._count - 1).bit_length(), -1, dtype=np.int64)
            self._settle(self.keys[: self._count], np.arange(self._count))
        else:
            self._settle(keys, slots)
        return slots

    def _first(self, keys: Keys) -> Keys:
        return (mix(keys) & np.uint64(len(self._places) - 1)).view(np.int64)

    def _settle(self, keys: Keys, slots: Keys) -> None:
        """Find a free place for each slot; of slots that probe the same place, one gets it and the others probe on."""
        at = self._first(keys)
        while len(slots):
            free = self._places[at] < 0
            self._places[at[free]] = slots[free]
            lost = self._places[at] != slots
            slots, at = slots[lost], (at[lost] + 1) & (len(self._places) - 1)


class TableRows:
    """The rows of one table, with their index.

    Args:
        width: elements of a row.
        dtype: of the values.
        extra: extra integers of a row (reductions.py); 0: none.
        state: makes the state of an optimizer for a number of new rows; None: there is no optimizer.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, extra: int, state: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.width, self.dtype, self.extra = width, dtype, extra
        self._new_state = state
        self.state = state(0) if state is not None else None
        """By slot: the state of the optimizer; valid up to the number of rows."""
        self._index = KeyIndex()
        self._capacity = 0
        self._lists: dict[int, tuple[Keys, Keys]] = {}
        self._words: tuple[torch.Tensor, Array] | None = None
        self.lanes = self.zeros(0)
        """By slot; valid up to the number of rows."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def keys(self) -> Keys:
        """The keys, by slot."""
        return self._index.keys[: len(self)]

    @property
    def array(self) -> Array:
        """The values by slot, as an array (see `array_of`)."""
        if self._words is None or self._words[0] is not self.lanes.values:
            self._words = self.lanes.values, array_of(self.lanes.values)
        return self._words[1]

    def zeros(self, count: int) -> Lanes:
        """Return lanes of `count` rows, all zero."""
        extra = torch.zeros(count, self.extra, dtype=torch.int64) if self.extra else None
        return Lanes(torch.zeros(count, self.width, dtype=self.dtype), extra)

    def find(self, keys: Keys) -> Keys:
        """Return the slot of each key, -1 where there is no row.

        A read-only key list is used repeatedly (client_sessions.KeyLists): its slots, which never change, are cached,
        and the caller must not write to them.
        """
        known = self._lists.get(id(keys))
        if known is not None:
            return known[1]
        slots = self._index.find(keys)
        if not keys.flags.writeable and (slots >= 0).all():
            self._lists[id(keys)] = keys, slots  # the list too, so that its id is not reused
            if len(self._lists) > CACHED_LISTS:
                del self._lists[next(iter(self._lists))]
        return slots

    def add(self, keys: Keys) -> Keys:
        """Make zero rows for keys that have none, each given once; return their slots."""
        held, count = len(self), len(self) + len(keys)
        if count > self._capacity:
            self._capacity = max(8, count + count // 2)
            grown = self.zeros(self._capacity)
            grown.values[:held] = self.lanes.values[:held]
            if grown.extra is not None and self.lanes.extra is not None:
                grown.extra[:held] = self.lanes.extra[:held]
            self.lanes = grown
            if self.state is not None and self._new_state is not None:
                state = torch.empty(self._capacity, *self.state.shape[1:], dtype=self.state.dtype)
                state[:held] = self.state[:held]
                self.state = state
        if self.state is not None and self._new_state is not None:
            self.state[held:count] = self._new_state(len(keys))
        return self._index.add(keys)
