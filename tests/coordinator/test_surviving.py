"""Deaths under ps from which the job goes on at once: servers with replicas, workers that the store has all of."""

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
from psctl.job.process_messages import EndProcesses, ProcessExited, ProcessFailure, ProcessStarted, StopProcesses
from psctl.job.training_messages import Decision, Go, Heartbeat, Join, MemberReady, Prepare, Resume, Welcome
from psctl.orders import JobOrder
from psctl.types import Address, Member, Range, Shard
from tests.coordinator.play import A0, A1, LAYOUT, ORDER, PLAN, W0, W1, Play, appended, told

S = [Member("server", rank) for rank in range(3)]
AGENT = {0: A0, 1: A1, 2: A0, 3: A1}
SHARDS = [Shard(index, "float32", Range(index, index + 1)) for index in range(6)]
ELASTIC = replace(ORDER, servers=3, restarts=9, replicas=1, on_worker_loss="wait")


def again(member: Member) -> Member:
    return replace(member, incarnation=member.incarnation + 1)


def listens(play: Play, server: Member) -> None:
    play.hear(AGENT[server.rank], ProcessStarted(server, 300))
    play(Connected(server))
    play.hear(server, Join(300))
    play.hear(server, MemberReady(Address("10.0.0.1", 4000 + server.rank + 10 * server.incarnation)))


def training(order: JobOrder = ELASTIC) -> Play:
    play = Play(order).prepared()
    play(PlanMade("ps", "server", [0, 1, 0], PLAN))
    for server in S:
        listens(play, server)
    play(ShardsMade(SHARDS, [8] * 6))
    play.hear(W0, MemberReady())
    play.hear(W1, MemberReady())
    return play


def dies(play: Play, member: Member, agent: object = None) -> list:  # type: ignore[type-arg]
    where = agent or (AGENT[member.rank] if member.role == "server" else {0: A0, 1: A1}[member.rank])
    failure = ProcessFailure(str(member), "h", -9, 0.0, 0, "killed by signal 9 (SIGKILL)", [], [])
    new = play(ConnectionLost(member, "closed"))
    return [*new, *play.hear(where, ProcessExited(member, -9, failure))]  # type: ignore[arg-type]


# ---- servers -------------------------------------------------------------------------------------------------------


def test_a_shard_lies_on_two_servers_from_the_start() -> None:
    (decision, *_) = [each for _, each in told(training().said, Decision)]
    assert all(len(chain) == 2 for chain in decision.assignment.chains)


def test_at_a_servers_death_its_shards_have_another_head_at_once_and_it_is_replaced() -> None:
    play = training()
    new = dies(play, S[1])
    news = told(new, Reassign)
    assert [member for member, _ in news] == [S[0], S[2], W0, W1]
    assignment = news[0][1].assignment
    assert assignment.epoch == 1
    assert all(1 not in chain for chain in assignment.chains)
    assert [event.rank for event in appended(new, events.ServerLost)] == [1]
    assert [(each.member, each.host) for each in new if isinstance(each, StartMember)] == [(again(S[1]), 1)]
    assert play.mind.state == "running"
    assert FindRestorable() not in play.said


def test_the_replacement_is_filled_and_takes_its_share() -> None:
    play = training()
    dies(play, S[1])
    start = len(play.said)
    listens(play, again(S[1]))
    (told_it,) = [each for member, each in told(play.said[start:], Decision) if member == again(S[1])]
    assert all(1 not in chain for chain in told_it.assignment.chains)
    (*_, (_, news)) = told(play.said[start:], Reassign)
    copying = [shard for shard, found in enumerate(news.assignment.copies) if 1 in found]
    assert copying
    assert [at.incarnation for at in news.assignment.servers] == [0, 1, 0]
    for shard, found in enumerate(news.assignment.copies):
        for server in found:
            head = next(each for each in (S[0], again(S[1]), S[2]) if each.rank == news.assignment.chains[shard][0])
            play.hear(head, ShardCaughtUp(news.assignment.epoch, shard, server))
    last = [each for _, each in told(play.said, Reassign)][-1].assignment
    for shard in copying:
        assert 1 in last.chains[shard]


def test_without_a_replica_a_servers_death_restarts_all() -> None:
    play = training(replace(ELASTIC, replicas=0))
    dies(play, S[1])
    play.wait(0.4)
    assert told(play.said, Reassign) == []
    assert {agent for agent, _ in told(play.said, EndProcesses)} == {A0, A1}


def test_a_checkpoint_under_way_is_given_up_when_a_server_dies() -> None:
    play = training()
    play.hear(W0, SaveBegin(7, []))
    new = dies(play, S[1])
    assert DiscardCheckpoint(7) in new
    assert [each.step for _, each in told(new, CheckpointSaved)] == [7, 7]


def test_a_rank_that_does_not_reach_a_living_server_is_named_once() -> None:
    play = training()
    for _ in range(2):
        play.hear(W1, ServerUnreachable(0, 0, "no word for 5 s"))
    notices = [event.text for event in appended(play.said, events.Notice) if "reach" in event.text]
    assert notices == ["worker/1 on h1 does not reach server/0, which runs: no word for 5 s"]


# ---- workers -------------------------------------------------------------------------------------------------------


def answer(play: Play, server: Member, clock: int, shards: list[int], version: int | None = None) -> list:  # type: ignore[type-arg]
    held = dict.fromkeys(shards, clock)
    return play.hear(
        server,
        LostWorkerClocks(1, 0, held, dict.fromkeys(shards, clock if version is None else version)),
    )


def cut(play: Play) -> list:  # type: ignore[type-arg]
    """All servers have clock 7 of worker/1, one shard has 8."""
    answer(play, S[0], 7, [0, 1], 8)
    answer(play, S[1], 8, [2], 8)
    return answer(play, S[2], 7, [3, 4, 5], 8)


def test_the_least_clock_that_every_shard_has_is_the_last_that_counts() -> None:
    play = training()
    new = dies(play, W1)
    gone = WorkerGone(1, 0)
    assert told(new, WorkerGone) == [(server, gone) for server in S]
    assert [each.member for each in new if isinstance(each, StartMember)] == [again(W1)]
    assert told(answer(play, S[0], 7, [0, 1]), CountUntil) == []
    answer(play, S[1], 8, [2])
    new = answer(play, S[2], 7, [3, 4, 5])
    assert told(new, CountUntil) == [(server, CountUntil(1, 0, 7)) for server in S]


def test_a_replacement_is_let_in_when_the_cut_is_known_and_goes_on_after_it() -> None:
    play = training()
    dies(play, W1)
    replacement = again(W1)
    play(Connected(replacement))
    assert told(play.hear(replacement, Join(9)), Welcome) == []
    ((member, welcome),) = told(cut(play), Welcome)
    assert (member, welcome.resume) == (replacement, Resume("", 8, {}, []))
    ((member, decision),) = told(play.hear(replacement, Prepare(LAYOUT, ())), Decision)
    assert (member, decision.resume, decision.assignment.epoch) == (replacement, Resume("", 8, {}, []), 0)
    assert told(play.hear(replacement, MemberReady()), Go) == [(replacement, Go())]
    assert [event.rank for event in appended(play.said, events.WorkerLost)] == [1]


def test_one_that_joins_after_the_cut_is_let_in_at_once() -> None:
    play = training()
    dies(play, W1)
    cut(play)
    play(Connected(again(W1)))
    assert len(told(play.hear(again(W1), Join(9)), Welcome)) == 1


def test_a_servers_death_during_a_cut_asks_those_that_are_left_again() -> None:
    play = training()
    dies(play, W1)
    answer(play, S[0], 7, [0, 1])
    new = dies(play, S[2])
    assert [member for member, _ in told(new, WorkerGone)] == [S[0], S[1]]
    answer(play, S[0], 7, [0, 1, 3])
    new = answer(play, S[1], 8, [2, 4, 5])
    assert [each.clock for _, each in told(new, CountUntil)] == [7, 7]


def test_a_server_that_dies_before_a_replacement_has_its_start_values_restarts_all() -> None:
    play = training()
    dies(play, W1)
    cut(play)
    dies(play, S[1])
    play.wait(0.4)
    assert told(play.said, Reassign) == []
    assert {agent for agent, _ in told(play.said, EndProcesses)} == {A0, A1}


def test_a_server_that_dies_after_that_is_survived() -> None:
    play = training()
    dies(play, W1)
    cut(play)
    replacement = again(W1)
    play(Connected(replacement))
    play.hear(replacement, Join(9))
    play.hear(replacement, Prepare(LAYOUT, ()))
    play.hear(replacement, MemberReady())
    assert told(dies(play, S[1]), Reassign)


@pytest.mark.parametrize(("step", "survives"), [(8, False), (9, True)])
def test_under_continue_a_server_that_dies_before_the_cut_clock_is_applied_restarts_all(
    step: int, survives: bool
) -> None:
    play = training(replace(ELASTIC, on_worker_loss="continue"))
    dies(play, W1)
    cut(play)  # clock 7 of worker/1 counts, and the dead server may have its only copy
    play.hear(W0, NextClock(1, 8))
    play.hear(W0, Heartbeat(step, "compute"))
    assert bool(told(dies(play, S[1]), Reassign)) is survives
    play.wait(6)
    assert bool(told(play.said, EndProcesses)) is not survives


def test_a_cut_that_contradicts_what_was_applied_restarts_all() -> None:
    play = training()
    dies(play, W1)
    answer(play, S[0], 5, [0, 1, 2])
    answer(play, S[1], 7, [3, 4, 5], 8)
    play.wait(6)
    assert told(play.said, CountUntil) == []
    assert told(play.said, EndProcesses)


@pytest.mark.parametrize(("version", "clock"), [(8, 7), (9, 8)])
def test_what_is_in_a_hosts_sum_counts_only_where_some_shard_has_all_orders_of_the_clock(
    version: int, clock: int
) -> None:
    play = training()
    dies(play, W1)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        separate = {3: 7} if 3 in shards else {}
        held = dict.fromkeys(shards, 8)
        play.hear(server, LostWorkerClocks(1, 0, held, dict.fromkeys(shards, version), separate_clocks=separate))
    assert {each.clock for _, each in told(play.said, CountUntil)} == {clock}


def test_where_nobody_is_left_to_order_a_clock_the_last_applied_one_is_the_last_that_counts() -> None:
    play = training()
    dies(play, W1)
    dies(play, W0)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        for rank in (0, 1):  # both pushed clock 7, nobody ordered it
            held = dict.fromkeys(shards, 7)
            play.hear(server, LostWorkerClocks(rank, 0, held, held, 8))
    clocks = {each.rank: each.clock for _, each in told(play.said, CountUntil)}
    assert clocks == {0: 6, 1: 6}  # both do clock 7 again, and order it


HELD = ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5]))


def held(play: Play, rank: int, clocks: dict[int, int], version: int, rank_state_clock: int = -1) -> list:  # type: ignore[type-arg]
    """All servers tell of a dead worker; `clocks`: of these shards, 6 of the others."""
    new = []
    for server, shards in HELD:
        versions = dict.fromkeys(shards, version)
        new += play.hear(
            server,
            LostWorkerClocks(rank, 0, {shard: clocks.get(shard, 6) for shard in shards}, versions, rank_state_clock),
        )
    return new


def test_of_two_that_are_dead_at_once_the_earlier_cut_is_boths() -> None:
    play = training()
    dies(play, W1)
    dies(play, W0)
    all_of_it = dict.fromkeys(range(6), 7)
    assert told(held(play, 1, all_of_it, 7), CountUntil) == []  # it waits for what is said of worker/0
    new = held(play, 0, {0: 7}, 7, rank_state_clock=8)
    assert {each.rank: each.clock for _, each in told(new, CountUntil)} == {0: 6, 1: 6}


def test_nobody_is_cut_where_one_of_those_who_are_dead_cannot_be() -> None:
    play = training()
    dies(play, W1)
    dies(play, W0)
    held(play, 1, {}, 6)
    held(play, 0, {}, 6)  # its own state is nowhere: it cannot go on
    play.wait(6)
    assert told(play.said, CountUntil) == []
    assert told(play.said, EndProcesses)


@pytest.mark.parametrize(("first", "survives"), [(7, False), (8, True)])
def test_a_replacement_orders_only_what_comes_after_its_cut(first: int, survives: bool) -> None:
    play = training(replace(ELASTIC, staleness=2))
    dies(play, W1)
    assert told(held(play, 1, dict.fromkeys(range(6), 7), 7), CountUntil)  # it goes on with clock 8
    dies(play, W0)
    for server, shards in HELD:  # it pushed clocks 7 and 8; some shard has not applied `first`
        versions = {shard: first if shard == 5 else 8 for shard in shards}
        play.hear(server, LostWorkerClocks(0, 0, dict.fromkeys(shards, 8), versions, 9))
    play.wait(6)
    assert bool(told(play.said, EndProcesses)) is not survives


@pytest.mark.parametrize(("clocks", "survives"), [({0: 7}, False), ({}, True)])
def test_a_later_death_that_would_drop_what_another_dead_one_pushed_restarts_all(
    clocks: dict[int, int], survives: bool
) -> None:
    play = training()
    dies(play, W1)
    assert told(held(play, 1, dict.fromkeys(range(6), 7), 7), CountUntil)  # its clock 7 counts
    dies(play, W0)
    new = held(play, 0, clocks, 7, rank_state_clock=8)
    play.wait(6)
    assert bool(told(new, CountUntil)) is survives
    assert bool(told(play.said, EndProcesses)) is not survives


@pytest.mark.parametrize(("rank_state_clock", "version", "clocks"), [(8, 7, [7]), (7, 7, [6]), (7, 8, []), (-1, 8, [])])
def test_worker_0_is_cut_where_its_own_state_is_with_the_servers_else_all_start_again(
    rank_state_clock: int, version: int, clocks: list[int]
) -> None:
    play = training()
    dies(play, W0)
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        versions = dict.fromkeys(shards, version)
        play.hear(
            server,
            LostWorkerClocks(0, 0, dict.fromkeys(shards, 7), versions, rank_state_clock if 0 in shards else -1),
        )
    assert [each.clock for _, each in told(play.said, CountUntil)] == clocks * 3


def test_servers_that_do_not_answer_restart_all() -> None:
    play = training()
    dies(play, W1)
    play.wait(10.5)
    play.wait(6)
    assert told(play.said, EndProcesses)


def test_continue_goes_on_with_fewer_from_the_clock_after_the_cut() -> None:
    play = training(replace(ELASTIC, on_worker_loss="continue"))
    new = dies(play, W1)
    assert [each for each in new if isinstance(each, StartMember)] == []
    assert told(new, NextClockWanted) == [(W0, NextClockWanted(1))]
    assert told(cut(play), Members) == []  # servers wait for the dead one until all have answered
    play.hear(W0, SaveBegin(9, [], {}))
    new = play.hear(W0, NextClock(1, 10))
    assert told(new, Members) == [(each, Members(8, [0])) for each in S]
    assert told(new, ExamplesShared) == [(W0, ExamplesShared(1, 10, [0], {1: 8}))]
    assert [each.step for each in new if isinstance(each, DiscardCheckpoint)] == [
        9,
        10,
    ]  # they lack what joins clock 10
    assert [each.step for _, each in told(new, CheckpointSaved)] == [9, 10]
    play.exits(W0, 0)
    assert play.mind.state == "stopping"


def test_under_continue_who_comes_later_is_told_what_was_decided() -> None:
    play = training(replace(ELASTIC, on_worker_loss="continue"))
    dies(play, W1)
    cut(play)
    play.hear(W0, NextClock(1, 8))
    play.hear(W0, Heartbeat(9, "compute"))
    dies(play, S[1])
    start = len(play.said)
    listens(play, again(S[1]))
    new = [each for member, each in told(play.said[start:], JobMessage) if member == again(S[1])]
    kinds = (Decision, CountUntil, Members)
    assert [each for each in new if isinstance(each, kinds)][1:] == [
        CountUntil(1, -1, 7),
        Members(8, [0]),
    ]
    dies(play, W0)
    play.hear(again(W0), Join(1))
    for server, shards in ((S[0], [0, 1, 2]), (S[2], [3, 4, 5])):
        held = dict.fromkeys(shards, 9)
        play.hear(server, LostWorkerClocks(0, 0, held, held, 10 if 0 in shards else -1))
    start = len(play.said)
    play.hear(again(W0), Prepare(LAYOUT, ()))
    (decision, shared) = [each for member, each in told(play.said[start:], JobMessage) if member == again(W0)]
    assert decision.elastic
    assert shared == ExamplesShared(1, 8, [0], {1: 8})


def test_under_continue_two_that_die_together_are_divided_once() -> None:
    hosts = [replace(ORDER.hosts[0], workers=1, slots=2), replace(ORDER.hosts[1], workers=1, slots=2)]
    play = training(replace(ELASTIC, hosts=hosts, on_worker_loss="continue"))
    dies(play, W1)
    dies(play, W0)  # it had not answered; its place is taken, and its cut says what it had begun
    for server, shards in ((S[0], [0, 1]), (S[1], [2]), (S[2], [3, 4, 5])):
        for rank, last in ((0, 8), (1, 7)):
            held = dict.fromkeys(shards, last)
            play.hear(
                server,
                LostWorkerClocks(rank, 0, held, dict.fromkeys(shards, 8), 9 if 0 in shards else -1),
            )
    assert told(play.said, Members)[0] == (S[0], Members(8, [0]))
    play.hear(again(W0), Join(1))
    start = len(play.said)
    play.hear(again(W0), Prepare(LAYOUT, ()))
    shared = [each for _, each in told(play.said[start:], ExamplesShared)]
    assert shared == [ExamplesShared(1, 8, [0], {1: 8})]


def test_under_continue_rank_0_is_replaced_all_the_same() -> None:
    play = training(replace(ELASTIC, on_worker_loss="continue"))
    assert [each.member for each in dies(play, W0) if isinstance(each, StartMember)] == [again(W0)]


def test_with_the_optimizer_on_workers_a_workers_death_restarts_all() -> None:
    play = Play(ELASTIC).prepared()
    play(PlanMade("ps", "worker", [0, 1, 0], PLAN))
    for server in S:
        listens(play, server)
    play(ShardsMade(SHARDS, [8] * 6))
    for worker in (W0, W1):
        play.hear(worker, MemberReady())
    dies(play, W1)
    play.wait(0.4)
    assert told(play.said, EndProcesses)


def test_a_lost_host_takes_a_server_and_a_worker_and_both_are_replaced_elsewhere() -> None:
    play = training(replace(ELASTIC, hosts=[replace(host, slots=2) for host in ORDER.hosts]))
    new = play(ConnectionLost(A1, "no word for 5 s"))
    starts = {each.member: each.host for each in new if isinstance(each, StartMember)}
    assert starts == {again(W1): 0, again(S[1]): 0}
    assert told(new, Reassign)
    assert [member for member, _ in told(new, WorkerGone)] == [S[0], S[2]]


def test_each_loss_counts_and_beyond_the_last_the_job_ends() -> None:
    play = training(replace(ELASTIC, restarts=1))
    dies(play, S[1])
    dies(play, W1)
    play.wait(0.4)
    assert told(play.said, StopProcesses)
