"""Which servers hold tables: the plan's, or some that are started for them; asked for before or after the plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Connected, MakeShards, PlanMade, ShardsMade
from psctl.coordinator.state.table_placement import hosts_for_tables
from psctl.job.membership_messages import ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import ProcessStarted
from psctl.job.table_server_messages import (
    ServeTables,
    TablesAssigned,
    TablesAt,
    TablesReady,
    TablesWanted,
)
from psctl.job.training_messages import Decision, Join, MemberReady, Prepare
from psctl.types import Address, Member, ServerAt
from tests.helpers.driven_job import (
    A0,
    LAYOUT,
    ORDER,
    PLAN,
    S0,
    W0,
    W1,
    DrivenJob,
    sent,
    started,
)

S1 = Member("server", 1)
HERE = Address("10.0.0.1", 5000)


def serves(job, server=S0):
    """A server comes up as far as listening; returns what is said then."""
    job.receive(A0, ProcessStarted(server, 102))
    job.handle(Connected(server))
    new = job.receive(server, Join(102))
    return new + job.receive(server, MemberReady(Address("10.0.0.1", 4000)))


def test_a_script_without_prepare_gets_a_server_for_its_tables() -> None:
    job = DrivenJob(replace(ORDER, servers=None, strategy="auto")).running()
    job.receive(W0, Join(1))
    assert started(job.receive(W0, TablesWanted())) == [(S0, 0)]
    assert started(job.receive(W1, TablesWanted())) == []
    assert sent(serves(job), ServeTables) == [(S0, ServeTables())]
    answers = sent(job.receive(S0, TablesReady(HERE)), TablesAt)
    assert answers == [(worker, TablesAt([ServerAt(0, 0, HERE)], 8)) for worker in (W0, W1)]
    again = sent(job.receive(W1, TablesWanted()), TablesAt)
    assert again == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_the_plans_servers_hold_tables_too() -> None:
    job = DrivenJob().training()
    assert sent(job.receive(W1, TablesWanted()), ServeTables) == [(S0, ServeTables())]
    assert sent(job.receive(S0, TablesReady(HERE)), TablesAt) == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_begins_with_the_servers_that_are_there_and_tables_stay_where_they_are() -> None:
    job = DrivenJob(replace(ORDER, servers=None)).running()
    job.receive(W0, TablesWanted())
    serves(job)
    job.receive(S0, TablesReady(HERE))
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, ()))
    assert started(job.handle(PlanMade("ps", "server", [0, 1], PLAN))) == [(S1, 1)]
    assert MakeShards(LAYOUT, 2, near=False) in serves(job, S1)
    decided = sent(job.handle(ShardsMade([], [])), Decision)
    assert [member for member, _ in decided] == [S0, S1, W0, W1]
    assert sent(job.receive(W1, TablesWanted()), TablesAt) == [(W1, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_of_the_servers_that_are_there_is_cut_at_once() -> None:
    job = DrivenJob().running()
    job.receive(W0, TablesWanted())
    serves(job)
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, ()))
    assert job.handle(PlanMade("ps", "server", [0], PLAN))[-1] == MakeShards(LAYOUT, 1, near=False)


def two(replicas: int | None, servers: int = 2) -> DrivenJob:
    """A job that counts words: no `prepare`, tables on two servers."""
    job = DrivenJob(replace(ORDER, servers=servers, restarts=3, replicas=replicas, strategy="auto")).running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, TablesWanted())
    for server in (S0, S1):
        serves(job, server)
        job.receive(server, TablesReady(HERE))
    return job


def test_a_server_with_replicas_is_lost_without_going_back_and_replaced() -> None:
    job = two(1)
    (_, first), (_, other) = sent(job.instructions, TablesAssigned)
    assert first == other
    assert first.begins
    assert {len(chain) for chain in first.assignment.chains} == {2}
    new = job.exits(S0, status=-9, exception="killed by signal 9")
    assert {each.assignment.epoch for _, each in sent(new, TablesAssigned)} == {1}
    assert all(each.assignment.chains == [[1]] * 8 for _, each in sent(new, TablesAssigned))
    assert [member for member, _ in sent(new, TablesAt)] == [W0, W1]
    again = Member("server", 0, 1)
    assert started(new) == [(again, 0)]
    job.receive(A0, ProcessStarted(again, 103))
    job.handle(Connected(again))
    assert sent(job.receive(again, Join(103)), ServeTables) == [(again, ServeTables())]
    new = job.receive(again, TablesReady(HERE))
    filled = dict(sent(new, TablesAssigned))
    assert filled.keys() == {again, S1}
    assert not filled[again].begins
    copies = filled[again].assignment.copies
    assert copies == [[0]] * 8
    for shard in range(8):
        new = job.receive(S1, ShardCaughtUp(filled[again].assignment.epoch, shard, 0, tables=True))
    job.wait(1)
    newest = sent(job.instructions, TablesAssigned)[-1][1].assignment
    assert all(sorted(chain) == [0, 1] for chain in newest.chains)
    assert {chain[0] for chain in newest.chains} == {0, 1}
    assert job.machine.job.tables.placement.transfers
    for shard, chain in enumerate(newest.chains):
        if chain[0] == 0:
            job.receive(S1, ShardHandedOver(newest.epoch, shard, tables=True))
    assert sent(job.instructions, TablesAt)[-1][1].epoch == newest.epoch
    assert job.machine.job.restart is None
    assert job.machine.job.losses.survived == 1


def test_without_replicas_the_loss_of_a_server_restarts_all() -> None:
    job = two(0)
    job.exits(S0, status=-9, exception="killed by signal 9")
    job.wait(1)
    assert job.machine.job.restart is not None


def test_tables_that_are_requested_while_training_get_a_server_of_their_own() -> None:
    job = DrivenJob(replace(ORDER, strategy="native", servers=None)).prepared()
    job.handle(PlanMade("native", "worker", [], PLAN))
    for worker in (W0, W1):
        job.receive(worker, MemberReady())
    assert started(job.receive(W0, TablesWanted())) == [(S0, 0)]
    assert sent(serves(job), Decision) == []
    assert sent(job.receive(S0, TablesReady(HERE)), TablesAt) == [(W0, TablesAt([ServerAt(0, 0, HERE)], 8))]


def test_a_plan_without_servers_leaves_those_of_tables_alone() -> None:
    job = DrivenJob(replace(ORDER, strategy="native")).running()
    job.receive(W0, TablesWanted())
    serves(job)
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, ()))
    new = job.handle(PlanMade("native", "worker", [], PLAN))
    decided = sent(new, Decision)
    assert [member for member, _ in decided] == [W0, W1]
    assert decided[0][1].assignment.servers == []


@pytest.mark.parametrize("hosts", [ORDER.hosts, [replace(ORDER.hosts[0], may_serve=False)]])
def test_where_there_can_be_no_server_the_worker_gets_the_reason(hosts) -> None:
    order = replace(ORDER, servers=0) if len(hosts) == 2 else replace(ORDER, hosts=hosts)
    job = DrivenJob(order).running() if len(hosts) == 2 else DrivenJob(order)
    answers = sent(job.receive(W0, TablesWanted()), TablesAt)
    assert [(member, bool(answer.servers)) for member, answer in answers] == [(W0, False)]
    assert ("servers: 0" if len(hosts) == 2 else "no host") in answers[0][1].problem


def test_servers_for_tables_sit_on_hosts_without_workers_first() -> None:
    idle = replace(ORDER.hosts[0], name="h2", workers=0)
    assert hosts_for_tables(replace(ORDER, hosts=[*ORDER.hosts, idle], servers=None)) == [2]
    assert hosts_for_tables(replace(ORDER, hosts=[*ORDER.hosts, idle], servers=4)) == [2, 0, 1, 2]


def test_a_server_whose_tables_do_not_come_is_named() -> None:
    job = DrivenJob().running()
    job.receive(W0, TablesWanted())
    serves(job)
    job.wait(121)
    failures = [failure for failure in job.machine.job.ending.failures if "hold tables" in failure.exception]
    assert failures
    assert "server/0" in failures[0].exception
