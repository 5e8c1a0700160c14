"""Owners of shards, and the conditions under which a step order is sent."""

from __future__ import annotations

from collections.abc import Sized

from psctl.ps.dense.client.unacked_pushes import KEPT, ShardRoutes, UnackedPushes
from psctl.ps.messages import Push, Step


def push(clock: int, shard: int) -> Push:
    return Push(shard, clock, 1.0, b"\1", clock)


def opened(owners: list[int]) -> tuple[ShardRoutes, UnackedPushes]:
    route = ShardRoutes(owners, sorted(set(owners)))
    for server in set(owners):
        route.on_leads(server, 0, [shard for shard, owner in enumerate(owners) if owner == server])
    return route, UnackedPushes(route)


def test_a_step_order_is_sent_when_pushes_to_other_servers_are_staged():
    _, box = opened([0, 1, 1])
    for shard in range(3):
        box.add_push(push(0, shard))
    box.add_step(Step(0, []))
    assert box.ready_orders() == []
    box.on_staged(0, 1)
    assert box.ready_orders() == []
    box.on_staged(0, 2)
    assert [server for server, _ in box.ready_orders()] == [0]
    box.on_staged(0, 0)
    assert [server for server, _ in box.ready_orders()] == [1]
    assert box.ready_orders() == []


def test_a_step_order_to_the_only_server_is_sent_immediately():
    _, box = opened([0, 0])
    box.add_push(push(0, 0))
    box.add_push(push(0, 1))
    box.add_step(Step(0, []))
    assert [server for server, _ in box.ready_orders()] == [0]


def test_a_server_without_shards_that_connects_late_learns_what_is_saved():
    route, box = opened([0, 0])
    route.servers.append(1)  # which leads no shard
    for clock, save in enumerate((False, True, *[False] * (2 * KEPT))):
        for shard in range(2):
            box.add_push(push(clock, shard))
        box.add_step(Step(clock, [], save=save))
        assert [server for server, _ in box.ready_orders()] == [0]
        for shard in range(2):
            box.on_pushed(clock, shard)
        assert box.unsettled_servers() == ({1} if clock else set()), "its part of the checkpoint is missing"
    route.on_leads(1, 0, [])
    found = [(server, step.clock) for server, step in box.ready_orders()]
    assert found[0] == (1, 1)
    assert len(found) <= 2 + KEPT, "orders that save nothing are not kept for it"
    assert box.unsettled_servers() == set()
    assert box.ready_orders() == []


def test_a_push_in_a_host_sum_is_staged_before_any_order_is_sent():
    _, box = opened([0, 1, 0])
    for shard in range(3):
        box.add_push(push(0, shard))
    box.note_in_host_sum(0, 0)
    box.note_in_host_sum(0, 2)
    box.add_step(Step(0, []))
    box.on_staged(0, 1)
    assert box.ready_orders() == [], "that of shards 0 and 2 does not come on our connection to their own server"
    box.on_staged(0, 0)
    assert box.ready_orders() == []
    box.note_separate(0, 2)
    assert [server for server, _ in box.ready_orders()] == [0], "now shard 2's does"
    box.on_staged(0, 2)
    assert [server for server, _ in box.ready_orders()] == [1]


def test_a_repeated_push_is_in_no_host_sum():
    _, box = opened([0, 0])
    for shard in range(2):
        box.add_push(push(0, shard))
        box.note_in_host_sum(0, shard)
    box.add_step(Step(0, []))
    box.on_staged(0, 1)
    assert box.ready_orders() == []
    assert [one.shard for one in box.to_resend(0)] == [0]
    assert [server for server, _ in box.ready_orders()] == [0]


def test_under_update_worker_no_order_is_sent_and_a_clock_is_settled_when_all_is_pushed():
    route, _ = opened([0, 1])
    box = UnackedPushes(route, ordered=False)
    box.add_push(push(0, 0))
    box.add_push(push(0, 1))
    assert box.ready_orders() == []
    assert box.unsettled_servers() == {0, 1}
    box.on_pushed(0, 0)
    assert box.unsettled_servers() == {1}
    box.on_pushed(0, 1)
    assert box.unsettled_servers() == set()
    kept = [value for value in vars(box).values() if isinstance(value, Sized)]
    assert not any(kept), "a clock that is settled is forgotten"


def test_a_push_to_be_repeated_counts_as_not_staged_and_delays_the_order():
    route, box = opened([0, 1])
    box.add_push(push(0, 0))
    box.add_push(push(0, 1))
    box.on_staged(0, 1)
    route.on_assignment(1, [0, 2], [0, 2])
    box.on_assignment()
    route.on_leads(2, 1, [1])
    assert box.to_resend(1) == [push(0, 1)]
    box.add_step(Step(0, []))
    assert box.ready_orders() == []
    box.on_staged(0, 1)
    assert [server for server, _ in box.ready_orders()] == [0]


def test_acknowledged_pushes_are_removed_up_to_their_clock():
    _, box = opened([0, 0])
    for clock in range(2):
        for shard in range(2):
            box.add_push(push(clock, shard))
        box.add_step(Step(clock, []))
    box.ready_orders()
    box.on_pushed(1, 0)
    assert box.to_resend(0) == []
    assert box.servers_behind(0) == {0}
    assert box.has_unacknowledged(0)
    box.on_pushed(0, 1)
    assert box.servers_behind(0) == set()
    assert box.to_resend(1) == [push(1, 1)]


def test_a_moved_shard_opens_when_its_new_server_leads_by_that_assignment():
    route, _ = opened([0, 0])
    assert route.on_leads(1, 1, [1]) == []
    assert route.on_assignment(1, [0, 1], [0, 1]) == ([1], [1])
    route, _ = opened([0, 0])
    assert route.on_assignment(1, [0, 1], [0, 1]) == ([1], [])
    assert route.closed_shards == {1}
    assert route.on_leads(1, 1, [1]) == [1]
    assert route.closed_shards == set()


def test_leads_of_an_older_assignment_does_not_open_a_shard():
    route, _ = opened([0])
    route.on_assignment(1, [1], [0, 1])
    route.on_leads(1, 1, [0])
    assert route.on_assignment(2, [0], [0, 1]) == ([0], [])
    assert route.on_leads(0, 2, [0]) == [0]


def test_a_worker_that_missed_an_assignment_accepts_leads_of_a_newer_one():
    route, _ = opened([0])
    route.on_assignment(2, [0], [0, 1])
    route.on_leads(1, 3, [0])
    assert route.on_assignment(4, [1], [0, 1]) == ([0], [0])


def test_a_broken_connection_closes_its_shards():
    route, _ = opened([0, 1])
    assert route.on_server_lost(1) == [1]
    assert route.closed_shards == {1}


def test_an_order_is_repeated_to_a_server_that_connects_again():
    route, box = opened([0, 0])
    route.servers.append(1)  # which leads no shard
    route.on_leads(1, 0, [])
    for shard in range(2):
        box.add_push(push(0, shard))
        box.on_staged(0, shard)
    box.add_step(Step(0, [], save=True))
    assert sorted(server for server, _ in box.ready_orders()) == [0, 1]
    box.forget_orders(1)
    assert box.unsettled_servers() >= {1}
    assert [(server, step.clock, step.save) for server, step in box.ready_orders()] == [(1, 0, True)]
    assert box.ready_orders() == []
