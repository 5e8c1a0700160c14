"""Lookups and inserts of a table's index beside peers, by turns on one thread.

    python bench/table_index.py [--keys 10000000] [--batch 100000] [--exponent 1.05] [--turns 5] [-o json]

Every index is filled with all keys in batches; then each looks up the same batches of a Zipf distribution, in blocks of
turns, so that each has the caches to itself. A peer takes part where it is installed: pandas (get_indexer of an Index,
built whole), numba (linear probing, compiled), torch (searchsorted in sorted keys). Bytes are those beyond the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from psctl.ps.tables.row_index import KeyIndex, mix

Find = Callable[[np.ndarray], np.ndarray]


def zipf_keys(generator: np.random.Generator, count: int, keys: int, exponent: float) -> np.ndarray:
    """Return keys whose ranks are Zipf-distributed, by the inverse of the continuous distribution."""
    if exponent == 1.0:
        ranks = keys ** generator.random(count)
    else:
        ranks = ((keys ** (1 - exponent) - 1) * generator.random(count) + 1) ** (1 / (1 - exponent))
    return scattered(np.minimum(ranks.astype(np.int64), keys))


def scattered(ranks: np.ndarray) -> np.ndarray:
    """Return 64-bit keys for ranks, without structure."""
    return mix(ranks).view(np.int64)


class Psctl:
    """The index of psctl."""

    def __init__(self) -> None:
        self._index = KeyIndex()
        self.find: Find = self._index.find

    def fill(self, batches: list[np.ndarray]) -> None:
        for batch in batches:
            self._index.add(batch)

    def bytes(self) -> int:
        return self._index.nbytes


class Pandas:
    """An Index of pandas, whose hash table is made at its first lookup."""

    def __init__(self) -> None:
        import pandas

        self._pandas = pandas

    def fill(self, batches: list[np.ndarray]) -> None:
        index = self._pandas.Index(np.concatenate(batches))
        index.get_indexer(batches[0][:1])
        self.find: Find = index.get_indexer
        self._size = int(index.memory_usage()) + index._engine.sizeof()

    def bytes(self) -> int:
        return self._size


class Sorted:
    """torch.searchsorted in sorted keys."""

    def fill(self, batches: list[np.ndarray]) -> None:
        keys = np.concatenate(batches)
        order = np.argsort(keys)
        self._keys, self._slots = torch.from_numpy(keys[order]), torch.from_numpy(order)

    def find(self, keys: np.ndarray) -> np.ndarray:
        wanted = torch.from_numpy(keys)
        at = torch.searchsorted(self._keys, wanted).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[at] == wanted, self._slots[at], -1).numpy()

    def bytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes


class Numba:
    """Linear probing compiled by numba: keys and slots side by side, half full at most."""

    def __init__(self) -> None:
        import numba

        @numba.njit
        def first(key, mask):
            hashed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
            hashed ^= hashed >> np.uint64(32)
            return np.int64((hashed * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)) & mask

        @numba.njit
        def add(held, slots, keys, start):
            mask = len(held) - 1
            for index in range(len(keys)):
                at = first(keys[index], mask)
                while slots[at] >= 0:
                    at = (at + 1) & mask
                held[at], slots[at] = keys[index], start + index

        @numba.njit
        def find(held, slots, keys, found):
            mask = len(held) - 1
            for index in range(len(keys)):
                at = first(keys[index], mask)
                while slots[at] >= 0 and held[at] != keys[index]:
                    at = (at + 1) & mask
                found[index] = slots[at]

        self._add, self._find, self._count = add, find, 0
        self._resize(1 << 10)

    def _resize(self, places: int) -> None:
        self._held, self._slots = np.zeros(places, dtype=np.int64), np.full(places, -1, dtype=np.int32)

    def fill(self, batches: list[np.ndarray]) -> None:
        self._add(self._held, self._slots, batches[0][:1], 0)
        self._resize(1 << 10)
        for batch in batches:
            if 2 * (self._count + len(batch)) > len(self._held):
                held, slots = self._held, self._slots
                self._resize(1 << (4 * (self._count + len(batch)) - 1).bit_length() - 1)
                live = slots >= 0
                order = np.argsort(slots[live])
                self._add(self._held, self._slots, held[live][order], 0)
            self._add(self._held, self._slots, batch, self._count)
            self._count += len(batch)

    def find(self, keys: np.ndarray) -> np.ndarray:
        found = np.empty(len(keys), dtype=np.int64)
        self._find(self._held, self._slots, keys, found)
        return found

    def bytes(self) -> int:
        return self._held.nbytes + self._slots.nbytes


def measured(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by index: inserts and lookups a second (median over turns of a turn's median), and bytes a key."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(given.seed)
    keys = scattered(generator.permutation(np.arange(1, given.keys + 1)))
    batches = np.split(keys, range(given.batch, len(keys), given.batch))
    found: dict[str, dict[str, float]] = {}
    indices = {}
    for make in (Psctl, Numba, Pandas, Sorted):
        try:
            index = make()
        except ImportError:
            continue
        start = time.perf_counter()
        index.fill(batches)
        spent = time.perf_counter() - start
        name = make.__name__.lower()
        indices[name] = index
        found[name] = {"inserts": len(keys) / spent, "bytes_per_key": index.bytes() / len(keys)}
    speeds: dict[str, list[float]] = {name: [] for name in indices}
    for _ in range(given.turns):
        wanted = [zipf_keys(generator, given.batch, given.keys, given.exponent) for _ in range(30)]
        for name, index in indices.items():
            times = []
            for batch in wanted:
                start = time.perf_counter()
                slots = index.find(batch)
                times.append(time.perf_counter() - start)
                assert np.array_equal(keys[slots], batch), name
            speeds[name].append(given.batch / statistics.median(times[5:]))
    for name, each in speeds.items():
        found[name]["lookups"] = statistics.median(each)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    given = parser.parse_args()
    found = measured(given)
    if given.output == "json":
        print(json.dumps({"arguments": vars(given), "indices": found}))
        return
    print(f"{'index':10}{'lookups/s':>12}{'inserts/s':>12}{'bytes/key':>12}")
    for name, each in found.items():
        print(
            f"{name:10}{each['lookups'] / 1e6:>10.1f} M{each['inserts'] / 1e6:>10.1f} M{each['bytes_per_key']:>12.1f}"
        )


if __name__ == "__main__":
    main()
