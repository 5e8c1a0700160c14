"""A job continues after its coordinator was killed: what goes on, what is given up, and what counts as lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.deadlines import LOST_SLACK
from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CommitCheckpoint,
    Connected,
    DiscardCheckpoint,
    FindRestorable,
    Instruction,
    RestorableFound,
    SendCheckpointCopy,
    StartMember,
    TakenOver,
    Tick,
)
from psctl.coordinator.state.takeover import RECONNECT
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointSaved, CutAt, CutPosition, ProposeCut, SaveBegin, SaveEnd
from psctl.job.process_messages import EndProcesses, ProcessExited, Register, StopWanted
from psctl.job.session_messages import ResumeSession
from psctl.job.training_messages import ScriptFinished
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.driven_job import (
    A0,
    A1,
    ELASTIC,
    ORDER,
    S0,
    W0,
    W1,
    DrivenJob,
    S,
    appended,
    commits,
    notices,
    sent,
    started,
    training,
)

AWAY = 0.8


def take_over(job: DrivenJob, *connect: Member, saving: tuple[int, ...] = ()) -> list[Instruction]:
    """A coordinator takes over; then these members connect again."""
    job.now += AWAY
    new = job.handle(TakenOver(4711))
    for member in connect:
        new += job.handle(Connected(member))
        new += job.receive(member, Register(received=0) if member.role == "agent" else ResumeSession(0, saving))
    return new


def in_training(order: JobOrder = ELASTIC) -> DrivenJob:
    job = training(order)
    for worker in (W0, W1):
        job.report(worker, 10)
    return job


EVERYONE = (A0, A1, W0, W1, *S)


def test_when_all_connect_again_nothing_else_happens() -> None:
    job = in_training()
    new = take_over(job, *EVERYONE)
    assert notices(new) == ["psctl's coordinator was lost; a new one continues the job after 0.8 s"]
    state = appended(new, events.StateChanged)
    assert [(event.role, event.state, event.pid) for event in state] == [("coordinator", "running", 4711)]
    new = job.wait(RECONNECT + 5)
    assert appended(new, events.WorkerLost) == appended(new, events.ServerLost) == started(new) == []
    assert job.machine.state == "running"


def test_a_server_that_runs_and_does_not_connect_again_is_lost_like_one_whose_connection_ends() -> None:
    job = in_training()
    take_over(job, A0, A1, W0, W1, S[0], S[2])
    assert sent(job.wait(RECONNECT + LOST_SLACK - 1), EndProcesses) == []
    assert sent(job.wait(8), EndProcesses), "all go back to the last checkpoint"


def test_an_end_that_an_agent_reports_is_taken_at_once() -> None:
    job = in_training()
    take_over(job, A0, A1, W0, W1, S[0], S[2])
    new = job.receive(A1, ProcessExited(S[1], -9))
    assert [event.rank for event in appended(new, events.ServerLost)] == [1]


def test_a_host_whose_agent_does_not_connect_again_is_lost() -> None:
    job = in_training()
    take_over(job, A0, W0, W1, *S)
    assert appended(job.wait(RECONNECT - 0.5), events.WorkerLost) == []
    new = job.wait(1)
    assert [event.rank for event in appended(new, events.WorkerLost)] == [1]
    assert "its agent did not connect to the new coordinator within 10 s" in appended(new, events.WorkerLost)[0].reason


def test_a_second_takeover_waits_anew() -> None:
    job = in_training()
    take_over(job)
    job.wait(RECONNECT - 1)
    take_over(job)
    new = job.wait(RECONNECT - 1)
    assert appended(new, events.WorkerLost) == []
    for member in EVERYONE:
        job.handle(Connected(member))
        job.receive(member, Register(received=0) if member.role == "agent" else ResumeSession(0, ()))
    assert appended(job.wait(20), events.WorkerLost) == []


def test_a_lost_rank_of_before_may_not_connect_again() -> None:
    job = in_training()
    job.killed(S[1])
    take_over(job)
    assert job.machine.why_not_expected(S[1]) == "server/1 is of incarnation 0, 1 was started"


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def alone() -> DrivenJob:
    """Under ps with one server, whose checkpoints have no copies."""
    return DrivenJob(replace(ORDER, restarts=3)).training()


def test_a_checkpoint_whose_parts_were_arriving_is_given_up_and_named() -> None:
    job = alone()
    job.receive(W0, SaveBegin(500, []))
    new = take_over(job, A0, A1, W0, W1, S0, saving=(500,))
    assert [each.step for each in new if isinstance(each, DiscardCheckpoint)] == [500]
    problems = {member: message.problem for member, message in sent(new, CheckpointSaved)}
    assert set(problems) >= {W0, W1}
    assert all("coordinator was lost" in problem for problem in problems.values())
    for member in (W0, W1, S0):  # parts that are still sent belong to no checkpoint
        job.receive(member, SaveBegin(500, []))
        job.receive(member, SaveEnd(500))
    assert commits(job.wait(60)) == []
    assert [commit.step for commit in job.saves(1000)] == [1000], "the next one is written"


def test_a_part_that_a_broken_connection_has_interrupted_gives_the_checkpoint_up() -> None:
    """The coordinator did not see its begin: the member names the step."""
    job = alone()
    take_over(job, A0, A1, W1, S0)
    job.handle(Connected(W0))
    job.receive(W0, ResumeSession(0, (500,)))
    for member in (W1, S0):
        job.receive(member, SaveBegin(500, []))
        job.receive(member, SaveEnd(500))
    assert commits(job.wait(60)) == []


def test_a_checkpoint_that_was_being_written_is_looked_for_on_disk() -> None:
    job = alone()
    (commit,) = job.saves(500)
    assert not commit.again
    new = take_over(job, A0, A1, W0, W1, S0, saving=(500,))
    (commit,) = commits(new)
    assert (commit.step, commit.again) == (500, True)
    new = job.handle(CheckpointCommitted(500, "digits-3@500"))
    assert {message.problem for _, message in sent(new, CheckpointSaved)} == {""}


def test_a_written_checkpoint_is_not_given_up_by_a_member_that_names_it() -> None:
    job = alone()
    job.saves(500)
    job.handle(CheckpointCommitted(500, "digits-3@500"))
    new = take_over(job, A0, A1, W0, W1, S0, saving=(500,))
    assert [each for each in new if isinstance(each, DiscardCheckpoint | CommitCheckpoint)] == []


def test_a_second_copy_that_was_being_sent_has_failed() -> None:
    keep = replace(ORDER.checkpoint, copies=2)
    job = DrivenJob(replace(ORDER, restarts=3, checkpoint=keep)).training()
    job.saves(500)
    new = job.handle(CheckpointCommitted(500, "digits-3@500"))
    copies = [each for each in new if isinstance(each, SendCheckpointCopy)]
    new = take_over(job, A0, A1, W0, W1, S0)
    assert len([each for each in new if isinstance(each, SendCheckpointCopy)]) in (0, len(copies))
    assert all("coordinator was lost" in text for text in notices(new) if "copy" in text)


def test_a_cut_that_was_proposed_goes_on() -> None:
    job = in_training()
    job.receive(A0, StopWanted(True, False, "Ctrl-C"))
    job.handle(Tick())
    (proposal,) = {message.ticket for _, message in sent(job.instructions, ProposeCut)}
    take_over(job, *EVERYONE)
    for worker in (W0, W1):
        job.receive(worker, CutPosition(proposal, 11))
    assert {member: message.step for member, message in sent(job.instructions, CutAt)} == {W0: 12, W1: 12}


def test_a_stop_before_the_members_connect_again_is_sent_to_them_all_the_same() -> None:
    job = in_training()
    take_over(job)
    job.receive(A0, StopWanted(True, False, "Ctrl-C"))
    job.handle(Tick())
    assert [member for member, _ in sent(job.instructions, ProposeCut)] == [W0, W1]
    job.handle(Connected(W0))
    job.receive(W0, ResumeSession(0, ()))


# ---- starts, restarts and ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["running", "prepared"])
def test_a_job_that_was_starting_starts_again_once(phase: str) -> None:
    job = DrivenJob(replace(ORDER, restarts=1))
    getattr(job, phase)()
    take_over(job, A0, A1, W0, W1)
    new = job.wait(4)
    if phase == "running":  # scripts run, and none has joined: nothing was lost with the coordinator
        assert sent(new, EndProcesses) == []
        return
    assert {member for member, _ in sent(new, EndProcesses)} == {A0, A1}
    for member in (W0, W1):
        job.exits(member, -15)
    job.wait(1)
    assert FindRestorable() in job.instructions
    new = job.handle(RestorableFound(None))
    assert [each.member for each in new if isinstance(each, StartMember)] == [
        replace(W0, incarnation=1), replace(W1, incarnation=1)
    ]  # fmt: skip


def test_a_job_that_may_not_restart_fails_if_it_was_starting() -> None:
    job = DrivenJob(ORDER).prepared()
    take_over(job, A0, A1, W0, W1)
    job.wait(5)
    for member in (W0, W1):
        job.exits(member, -15)
    job.wait(60)
    failure = job.finished.failure
    assert failure is not None
    assert failure["exception"] == "psctl's coordinator was killed while the job started"


def test_the_choice_of_a_checkpoint_is_made_again() -> None:
    job = alone()
    job.killed(W1)
    job.wait(5)
    for member in (W0, S0):
        job.exits(member, -15)
    job.wait(1)
    assert FindRestorable() in job.instructions
    new = take_over(job, A0, A1)
    assert [each for each in new if isinstance(each, FindRestorable)]
    assert {member for member, _ in started(job.handle(RestorableFound(None)))} == {
        replace(W0, incarnation=1), replace(W1, incarnation=1), replace(S0, incarnation=1)
    }  # fmt: skip


def test_a_job_that_was_ending_ends() -> None:
    job = in_training()
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(10))
    take_over(job, *EVERYONE)
    for worker in (W0, W1):
        job.exits(worker)
    job.wait(1)
    for server in S:
        job.exits(server)
    job.wait(30)
    assert (job.finished.status, job.finished.exit) == ("done", 0)
