"""Admission, expiry and eviction of rows: pure decisions, equal on all replicas, and kept by copies and checkpoints."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import Admission, StoreSpec
from psctl.ps.tables import retention
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.retention import Sketch, admitted, evicted, expired, is_sweep, use_at
from psctl.ps.tables.server.saved_tables import copy_shard, load
from psctl.ps.tables.server.table_shard import ReplicatedTables
from psctl.ps.tables.table_bytes import decode_shards, encode_shards
from psctl.ps.tables.table_state import EntryPart, TableEntry, TableShard
from tests.ps.table_world import Functions, World, spec


def test_a_sketch_never_counts_too_little_and_seldom_too_much() -> None:
    numbers, sketch, exact, wrong = np.random.default_rng(1), Sketch(), Counter(), 0
    for _ in range(100):
        keys = np.unique((numbers.pareto(1.0, 2000) * 100).astype(np.int64))
        exact.update(keys.tolist())
        for key, count in zip(keys.tolist(), sketch.add(keys).tolist(), strict=True):
            assert count >= min(exact[key], retention.MOST_COUNT)
            wrong += count != min(exact[key], retention.MOST_COUNT)
    assert wrong < 20


def test_all_counts_are_halved_before_a_sketch_is_full(monkeypatch) -> None:
    monkeypatch.setattr(retention, "HALVED_AFTER", 10)
    sketch, key = Sketch(), np.array([5])
    assert [int(sketch.add(key)[0]) for _ in range(12)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 6, 7]


def test_sketches_of_different_keys_are_merged_into_their_counts() -> None:
    one, other = Sketch(), Sketch()
    for _ in range(3):
        one.add(np.array([1]))
    other.add(np.array([2]))
    one.merge(other)
    assert one.add(np.array([1, 2])).tolist() == [4, 2]
    for _ in range(300):
        one.add(np.array([1]))
    one.merge(one)
    assert one.add(np.array([1])).tolist() == [255]


def test_admission_by_probability_is_a_function_of_key_and_seed() -> None:
    keys = np.arange(20_000)
    found = admitted(Admission(probability=0.1, seed=3), keys, Sketch())
    assert 0.09 < found.mean() < 0.11
    assert (found[500:] == admitted(Admission(probability=0.1, seed=3), keys[500:], Sketch())).all()
    assert not (found == admitted(Admission(probability=0.1, seed=4), keys, Sketch())).all()


def test_rows_expire_when_their_last_use_is_age_clocks_ago() -> None:
    uses = np.array([use_at(0, 5), use_at(2, 1), use_at(3, 0), use_at(3, 7)])
    assert expired(uses, 2, 3).tolist() == []
    assert expired(uses, 3, 3).tolist() == [0]
    assert expired(uses, 5, 3).tolist() == [0, 1]
    assert expired(uses, 6, 3).tolist() == [0, 1, 2, 3]
    assert [clock for clock in range(1, 50) if is_sweep(clock - 1, clock, 80)] == [10, 20, 30, 40]
    assert is_sweep(9, 35, 80)


def test_the_oldest_uses_are_evicted_whatever_the_order_of_slots() -> None:
    numbers = np.random.default_rng(2)
    keys, uses = np.arange(100), np.repeat([4, 1, 3, 2], 25)
    expected = {*range(25, 50), *range(75, 85)}
    for _ in range(5):
        order = numbers.permutation(100)
        gone = evicted(uses[order], keys[order], 35)
        assert set(keys[order][gone].tolist()) == expected
    assert sorted(evicted(uses, keys, 200).tolist()) == list(range(100))


class Shard:
    """One shard of a store with a table of integer keys."""

    def __init__(self, staleness: int | None = 1, workers: int = 1, **more) -> None:
        self.spec = spec("", (1,), **more)
        self.machine = ReplicatedTables(Functions())
        self.held = self.machine.make_shard(StoreSpec("s", staleness, False, tuple(range(workers)), 1))
        self.held.table(self.spec)
        self.sequence = self.clock = 0

    def push(self, *keys: int) -> None:
        self.sequence += 1
        lanes = Lanes(torch.ones(len(keys), 1, dtype=torch.float64))
        part = EntryPart("push", "", self.spec, np.array(keys), lanes)
        self.held.apply(TableEntry(0, self.sequence, self.clock, [part]))

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.sequence, self.clock = self.sequence + 1, self.clock + 1
            self.held.apply(TableEntry(0, self.sequence, self.clock, [], "clock"))

    def rows(self) -> dict[int, float]:
        rows = self.held.tables[""].rows
        return dict(zip(rows.keys.tolist(), rows.lanes.values[: len(rows)].flatten().tolist(), strict=True))

    def counts(self) -> dict[str, int]:
        return self.held.tables[""].counts


def test_a_key_is_admitted_at_its_third_push() -> None:
    shard = Shard(admit=Admission(count=3))
    for _ in range(4):
        shard.push(1, 2)
    shard.push(3)
    assert shard.rows() == {1: 2.0, 2: 2.0}
    assert list(shard.counts().values()) == [9, 2, 2, 5, 0, 0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_row_without_pushes_expires_and_begins_anew(staleness) -> None:
    shard = Shard(staleness=staleness, expire=3)
    shard.push(1, 2)
    shard.tick()
    for _ in range(3):
        shard.push(2)
        shard.tick()
    assert shard.rows() == {2: 4.0}
    shard.push(1)
    shard.tick()
    assert shard.rows() == {2: 4.0, 1: 1.0}
    assert shard.counts()["expired"] == 1


def test_beyond_its_capacity_a_table_keeps_the_rows_pushed_last() -> None:
    cost = 8 + 32
    shard = Shard(staleness=None, capacity=64 * cost)
    for key in range(1, 200):
        shard.push(key, 0)
        assert len(shard.rows()) <= 64
    kept = set(shard.rows())
    assert 0 in kept
    assert kept - {0} == set(range(200 - len(kept) + 1, 200))
    assert shard.counts()["evicted"] == 200 - len(kept)


def test_one_push_of_more_rows_than_the_capacity_leaves_as_many_as_fit() -> None:
    shard = Shard(staleness=None, capacity=10 * 40)
    shard.push(*range(50))
    assert 8 <= len(shard.rows()) <= 10


FULL = {"admit": Admission(count=2), "expire": 5, "capacity": 40 * 40}


def busy(seed: int, turns: int, shard: Shard) -> None:
    numbers = np.random.default_rng(seed)
    for _ in range(turns):
        shard.push(*np.unique((numbers.pareto(0.7, 12) * 5).astype(np.int64) % 1000).tolist())
        if numbers.random() < 0.3:
            shard.tick()


def state(shard: TableShard) -> dict:
    table = shard.tables[""]
    uses = dict(zip(table.rows.keys.tolist(), table.uses.tolist(), strict=False))
    values = dict(zip(table.rows.keys.tolist(), table.rows.lanes.values.flatten().tolist(), strict=False))
    return {"uses": uses, "values": values, "counts": table.counts, "sketch": table.sketch.cells.tobytes(),
            "now": table.now}  # fmt: skip


def tensors_of(shard: TableShard) -> dict[str, torch.Tensor]:
    found = {}
    for each in copy_shard(shard, 0, 1):
        kind = getattr(torch, each.slice.dtype)
        flat = torch.frombuffer(bytearray(each.data), dtype=kind) if each.data else torch.empty(0, dtype=kind)
        found[each.slice.name] = flat.reshape(each.slice.shape)
    return found


@pytest.mark.parametrize("how", ["copy", "checkpoint"])
def test_a_copy_and_a_restored_shard_make_the_same_decisions(how) -> None:
    one, other = Shard(**FULL), Shard(**FULL)
    busy(1, 120, one)
    assert min(one.counts()[name] for name in ("refused", "expired", "evicted")) > 0
    if how == "copy":
        (other.held,) = decode_shards(encode_shards([one.held]), one.machine.make_shard)
    else:
        (other.held,) = load(tensors_of(one.held), 0, 1, one.machine)
        other.held.reopen(one.held.spec)
    other.sequence, other.clock = one.sequence, one.clock
    assert state(other.held) == state(one.held)
    for shard in (one, other):
        busy(2, 120, shard)
    assert state(other.held) == state(one.held)


def test_counts_of_a_checkpoint_are_kept_once_by_other_numbers_of_shards() -> None:
    one = Shard(**FULL)
    busy(1, 120, one)
    parts = [shard for at in range(3) for shard in load(tensors_of(one.held), at, 3, one.machine)]
    assert sum(shard.tables[""].counts["evicted"] for shard in parts) == one.counts()["evicted"]
    assert sorted(key for shard in parts for key in shard.tables[""].rows.keys.tolist()) == sorted(one.rows())


def test_replicas_remove_the_same_rows() -> None:
    table = spec("", (1,), admit=Admission(count=2), expire=2, capacity=4 * 40 * 4)
    world = World(workers=2, servers=3, staleness=0, replicas=2)
    numbers = np.random.default_rng(4)
    for _ in range(30):
        for rank in range(2):
            keys = np.unique(numbers.integers(0, 60, 20))
            world.push(rank, table, keys, np.ones(len(keys)))
            world.clock(rank)
        world.run()
    for shard in range(4):
        held = [machine.shards_here[shard].state.stores["s"] for machine in world.servers.values()]
        assert len({str(state(each)) for each in held}) == 1
        assert held[0].tables[""].counts["expired"] + held[0].tables[""].counts["evicted"] > 0


@pytest.mark.parametrize(
    ("store", "more", "words"),
    [({"staleness": None}, {"expire": 3}, "asp"), ({"staleness": 1, "eager": True}, {"capacity": 100}, "eager")],
)
def test_limits_that_a_store_cannot_keep_are_refused_by_servers(store, more, words) -> None:
    world = World(workers=1, servers=1, **store)
    world.push(0, spec("", (1,), **more), [0], [1.0])
    world.run()
    refused = world.clients[0].refused
    assert refused is not None
    assert words in refused.reason


def test_named_keys_have_no_limits() -> None:
    with pytest.raises(UsageError, match="admit="):
        World(workers=1).clients[0].resolve_kind(spec("w", (1,), admit=Admission(count=2)))
