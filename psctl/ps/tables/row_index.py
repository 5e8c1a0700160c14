"""Rows by 64-bit key: a hash index on arrays, and the rows of one table that a shard (or a cache) holds.

The high bits of a key's hash by the finaliser of splitmix64, which is a bijection, select its shard, a half-open range
of hash values. A cheaper hash selects the first place to probe in the index, which uses open addressing with linear
probing. All keys of a call are looked up together, one probe of all of them at a time, so Python's loop runs as often
as the longest probe, never over keys. A lookup costs two accesses to memory, of the place and of the key in its slot;
they are most of its time when the index is larger than the caches.

Rows have the slots 0, 1, 2 ... without gaps. When rows are removed, the last ones move into their slots; a removed key
leaves a mark at its place until the index is built again.

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


EMPTY, REMOVED = -1, -2
"""Contents of a place without a slot: none was there, or its key was removed and probes go on."""

FULL, SPARSE = 0.6, 0.3
"""The share of places in use at which the index is built again, and the share after that."""

GROWTH = 1.2
"""Growth of the array of keys: a copy of it is sequential and cheap."""

_FACTORS = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_LOW = (1 << 32) - 1


def place_hashes(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return 32 bits of hash of each key, independent of those that select the shard, in a quarter of the time."""
    hashed = keys.view(np.uint64) * np.uint64(_FACTORS[0])
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(_FACTORS[1])
    hashed >>= np.uint64(32)
    return hashed


class KeyIndex:
    """Maps 64-bit keys to slots 0, 1, 2 ... in the order in which keys were added, without gaps."""

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, dtype=np.int64)
        """By slot; valid up to the number of keys."""
        self._count = self._removed = 0  # keys, and places of removed ones
        self._places = np.full(FIRST_PLACES, EMPTY, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self.keys.nbytes + self._places.nbytes

    def find(self, keys: Keys) -> Keys:
        """Return the slot of each key, -1 for an absent key."""
        if len(keys) == 1:
            return np.array([self._find_one(int(keys[0]))[1]])
        return self._find(keys)[1]

    def _find(self, keys: Keys, *, places: bool = False) -> tuple[Keys, Keys]:
        """Return the place (if wanted) and the slot of each key; the slot of an absent key is -1.

        The calls are chosen for their speed: `take` without a check of bounds, no selection by an array of bools.
        """
        if not self._count:
            return NO_KEYS, np.full(len(keys), EMPTY, dtype=np.int64)
        at = self._first(keys)
        ends = at.copy() if places else NO_KEYS
        slots = self._places.take(at, 0, None, "clip").astype(np.int64)
        left = self._going(slots, keys)
        at, wanted = at.take(left), keys.take(left)
        found = slots
        while len(left):
            at = self._next(at)
            slots = self._places.take(at, 0, None, "clip").astype(np.int64)
            found[left] = slots
            if places:
                ends[left] = at
            going = self._going(slots, wanted)
            left, at, wanted = left.take(going), at.take(going), wanted.take(going)
        return ends, found

    def _going(self, slots: Keys, wanted: Keys) -> Keys:
        """Return the indices of keys that are not in their slots, and whose places are in use."""
        other = self.keys.take(slots, 0, None, "clip") != wanted
        if self._removed:
            other |= slots == REMOVED
        going = np.flatnonzero(other)
        return going.take(np.flatnonzero(slots.take(going) != EMPTY))

    def _next(self, at: Keys) -> Keys:
        at = at + 1
        np.subtract(at, len(self._places), out=at, where=at == len(self._places))
        return at

    def _find_one(self, key: int) -> tuple[int, int]:
        """Return the place and the slot of one key: Python's integers take less time for it than arrays."""
        hashed = (key & _MASK) * _FACTORS[0] & _MASK
        hashed = ((hashed ^ (hashed >> 32)) * _FACTORS[1] & _MASK) >> 32
        size = len(self._places)
        at = hashed * size >> 32
        while (slot := int(self._places[at])) != EMPTY and (slot == REMOVED or self.keys[slot] != key):
            at = at + 1 if at + 1 < size else 0
        return at, slot

    def add(self, keys: Keys) -> Keys:
        """Add absent keys, each given once; return their slots, the next free ones."""
        before, self._count = self._count, self._count + len(keys)
        slots = np.arange(before, self._count)
        if len(self.keys) < self._count:
            grown = np.empty(max(FIRST_PLACES, int(GROWTH * self._count)), dtype=np.int64)
            grown[:before] = self.keys[:before]
            self.keys = grown
        self.keys[before : self._count] = keys
        if self._count + self._removed > FULL * len(self._places):
            self._build()
        else:
            self._settle(self._first(keys), slots.astype(np.int32))
        return slots

    def remove(self, slots: Keys) -> tuple[Keys, Keys]:
        """Remove the keys of these slots, each given once; keys of the last slots take the places of the others.

        Returns:
            Slots whose keys moved: from (old), to (new).
        """
        left = self._count - len(slots)
        to = np.sort(slots[slots < left])
        stays = np.ones(len(slots), dtype=bool)
        stays[slots[slots >= left] - left] = False
        moved = np.flatnonzero(stays) + left
        ends, _ = self._find(self.keys.take(np.concatenate([slots, moved])), places=True)
        self._places[ends[: len(slots)]] = REMOVED
        self._places[ends[len(slots) :]] = to
        self.keys[to] = self.keys.take(moved)
        self._count, self._removed = left, self._removed + len(slots)
        if not left:
            self._places.fill(EMPTY)
            self._removed = 0
        return moved, to

    def _first(self, keys: Keys) -> Keys:
        """Return the first place to probe of each key: ascending with its hash, for any number of places."""
        hashed = place_hashes(keys)
        hashed *= np.uint64(len(self._places))
        hashed >>= np.uint64(32)
        return hashed.view(np.int64)

    def _build(self) -> None:
        """Make the places anew: keys in the order of their first place, each in the first free one from there on.

        A running maximum finds those. Of keys with one first place the oldest has it: likely the most frequent.
        """
        self._places = np.full(int(self._count / SPARSE) + FIRST_PLACES, EMPTY, dtype=np.int32)
        self._removed = 0
        packed = self._first(self.keys[: self._count])
        packed <<= 32
        packed |= np.arange(self._count)
        packed.sort()
        slots = packed.astype(np.int32)
        packed >>= 32
        numbers = np.arange(self._count)
        packed -= numbers
        np.maximum.accumulate(packed, out=packed)
        packed += numbers
        inside = int(np.searchsorted(packed, len(self._places)))
        self._places[packed[:inside]] = slots[:inside]
        self._settle(np.zeros(self._count - inside, dtype=np.int64), slots[inside:])

    def _settle(self, at: Keys, slots: npt.NDArray[np.int32]) -> None:
        """Find a free place for each slot; of slots that probe the same place, one gets it and the others probe on."""
        while len(slots):
            free = np.flatnonzero(self._places.take(at, 0, None, "clip") < 0)
            taken = at.take(free)
            if self._removed:
                self._removed -= len(np.unique(taken[self._places.take(taken) == REMOVED]))
            self._places[taken] = slots.take(free)
            lost = np.flatnonzero(self._places.take(at, 0, None, "clip") != slots)
            slots, at = slots.take(lost), self._next(at.take(lost))


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
        self.most: int | None = None
        """The number of rows for which memory is taken at most, while there are no more."""

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

        A read-only key list is used repeatedly (client_sessions.KeyLists): its slots are cached until rows are removed,
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
            if self.most is not None:
                self._capacity = max(count, min(self._capacity, self.most))
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

    def remove(self, slots: Keys) -> tuple[Keys, Keys]:
        """Remove these rows, each given once; the last rows move into their slots.

        Returns:
            Slots of the rows that moved: from (old), to (new).
        """
        moved, to = self._index.remove(slots)
        old, new = torch.from_numpy(moved), torch.from_numpy(to)
        self.lanes.put(new, self.lanes.at(old))
        if self.state is not None:
            self.state[new] = self.state[old]
        self._lists.clear()
        return moved, to

    @property
    def index_bytes(self) -> int:
        """Bytes of the index's memory."""
        return self._index.nbytes
