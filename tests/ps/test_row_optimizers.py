"""Optimizers of rows: equal to torch's on each row, lazy, exact on all replicas; and start values of rows."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import Initialiser, RowOptimizerSpec
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_initialisers import initial_values
from psctl.ps.tables.row_optimizers import RowOptimizer, complete, powers, rules
from psctl.ps.tables.server.saved_tables import copy_shard, load
from psctl.ps.tables.table_bytes import decode_shards, encode_shards
from psctl.ps.tables.table_state import EntryPart, TableEntry, TableShard
from tests.ps.table_world import Functions, World, spec

TORCH = {
    "sgd": lambda rows: torch.optim.SGD(rows, lr=0.1),
    "sgd momentum": lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda rows: torch.optim.Adam(rows, lr=0.1, betas=(0.8, 0.95), weight_decay=0.01),
}
OURS = {
    "sgd": {"name": "sgd", "lr": 0.1},
    "sgd momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adagrad": {"name": "adagrad", "lr": 0.1, "initial_accumulator": 0.1},
    "adam": {"name": "adam", "lr": 0.1, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.01},
}


def optimizer(name: str, **settings: float) -> RowOptimizerSpec:
    return complete(RowOptimizerSpec(name, settings))


def named(which: dict) -> RowOptimizerSpec:
    return optimizer(which["name"], **{name: value for name, value in which.items() if name != "name"})


@pytest.mark.parametrize("which", TORCH)
def test_each_row_is_stepped_as_torch_steps_a_parameter_of_its_own(which):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    parameters = [torch.nn.Parameter(row.clone()) for row in start]
    theirs = [TORCH[which]([each]) for each in parameters]
    table = spec("", (3,), optimizer=named(OURS[which]))
    world = World(workers=1, servers=2)
    world.push(0, table, range(6), start, what="start")
    for step in range(12):
        keys = [key for key in range(6) if (key + step) % (key % 3 + 1) == 0]
        gradients = torch.randn(len(keys), 3, generator=generator, dtype=torch.float64)
        world.push(0, table, keys, gradients)
        for key, gradient in zip(keys, gradients, strict=True):
            parameters[key].grad = gradient.clone()
            theirs[key].step()
    world.run()
    expected = torch.stack([each.detach() for each in parameters])
    assert torch.allclose(world.pull(0, table, list(range(6))), expected, rtol=1e-12, atol=1e-14)


def test_rowwise_adagrad_has_one_accumulator_of_the_mean_square():
    own = optimizer("rowwise-adagrad", lr=0.5, eps=0.0)
    rows = RowOptimizer(own, 2, torch.float32)
    state = rows.new_state(1, rows.settings)
    values = rows.step(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), state, rows.settings)
    assert state.tolist() == [[12.5]]
    assert torch.allclose(values, torch.tensor([[-1.5, -2.0]]) / math.sqrt(12.5))


def ftrl_reference(gradients, alpha, beta, l1, l2):
    """McMahan and others 2013, algorithm 1, for one weight."""
    z = n = 0.0
    weights = []
    for gradient in gradients:
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        sigma = (math.sqrt(n + gradient * gradient) - math.sqrt(n)) / alpha
        z += gradient - sigma * w
        n += gradient * gradient
        weights.append(0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2))
    return weights


def test_ftrl_is_the_algorithm_of_the_paper_and_gives_exact_zeros():
    random = Random(2)
    series = [[random.gauss(0.1 * at, 0.5) for _ in range(40)] for at in range(8)]
    own = optimizer("ftrl", alpha=0.3, beta=1.0, l1=2.0, l2=0.5)
    rows = RowOptimizer(own, 1, torch.float64)
    state, values = rows.new_state(8, rows.settings), torch.zeros(8, 1, dtype=torch.float64)
    zeros = 0
    for at, gradients in enumerate(zip(*series, strict=True)):
        values = rows.step(values, torch.tensor(gradients, dtype=torch.float64)[:, None], state, rows.settings)
        for row in range(8):
            assert math.isclose(values[row, 0], ftrl_reference(series[row], 0.3, 1.0, 2.0, 0.5)[at], rel_tol=1e-12)
        zeros += int((values == 0).sum())
    assert 20 < zeros < 300


@pytest.mark.parametrize("name", rules())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_has_the_same_bits_in_any_order_and_grouping_of_rows(name, dtype):
    generator = torch.Generator().manual_seed(3)
    own = optimizer(name, **{"alpha" if name == "ftrl" else "lr": 0.1, **({"momentum": 0.9} if name == "sgd" else {})})
    rows = RowOptimizer(own, 5, dtype)
    values, gradients = (torch.randn(37, 5, generator=generator).to(dtype) for _ in range(2))
    state = torch.rand(37, rows.state_width, generator=generator).to(rows.state_dtype)
    if name == "adam":
        state[:, -1] = torch.randint(0, 3000, (37,), generator=generator)
    whole_state = state.clone()
    whole = rows.step(values.clone(), gradients, whole_state, rows.settings)
    order = torch.randperm(37, generator=generator)
    for part in order.split(3):
        some = state[part]
        found = rows.step(values[part], gradients[part], some, rows.settings)
        assert torch.equal(found, whole[part])
        assert torch.equal(some, whole_state[part])


def test_powers_are_those_of_arithmetic():
    exponents = np.array([0, 1, 2, 3, 10, 1000, 100_000])
    assert np.allclose(powers(0.999, exponents), [0.999 ** int(each) for each in exponents], rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "adagrads", "lr": 1.0}, "no optimizer of rows"),
        ({"name": "adagrad"}, "without lr"),
        ({"name": "adagrad", "lr": -1.0}, "lr=-1"),
        ({"name": "adam", "lr": 1.0, "beta1": 1.0}, "beta1=1"),
        ({"name": "sgd", "lr": 1.0, "eps": 1.0}, "no setting 'eps'"),
        ({"name": "ftrl", "alpha": 0.0}, "alpha=0"),
        ({"name": "sgd", "lr": math.nan}, "lr=nan"),
    ],
)
def test_wrong_settings_are_refused_with_the_setting(given, words):
    with pytest.raises(UsageError, match=words):
        named(given)


@pytest.mark.parametrize("more", [
    {"dtype": "int64"}, {"apply": "mine:f"}, {"reduce": "max"}, {"initial": 1.0},
])  # fmt: skip
def test_an_optimizer_that_does_not_fit_its_table_is_refused(more):
    table = spec("", (2,), **{"optimizer": optimizer("ftrl", alpha=1.0), **more})
    with pytest.raises(UsageError, match="optimizer"):
        World(functions=Functions(f=lambda old, new: new)).clients[0].resolve_kind(table)


def test_bsp_sums_the_gradients_of_a_clock_and_steps_once():
    table = spec("", (1,), optimizer=optimizer("adagrad", lr=1.0, eps=0.0))
    world = World(workers=3, servers=2, staleness=0)
    for rank in range(3):
        world.push(rank, table, [1, 2], [[1.0], [rank]])
        world.clock(rank)
    world.run()
    assert world.pull(0, table, [1, 2, 3]).flatten().tolist() == [-1.0, -1.0, 0.0]  # 3 / sqrt(9)


def test_reduce_mean_steps_with_the_mean_of_the_gradients():
    table = spec("", (1,), reduce="mean", optimizer=optimizer("sgd", lr=1.0))
    world = World(workers=3, servers=2, staleness=0)
    for rank in range(3):
        world.push(rank, table, [1], [[3.0 * rank]])
        world.clock(rank)
    world.run()
    assert world.pull(0, table, [1]).item() == -3.0


def test_single_pushes_of_one_key_are_steps_of_their_own_under_asp():
    table = spec("", (1,), optimizer=optimizer("adagrad", lr=1.0, eps=0.0))
    world = World(workers=1, servers=1, shards=1)
    for _ in range(3):
        world.push_one(0, table, 7, [1.0])
    world.run()
    assert math.isclose(world.pull(0, table, [7]).item(), -(1 + 1 / math.sqrt(2) + 1 / math.sqrt(3)))


def configure(world, rank, table, **settings):
    client = world.clients[rank]
    for change in client.prepare_settings(client.resolve_kind(table), settings, world.ticket()):
        world.put(rank, client.send_change(change, 0))


@pytest.mark.parametrize("staleness", [None, 0])
def test_settings_change_for_the_pushes_after_them(staleness):
    table = spec("", (1,), optimizer=optimizer("sgd", lr=1.0))
    world = World(workers=1, servers=2, staleness=staleness)
    for rate in (1.0, 0.1, 0.0):
        configure(world, 0, table, lr=rate)
        world.push(0, table, [1, 2], [[1.0], [2.0]])
        if staleness == 0:
            world.clock(0)
    world.run()
    assert world.pull(0, table, [1, 2]).flatten().tolist() == [-1.1, -2.2]


def shard_with_state() -> tuple[TableShard, object]:
    world = World(workers=1, servers=1, shards=1)
    table = spec("", (2,), optimizer=optimizer("adam", lr=0.1), initial=0.5)
    shard = world.servers[0].shards_here[0].state.make_shard(world.store)
    keys = np.arange(20)
    for sequence in range(3):
        part = EntryPart("push", "", table, keys, Lanes(torch.full((20, 2), 1.0 + sequence, dtype=torch.float64)))
        shard.apply(TableEntry(0, sequence, 0, [part]))
    shard.tables[""].configure({"lr": 0.01})
    return shard, world.servers[0].shards_here[0].state


def states(shards) -> dict[int, list[float]]:
    return {
        int(key): table.rows.state[slot].tolist() + table.rows.lanes.values[slot].tolist()
        for shard in shards
        for table in shard.tables.values()
        for slot, key in enumerate(table.rows.keys)
    }


def test_the_state_of_optimizers_is_in_copies_of_shards():
    shard, machine = shard_with_state()
    (copied,) = decode_shards(encode_shards([shard]), machine.make_shard)
    assert states([copied]) == states([shard])
    assert copied.tables[""].settings == shard.tables[""].settings


@pytest.mark.parametrize("shards", [1, 3])
def test_the_state_of_optimizers_is_in_checkpoints(shards):
    shard, machine = shard_with_state()
    tensors = {
        each.slice.name: torch.frombuffer(bytearray(each.data), dtype=getattr(torch, each.slice.dtype)).reshape(
            each.slice.shape
        )
        for each in copy_shard(shard, 0, 1)
    }
    found = [held for own in range(shards) for held in load(tensors, own, shards, machine)]
    assert states(found) == states([shard])
    assert all(each.tables[""].settings["lr"] == 0.01 for each in found)


def test_start_values_depend_on_the_seed_and_the_key_alone():
    normal = Initialiser("normal", 0.5, 7)
    keys = np.array([5, -3, 1 << 60, 12])
    whole = initial_values(normal, keys, 9)
    for at, key in enumerate(keys):
        assert np.array_equal(initial_values(normal, np.array([key]), 9)[0], whole[at])
    assert not np.array_equal(initial_values(Initialiser("normal", 0.5, 8), keys, 9), whole)


def test_start_values_have_their_distribution():
    keys = np.arange(20_000)
    normal = initial_values(Initialiser("normal", 2.0, 1), keys, 8)
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 2.0) < 0.02
    assert abs((np.abs(normal) < 2.0).mean() - 0.6827) < 0.005
    flat = normal.reshape(len(keys), -1)
    assert np.abs(np.corrcoef(flat.T) - np.eye(8)).max() < 0.03
    uniform = initial_values(Initialiser("uniform", 3.0, 1), keys, 2)
    assert uniform.min() >= -3.0
    assert uniform.max() < 3.0
    assert abs(uniform.std() - math.sqrt(3.0)) < 0.02
