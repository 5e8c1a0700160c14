"""Whom a worker speaks to, and when a step order may leave."""

from __future__ import annotations

from psctl.ps.dense.client.unacked_pushes import ShardRoutes, UnackedPushes
from psctl.ps.messages import Push, Step


def push(clock: int, shard: int) -> Push:
    return Push(shard, clock, 1.0, b"\1", clock)


def opened(owners: list[int]) -> tuple[ShardRoutes, UnackedPushes]:
    route = ShardRoutes(owners, sorted(set(owners)))
    for server in set(owners):
        route.on_leads(server, 0, [shard for shard, owner in enumerate(owners) if owner == server])
    return route, UnackedPushes(route)


def test_an_order_leaves_for_a_server_when_all_pushes_to_others_are_taken():
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


def test_with_one_server_an_order_waits_for_nothing():
    _, box = opened([0, 0])
    box.add_push(push(0, 0))
    box.add_push(push(0, 1))
    box.add_step(Step(0, []))
    assert [server for server, _ in box.ready_orders()] == [0]


def test_what_goes_in_a_host_sum_is_taken_before_any_order_leaves():
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


def test_what_is_said_again_is_in_no_host_sum_any_more():
    _, box = opened([0, 0])
    for shard in range(2):
        box.add_push(push(0, shard))
        box.note_in_host_sum(0, shard)
    box.add_step(Step(0, []))
    box.on_staged(0, 1)
    assert box.ready_orders() == []
    assert [one.shard for one in box.to_resend(0)] == [0]
    assert [server for server, _ in box.ready_orders()] == [0]


def test_where_workers_hold_the_values_nothing_is_ordered_and_a_clock_is_settled_when_all_of_it_is_pushed():
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
    kept = box._pushes, box._push_count, box._unstaged, box._unstaged_by_server, box._sent
    assert not any(kept), "a clock that is settled is forgotten"


def test_a_push_that_must_be_sent_again_is_not_taken_any_more_and_holds_the_order_back():
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


def test_what_is_pushed_is_forgotten_up_to_its_clock():
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


def test_a_shard_that_moved_opens_when_its_new_server_leads_by_that_assignment_whoever_speaks_first():
    route, _ = opened([0, 0])
    assert route.on_leads(1, 1, [1]) == []
    assert route.on_assignment(1, [0, 1], [0, 1]) == ([1], [1])
    route, _ = opened([0, 0])
    assert route.on_assignment(1, [0, 1], [0, 1]) == ([1], [])
    assert route.closed_shards == {1}
    assert route.on_leads(1, 1, [1]) == [1]
    assert route.closed_shards == set()


def test_an_old_word_of_a_server_that_leads_again_does_not_open_its_shard():
    route, _ = opened([0])
    route.on_assignment(1, [1], [0, 1])
    route.on_leads(1, 1, [0])
    assert route.on_assignment(2, [0], [0, 1]) == ([0], [])
    assert route.on_leads(0, 2, [0]) == [0]


def test_a_worker_that_was_not_told_of_an_assignment_between_takes_the_word_of_it():
    route, _ = opened([0])
    route.on_assignment(2, [0], [0, 1])
    route.on_leads(1, 3, [0])
    assert route.on_assignment(4, [1], [0, 1]) == ([0], [0])


def test_a_connection_that_breaks_shuts_its_shards():
    route, _ = opened([0, 1])
    assert route.on_server_lost(1) == [1]
    assert route.closed_shards == {1}
