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
from psctl.job.membership_messages import Reassign
from psctl.job.process_messages import EndProcesses, HoldSlots, ProcessStarted, StopWanted
from psctl.job.training_messages import Join, Leave, MemberReady, Prepare, Resume
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.driven_job import (
    A0,
    A1,
    ELASTIC,
    LAYOUT,
    PLAN,
    S3,
    W0,
    W1,
    DrivenJob,
    S,
    appended,
    asks,
    move,
    newest,
    sent,
    training,
)


def test_a_server_that_comes_gets_its_share() -> None:
    job = training()
    before = len(job.instructions)
    answer = asks(job, servers=4)
    assert (answer.problem, answer.workers, answer.servers) == ("", 2, 3)
    assert [each.member for each in job.instructions[before:] if isinstance(each, StartMember)] == [S3]
    listens_on(job, S3)
    move(job)
    now = newest(job)
    assert any(3 in chain for chain in now.chains)
    assert not any(now.copies)
    assert {member for member, each in sent(job.instructions, Reassign) if each.assignment == now} == {
        *S, S3, W0, W1,
    }  # fmt: skip


def listens_on(job: DrivenJob, server: Member) -> None:
    start = next(each for each in job.instructions if isinstance(each, StartMember) and each.member == server)
    job.receive((A0, A1)[start.host], ProcessStarted(server, 300))
    job.listens(server)


def test_a_server_that_goes_leaves_when_it_holds_nothing_and_that_is_no_loss() -> None:
    job = training()
    assert asks(job, servers=2).problem == ""
    assert sent(job.instructions, Leave) == []
    move(job)
    assert sent(job.instructions, Leave) == [(S[2], Leave("the job continues with fewer servers"))]
    assert all(2 not in chain for chain in newest(job).chains)
    job.exits(S[2], 0)
    job.wait(1)
    assert job.machine.state == "running"
    assert sent(job.instructions, EndProcesses) == []


def test_a_second_change_waits_for_the_first() -> None:
    job = training()
    asks(job, servers=4)
    assert asks(job, servers=2).problem == "servers are joining or leaving already"


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
    job = DrivenJob(order).prepared()
    job.handle(plan)
    job.receive(W0, MemberReady())
    job.receive(W1, MemberReady())
    answer = asks(job, workers, servers)
    assert why in answer.problem
    assert "psctl checkpoint restore digits-3@latest" in answer.hint


@pytest.mark.parametrize(
    ("servers", "why"), [(0, "one server at least"), (1, "1 replicas of every shard need 2 servers")]
)
def test_too_few_servers_are_refused(servers: int, why: str) -> None:
    assert why in asks(training(), servers=servers).problem


def test_a_job_that_starts_or_ends_is_refused() -> None:
    assert asks(DrivenJob(ELASTIC).prepared(), servers=4).problem == "the job does not train yet"
    job = training()
    job.receive(A0, StopWanted(False, False, "psctl stop"))
    assert asks(job, servers=4).problem == "the job is ending"


def test_no_host_for_another_server_is_refused() -> None:
    order = replace(ELASTIC, hosts=[replace(host, may_serve=False) for host in ELASTIC.hosts])
    assert "no host of the job may hold another server" in asks(training(order), servers=4).problem


ROOMY = replace(ELASTIC, hosts=[replace(host, slots=2) for host in ELASTIC.hosts])


def left(job: DrivenJob) -> None:
    """All workers come to a common step, save and leave."""
    for worker in (W0, W1):
        ((_, propose), *_) = sent(job.instructions, ProposeCut)
        job.receive(worker, CutPosition(propose.ticket, 7))
    assert {(each.step, each.save, each.stop) for _, each in sent(job.instructions, CutAt)} == {(8, True, True)}
    for member in (W0, W1, *S):
        job.receive(member, SaveBegin(8, []))
        job.receive(member, SaveEnd(8))
    for worker in (W0, W1):
        job.exits(worker, 0)


def test_another_number_of_workers_starts_from_a_common_step_and_loses_none() -> None:
    job = training(ROOMY)
    for worker in (W0, W1):
        job.report(worker, 8, loss=1.0)
    assert asks(job, workers=3, servers=2).problem == ""
    left(job)
    assert sent(job.instructions, EndProcesses) == []  # the checkpoint is not whole yet
    job.handle(CheckpointCommitted(8, "/c/8", 8, 0.1))
    ends = sent(job.instructions, EndProcesses)
    assert {member for _, each in ends for member in each.members} == set(S)
    for server in S:
        job.exits(server, -15)
    assert job.instructions[-1] == FindRestorable()
    before = len(job.instructions)
    job.handle(RestorableFound(Resume("digits-3@8", 8, {}, [])))
    starts = [each for each in job.instructions[before:] if isinstance(each, StartMember)]
    assert [(str(each.member), each.member.incarnation, each.host, each.world) for each in starts] == [
        ("worker/0", 1, 0, 3), ("worker/1", 1, 0, 3), ("worker/2", 0, 1, 3),
    ]  # fmt: skip
    assert starts[0].environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    for start in starts:
        job.handle(Connected(start.member))
        job.receive(start.member, Join(1))
        new = job.receive(start.member, Prepare(LAYOUT, ()))
    (plan,) = [each for each in new if isinstance(each, MakePlan)]
    assert (plan.order.servers, plan.order.strategy) == (2, "ps")
    assert appended(job.instructions, events.WorkerLost) == []


def test_fewer_workers_leave_from_the_end_of_the_roster() -> None:
    job = training(ROOMY)
    assert asks(job, workers=1).problem == ""
    left(job)
    job.handle(CheckpointCommitted(8, "/c/8", 8, 0.1))
    for server in S:
        job.exits(server, -15)
    before = len(job.instructions)
    job.handle(RestorableFound(Resume("digits-3@8", 8, {}, [])))
    assert [str(each.member) for each in job.instructions[before:] if isinstance(each, StartMember)] == ["worker/0"]
    assert sent(job.instructions[before:], HoldSlots) == [
        (A0, HoldSlots(1)),
        (A1, HoldSlots(0)),
    ], "another job may have the slot"


def test_more_workers_than_slots_are_refused() -> None:
    assert asks(training(ROOMY), workers=5).problem == "5 workers do not fit: the job's hosts have 4 slots"


def test_a_death_on_the_way_to_the_common_step_goes_back_to_the_checkpoint_before_with_the_new_number() -> None:
    job = training(ROOMY)
    asks(job, workers=3)
    job.exits(W1, -9, "killed by signal 9 (SIGKILL)")
    job.wait(0.4)
    for member in (W0, *S):
        job.exits(member, -15)
    before = len(job.instructions)
    job.handle(RestorableFound(None))
    assert len([each for each in job.instructions[before:] if isinstance(each, StartMember)]) == 3


def test_workers_that_do_not_come_to_a_common_step_are_ended() -> None:
    job = training(ROOMY)
    asks(job, workers=3)
    job.wait(301)
    assert {member for _, each in sent(job.instructions, EndProcesses) for member in each.members} == {
        W0,
        W1,
        *S,
    }


def test_a_server_that_is_lost_while_it_comes_is_replaced() -> None:
    job = training()
    asks(job, servers=4)
    listens_on(job, S3)
    start = next(each for each in job.instructions if isinstance(each, StartMember) and each.member == S3)
    new = job.killed(S3, (A0, A1)[start.host])
    assert [each.member for each in new if isinstance(each, StartMember)] == [replace(S3, incarnation=1)]
