"""What a model asks of its servers, against the store's own cutting and against sums by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.coordinator.policies.assignment import assign
from psctl.plan.capacity import capacity, waiting
from psctl.ps.shards import cut, sizes
from psctl.types import Layout, ParameterInfo


def test_a_billion_parameters_on_four_servers():
    found = capacity(10**9, list("abcdefgh"), ["a", "b", "c", "d"], None, 0, 0.0)
    assert (found.bytes, found.replicas, found.survives, found.servers, found.hosts) == (4 * 10**9, 1, 1, 4, 4)
    assert found.values_a_server == pytest.approx(10**9, rel=0.005)
    assert found.memory_a_server == 6 * found.values_a_server  # two copies of a value and Adam's two numbers
    assert found.checkpoint.bytes == 12 * 10**9
    assert found.checkpoint.seconds == 24  # at 500 MB/s
    assert found.checkpoint.interval == pytest.approx((2 * 24 * found.checkpoint.between_failures) ** 0.5)
    assert found.clocks == found.shards * 8


@given(st.integers(1, 3_000_000), st.integers(1, 6), st.integers(0, 2), st.booleans())
def test_no_server_holds_more_than_was_said(parameters, servers, replicas, near):
    hosts = ["0" if near else str(each) for each in range(servers)]
    found = capacity(parameters, ["0"] * 3 if near else list("abc"), hosts, replicas, 0, 0.0)
    layout = Layout((ParameterInfo("w", (parameters,), "float32", 0),), "Adam", ({},))
    held = sizes(cut(layout, servers, near=near))
    chains = assign(held, {rank: rank for rank in range(servers)}, replicas)
    load = [0] * servers
    for size, chain in zip(held, chains, strict=True):
        for server in chain:
            load[server] += size
    assert max(load) * 3 <= found.memory_a_server + 2 * 4 * 64 * 3 * len(held)  # cuts are rounded to 64 elements
    assert abs(len(held) - found.shards) <= 1 + found.shards // 20


def test_servers_on_one_host_add_up_there_and_replicas_are_at_most_the_other_servers():
    found = capacity(10**8, ["a", "b"], ["a", "a", "b"], 5, 2, 1e8)
    assert (found.replicas, found.hosts) == (2, 2)
    assert found.memory_a_host_at_most == 2 * found.memory_a_server_at_most
    assert found.checkpoint.seconds == 12  # the network is slower than the disk


def test_waiting_falls_with_staleness_and_so_does_the_stable_step():
    rows = waiting(4, 3)
    assert [row.staleness for row in rows] == [0, 1, 2, 3, 4, 8, 16, None]
    assert all(a.clock > b.clock and a.idle > b.idle for a, b in pairwise(rows))
    steps = [row.step for row in rows if row.step is not None]
    assert steps == sorted(steps, reverse=True)
    assert rows[0].idle == pytest.approx(0.52)
