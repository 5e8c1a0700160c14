"""Which servers hold tables: the plan's, or some that are started for them; asked for before or after the plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Connected, MakeShards, PlanMade, ShardsMade, StartMember
from psctl.coordinator.state.table_placement import hosts_for_tables
from psctl.job.process_messages import ProcessStarted
from psctl.job.table_server_messages import (
    ServeTables,
    TablesAssigned,
    TablesAt,
    TablesCaughtUp,
    TablesHandedOver,
    TablesReady,
    TablesWanted,
)
from psctl.job.training_messages import Decision, Join, MemberReady, Prepare
from psctl.types import Address, Member, ServerAt
from tests.coordinator.play import A0, LAYOUT, ORDER, PLAN, S0, W0, W1, Play, told

S1 = Member("server", 1)
HERE = Address("10.0.0.1", 5000)


def serves(play, server=S0):
    """A server comes up as far as listening; returns what is said then."""
    play.hear(A0, ProcessStarted(server, 102))
    play(Connected(server))
    said = play.hear(server, Join(102))
    return said + play.hear(server, MemberReady(Address("10.0.0.1", 4000)))


def starts(said) -> list[tuple[Member, int]]:
    return [(each.member, each.host) for each in said if isinstance(each, StartMember)]


def test_a_script_without_prepare_gets_a_server_for_its_tables() -> None:
    play = Play(replace(ORDER, servers=None, strategy="auto")).running()
    play.hear(W0, Join(1))
    assert starts(play.hear(W0, TablesWanted())) == [(S0, 0)]
    assert starts(play.hear(W1, TablesWanted())) == []
    assert told(serves(play), ServeTables) == [(S0, ServeTables())]
    answers = told(play.hear(S0, TablesReady(HERE)), TablesAt)
    assert answers == [(worker, TablesAt([ServerAt(0, 0, HERE)], 8)) for worker in (W0, W1)]
    again = told(play.hear(W1, TablesWanted()), TablesAt)
    assert again == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_the_plans_servers_hold_tables_too() -> None:
    play = Play().training()
    assert told(play.hear(W1, TablesWanted()), ServeTables) == [(S0, ServeTables())]
    assert told(play.hear(S0, TablesReady(HERE)), TablesAt) == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_begins_with_the_servers_that_are_there_and_tables_stay_where_they_are() -> None:
    play = Play(replace(ORDER, servers=None)).running()
    play.hear(W0, TablesWanted())
    serves(play)
    play.hear(S0, TablesReady(HERE))
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
        play.hear(worker, Prepare(LAYOUT, ()))
    assert starts(play(PlanMade("ps", "server", [0, 1], PLAN))) == [(S1, 1)]
    assert MakeShards(LAYOUT, 2, near=False) in serves(play, S1)
    decided = told(play(ShardsMade([], [])), Decision)
    assert [member for member, _ in decided] == [S0, S1, W0, W1]
    assert told(play.hear(W1, TablesWanted()), TablesAt) == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_of_the_servers_that_are_there_is_cut_at_once() -> None:
    play = Play().running()
    play.hear(W0, TablesWanted())
    serves(play)
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
        play.hear(worker, Prepare(LAYOUT, ()))
    assert play(PlanMade("ps", "server", [0], PLAN))[-1] == MakeShards(LAYOUT, 1, near=False)


def two(replicas: int | None, servers: int = 2) -> Play:
    """A job that counts words: no `prepare`, tables on two servers."""
    play = Play(replace(ORDER, servers=servers, restarts=3, replicas=replicas, strategy="auto")).running()
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
        play.hear(worker, TablesWanted())
    for server in (S0, S1):
        serves(play, server)
        play.hear(server, TablesReady(HERE))
    return play


def test_a_server_with_replicas_is_lost_without_going_back_and_replaced() -> None:
    play = two(1)
    (_, first), (_, other) = told(play.said, TablesAssigned)
    assert first == other
    assert first.begins
    assert {len(chain) for chain in first.assignment.chains} == {2}
    said = play.exits(S0, status=-9, exception="killed by signal 9")
    assert {each.assignment.epoch for _, each in told(said, TablesAssigned)} == {1}
    assert all(each.assignment.chains == [[1]] * 8 for _, each in told(said, TablesAssigned))
    assert [member for member, _ in told(said, TablesAt)] == [W0, W1]
    again = Member("server", 0, 1)
    assert starts(said) == [(again, 0)]
    play.hear(A0, ProcessStarted(again, 103))
    play(Connected(again))
    assert told(play.hear(again, Join(103)), ServeTables) == [(again, ServeTables())]
    said = play.hear(again, TablesReady(HERE))
    filled = dict(told(said, TablesAssigned))
    assert filled.keys() == {again, S1}
    assert not filled[again].begins
    copies = filled[again].assignment.copies
    assert copies == [[0]] * 8
    for shard in range(8):
        said = play.hear(S1, TablesCaughtUp(filled[again].assignment.epoch, shard, 0))
    play.wait(1)
    newest = told(play.said, TablesAssigned)[-1][1].assignment
    assert all(sorted(chain) == [0, 1] for chain in newest.chains)
    assert {chain[0] for chain in newest.chains} == {0, 1}
    assert play.mind.job.tables.placement.transfers
    for shard, chain in enumerate(newest.chains):
        if chain[0] == 0:
            play.hear(S1, TablesHandedOver(newest.epoch, shard))
    assert told(play.said, TablesAt)[-1][1].epoch == newest.epoch
    assert play.mind.job.restart is None
    assert play.mind.job.losses.survived == 1


def test_without_replicas_the_loss_of_a_server_restarts_all() -> None:
    play = two(0)
    play.exits(S0, status=-9, exception="killed by signal 9")
    play.wait(1)
    assert play.mind.job.restart is not None


def test_tables_that_are_asked_for_while_training_get_a_server_of_their_own() -> None:
    play = Play(replace(ORDER, strategy="native", servers=None)).prepared()
    play(PlanMade("native", "worker", [], PLAN))
    for worker in (W0, W1):
        play.hear(worker, MemberReady())
    assert starts(play.hear(W0, TablesWanted())) == [(S0, 0)]
    assert told(serves(play), Decision) == []
    assert told(play.hear(S0, TablesReady(HERE)), TablesAt) == [(W0, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_without_servers_leaves_those_of_tables_alone() -> None:
    play = Play(replace(ORDER, strategy="native")).running()
    play.hear(W0, TablesWanted())
    serves(play)
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
        play.hear(worker, Prepare(LAYOUT, ()))
    said = play(PlanMade("native", "worker", [], PLAN))
    decided = told(said, Decision)
    assert [member for member, _ in decided] == [W0, W1]
    assert decided[0][1].assignment.servers == []


@pytest.mark.parametrize("hosts", [ORDER.hosts, [replace(ORDER.hosts[0], may_serve=False)]])
def test_where_there_can_be_no_server_the_worker_is_told_why(hosts) -> None:
    order = replace(ORDER, servers=0) if len(hosts) == 2 else replace(ORDER, hosts=hosts)
    play = Play(order).running() if len(hosts) == 2 else Play(order)
    answers = told(play.hear(W0, TablesWanted()), TablesAt)
    assert [(member, bool(answer.servers)) for member, answer in answers] == [(W0, False)]
    assert ("servers: 0" if len(hosts) == 2 else "no host") in answers[0][1].problem


def test_servers_for_tables_sit_on_hosts_without_workers_first() -> None:
    idle = replace(ORDER.hosts[0], name="h2", workers=0)
    assert hosts_for_tables(replace(ORDER, hosts=[*ORDER.hosts, idle], servers=None)) == [2]
    assert hosts_for_tables(replace(ORDER, hosts=[*ORDER.hosts, idle], servers=4)) == [2, 0, 1, 2]


def test_a_server_whose_tables_do_not_come_is_named() -> None:
    play = Play().running()
    play.hear(W0, TablesWanted())
    serves(play)
    play.wait(121)
    failures = [failure for failure in play.mind.job.ending.failures if "hold tables" in failure.exception]
    assert failures
    assert "server/0" in failures[0].exception
