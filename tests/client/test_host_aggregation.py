"""Host sums with real connections, threads and servers: equal bits and half the bytes, under failures too."""

from __future__ import annotations

import pytest
import torch

from psctl.types import Member
from tests.helpers.ps_world import DTYPES, World, flat_values, make_layout
from tests.helpers.running import until

SHAPES = [((70, 90), "float32", 0), ((33,), "float64", 0), ((2000,), "float32", 0)]
GROUPS = [{"lr": 0.1, "momentum": 0.5}]
LAYOUT = make_layout(SHAPES, "SGD", GROUPS)
SUMS = make_layout(SHAPES, "", GROUPS)
ONES = [torch.ones(shape, dtype=DTYPES[dtype]) for shape, dtype, _ in SHAPES]
SIZE = sum(one.numel() * one.element_size() for one in ONES)
HOSTS = ((0, 1), (2, 3))
WEIGHTS = [0.7, 1.3, 1.0, 1.0]
LONG = 20.0


def worker_near(member: Member) -> bool:
    return member.role == "worker"


def draw(clock: int, rank: int, *, full: bool) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * clock + rank)
    dtypes = DTYPES
    return {
        index: torch.randn(shape, generator=generator, dtype=dtypes[dtype])
        for index, (shape, dtype, _) in enumerate(SHAPES)
        if full or (clock + rank + index) % 4
    }


def met(world) -> None:
    """Connect all workers."""
    world.meet()
    for group in world.decision.hosts:
        for rank in group:
            client = world.clients[rank]
            until(lambda client=client, group=group: len(client._state._host._up) == len(group) - 1)


def step(world, clock, update: str, *, full: bool) -> None:
    world.push(clock, [draw(clock, rank, full=full) for rank in range(world.workers)], WEIGHTS)
    world.step(clock, GROUPS if update == "server" else [])


def sent(client) -> int:
    return sum(peer.bytes_sent for peer in client._servers.in_use.values())


def trained(update: str, folder, near=worker_near, trouble=lambda world, clock: None, replicas=0, full=False):
    """Train six steps; return the last values of each rank, and the bytes that each sent from the second step on."""
    layout = LAYOUT if update == "server" else SUMS
    with World(layout, 4, 2, update, 6000, near=near, hosts=HOSTS, folder=folder, replicas=replicas) as world:
        if folder is not None:
            met(world)
        world.start(flat_values(LAYOUT, ONES))
        step(world, 0, update, full=full)
        before = [sent(client) for client in world.clients]
        for clock in range(1, 6):
            trouble(world, clock)
            step(world, clock, update, full=full)
        found = [world.parameter(rank, index).clone() for rank in range(4) for index in range(len(SHAPES))]
        return found, [sent(client) - was for client, was in zip(world.clients, before, strict=True)]


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("full", [True, False])
def test_host_sums_give_equal_bits_and_half_the_bytes_of_separate_pushes(update, full, tmp_path):
    apart, each = trained(update, None, full=full)
    together, half = trained(update, tmp_path, full=full)
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    if not full:  # what one of them has no gradient for is in the sum of both
        return
    assert min(each) > 5 * SIZE
    for one, two in HOSTS:
        assert half[one] + half[two] < 0.55 * (each[one] + each[two])
        assert min(half[one], half[two]) > 0.2 * max(half[one], half[two]), "the work is shared"


def test_pushes_to_a_server_on_the_same_host_are_separate(tmp_path):
    _, moved = trained("server", tmp_path, near=lambda member: True)
    assert max(moved) < 0.2 * 5 * SIZE


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_broken_or_late_connection_only_costs_bytes(update, tmp_path):
    apart, _ = trained(update, None)

    def trouble(world, clock):
        if clock in (2, 4):
            for rank, other in ((1, 0), (3, 2)):
                connections = world.clients[rank]._host._connections
                if clock == 2:
                    connections._channels[other][1].shutdown()
                else:  # and is made again
                    connections._known.clear()
                    world.meet()

    broken, _ = trained(update, tmp_path, trouble=trouble)
    assert all(torch.equal(one, other) for one, other in zip(apart, broken, strict=True))


def test_a_connection_break_of_the_collector_during_a_push_loses_no_push(tmp_path):
    apart, _ = trained("server", None)

    def trouble(world, clock):
        for rank in (0, 1):
            world.network.link(Member("worker", rank), Member("server", clock % 2)).kill()

    broken, _ = trained("server", tmp_path, trouble=trouble)
    assert all(torch.equal(one, other) for one, other in zip(apart, broken, strict=True))


def test_a_server_failure_loses_no_push(tmp_path):
    apart, _ = trained("server", None, replicas=1)

    def trouble(world, clock):
        if clock == 3:
            world.push = lambda *args, world=world: (type(world).push(world, *args), world.kill(1), world.reassign())
        elif clock == 4:
            del world.push

    broken, _ = trained("server", tmp_path, trouble=trouble, replicas=1)
    assert all(torch.equal(one, other) for one, other in zip(apart, broken, strict=True))
