"""Which keys of a call go to which shard; worked out once for a key list that comes again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from psctl.store.rows import Keys, shard_of
from psctl.store.table_messages import TableSpec
from psctl.store.table_packing import digest_of

ROUTES = 64
"""Key lists whose routes are remembered."""

FIRST: Keys = np.zeros(1, dtype=np.int64)
"""The place of the only key of a list."""


class Stop(msgspec.Struct, frozen=True):
    """The part of a key list that one shard holds: `at` are its places among the list's unique keys."""

    shard: int
    keys: Keys
    at: Keys
    digest: bytes


class Route(msgspec.Struct, frozen=True):
    """A key list: its keys once and ascending, where each of the list stands among them, and where they lie."""

    unique: Keys
    inverse: Keys
    stops: list[Stop]
    plain: bool
    """The list is ascending without repetition, so that `unique` is the list itself."""


class Routes:
    """Makes routes.

    Args:
        shards: how many there are.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._known: OrderedDict[tuple[str, bytes], Route] = OrderedDict()

    def of(self, table: str, keys: Keys) -> Route:
        """Return the route of a key list."""
        digest = digest_of(keys)
        found = self._known.get((table, digest)) if digest else None
        if found is None:
            found = self._make(table, keys)
            if digest:
                self._known[table, digest] = found
                if len(self._known) > ROUTES:
                    self._known.popitem(last=False)
        return found

    def tensor(self, spec: TableSpec) -> Route:
        """Return the route of a named key: of its blocks."""
        return self.of(spec.name, np.arange(spec.blocks))

    def _make(self, table: str, keys: Keys) -> Route:
        if len(keys) == 1:  # key by key: no sorting
            shard = int(shard_of(table, keys, self._shards)[0])
            return Route(keys.copy(), FIRST, [Stop(shard, keys.copy(), FIRST, digest_of(keys))], True)
        plain = len(keys) < 2 or bool((keys[1:] > keys[:-1]).all())
        if plain:
            unique, inverse = keys.copy(), np.arange(len(keys))
        else:
            unique, inverse = np.unique(keys, return_inverse=True)
        shards = shard_of(table, unique, self._shards)
        order = np.argsort(shards, kind="stable")
        held, starts = np.unique(shards[order], return_index=True)
        stops = []
        for shard, at in zip(held.tolist(), np.split(order, starts[1:]), strict=True):
            part = unique[at]
            stops.append(Stop(shard, part, at, digest_of(part)))
        return Route(unique, inverse.reshape(-1), stops, plain)
