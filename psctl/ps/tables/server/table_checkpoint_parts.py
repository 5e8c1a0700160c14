"""A server's part of a checkpoint of tables: each shard that it leads, as it was when all had marked the step."""

from __future__ import annotations

from collections.abc import Mapping

from psctl.ps.outputs import SaveSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.ps.tables.server.saved_tables import copy_shard
from psctl.ps.tables.server.table_shard import HostedShard
from psctl.ps.tables.table_state import FOREVER, TableShard

KEPT = 2
"""Checkpoints whose state is kept until they are asked for."""


class TableCheckpoints:
    """Copies that were taken.

    Args:
        slots: the server's shards.
        shards: how many each store has.
    """

    def __init__(self, slots: Mapping[int, HostedShard], shards: int) -> None:
        self.wanted: int | None = None
        """The step of the checkpoint that this server is to send its part of."""
        self._slots, self._shards = slots, shards
        self._cuts: dict[int, dict[tuple[str, int], list[CopiedSlice]]] = {}  # step -> (store, shard) -> as it was then

    def add_copy(self, store: TableShard, shard: int) -> None:
        """All have marked a step in this shard: copy it as it is."""
        self._cuts.setdefault(store.cut, {})[store.spec.name, shard] = copy_shard(store, shard, self._shards)
        for old in sorted(self._cuts)[:-KEPT]:
            del self._cuts[old]

    def forget(self, shard: int) -> None:
        """A shard is led by another."""
        for cut in self._cuts.values():
            for key in [key for key in cut if key[1] == shard]:
                del cut[key]

    def take_part(self) -> SaveSlices | None:
        """Return this server's part of the checkpoint that is wanted, once, when it is there."""
        if self.wanted is None:
            return None
        copied: list[CopiedSlice] = []
        for _, slot in sorted(self._slots.items()):
            for name, store in slot.state.stores.items() if slot.leads else ():
                held = self._cuts.get(self.wanted, {}).get((name, slot.shard))
                if held is not None:
                    copied += held
                elif store.cut < self.wanted:
                    return None
                elif store.cut == FOREVER:  # all have left it: it does not change any more
                    copied += copy_shard(store, slot.shard, self._shards)
        step, self.wanted = self.wanted, None
        for old in [old for old in self._cuts if old <= step]:
            del self._cuts[old]
        return SaveSlices(step, copied)
