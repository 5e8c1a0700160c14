"""Sums by rack with real connections, threads and servers: equal bits, one push and one pull a rack, failures too.

Ranks 0 and 1 are in rack a, and so are both servers; ranks 2 and 3 are in rack b.
"""

from __future__ import annotations

import time

import pytest
import torch

from psctl.client import server_waits
from psctl.types import Member
from tests.client.test_host_aggregation import HOSTS, LAYOUT, ONES, SHAPES, SIZE, SUMS, met, sent, step
from tests.helpers.ps_world import World, flat_values

RACKS = ("a", "a", "b", "b")


def received(client) -> int:
    return sum(peer.received for peer in client.bytes_by_peer.values())


def trained(update: str, folder, trouble=lambda world, clock: None, replicas=0, full=True):
    """Train six steps; return the last values of each rank, and what each sent and received from the second step on."""
    layout = LAYOUT if update == "server" else SUMS
    with World(
        layout,
        4,
        2,
        update,
        6000,
        near=lambda member: False,
        hosts=HOSTS,
        folder=folder,
        racks=RACKS,
        replicas=replicas,
    ) as world:
        assert world.decision.racks == RACKS
        if folder is not None:
            met(world)
        world.start(flat_values(LAYOUT, ONES))
        step(world, 0, update, full=full)
        before = [(sent(client), received(client)) for client in world.clients]
        for clock in range(1, 6):
            trouble(world, clock)
            step(world, clock, update, full=full)
        found = [world.parameter(rank, index).clone() for rank in range(4) for index in range(len(SHAPES))]
        moved = [
            (sent(client) - out, received(client) - into)
            for client, (out, into) in zip(world.clients, before, strict=True)
        ]
        return found, moved


def equal(some, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("full", [True, False])
def test_each_byte_crosses_between_racks_once_each_way(update, full, tmp_path) -> None:
    apart, each = trained(update, None, full=full)
    together, moved = trained(update, tmp_path, full=full)
    assert equal(apart, together)
    if not full:  # what one of them has no gradient for is in the sum of both
        return
    for way in (0, 1):
        assert each[2][way] > 5 * SIZE
        assert moved[2][way] + moved[3][way] < 0.55 * (each[2][way] + each[3][way])
        assert min(moved[2][way], moved[3][way]) > 0.2 * max(moved[2][way], moved[3][way]), "the work is shared"
        assert moved[0][way] > 0.95 * each[0][way], "its servers are in its rack"


@pytest.mark.parametrize("update", ["server", "worker"])
def test_broken_connections_between_workers_cost_bytes_only(update, tmp_path) -> None:
    apart, _ = trained(update, None)

    def trouble(world, clock):
        if clock in (2, 3, 5):
            world.network.link(Member("worker", 2), Member("worker", 3)).kill()

    broken, _ = trained(update, tmp_path, trouble)
    assert equal(apart, broken)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_connection_that_breaks_during_a_step_costs_bytes_only(update, tmp_path) -> None:
    apart, _ = trained(update, None)

    def trouble(world, clock):
        if clock in (2, 4):
            push = type(world).push

            def broken_push(*arguments):
                push(world, *arguments)
                world.network.link(Member("worker", 2), Member("worker", 3)).kill()
                del world.push

            world.push = broken_push

    broken, _ = trained(update, tmp_path, trouble)
    assert equal(apart, broken)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_broken_connections_to_servers_lose_no_push(update, tmp_path) -> None:
    apart, _ = trained(update, None)

    def trouble(world, clock):
        for rank in (2, 3):
            world.network.link(Member("worker", rank), Member("server", clock % 2)).kill()

    broken, _ = trained(update, tmp_path, trouble)
    assert equal(apart, broken)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_server_failure_loses_no_push(update, tmp_path) -> None:
    apart, _ = trained(update, None, replicas=1)

    def trouble(world, clock):
        if clock == 3:
            world.push = lambda *args, world=world: (type(world).push(world, *args), world.kill(1), world.reassign())
        elif clock == 4:
            del world.push

    broken, _ = trained(update, tmp_path, trouble, replicas=1)
    assert equal(apart, broken)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_forwarded_values_end_a_wait_when_they_arrive(update, tmp_path, monkeypatch) -> None:
    """Not when a waiting thread looks for lost servers the next time, which is once a second."""
    monkeypatch.setattr(server_waits, "TICK", 40.0)
    began = time.monotonic()
    trained(update, tmp_path)
    assert time.monotonic() - began < 30
