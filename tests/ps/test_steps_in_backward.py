"""Shards that step before the others are pushed: equal values, checkpoints, and a worker that is lost meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.client.backward_shards import shards_in_backward
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.clock_ledger import BackwardLedger, JobRefusal, Membership, StepOrder
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import Leads, Pull, Step, StepInBackward, Values
from psctl.ps.outputs import Snapshot, ToServer
from psctl.ps.pieces import bytes_view, pieces
from psctl.types import Layout, ParameterInfo, Range, Shard
from tests.ps import test_dense_shard as one_shard
from tests.ps.world import SHARDS, World

GROUPS = [{"lr": 0.1}]
FASTER = [{"lr": 0.2}]
LAYOUT = Layout(tuple(ParameterInfo(f"p{i}", (8,), "float32", 0) for i in range(4)), "SGD", tuple(GROUPS))
FOUR = [Shard(index, "float32", Range(8 * index, 8 * index + 8)) for index in range(4)]


def versions(world: World) -> list[int]:
    """Return the version of each shard at its primary."""
    return [world.servers[world.chains[one.index][0]].shards[one.index].version or 0 for one in SHARDS]


@pytest.mark.parametrize("replicas", [0, 1])
def test_values_and_checkpoints_are_those_of_steps_after_backward(replicas: int) -> None:
    ahead = 0
    for seed in range(20):
        plain = World(seed, 2, 3, 5, replicas=replicas, saves=(2, 5))
        early = World(seed, 2, 3, 5, replicas=replicas, saves=(2, 5), in_backward=1.0)
        plain.run()
        while early.step():
            pushing = all(worker.phase == "backward" for worker in early.workers.values())
            ahead += pushing and max(versions(early)) > min(worker.clock for worker in early.workers.values())
        assert early.values().equal(plain.values())
        assert early.saved == plain.saved
        assert sorted(early.saved) == [2, 5]
        early.copies_agree()
    assert ahead > 30, "shards step while every worker still pushes others"


def test_a_lost_worker_is_replaced_unless_some_of_its_step_was_made() -> None:
    replaced = refused = 0
    calm = World(0, 2, 2, 4)
    calm.run()
    for seed in range(120):
        world = World(seed, 2, 2, 4, in_backward=0.5)
        world.run(steps=60 + seed)
        if world.workers[1].phase == "done":
            continue
        cut, newest = world.held(1)
        if newest > cut + 1:
            refused += 1  # lost_workers.py has all continue from the last checkpoint
            continue
        world.start_again(1, cut)
        world.run()
        replaced += 1
        assert world.values().equal(calm.values()), f"seed {seed}"
    assert replaced > 20
    assert refused > 5


def test_an_order_that_is_withdrawn_or_too_late_has_no_effect() -> None:
    order = StepOrder(one_shard.GROUPS, None, False)
    for late in (False, True):
        machine = one_shard.make()
        if not late:
            machine.on_order_in_backward(0, order)
        for rank in (0, 1):
            one_shard.push(machine, rank, 0)
        machine.withdraw_orders_in_backward(1)
        if late:
            machine.on_order_in_backward(0, order)
        one_shard.push(machine, 2, 0)
        assert machine.version == 0
        machine.on_step_order(0, order)
        assert machine.version == 1
        machine.on_order_in_backward(1, order)
        for rank in range(3):
            one_shard.push(machine, rank, 1)
        assert machine.version == 2


def test_a_shard_that_has_stepped_in_backward_is_saved_once() -> None:
    machine, order = saving_shard(), StepOrder(one_shard.GROUPS, None, False)
    machine.on_order_in_backward(0, order)
    for rank in range(3):
        one_shard.push(machine, rank, 0)
    assert machine.version == 1
    save = StepOrder(one_shard.GROUPS, None, True)
    assert [one.step for one in machine.on_step_order(0, save) if isinstance(one, Snapshot)] == [1]
    assert machine.on_step_order(0, save) == []


def saving_shard() -> DenseShard:
    plain = one_shard.make()
    shard, terms = plain.shard, plain.state.terms
    layout = terms.layout
    machine = DenseShard(Terms(layout, 3, "server", in_backward=1.0), shard, pieces(layout, [shard])[0])
    machine.on_assignment(0, [0], [], lambda server: True)
    machine.start_values_buffer(0, 4 * len(shard.range))[:] = bytes_view(torch.ones(len(shard.range)))
    machine.on_start_values()
    return machine


# ---- the ledger ----


def test_all_members_order_with_the_same_numbers_and_the_shards_that_all_name_step() -> None:
    ledger = BackwardLedger(Membership.initial(2, 0), 0)
    assert ledger.add(0, StepInBackward(0, [0, 2, 3], GROUPS)) is None
    assert ledger.add(1, StepInBackward(0, [0, 3], GROUPS)) == (StepOrder(GROUPS, None, False), frozenset({0, 3}))
    assert ledger.add(1, StepInBackward(0, [0], GROUPS)) is None, "it is agreed on"
    ledger.add(0, StepInBackward(1, [0], GROUPS))
    with pytest.raises(JobRefusal, match=r"group 0: lr is 0.1 on worker/0 and 0.2 on worker/1 \(clock 1\)"):
        ledger.add(1, StepInBackward(1, [0], FASTER))


def test_what_is_withdrawn_must_be_ordered_by_all_again() -> None:
    ledger = BackwardLedger(Membership.initial(2, 0), 0)
    ledger.add(0, StepInBackward(0, [0], GROUPS))
    assert ledger.withdraw() == 0
    assert ledger.add(1, StepInBackward(0, [0], GROUPS)) is None
    ledger.set_members(Membership.initial(1, 0))
    assert ledger.add(0, StepInBackward(1, [0], GROUPS)) is not None
    assert ledger.withdraw() == 2


# ---- the client ----


def client(part: float = 0.5) -> DenseClient:
    machine = DenseClient(Terms(LAYOUT, 2, "server", in_backward=part), FOUR, [0, 1, 0, 1], 1)
    for server, shards in ((0, [0, 2]), (1, [1, 3])):
        machine.on_server_message(server, Leads(0, shards))
    machine.pull(0)
    land(machine, 0)
    machine.copy_to_front()
    return machine


def land(machine: DenseClient, version: int, *shards: int) -> None:
    for shard in shards or range(4):
        head = Values(shard, version, b"\1", version, version)
        place = machine.receive_buffer_for(shard % 2, head, 32)
        assert place is not None
        place[:] = bytes(32)
        machine.on_server_message(shard % 2, head, 32)


def test_a_servers_last_pushed_shard_never_steps_in_backward() -> None:
    assert client(1.0).shards_in_backward == {2, 3}
    assert client(0.25).shards_in_backward == set(), "one in two shards is too many"


def test_shards_in_backward_lie_apart_on_each_server_and_between_servers() -> None:
    owners = [shard % 4 for shard in range(48)]
    found = shards_in_backward(owners, 1 / 4)
    assert sorted(found) == [0, 1, 2, 3]
    assert all({before - after for before, after in pairwise(shards)} == {16} for shards in found.values())
    chosen = sorted(shard for shards in found.values() for shard in shards)
    assert min(after - before for before, after in pairwise(chosen)) == 3
    assert shards_in_backward(owners, 0.0) == {}


def test_another_assignment_changes_the_shards_in_backward() -> None:
    machine = client(1.0)
    machine.on_assignment(1, [0, 0, 0, 0], [0])
    assert machine.shards_in_backward == {1, 2, 3}


def test_a_shard_that_was_pulled_in_backward_is_not_pulled_again() -> None:
    machine = client(1.0)
    orders = machine.order_in_backward(0, GROUPS)
    assert orders == [ToServer(1, StepInBackward(0, [3], GROUPS)), ToServer(0, StepInBackward(0, [2], GROUPS))]
    for shard in (3, 2, 1, 0):
        machine.push(0, shard, [True], 1.0)
    assert machine.pull_in_backward(1, 3) == [ToServer(1, Pull(1, [3], 1, [0]))]
    machine.order_step(0, GROUPS)
    assert machine.pull(1) == [ToServer(0, Pull(1, [0, 2], 1, [0, 0])), ToServer(1, Pull(1, [1], 1, [0]))]


def test_values_that_nothing_has_read_are_pulled_with_the_others() -> None:
    machine = client(1.0)
    for shard in range(4):
        machine.push(0, shard, [True], 1.0)
    machine.order_step(0, GROUPS)
    machine.pull(1)
    land(machine, 1)
    assert machine.pull_in_backward(2, 3) == []
    machine.copy_to_front()
    assert machine.pull_in_backward(2, 3) != []


def test_a_server_that_lacks_an_order_is_left_out_in_backward() -> None:
    machine = client(1.0)
    for shard in range(4):
        machine.push(0, shard, [True], 1.0)
    machine.on_server_disconnected(1)
    machine.order_step(0, GROUPS, save=True)
    assert [one.server for one in machine.order_in_backward(1, GROUPS)] == []
    said = machine.on_server_message(1, Leads(0, [1, 3]))
    assert not any(isinstance(one.message, StepInBackward) for one in said if isinstance(one, ToServer))


def test_a_server_refuses_an_order_where_no_shard_steps_in_backward() -> None:
    world = World(0, 1, 1, 1)
    with pytest.raises(ProtocolError, match="ordered a step in backward, of which this job has none"):
        world.servers[0].on_worker_message(0, StepInBackward(0, [0], [{"lr": 0.1}]))
    with pytest.raises(ProtocolError, match="ordered a step of 0 groups where 1 are"):
        world.servers[0].on_worker_message(0, StepInBackward(0, [0], []))
    assert world.servers[0].on_worker_message(0, Step(0, [{"lr": 0.1}])) == []
