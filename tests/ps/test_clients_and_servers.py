"""Servers and workers together: every message order gives the same bytes, with failures, moves and joins."""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch

from psctl.ps.replication.chain_entries import CopyBudget
from tests.ps.world import SHARDS, World

CLOCKS = 5
SEEDS = range(12)


@cache
def undisturbed(workers: int = 2) -> torch.Tensor:
    world = World(0, 2, workers, CLOCKS)
    world.run()
    return world.values()


def same(world: World) -> None:
    world.run()
    assert torch.equal(world.values(), undisturbed(world.workers_))
    world.copies_agree()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_every_message_order_gives_the_same_bytes_on_every_replica(seed, replicas):
    same(World(seed, 3, 2, CLOCKS, replicas=replicas))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_connection_break_at_any_message_changes_no_value(seed):
    world = World(seed, 3, 2, CLOCKS, replicas=seed % 3)
    for _ in range(12):
        world.run(steps=world.random.randrange(60))
        if world.random.random() < 0.5:
            world.connect(world.random.randrange(2), world.random.randrange(3))
        else:
            world.reconnect_servers(*world.random.sample(range(3), 2))
    same(world)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_failure_at_any_message_applies_each_push_exactly_once(seed, replicas):
    world = World(seed, 4, 2, CLOCKS, replicas=replicas)
    world.run(until=lambda: min(one.clock for one in world.workers.values()) >= 1)
    for _ in range(replicas):
        world.run(steps=world.random.randrange(200))
        world.kill(world.random.choice(sorted(world.servers)))
    same(world)


@pytest.mark.parametrize("seed", range(24))
def test_a_shard_move_at_any_message_and_a_later_failure_change_no_value(seed):
    world = World(seed, 3, 2, CLOCKS, replicas=seed % 2)
    world.run(steps=world.random.randrange(400))
    world.add(7, sorted(world.random.sample(range(len(SHARDS)), 2)))
    world.run(until=lambda: world.caught_up(7))
    world.move(7)
    if seed % 2:
        world.run(steps=world.random.randrange(100))
        world.kill(7)
    same(world)


@pytest.mark.parametrize("seed", range(24))
def test_a_new_replica_is_filled_during_training_and_can_become_primary(seed, monkeypatch):
    monkeypatch.setattr(
        CopyBudget.__init__, "__defaults__", (1 if seed % 2 else 1 << 29,)
    )  # one copy at a time, or all
    world = World(seed, 2, 2, CLOCKS)
    world.run(steps=world.random.randrange(60))
    world.add(7, list(range(len(SHARDS))))
    world.run(until=lambda: world.caught_up(7))
    world.copies = [[] for _ in SHARDS]
    world.chains = [[*chain, 7] for chain in world.chains]
    world.assign()
    world.run(steps=world.random.randrange(100))
    world.kill(world.random.randrange(2))
    same(world)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_worker_replaced_at_any_message_replays_bitwise(seed, replicas):
    world = World(seed, 2, 3, CLOCKS, replicas=replicas)
    world.run(until=lambda: min(one.clock for one in world.workers.values()) >= 1)
    for _ in range(2):
        world.run(steps=world.random.randrange(200))
        world.replace(1 + world.random.randrange(2))
    same(world)


def test_training_continues_without_a_lost_worker_and_drops_its_pushes_after_the_cut():
    found: dict[int, torch.Tensor] = {}
    for seed in range(16):
        world = World(seed, 2, 3, CLOCKS, replicas=1)
        world.run(until=lambda world=world: min(one.clock for one in world.workers.values()) >= 2)
        world.run(steps=world.random.randrange(80))
        cut_at, newest = world.held(0)
        assert newest <= cut_at + 1
        for server, machine in sorted(world.servers.items()):
            world.follow(server, machine.count_until(0, cut_at))
            world.follow(server, machine.set_members(cut_at + 1, [1, 2]))
        world.run()
        world.copies_agree()
        assert torch.equal(found.setdefault(cut_at, world.values()), world.values())  # it depends on the cut alone
    assert len(found) < 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", [1, 3])
def test_under_ssp_no_worker_is_more_than_s_ahead_and_a_failure_loses_no_push(seed, staleness):
    world = World(seed, 3, 3, CLOCKS, replicas=1, staleness=staleness)
    killed = False
    while world.step():
        clocks = [one.clock for one in world.workers.values()]
        assert max(clocks) - min(clocks) <= staleness + 1  # one is being computed
        if not killed and min(clocks) >= 2:
            killed = True
            world.kill(world.random.randrange(3))
    assert killed
    world.run()
    world.copies_agree()
    assert {machine.version for server in world.servers.values() for machine in server.shards.values()} == {CLOCKS}


@pytest.mark.parametrize("seed", SEEDS)
def test_under_asp_each_push_is_applied_once_and_checkpoints_hold_equal_clocks_of_all_workers(seed):
    world = World(seed, 3, 3, CLOCKS, replicas=seed % 2, staleness=None, saves=(2,))
    if seed % 2:
        world.run(until=lambda: min(one.clock for one in world.workers.values()) >= 1)
        world.run(steps=world.random.randrange(200))
        world.kill(world.random.randrange(3))
    world.run()
    world.copies_agree()
    for shard, chain in enumerate(world.chains):
        state = world.servers[chain[0]].shards[shard].state
        assert state.version == 3 * CLOCKS
        assert state.applied == dict.fromkeys(range(3), CLOCKS - 1)
    if not seed % 2:
        assert sorted(world.saved) == [2]
        assert sum(name.startswith("param/") for name in world.saved[2]) >= len(SHARDS)


def test_one_worker_under_asp_equals_bsp_bitwise():
    world = World(3, 2, 1, CLOCKS, staleness=None)
    world.run()
    assert torch.equal(world.values(), undisturbed(1))


@pytest.mark.parametrize("replicas", [0, 1])
def test_memory_does_not_grow_over_clocks(replicas):
    """Buffers rotate; none is allocated or wrapped again."""

    def tensors(clocks: int) -> int:
        world = World(3, 2, 2, clocks, replicas=replicas)
        world.run()
        gc.collect()
        return sum(type(one) in (torch.Tensor, torch.UntypedStorage) for one in gc.get_objects())

    before = tensors(8)
    assert tensors(40) <= before + 8
