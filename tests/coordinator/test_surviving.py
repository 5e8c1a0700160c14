"""Losses under ps after which the job continues at once: servers with replicas, workers whose state is in the store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    Connected,
    ConnectionLost,
    DiscardCheckpoint,
    FindRestorable,
    PlanMade,
    ShardsMade,
    StartMember,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointSaved, SaveBegin
from psctl.job.membership_messages import (
    CountUntil,
    ExamplesShared,
    LostWorkerClocks,
    Members,
    NextClock,
    NextClockWanted,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    WorkerGone,
)
from psctl.job.message import JobMessage
from psctl.job.process_messages import EndProcesses, StopProcesses
from psctl.job.training_messages import Decision, Go, Heartbeat, Join, MemberReady, Prepare, Resume, Welcome
from psctl.types import Member
from tests.helpers.driven_job import (
    A0,
    A1,
    ELASTIC,
    LAYOUT,
    ORDER,
    PLAN,
    SHARDS,
    W0,
    W1,
    DrivenJob,
    S,
    again,
    answer,
    appended,
    sent,
    training,
)
from tests.helpers.orders import make_hosts

# ---- servers -------------------------------------------------------------------------------------------------------


def test_a_shard_lies_on_two_servers_from_the_start() -> None:
    (decision, *_) = [each for _, each in sent(training().instructions, Decision)]
    assert all(len(chain) == 2 for chain in decision.assignment.chains)


def test_at_a_servers_death_its_shards_have_another_head_at_once_and_it_is_replaced() -> None:
    job = training()
    new = job.killed(S[1])
    news = sent(new, Reassign)
    assert [member for member, _ in news] == [S[0], S[2], W0, W1]
    assignment = news[0][1].assignment
    assert assignment.epoch == 1
    assert all(1 not in chain for chain in assignment.chains)
    assert [event.rank for event in appended(new, events.ServerLost)] == [1]
    assert [(each.member, each.host) for each in new if isinstance(each, StartMember)] == [(again(S[1]), 1)]
    assert job.machine.state == "running"
    assert FindRestorable() not in job.instructions


def test_the_replacement_is_filled_and_takes_its_share() -> None:
    job = training()
    job.killed(S[1])
    start = len(job.instructions)
    job.listens(again(S[1]))
    (told_it,) = [each for member, each in sent(job.instructions[start:], Decision) if member == again(S[1])]
    assert all(1 not in chain for chain in told_it.assignment.chains)
    (*_, (_, news)) = sent(job.instructions[start:], Reassign)
    copying = [shard for shard, found in enumerate(news.assignment.copies) if 1 in found]
    assert copying
    assert [at.incarnation for at in news.assignment.servers] == [0, 1, 0]
    for shard, found in enumerate(news.assignment.copies):
        for server in found:
            head = next(each for each in (S[0], again(S[1]), S[2]) if each.rank == news.assignment.chains[shard][0])
            job.receive(head, ShardCaughtUp(news.assignment.epoch, shard, server))
    last = [each for _, each in sent(job.instructions, Reassign)][-1].assignment
    for shard in copying:
        assert 1 in last.chains[shard]


def test_without_a_replica_a_servers_death_restarts_all() -> None:
    job = training(replace(ELASTIC, replicas=0))
    job.killed(S[1])
    job.wait(0.4)
    assert sent(job.instructions, Reassign) == []
    assert {agent for agent, _ in sent(job.instructions, EndProcesses)} == {A0, A1}


def test_a_checkpoint_under_way_is_given_up_when_a_server_is_lost() -> None:
    job = training()
    job.receive(W0, SaveBegin(7, []))
    new = job.killed(S[1])
    assert DiscardCheckpoint(7) in new
    assert [each.step for _, each in sent(new, CheckpointSaved)] == [7, 7]


def test_a_rank_that_does_not_reach_a_living_server_is_named_once() -> None:
    job = training()
    for _ in range(2):
        job.receive(W1, ServerUnreachable(0, 0, "no word for 5 s"))
    notices = [event.text for event in appended(job.instructions, events.Notice) if "connect" in event.text]
    assert notices == ["worker/1 on h1 cannot connect to server/0 on h0, which runs: no word for 5 s"]


# ---- workers -------------------------------------------------------------------------------------------------------


def cut(job: DrivenJob) -> list:  # type: ignore[type-arg]
    """All servers have clock 7 of worker/1, one shard has 8."""
    answer(job, S[0], 7, [0, 1], 8)
    answer(job, S[1], 8, [2], 8)
    return answer(job, S[2], 7, [3, 4, 5], 8)


def test_the_least_clock_that_every_shard_has_is_the_last_that_counts() -> None:
    job = training()
    new = job.killed(W1)
    gone = WorkerGone(1, 0)
    assert sent(new, WorkerGone) == [(server, gone) for server in S]
    assert [each.member for each in new if isinstance(each, StartMember)] == [again(W1)]
    assert sent(answer(job, S[0], 7, [0, 1]), CountUntil) == []
    answer(job, S[1], 8, [2])
    new = answer(job, S[2], 7, [3, 4, 5])
    assert sent(new, CountUntil) == [(server, CountUntil(1, 0, 7)) for server in S]


def test_a_replacement_is_let_in_when_the_cut_is_known_and_continues_after_it() -> None:
    job = training()
    job.killed(W1)
    replacement = again(W1)
    job.handle(Connected(replacement))
    assert sent(job.receive(replacement, Join(9)), Welcome) == []
    ((member, welcome),) = sent(cut(job), Welcome)
    assert (member, welcome.resume) == (replacement, Resume("", 8, {}, []))
    ((member, decision),) = sent(job.receive(replacement, Prepare(LAYOUT, ())), Decision)
    assert (member, decision.resume, decision.assignment.epoch) == (replacement, Resume("", 8, {}, []), 0)
    assert sent(job.receive(replacement, MemberReady()), Go) == [(replacement, Go())]
    assert [event.rank for event in appended(job.instructions, events.WorkerLost)] == [1]


def test_one_that_joins_after_the_cut_is_let_in_at_once() -> None:
    job = training()
    job.killed(W1)
    cut(job)
    job.handle(Connected(again(W1)))
    assert len(sent(job.receive(again(W1), Join(9)), Welcome)) == 1


def test_a_servers_loss_during_a_cut_repeats_the_request_to_the_remaining_servers() -> None:
    job = training()
    job.killed(W1)
    answer(job, S[0], 7, [0, 1])
    new = job.killed(S[2])
    assert [member for member, _ in sent(new, WorkerGone)] == [S[0], S[1]]
    answer(job, S[0], 7, [0, 1, 3])
    new = answer(job, S[1], 8, [2, 4, 5])
    assert [each.clock for _, each in sent(new, CountUntil)] == [7, 7]


def test_a_server_that_is_lost_before_a_replacement_has_its_start_values_restarts_all() -> None:
    job = training()
    job.killed(W1)
    cut(job)
    job.killed(S[1])
    job.wait(0.4)
    assert sent(job.instructions, Reassign) == []
    assert {agent for agent, _ in sent(job.instructions, EndProcesses)} == {A0, A1}


def test_a_server_that_is_lost_after_that_is_survived() -> None:
    job = training()
    job.killed(W1)
    cut(job)
    replacement = again(W1)
    job.handle(Connected(replacement))
    job.receive(replacement, Join(9))
    job.receive(replacement, Prepare(LAYOUT, ()))
    job.receive(replacement, MemberReady())
    assert sent(job.killed(S[1]), Reassign)


@pytest.mark.parametrize(("step", "survives"), [(8, False), (9, True)])
def test_under_continue_a_server_that_is_lost_before_the_cut_clock_is_applied_restarts_all(
    step: int, survives: bool
) -> None:
    job = training(replace(ELASTIC, on_worker_loss="continue"))
    job.killed(W1)
    cut(job)  # clock 7 of worker/1 counts, and the dead server may have its only copy
    job.receive(W0, NextClock(1, 8))
    job.receive(W0, Heartbeat(step, "compute"))
    assert bool(sent(job.killed(S[1]), Reassign)) is survives
    job.wait(6)
    assert bool(sent(job.instructions, EndProcesses)) is not survives


def test_a_cut_that_contradicts_what_was_applied_restarts_all() -> None:
    job = training()
    job.killed(W1)
    answer(job, S[0], 5, [0, 1, 2])
    answer(job, S[1], 7, [3, 4, 5], 8)
    job.wait(6)
    assert sent(job.instructions, CountUntil) == []
    assert sent(job.instructions, EndProcesses)


@pytest.mark.parametrize(("version", "clock"), [(8, 7), (9, 8)])
def test_what_is_in_a_hosts_sum_counts_only_where_some_shard_has_all_orders_of_the_clock(
    version: int, clock: int
) -> None:
    job = training()
    job.killed(W1)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        separate = {3: 7} if 3 in shards else {}
        held = dict.fromkeys(shards, 8)
        job.receive(server, LostWorkerClocks(1, 0, held, dict.fromkeys(shards, version), separate_clocks=separate))
    assert {each.clock for _, each in sent(job.instructions, CountUntil)} == {clock}


def test_where_no_worker_is_left_to_order_a_clock_the_last_applied_one_is_the_last_that_counts() -> None:
    job = training()
    job.killed(W1)
    job.killed(W0)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        for rank in (0, 1):  # both pushed clock 7, nobody ordered it
            held = dict.fromkeys(shards, 7)
            job.receive(server, LostWorkerClocks(rank, 0, held, held, 8))
    clocks = {each.rank: each.clock for _, each in sent(job.instructions, CountUntil)}
    assert clocks == {0: 6, 1: 6}  # both do clock 7 again, and order it


HELD = ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5]))


def held(job: DrivenJob, rank: int, clocks: dict[int, int], version: int, rank_state_clock: int = -1) -> list:  # type: ignore[type-arg]
    """All servers tell of a dead worker; `clocks`: of these shards, 6 of the others."""
    new = []
    for server, shards in HELD:
        versions = dict.fromkeys(shards, version)
        new += job.receive(
            server,
            LostWorkerClocks(rank, 0, {shard: clocks.get(shard, 6) for shard in shards}, versions, rank_state_clock),
        )
    return new


def test_of_two_workers_lost_at_once_the_earlier_cut_is_valid_for_both() -> None:
    job = training()
    job.killed(W1)
    job.killed(W0)
    all_of_it = dict.fromkeys(range(6), 7)
    assert sent(held(job, 1, all_of_it, 7), CountUntil) == []  # it waits for what is said of worker/0
    new = held(job, 0, {0: 7}, 7, rank_state_clock=8)
    assert {each.rank: each.clock for _, each in sent(new, CountUntil)} == {0: 6, 1: 6}


def test_no_cut_is_made_where_one_of_the_lost_workers_cannot_be_cut() -> None:
    job = training()
    job.killed(W1)
    job.killed(W0)
    held(job, 1, {}, 6)
    held(job, 0, {}, 6)  # its own state is nowhere: it cannot go on
    job.wait(6)
    assert sent(job.instructions, CountUntil) == []
    assert sent(job.instructions, EndProcesses)


@pytest.mark.parametrize(("first", "survives"), [(7, False), (8, True)])
def test_a_replacement_orders_only_what_comes_after_its_cut(first: int, survives: bool) -> None:
    job = training(replace(ELASTIC, staleness=2))
    job.killed(W1)
    assert sent(held(job, 1, dict.fromkeys(range(6), 7), 7), CountUntil)  # it goes on with clock 8
    job.killed(W0)
    for server, shards in HELD:  # it pushed clocks 7 and 8; some shard has not applied `first`
        versions = {shard: first if shard == 5 else 8 for shard in shards}
        job.receive(server, LostWorkerClocks(0, 0, dict.fromkeys(shards, 8), versions, 9))
    job.wait(6)
    assert bool(sent(job.instructions, EndProcesses)) is not survives


@pytest.mark.parametrize(("clocks", "survives"), [({0: 7}, False), ({}, True)])
def test_a_later_loss_that_would_drop_a_push_of_another_lost_worker_restarts_all(
    clocks: dict[int, int], survives: bool
) -> None:
    job = training()
    job.killed(W1)
    assert sent(held(job, 1, dict.fromkeys(range(6), 7), 7), CountUntil)  # its clock 7 counts
    job.killed(W0)
    new = held(job, 0, clocks, 7, rank_state_clock=8)
    job.wait(6)
    assert bool(sent(new, CountUntil)) is survives
    assert bool(sent(job.instructions, EndProcesses)) is not survives


@pytest.mark.parametrize(("rank_state_clock", "version", "clocks"), [(8, 7, [7]), (7, 7, [6]), (7, 8, []), (-1, 8, [])])
def test_worker_0_is_cut_where_its_own_state_is_with_the_servers_else_all_start_again(
    rank_state_clock: int, version: int, clocks: list[int]
) -> None:
    job = training()
    job.killed(W0)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        versions = dict.fromkeys(shards, version)
        job.receive(
            server,
            LostWorkerClocks(0, 0, dict.fromkeys(shards, 7), versions, rank_state_clock if 0 in shards else -1),
        )
    assert [each.clock for _, each in sent(job.instructions, CountUntil)] == clocks * 3


def test_servers_that_do_not_answer_restart_all() -> None:
    job = training()
    job.killed(W1)
    job.wait(10.5)
    job.wait(6)
    assert sent(job.instructions, EndProcesses)


def test_under_continue_fewer_workers_train_from_the_clock_after_the_cut() -> None:
    job = training(replace(ELASTIC, on_worker_loss="continue"))
    new = job.killed(W1)
    assert [each for each in new if isinstance(each, StartMember)] == []
    assert sent(new, NextClockWanted) == [(W0, NextClockWanted(1))]
    assert sent(cut(job), Members) == []  # servers wait for the dead one until all have answered
    job.receive(W0, SaveBegin(9, [], {}))
    new = job.receive(W0, NextClock(1, 10))
    assert sent(new, Members) == [(each, Members(8, [0])) for each in S]
    assert sent(new, ExamplesShared) == [(W0, ExamplesShared(1, 10, [0], {1: 8}))]
    assert [each.step for each in new if isinstance(each, DiscardCheckpoint)] == [
        9,
        10,
    ]  # they lack what joins clock 10
    assert [each.step for _, each in sent(new, CheckpointSaved)] == [9, 10]
    job.exits(W0, 0)
    assert job.machine.state == "stopping"


def test_under_continue_a_later_replacement_gets_the_decision() -> None:
    job = training(replace(ELASTIC, on_worker_loss="continue"))
    job.killed(W1)
    cut(job)
    job.receive(W0, NextClock(1, 8))
    job.receive(W0, Heartbeat(9, "compute"))
    job.killed(S[1])
    start = len(job.instructions)
    job.listens(again(S[1]))
    new = [each for member, each in sent(job.instructions[start:], JobMessage) if member == again(S[1])]
    kinds = (Decision, CountUntil, Members)
    assert [each for each in new if isinstance(each, kinds)][1:] == [
        CountUntil(1, -1, 7),
        Members(8, [0]),
    ]
    job.killed(W0)
    job.receive(again(W0), Join(1))
    for server, shards in ((S[0], [0, 1, 2]), (S[2], [3, 4, 5])):
        held = dict.fromkeys(shards, 9)
        job.receive(server, LostWorkerClocks(0, 0, held, held, 10 if 0 in shards else -1))
    start = len(job.instructions)
    job.receive(again(W0), Prepare(LAYOUT, ()))
    (decision, shared) = [each for member, each in sent(job.instructions[start:], JobMessage) if member == again(W0)]
    assert decision.elastic
    assert shared == ExamplesShared(1, 8, [0], {1: 8})


def test_under_continue_the_examples_of_two_lost_together_are_divided_once() -> None:
    hosts = [replace(ORDER.hosts[0], workers=1, slots=2), replace(ORDER.hosts[1], workers=1, slots=2)]
    job = training(replace(ELASTIC, hosts=hosts, on_worker_loss="continue"))
    job.killed(W1)
    job.killed(W0)  # it had not answered; its place is taken, and its cut says what it had begun
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        for rank, last in ((0, 8), (1, 7)):
            held = dict.fromkeys(shards, last)
            job.receive(
                server,
                LostWorkerClocks(rank, 0, held, dict.fromkeys(shards, 8), 9 if 0 in shards else -1),
            )
    assert sent(job.instructions, Members)[0] == (S[0], Members(8, [0]))
    job.receive(again(W0), Join(1))
    start = len(job.instructions)
    job.receive(again(W0), Prepare(LAYOUT, ()))
    shared = [each for _, each in sent(job.instructions[start:], ExamplesShared)]
    assert shared == [ExamplesShared(1, 8, [0], {1: 8})]


def test_under_continue_what_a_worker_did_before_it_was_replaced_counts_as_begun() -> None:
    """Else the examples of clock 8 that worker/1 had drawn are in no step: rank 0's next batch is that of clock 9."""
    hosts = [replace(ORDER.hosts[0], workers=1, slots=2), replace(ORDER.hosts[1], workers=1, slots=2)]
    job = training(replace(ELASTIC, hosts=hosts, on_worker_loss="continue"))
    for lost, last in ((W0, 8), (W1, 7)):
        job.killed(lost)
        for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
            held, applied = dict.fromkeys(shards, last), dict.fromkeys(shards, 8)
            job.receive(server, LostWorkerClocks(lost.rank, 0, held, applied, 9 if 0 in shards else -1))
    assert [each.clock for _, each in sent(job.instructions, CountUntil)] == [8, 8, 8, 7, 7, 7]
    assert sent(job.instructions, Members)[0] == (S[0], Members(8, [0]))
    job.receive(again(W0), Join(1))
    start = len(job.instructions)
    job.receive(again(W0), Prepare(LAYOUT, ()))
    assert [each for _, each in sent(job.instructions[start:], ExamplesShared)] == [ExamplesShared(1, 9, [0], {1: 8})]


def test_under_continue_rank_0_is_replaced_all_the_same() -> None:
    job = training(replace(ELASTIC, on_worker_loss="continue"))
    assert [each.member for each in job.killed(W0) if isinstance(each, StartMember)] == [again(W0)]


def test_with_the_optimizer_on_workers_a_workers_death_restarts_all() -> None:
    job = DrivenJob(ELASTIC).prepared()
    job.handle(PlanMade("ps", "worker", [0, 1, 0], PLAN))
    for server in S:
        job.listens(server)
    job.handle(ShardsMade(SHARDS, [8] * 6))
    for worker in (W0, W1):
        job.receive(worker, MemberReady())
    job.killed(W1)
    job.wait(0.4)
    assert sent(job.instructions, EndProcesses)


def test_a_lost_host_takes_a_server_and_a_worker_and_both_are_replaced_elsewhere() -> None:
    job = training(replace(ELASTIC, hosts=[replace(host, slots=2) for host in ORDER.hosts]))
    new = job.handle(ConnectionLost(A1, "no word for 5 s"))
    starts = {each.member: each.host for each in new if isinstance(each, StartMember)}
    assert starts == {again(W1): 0, again(S[1]): 0}
    assert sent(new, Reassign)
    assert [member for member, _ in sent(new, WorkerGone)] == [S[0], S[2]]


def test_each_loss_counts_and_beyond_the_last_the_job_ends() -> None:
    job = training(replace(ELASTIC, restarts=1))
    job.killed(S[1])
    job.killed(W1)
    job.wait(0.4)
    assert sent(job.instructions, StopProcesses)


def test_two_workers_of_a_lost_host_that_fit_nowhere_together_restart_all() -> None:
    """One slot is free: each would fit alone."""

    class FourWorkers(DrivenJob):
        def agent_of(self, member: Member) -> Member:
            return Member("agent", self.machine.job.ranks[member].host)

    hosts = [replace(host, slots=2) for host in make_hosts(2, 1, 2)]
    job = FourWorkers(replace(ELASTIC, hosts=hosts, servers=1, replicas=0))
    job.register()
    workers = [Member("worker", rank) for rank in range(5)]
    for worker in workers:
        job.prepares(worker, LAYOUT)
    job.handle(PlanMade("ps", "server", [0], PLAN))
    job.listens(S[0])
    job.handle(ShardsMade(SHARDS, [8] * 6))
    for worker in workers:
        job.receive(worker, MemberReady())
    assert job.machine.job.training
    job.handle(ConnectionLost(Member("agent", 2), "reset"))
    job.wait(0.4)
    assert {member for _, each in sent(job.instructions, EndProcesses) for member in each.members} >= {W0, W1, S[0]}
