"""Whom a worker speaks to, and when a step order may leave."""

from __future__ import annotations

from psctl.ps.dense.client.shard_routes import Route
from psctl.ps.dense.client.unacked_pushes import Outbox
from psctl.ps.messages import Push, Step


def push(clock: int, shard: int) -> Push:
    return Push(shard, clock, 1.0, b"\1", clock)


def opened(owners: list[int]) -> tuple[Route, Outbox]:
    route = Route(owners, sorted(set(owners)))
    for server in set(owners):
        route.leads(server, 0, [shard for shard, owner in enumerate(owners) if owner == server])
    return route, Outbox(route)


def test_an_order_leaves_for_a_server_when_all_pushes_to_others_are_taken():
    _, box = opened([0, 1, 1])
    for shard in range(3):
        box.push(push(0, shard))
    box.step(Step(0, []))
    assert box.orders() == []
    box.taken(0, 1)
    assert box.orders() == []
    box.taken(0, 2)
    assert [server for server, _ in box.orders()] == [0]
    box.taken(0, 0)
    assert [server for server, _ in box.orders()] == [1]
    assert box.orders() == []


def test_with_one_server_an_order_waits_for_nothing():
    _, box = opened([0, 0])
    box.push(push(0, 0))
    box.push(push(0, 1))
    box.step(Step(0, []))
    assert [server for server, _ in box.orders()] == [0]


def test_what_goes_in_a_host_sum_is_taken_before_any_order_leaves():
    _, box = opened([0, 1, 0])
    for shard in range(3):
        box.push(push(0, shard))
    box.beside(0, 0)
    box.beside(0, 2)
    box.step(Step(0, []))
    box.taken(0, 1)
    assert box.orders() == [], "that of shards 0 and 2 does not come on our connection to their own server"
    box.taken(0, 0)
    assert box.orders() == []
    box.alone(0, 2)
    assert [server for server, _ in box.orders()] == [0], "now shard 2's does"
    box.taken(0, 2)
    assert [server for server, _ in box.orders()] == [1]


def test_what_is_said_again_is_in_no_host_sum_any_more():
    _, box = opened([0, 0])
    for shard in range(2):
        box.push(push(0, shard))
        box.beside(0, shard)
    box.step(Step(0, []))
    box.taken(0, 1)
    assert box.orders() == []
    assert [one.shard for one in box.again(0)] == [0]
    assert [server for server, _ in box.orders()] == [0]


def test_where_workers_hold_the_values_nothing_is_ordered_and_a_clock_is_settled_when_all_of_it_is_pushed():
    route, _ = opened([0, 1])
    box = Outbox(route, ordered=False)
    box.push(push(0, 0))
    box.push(push(0, 1))
    assert box.orders() == []
    assert box.unsettled() == {0, 1}
    box.pushed(0, 0)
    assert box.unsettled() == {1}
    box.pushed(0, 1)
    assert box.unsettled() == set()
    kept = box._pushes, box._made, box._untaken, box._behind, box._sent
    assert not any(kept), "a clock that is settled is forgotten"


def test_a_push_that_must_be_sent_again_is_not_taken_any_more_and_holds_the_order_back():
    route, box = opened([0, 1])
    box.push(push(0, 0))
    box.push(push(0, 1))
    box.taken(0, 1)
    route.assigned(1, [0, 2], [0, 2])
    box.moved()
    route.leads(2, 1, [1])
    assert box.again(1) == [push(0, 1)]
    box.step(Step(0, []))
    assert box.orders() == []
    box.taken(0, 1)
    assert [server for server, _ in box.orders()] == [0]


def test_what_is_pushed_is_forgotten_up_to_its_clock():
    _, box = opened([0, 0])
    for clock in range(2):
        for shard in range(2):
            box.push(push(clock, shard))
        box.step(Step(clock, []))
    box.orders()
    box.pushed(1, 0)
    assert box.again(0) == []
    assert box.unacknowledged(0) == {0}
    assert box.holds(0)
    box.pushed(0, 1)
    assert box.unacknowledged(0) == set()
    assert box.again(1) == [push(1, 1)]


def test_a_shard_that_moved_opens_when_its_new_server_leads_by_that_assignment_whoever_speaks_first():
    route, _ = opened([0, 0])
    assert route.leads(1, 1, [1]) == []
    assert route.assigned(1, [0, 1], [0, 1]) == ([1], [1])
    route, _ = opened([0, 0])
    assert route.assigned(1, [0, 1], [0, 1]) == ([1], [])
    assert route.shut == {1}
    assert route.leads(1, 1, [1]) == [1]
    assert route.shut == set()


def test_an_old_word_of_a_server_that_leads_again_does_not_open_its_shard():
    route, _ = opened([0])
    route.assigned(1, [1], [0, 1])
    route.leads(1, 1, [0])
    assert route.assigned(2, [0], [0, 1]) == ([0], [])
    assert route.leads(0, 2, [0]) == [0]


def test_a_worker_that_was_not_told_of_an_assignment_between_takes_the_word_of_it():
    route, _ = opened([0])
    route.assigned(2, [0], [0, 1])
    route.leads(1, 3, [0])
    assert route.assigned(4, [1], [0, 1]) == ([0], [0])


def test_a_connection_that_breaks_shuts_its_shards():
    route, _ = opened([0, 1])
    assert route.lost(1) == [1]
    assert route.shut == {1}
