"""Stops and checkpoints while servers and workers join and leave: which of them are awaited, and which are informed."""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state.instructions import CheckpointCommitted, CommitCheckpoint, Connected
from psctl.job.checkpoint_messages import CheckpointSaved, ProposeCut, SaveBegin, SaveEnd
from psctl.job.membership_messages import Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import StopProcesses, StopWanted
from psctl.job.training_messages import Join, Leave, MemberReady, Prepare
from psctl.types import Member
from tests.helpers.driven_job import (
    A0,
    ELASTIC,
    LAYOUT,
    W0,
    W1,
    DrivenJob,
    S,
    again,
    answer,
    asks,
    move,
    newest,
    notices,
    sent,
    training,
)

STOP = StopWanted(True, False, "psctl stop")


def refilled(job: DrivenJob, server: Member) -> DrivenJob:
    """A server is lost, and its replacement is filled."""
    job.killed(server)
    job.listens(again(server))
    before = newest(job)
    leading = {0: S[0], 1: S[1], 2: S[2], server.rank: again(server)}
    for shard, copying in enumerate(before.copies):
        for number in copying:
            job.receive(leading[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    job.wait(0.1)
    return job


def replaced(job: DrivenJob) -> DrivenJob:
    """Worker 1 is lost; its replacement is started, and does not train yet."""
    job.killed(W1)
    job.handle(Connected(again(W1)))
    job.receive(again(W1), Join(9))
    for server, shards in zip(S, ([0, 1], [2], [3, 4, 5]), strict=True):
        answer(job, server, 7, shards)
    job.receive(again(W1), Prepare(LAYOUT, ()))
    return job


def test_how_many_copies_shards_have_is_reported_at_a_death_and_when_they_are_whole_again() -> None:
    job = training()
    job.killed(S[1])
    assert "if it is lost before another is filled, all ranks go back to the start" in notices(job.instructions)[-1]
    job = refilled(training(), S[1])
    assert "every shard is on 2 servers again" in notices(job.instructions)


def test_a_stop_during_a_transfer_still_informs_workers_of_it() -> None:
    job = training()
    asks(job, servers=2)
    before = newest(job)
    for shard, copying in enumerate(before.copies):
        for number in copying:
            job.receive(S[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    job.wait(0.1)
    after = newest(job)
    start = len(job.instructions)
    job.receive(A0, STOP)
    moved = [shard for shard, (old, new) in enumerate(zip(before.owners, after.owners, strict=True)) if old != new]
    assert moved
    for shard in moved:
        job.receive(S[before.owners[shard]], ShardHandedOver(after.epoch, shard))
    news = [member for member, _ in sent(job.instructions[start:], Reassign)]
    assert news == [W0, W1], "without it they would wait for who is silent, and never come to the common step"


def test_a_stop_begins_no_new_move() -> None:
    job = training()
    job.killed(S[1])
    job.listens(again(S[1]))
    job.receive(A0, STOP)
    before = newest(job)
    for shard, copying in enumerate(before.copies):
        for number in copying:
            job.receive({0: S[0], 2: S[2]}[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    job.wait(1.0)
    assert newest(job) == before


def test_a_stop_waits_for_a_worker_that_is_being_replaced_and_stops_it_too() -> None:
    job = replaced(training())
    job.receive(A0, STOP)
    assert notices(job.instructions)[-1] == "the stop waits until worker/1 on h1 trains again"
    job.wait(1.0)
    assert sent(job.instructions, ProposeCut) == []
    job.receive(again(W1), MemberReady())
    job.wait(0.1)
    assert [member for member, _ in sent(job.instructions, ProposeCut)] == [W0, again(W1)]
    assert notices(job.instructions).count("stop wanted by psctl stop") == 1


def test_a_stop_by_force_does_not_wait() -> None:
    job = replaced(training())
    job.receive(A0, STOP)
    assert sent(job.receive(A0, StopWanted(False, True, "psctl stop")), StopProcesses)


def test_a_stop_that_waits_ends_the_job_when_all_have_to_start_again() -> None:
    job = replaced(training())
    job.receive(A0, STOP)
    job.killed(S[0])
    job.killed(S[1])
    job.wait(1.0)
    assert sent(job.instructions, StopProcesses)


def test_workers_are_not_scaled_while_one_is_being_replaced() -> None:
    answered = asks(replaced(training()), workers=1)
    assert answered.problem == "worker/1 on h1 is being started again"


def sends(job: DrivenJob, step: int, *members: Member) -> list:  # type: ignore[type-arg]
    new = []
    for member in members:
        new += job.receive(member, SaveBegin(step, []))
        new += job.receive(member, SaveEnd(step))
    return new


def commits(new: list) -> list[int]:  # type: ignore[type-arg]
    return [each.step for each in new if isinstance(each, CommitCheckpoint)]


def test_a_checkpoint_does_not_wait_for_a_server_that_leads_nothing() -> None:
    job = training()
    job.killed(S[1])
    job.listens(again(S[1]))
    new = sends(job, 9, W0, W1, S[0], S[2])
    assert commits(new) == [9]
    (commit,) = [each for each in new if isinstance(each, CommitCheckpoint)]
    assert commit.parameters == ["w"]


def test_a_part_that_was_begun_is_awaited_from_any_sender() -> None:
    job = training()
    job.killed(S[1])
    job.listens(again(S[1]))
    job.receive(again(S[1]), SaveBegin(9, []))
    assert commits(sends(job, 9, W0, W1, S[0], S[2])) == []
    assert commits(job.receive(again(S[1]), SaveEnd(9))) == [9]


def test_an_empty_part_that_comes_after_the_checkpoint_is_whole_begins_no_other() -> None:
    job = training()
    job.killed(S[1])
    job.listens(again(S[1]))
    sends(job, 9, W0, W1, S[0], S[2])
    job.handle(CheckpointCommitted(9, "there", 1, 0.1))
    assert commits(sends(job, 9, again(S[1]))) == []
    job.exits(W0)
    job.exits(W1)
    job.wait(1.0)
    assert sent(job.instructions, Leave), "nothing is waited for at the end"


def test_a_move_makes_senders_of_those_that_lead_now() -> None:
    job = training(replace(ELASTIC, replicas=0))
    asks(job, servers=2)
    move(job)
    assert commits(sends(job, 9, W0, W1, S[0], S[1])) == [9]


def test_a_part_of_a_checkpoint_that_failed_is_answered_to_workers_only() -> None:
    """A server that receives the result of a checkpoint refuses it, and is lost."""
    job = training()
    job.receive(W0, SaveBegin(40, []))
    job.handle(CheckpointCommitted(40, problem="Read-only file system"))
    assert not sent(job.receive(S[0], SaveBegin(40, [])), CheckpointSaved)
    ((member, saved),) = sent(job.receive(W0, SaveBegin(40, [])), CheckpointSaved)
    assert (member, saved.problem) == (W0, "it was given up")
