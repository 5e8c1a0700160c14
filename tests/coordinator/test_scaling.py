"""psctl scale: what is refused and why, servers that come and servers that go."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    Connected,
    FindRestorable,
    MakePlan,
    PlanMade,
    RestorableFound,
    StartMember,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CutAt, CutPosition, ProposeCut, SaveBegin, SaveEnd
from psctl.job.membership_messages import Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import EndProcesses, HoldSlots, ProcessStarted, ScaleAnswer, ScaleWanted, StopWanted
from psctl.job.training_messages import Join, Leave, MemberReady, Prepare, Resume
from psctl.orders import JobOrder
from psctl.types import Assignment, Member
from tests.coordinator.play import A0, A1, LAYOUT, PLAN, W0, W1, Play, appended, told
from tests.coordinator.test_surviving import ELASTIC, S, dies, listens, training

FOURTH = Member("server", 3)
EVERYONE = {member.rank: member for member in [*S, FOURTH]}


def asks(play: Play, workers: int | None = None, servers: int | None = None) -> ScaleAnswer:
    new = play.hear(A0, ScaleWanted(7, workers, servers))
    ((member, answer),) = told(new, ScaleAnswer)
    assert (member, answer.ticket) == (A0, 7)
    found: ScaleAnswer = answer
    return found


def newest(play: Play) -> Assignment:
    found: Assignment = told(play.said, Reassign)[-1][1].assignment
    return found


def move(play: Play) -> None:
    """Every copy catches up; every server that is to hand over does."""
    before = newest(play)
    for shard, copying in enumerate(before.copies):
        for server in copying:
            play.hear(EVERYONE[before.owners[shard]], ShardCaughtUp(before.epoch, shard, server))
    play.wait(0.1)
    after = newest(play)
    for shard, (old, new) in enumerate(zip(before.owners, after.owners, strict=True)):
        if old != new:
            play.hear(EVERYONE[old], ShardHandedOver(after.epoch, shard))


def test_a_server_that_comes_gets_its_share() -> None:
    play = training()
    before = len(play.said)
    answer = asks(play, servers=4)
    assert (answer.problem, answer.workers, answer.servers) == ("", 2, 3)
    assert [each.member for each in play.said[before:] if isinstance(each, StartMember)] == [FOURTH]
    listens_on(play, FOURTH)
    move(play)
    now = newest(play)
    assert any(3 in chain for chain in now.chains)
    assert not any(now.copies)
    assert {member for member, each in told(play.said, Reassign) if each.assignment == now} == {
        *S, FOURTH, W0, W1,
    }  # fmt: skip


def listens_on(play: Play, server: Member) -> None:
    start = next(each for each in play.said if isinstance(each, StartMember) and each.member == server)
    play.hear((A0, A1)[start.host], ProcessStarted(server, 300))
    listens(play, server)


def test_a_server_that_goes_leaves_when_it_holds_nothing_and_that_is_no_loss() -> None:
    play = training()
    assert asks(play, servers=2).problem == ""
    assert told(play.said, Leave) == []
    move(play)
    assert told(play.said, Leave) == [(S[2], Leave("the job goes on with fewer servers"))]
    assert all(2 not in chain for chain in newest(play).chains)
    play.exits(S[2], 0)
    play.wait(1)
    assert play.mind.state == "running"
    assert told(play.said, EndProcesses) == []


def test_a_second_change_waits_for_the_first() -> None:
    play = training()
    asks(play, servers=4)
    assert asks(play, servers=2).problem == "servers are coming or going already"


@pytest.mark.parametrize(
    ("order", "plan", "workers", "servers", "why"),
    [
        (ELASTIC, PlanMade("native", "worker", [], PLAN), None, 2, "strategy native sums over a fixed number"),
        (ELASTIC, PlanMade("native", "worker", [], PLAN), 3, None, "strategy native sums over a fixed number"),
    ],
)
def test_collectives_are_refused_with_the_reason(
    order: JobOrder, plan: PlanMade, workers: int | None, servers: int | None, why: str
) -> None:
    play = Play(order).prepared()
    play(plan)
    play.hear(W0, MemberReady())
    play.hear(W1, MemberReady())
    answer = asks(play, workers, servers)
    assert why in answer.problem
    assert "psctl checkpoint restore digits-3@latest" in answer.hint


@pytest.mark.parametrize(
    ("servers", "why"), [(0, "one server at least"), (1, "1 replicas of every shard need 2 servers")]
)
def test_too_few_servers_are_refused(servers: int, why: str) -> None:
    assert why in asks(training(), servers=servers).problem


def test_a_job_that_starts_or_ends_is_refused() -> None:
    assert asks(Play(ELASTIC).prepared(), servers=4).problem == "the job does not train yet"
    play = training()
    play.hear(A0, StopWanted(False, False, "psctl stop"))
    assert asks(play, servers=4).problem == "the job is ending"


def test_no_host_for_another_server_is_refused() -> None:
    order = replace(ELASTIC, hosts=[replace(host, may_serve=False) for host in ELASTIC.hosts])
    assert "no host of the job may hold another server" in asks(training(order), servers=4).problem


ROOMY = replace(ELASTIC, hosts=[replace(host, slots=2) for host in ELASTIC.hosts])


def left(play: Play) -> None:
    """All workers come to a common step, save and leave."""
    for worker in (W0, W1):
        ((_, propose), *_) = told(play.said, ProposeCut)
        play.hear(worker, CutPosition(propose.ticket, 7))
    assert {(each.step, each.save, each.stop) for _, each in told(play.said, CutAt)} == {(8, True, True)}
    for member in (W0, W1, *S):
        play.hear(member, SaveBegin(8, []))
        play.hear(member, SaveEnd(8))
    for worker in (W0, W1):
        play.exits(worker, 0)


def test_another_number_of_workers_starts_from_a_common_step_and_loses_none() -> None:
    play = training(ROOMY)
    for worker in (W0, W1):
        play.report(worker, 8, loss=1.0)
    assert asks(play, workers=3, servers=2).problem == ""
    left(play)
    assert told(play.said, EndProcesses) == []  # the checkpoint is not whole yet
    play(CheckpointCommitted(8, "/c/8", 8, 0.1))
    ends = told(play.said, EndProcesses)
    assert {member for _, each in ends for member in each.members} == set(S)
    for server in S:
        play.exits(server, -15)
    assert play.said[-1] == FindRestorable()
    before = len(play.said)
    play(RestorableFound(Resume("digits-3@8", 8, {}, [])))
    starts = [each for each in play.said[before:] if isinstance(each, StartMember)]
    assert [(str(each.member), each.member.incarnation, each.host, each.world) for each in starts] == [
        ("worker/0", 1, 0, 3), ("worker/1", 1, 0, 3), ("worker/2", 0, 1, 3),
    ]  # fmt: skip
    assert starts[0].environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    for start in starts:
        play(Connected(start.member))
        play.hear(start.member, Join(1))
        new = play.hear(start.member, Prepare(LAYOUT, ()))
    (plan,) = [each for each in new if isinstance(each, MakePlan)]
    assert (plan.order.servers, plan.order.strategy) == (2, "ps")
    assert appended(play.said, events.WorkerLost) == []


def test_fewer_workers_leave_from_the_end_of_the_roster() -> None:
    play = training(ROOMY)
    assert asks(play, workers=1).problem == ""
    left(play)
    play(CheckpointCommitted(8, "/c/8", 8, 0.1))
    for server in S:
        play.exits(server, -15)
    before = len(play.said)
    play(RestorableFound(Resume("digits-3@8", 8, {}, [])))
    assert [str(each.member) for each in play.said[before:] if isinstance(each, StartMember)] == ["worker/0"]
    assert told(play.said[before:], HoldSlots) == [
        (A0, HoldSlots(1)),
        (A1, HoldSlots(0)),
    ], "another job may have the slot"


def test_more_workers_than_slots_are_refused() -> None:
    assert asks(training(ROOMY), workers=5).problem == "5 workers do not fit: the job's hosts have 4 slots"


def test_a_death_on_the_way_to_the_common_step_goes_back_to_the_checkpoint_before_with_the_new_number() -> None:
    play = training(ROOMY)
    asks(play, workers=3)
    play.exits(W1, -9, "killed by signal 9 (SIGKILL)")
    play.wait(0.4)
    for member in (W0, *S):
        play.exits(member, -15)
    before = len(play.said)
    play(RestorableFound(None))
    assert len([each for each in play.said[before:] if isinstance(each, StartMember)]) == 3


def test_workers_that_do_not_come_to_a_common_step_are_ended() -> None:
    play = training(ROOMY)
    asks(play, workers=3)
    play.wait(301)
    assert {member for _, each in told(play.said, EndProcesses) for member in each.members} == {
        W0,
        W1,
        *S,
    }


def test_a_server_that_dies_while_it_comes_is_replaced() -> None:
    play = training()
    asks(play, servers=4)
    listens_on(play, FOURTH)
    start = next(each for each in play.said if isinstance(each, StartMember) and each.member == FOURTH)
    new = dies(play, FOURTH, (A0, A1)[start.host])
    assert [each.member for each in new if isinstance(each, StartMember)] == [replace(FOURTH, incarnation=1)]
