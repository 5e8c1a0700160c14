"""Routes: the mapping of a call's keys to shards; cached for key lists that are used repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.row_index import FIRST_ONLY, Keys, shard_of, shard_of_one
from psctl.ps.tables.table_packing import digest_of

ROUTES = 64
"""Most key lists with cached routes."""


class RouteStop(msgspec.Struct, frozen=True):
    """The part of a key list that one shard stores; `at`: the indices of its keys among the unique keys, ascending."""

    shard: int
    keys: Keys
    at: Keys
    digest: bytes


class KeyRoute(msgspec.Struct, frozen=True):
    """The route of a key list: its unique keys, and the keys of each shard; shards of one server are adjacent.

    `unique` is the list itself if no key occurs twice; else its distinct keys ascending, and `inverse` has the index of
    each key of the list among them. `order` is the concatenation of the indices of all stops.
    """

    unique: Keys
    inverse: Keys | None
    stops: list[RouteStop]
    order: Keys


class KeyRoutes:
    """Makes routes.

    Args:
        shards: how many there are.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.shard_order: Keys = np.arange(shards)
        """By shard: its position among the stops."""
        self._known: OrderedDict[tuple[str, bytes], KeyRoute] = OrderedDict()

    def group_by_leader(self, leaders: Sequence[int]) -> None:
        """Make shards with the same leader adjacent in later routes; `leaders`: the leading server by shard."""
        shard_order = np.argsort(np.argsort(np.array(leaders), kind="stable"), kind="stable")
        if not np.array_equal(shard_order, self.shard_order):
            self.shard_order = shard_order
            self._known.clear()

    def route_of(self, table: str, keys: Keys) -> KeyRoute:
        """Return the route of a key list."""
        digest = digest_of(keys)
        found = self._known.get((table, digest)) if digest else None
        if found is None:
            found = self._make(table, keys, digest_of)
            if digest:
                self._known[table, digest] = found
                if len(self._known) > ROUTES:
                    self._known.popitem(last=False)
        return found

    def route_once(self, table: str, keys: Keys) -> KeyRoute:
        """Return the route of a key list without caching it."""
        return self._make(table, keys, lambda part: b"")

    def route_of_name(self, spec: TableSpec) -> KeyRoute:
        """Return the route of a named key: of its blocks."""
        return self.route_of(spec.name, np.arange(spec.blocks))

    def _make(self, table: str, keys: Keys, digest_of_part: Callable[[Keys], bytes]) -> KeyRoute:
        if len(keys) == 1:  # needs no sorting
            only = RouteStop(
                shard_of_one(table, int(keys[0]), self._shards), keys.copy(), FIRST_ONLY, digest_of_part(keys)
            )
            return KeyRoute(only.keys, None, [only], FIRST_ONLY)
        unique, inverse, ascending = keys.copy(), None, np.arange(len(keys))
        if not (keys[1:] > keys[:-1]).all():
            found, places = np.unique(keys, return_inverse=True)  # sorts once
            if len(found) < len(keys):
                unique, inverse, ascending = found, places, np.arange(len(found))
            else:
                ascending[places] = np.arange(len(keys))
        shards = shard_of(table, unique, self._shards)[ascending]
        by_stop = np.argsort(self.shard_order[shards], kind="stable")
        order, shards = ascending[by_stop], shards[by_stop]
        starts = np.flatnonzero(np.diff(shards)) + 1
        stops = []
        for start, stop in pairwise([0, *starts.tolist(), len(order)]) if len(order) else ():
            at = order[start:stop]
            part = unique[at]
            stops.append(RouteStop(int(shards[start]), part, at, digest_of_part(part)))
        return KeyRoute(unique, inverse, stops, order)
