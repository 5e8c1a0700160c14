"""Servers die, move and come back in the midst of training; parameters are the undisturbed run's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psctl.errors import PeerLost
from psctl.job.checkpoint_messages import LoadWanted
from psctl.job.membership_messages import LostWorkerClocks, ShardHandedOver
from psctl.job.training_messages import MemberReady
from psctl.ps.server_optimizers import numbers
from psctl.types import Member
from tests.helpers.ps_world import World, flat_values, make_layout
from tests.helpers.running import until
from tests.sync.test_trajectories import MIXED, assert_same, gradients, make_optimizer, reference, start_values

_here = Path(__file__)
STEPS = 6


class Trial:
    """Training of two workers on three servers, disturbed at a place of clock 3."""

    def __init__(self, world, optimizer) -> None:
        self.world, self.groups = world, numbers(optimizer)

    def clock(self, clock: int, disturb=None) -> None:
        world = self.world
        shares = []
        for rank in range(world.workers):
            values = [
                torch.zeros(shape) if group is None else world.parameter(rank, index)
                for index, (shape, _, group) in enumerate(MIXED)
            ]
            shares.append(gradients(MIXED, values, clock, rank, world.workers))
        self.disturb(disturb, "before the pushes")
        world.push(clock, shares)
        self.disturb(disturb, "between pushes and steps")
        world.clients[0].step(clock, self.groups)
        self.disturb(disturb, "between two steps")
        world.clients[1].step(clock, self.groups)
        self.disturb(disturb, "after the steps")
        for client in world.clients:
            client.pull(clock + 1)
        self.disturb(disturb, "after the pulls")
        for client in world.clients:
            client.wait(clock + 1)

    def disturb(self, disturb, place: str) -> None:
        if disturb is not None and disturb[0] == place:
            disturb[1](self.world)


def kill_one(world) -> None:
    world.kill(0)
    world.reassign()


def break_links(world) -> None:
    for rank in range(world.workers):
        world.network.link(Member("worker", rank), Member("server", 1)).kill()
    if len(world.servers) > 1:
        world.network.link(Member("server", 2), Member("server", 0)).kill()


PLACES = ["before the pushes", "between pushes and steps", "between two steps", "after the steps", "after the pulls"]


@pytest.mark.parametrize("disturb", [kill_one, break_links])
@pytest.mark.parametrize("place", PLACES)
def test_a_servers_death_or_broken_links_change_nothing_but_time(place, disturb):
    values = start_values(MIXED)
    _, optimizer = make_optimizer("AdamW", MIXED, values)
    layout = make_layout(MIXED, "AdamW", numbers(optimizer))
    with World(layout, 2, 3, target=600, replicas=1) as world:
        world.start(flat_values(layout, values))
        trial = Trial(world, optimizer)
        for clock in range(STEPS):
            trial.clock(clock, (place, disturb) if clock == 3 else None)
            assert_same(world, MIXED, reference("AdamW", 2, STEPS)[clock])


def test_a_shard_moves_to_a_server_that_was_filled_while_training_continued():
    values = start_values(MIXED)
    _, optimizer = make_optimizer("AdamW", MIXED, values)
    layout = make_layout(MIXED, "AdamW", numbers(optimizer))
    with World(layout, 2, 3, target=600) as world:
        world.start(flat_values(layout, values))
        trial = Trial(world, optimizer)
        chains = world.assignment.chains
        goal = [[(chain[0] + 1) % 3] for chain in chains]
        for clock in range(STEPS + 4):
            if clock == 2:
                world.job.aim(goal)  # fill the next server of each, which then has the shard
            if clock == 4:
                until(lambda: world.assignment.chains == goal)
            trial.clock(clock)
            assert_same(world, MIXED, reference("AdamW", 2, STEPS + 4)[clock])
        handed = {each.shard for rank in world.servers for each in world.server_link(rank).of(ShardHandedOver)}
        assert handed == set(range(len(chains)))


def test_a_server_that_was_taken_as_lost_and_returns_is_refused():
    values = start_values(MIXED)
    _, optimizer = make_optimizer("SGD", MIXED, values)
    layout = make_layout(MIXED, "SGD", numbers(optimizer))
    with World(layout, 2, 3, target=600, replicas=1) as world:
        world.start(flat_values(layout, values))
        trial = Trial(world, optimizer)
        trial.clock(0)
        world.dead.add(0)  # for the coordinator; the process itself lives on
        world.reassign()
        world.dead.clear()
        assert world.servers[1].dense.allow(Member("server", 0)) == "server/0 was declared lost"
        assert world.servers[1].dense.allow(Member("server", 0, 1)) is None
        for clock in range(1, 4):
            trial.clock(clock)
            assert_same(world, MIXED, reference("SGD", 2, 4)[clock])


def test_a_lost_worker_is_refused_and_its_next_incarnation_is_not():
    layout = make_layout(MIXED, "SGD", [{"lr": 0.1}, {"lr": 0.1}])
    with World(layout, 2, 1, target=600) as world:
        world.start(flat_values(layout, start_values(MIXED)))
        world.job.killed(Member("worker", 1))
        until(lambda: world.server_link(0).of(LostWorkerClocks))
        (answer,) = world.server_link(0).of(LostWorkerClocks)
        assert (answer.rank, answer.incarnation) == (1, 0)
        assert set(answer.clocks.values()) == {-1}
        assert world.servers[0].dense.allow(Member("worker", 1)) == "incarnation 0 of worker/1 is replaced"
        assert world.servers[0].dense.allow(Member("worker", 1, 1)) is None


def test_a_server_without_a_replica_that_is_lost_is_named_when_patience_ends(monkeypatch):
    monkeypatch.setattr("psctl.client.server_waits.TICK", 0.02)
    values = start_values(MIXED)
    _, optimizer = make_optimizer("SGD", MIXED, values)
    layout = make_layout(MIXED, "SGD", numbers(optimizer))
    with World(layout, 1, 2, target=600, patience=0.5) as world:
        world.start(flat_values(layout, values))
        world.kill(1)
        world.clients[0].pull(1)
        with pytest.raises(PeerLost, match="server/1 at memory:2 is lost since"):
            world.clients[0].wait(1)


def test_a_server_that_joins_a_resumed_job_in_mid_run_requests_nothing_of_the_checkpoint() -> None:
    """That may be pruned by then; what it is to hold comes by copy."""
    layout = make_layout([((8,), "float32", 0)], "SGD", [{"lr": 0.1}])
    with World(layout, 1, 1) as world:
        world.start(flat_values(layout, [torch.ones(8)]))
        world.push(0, [{0: torch.ones(8)}])
        world.step(0, [{"lr": 0.1}], save=True)
        checkpoint = world.checkpoint(1)
    with World(layout, 1, 1, checkpoint=checkpoint, step=1) as world:
        world.start()
        assert world.server_link(0).of(LoadWanted)
        world.scale(servers=2)
        until(lambda: [at.rank for at in world.assignment.servers] == [0, 1])
        assert world.server_link(1).of(MemberReady)
        assert not world.server_link(1).of(LoadWanted)
