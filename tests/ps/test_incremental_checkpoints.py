"""Incremental checkpoints of tables equal complete ones, whatever is lost or given up between them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from psctl.ps.outputs import SaveSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.ps.table_messages import Admission, RowOptimizerSpec, TableSpec
from psctl.ps.tables import retention
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.server import table_checkpoints
from psctl.ps.tables.server.saved_names import incomplete
from psctl.ps.tables.server.saved_tables import copy_changes, copy_shard, load
from psctl.ps.tables.server.table_shard import ReplicatedTables
from psctl.ps.tables.table_state import TableShard
from psctl.types import TensorSlice
from tests.ps.table_world import World, spec
from tests.ps.test_saved_tables import restored as world_restored

Tensors = dict[str, torch.Tensor]

ROWS = (
    spec("", (2,), "float32", optimizer=complete(RowOptimizerSpec("adagrad", {"lr": 0.1})), admit=Admission(count=2),
         expire=3),
    spec("", (1,), capacity=4 * 10 * 40),
    spec("", (3,), reduce="mean"),
)  # fmt: skip
NAMED = spec("named", (3,))


def tensors_of(copied: list[CopiedSlice]) -> Tensors:
    found = {}
    for each in copied:
        kind = getattr(torch, each.slice.dtype)
        flat = torch.frombuffer(bytearray(each.data), dtype=kind) if each.data else torch.empty(0, dtype=kind)
        assert each.slice.name not in found
        found[each.slice.name] = flat.reshape(each.slice.shape)
    return found


def content(shard: TableShard) -> dict[str, Any]:
    """Return all that a shard holds, in an order that does not depend on slots."""
    found: dict[str, Any] = {"clocks": shard.clocks, "staged": sorted(shard.staged)}
    for name, table in sorted(shard.tables.items()):
        rows, count = table.rows, len(table.rows)
        order = np.argsort(rows.keys)
        at = torch.from_numpy(order)
        lanes = rows.lanes.at(slice(0, count)).at(at)
        found[name] = (
            rows.keys[order].tolist(), lanes.values.tolist(), None if lanes.extra is None else lanes.extra.tolist(),
            None if rows.state is None else rows.state[:count][at].tolist(),
            table.uses[:count][order].tolist() if table.kind.removes else None,
            table.counts, table.settings, table.changes, table.sketch.cells.tobytes(), table.sketch.counted,
        )  # fmt: skip
    return found


def restored(tensors: Tensors, machine: ReplicatedTables, shards: int) -> list[dict[str, Any]]:
    return [content(store) for shard in range(shards) for store in load(tensors, shard, shards, machine)]


class Run:
    """Workers that train on servers, and checkpoints that are written, given up or lost.

    The files of a checkpoint are kept as the saver keeps them: those of a part that continues another one include that
    one's. `whole` has the copies of all rows that were made at the same moments.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, table: TableSpec) -> None:
        self.numbers, self.table = random.Random(seed), table
        self.staleness = self.numbers.choice([0, 2])
        self.step = 0
        self.begin({})
        self.whole: dict[int, dict[tuple[str, int], list[CopiedSlice]]] = {}
        self.checkpoints: dict[int, dict[int, list[list[CopiedSlice]]]] = {}  # by step, by server: files
        self.newest: int | None = None
        self.incremental = self.dropped = 0

        def copy(held: TableShard, shard: int, shards: int, *changes: Any) -> list[CopiedSlice]:
            whole = copy_shard(held, shard, shards)
            self.whole.setdefault(held.cut, {})[held.spec.name, shard] = whole
            return copy_changes(held, shard, shards, *changes) if changes else whole

        monkeypatch.setattr(table_checkpoints, "copy_shard", copy)
        monkeypatch.setattr(table_checkpoints, "copy_changes", copy)

    def begin(self, saved: dict[str, tuple[TensorSlice, bytes]]) -> None:
        """Begin with some number of servers, and with the tensors of a checkpoint, if there are any."""
        servers = self.numbers.choice([1, 2, 3])
        replicas = 1 if servers > 1 else 0
        self.chains = [[(shard + more) % servers for more in range(replicas + 1)] for shard in range(4)]
        options = {
            "workers": 2, "servers": servers, "staleness": self.staleness, "replicas": replicas,
            "random": self.numbers, "full_every": self.numbers.choice([2, 5, 20]),
        }  # fmt: skip
        self.world = world_restored(saved, **options) if saved else World(**options)
        self.world.run()

    def resume(self) -> None:
        """End all servers and workers; new ones continue from the newest checkpoint."""
        if self.newest is not None:
            copied = [each for chain in self.checkpoints[self.newest].values() for part in chain for each in part]
            self.begin({each.slice.name: (each.slice, bytes(each.data)) for each in copied})

    def train(self) -> None:
        """Finish some clocks on both workers."""
        for _ in range(self.numbers.randrange(1, 4)):
            self.step += 1
            for rank in self.numbers.sample(range(2), 2):
                keys = sorted(self.numbers.sample(range(80), self.numbers.randrange(1, 12)))
                rows = torch.randn(len(keys), self.table.width, dtype=getattr(torch, self.table.dtype))
                self.world.push(rank, self.table, keys, rows, place=2 * self.step)
                if self.numbers.random() < 0.3:
                    self.world.push(rank, NAMED, [0], torch.ones(3), place=2 * self.step)
                self.world.clock(rank, place=2 * self.step)
            for _ in range(self.numbers.randrange(30)):
                self.world.step()

    def save(self) -> None:
        """Mark a step and take the parts; the checkpoint is complete, or given up."""
        step = self.step
        for rank in range(2):
            self.world.mark(rank, step, place=2 * step)
        early = self.numbers.random() < 0.5
        if early:
            self.world.run()
        self.world.reports.clear()
        for rank, machine in self.world.servers.items():
            self.world.follow(rank, machine.request_checkpoint(step))
        if self.numbers.random() < 0.1 and min(map(len, self.chains)) > 1:  # the coordinator gives it up
            self.dropped += 1
            for _ in range(self.numbers.randrange(20)):
                self.world.step()
            self.lose()
            return
        self.world.run()
        parts = {rank: each for rank, each in self.world.reports if isinstance(each, SaveSlices) and each.step == step}
        assert parts.keys() == self.world.servers.keys()
        if self.numbers.random() < 0.25:
            self.dropped += 1
            return
        files = {}
        for rank, part in parts.items():
            base = [] if part.base is None else self.checkpoints[part.base][rank]
            self.incremental += part.base is not None
            files[rank] = [*base, part.copied]
        self.checkpoints[step] = files
        self.check(step)
        self.newest = step
        for machine in self.world.servers.values():
            if self.numbers.random() < 0.9:  # else the message comes later than the next part
                machine.on_saved(step)

    def tensors(self, step: int) -> Tensors:
        return tensors_of([each for chain in self.checkpoints[step].values() for part in chain for each in part])

    def check(self, step: int) -> None:
        found = self.tensors(step)
        assert not incomplete(found)
        whole = tensors_of([each for copied in self.whole[step].values() for each in copied])
        machine = ReplicatedTables(self.world.functions)
        for shards in (1, 4, 7):
            assert restored(found, machine, shards) == restored(whole, machine, shards)

    def lose(self) -> None:
        """End a server; those that have its shards lead them from now on."""
        self.world.run()
        rank = self.numbers.choice(sorted(self.world.servers))
        self.world.kill(rank)
        self.chains = [[at for at in chain if at != rank] for chain in self.chains]
        self.world.assign(self.chains)
        self.world.run()

    def move(self) -> None:
        """Reverse some chains: other servers lead these shards."""
        self.world.run()
        self.chains = [chain[::-1] if self.numbers.random() < 0.5 else chain for chain in self.chains]
        self.world.assign(self.chains)
        self.world.run()


@pytest.mark.parametrize("first", [0, pytest.param(15, marks=pytest.mark.soak)])
def test_incremental_checkpoints_equal_complete_ones(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "CELLS", 64)
    monkeypatch.setattr(table_checkpoints, "LARGEST", 3.0)
    incremental = dropped = 0
    for seed in range(first, first + 15):
        with monkeypatch.context() as patch:
            run = Run(seed, patch, ROWS[seed % len(ROWS)])
            for _ in range(8):
                run.train()
                run.save()
                if run.numbers.random() < 0.15 and min(map(len, run.chains)) > 1:
                    run.lose()
                elif run.numbers.random() < 0.15:
                    run.move()
                elif run.numbers.random() < 0.1:
                    run.resume()
            incremental, dropped = incremental + run.incremental, dropped + run.dropped
    assert incremental > 40
    assert dropped > 8
