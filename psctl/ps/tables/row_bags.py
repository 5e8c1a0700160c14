"""Bags of rows: sums of rows that a server makes for a reader, and gradients of such sums that it divides among rows.

A worker sends the places of a bag's keys among the keys of a shard instead of receiving their rows: four bytes for each
key of a bag and for each bag, and a row for each bag in each direction. So it is for bags that are larger than the
number of shards that a bag's keys are in. `pooled_route` counts both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from psctl.errors import MessageRefused
from psctl.ps.table_messages import BagCounts
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import Keys
from psctl.ps.tables.table_packing import PayloadReader, padded


class RowBags(NamedTuple):
    """Bags of some keys: the places of the keys of each bag among them, one bag after another, and each bag's length.

    A key that occurs twice in a bag is there twice.
    """

    places: Array
    lengths: Array

    @property
    def counts(self) -> BagCounts:
        """The counts, as a section has them."""
        return BagCounts(len(self.lengths), len(self.places))

    @property
    def bytes(self) -> int:
        """Bytes in a payload."""
        return padded(self.places.nbytes) + padded(self.lengths.nbytes)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of each bag's rows, added in the order of its places."""
        found = rows.new_zeros(len(self.lengths), rows.shape[1])
        return found.index_add_(0, self._bags(), rows.index_select(0, torch.from_numpy(self.places).long()))

    def gradients(self, of_sums: torch.Tensor, keys: int) -> torch.Tensor:
        """Return the gradient of each of the keys' rows from those of the sums."""
        found = of_sums.new_zeros(keys, of_sums.shape[1])
        return found.index_add_(0, torch.from_numpy(self.places).long(), of_sums.index_select(0, self._bags()))

    def _bags(self) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths)), self.lengths))

    @classmethod
    def read(cls, reader: PayloadReader, counts: BagCounts, keys: int) -> RowBags:
        """Read the bags of a section.

        Raises:
            MessageRefused: a place is none of the keys, or the lengths do not add up.
        """
        found = cls(reader.array(counts.places, np.int32), reader.array(counts.bags, np.int32))
        inside = not len(found.places) or (int(found.places.min()) >= 0 and int(found.places.max()) < keys)
        fits = not len(found.lengths) or int(found.lengths.min()) >= 0
        if not inside or not fits or int(found.lengths.sum(dtype=np.int64)) != counts.places:
            raise MessageRefused(f"bags of {counts.places} places among {keys} keys, which do not fit")
        return found


def split_bags(bags: RowBags, stops: list[Keys], keys: int) -> Iterator[tuple[RowBags, Keys]]:
    """Yield the part of bags that each of several lists of places of keys has, and the numbers of its bags.

    Args:
        bags: of all keys.
        stops: the places of the keys of each part.
        keys: their number.
    """
    bag_of = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    part_of, place_in = np.zeros(keys, dtype=np.int64), np.zeros(keys, dtype=np.int32)
    for part, at in enumerate(stops):
        part_of[at], place_in[at] = part, np.arange(len(at), dtype=np.int32)
    owner = part_of[bags.places]
    for part in range(len(stops)):
        mine = owner == part
        numbers, lengths = np.unique(bag_of[mine], return_counts=True)
        yield RowBags(place_in[bags.places[mine]], lengths.astype(np.int32)), numbers
