"""Losses that a job survives by starting again: what is ended, ordered, sent, counted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    Connected,
    ConnectionLost,
    DiscardCheckpoint,
    FindRestorable,
    MakePlan,
    MakeShards,
    RestorableFound,
    StartMember,
)
from psctl.job import events
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd
from psctl.job.membership_messages import StepUnfit
from psctl.job.process_messages import EndProcesses, Register, RenewStore, StopProcesses, StopWanted
from psctl.job.training_messages import Decision, Join, MemberReady, Prepare, Resume, Welcome, WorkerReport
from psctl.types import Address, Member
from tests.helpers.driven_job import A0, A1, LAYOUT, ORDER, S0, W0, W1, DrivenJob, again, appended, sent
from tests.helpers.ring_job import RING
from tests.helpers.ring_job import training as ring_training

THREE = replace(ORDER, restarts=3)
ROOMY = replace(THREE, hosts=[replace(host, slots=2) for host in ORDER.hosts])
AT_500 = Resume("digits-3@500", 500, {"position": 500}, [])


def ended(job: DrivenJob, *members: Member) -> None:
    """The remaining processes end as ordered."""
    for member in members:
        job.exits(member, -15)


def lose_worker_1(order: object = THREE) -> DrivenJob:
    job = DrivenJob(order).training()  # type: ignore[arg-type]
    for worker in (W0, W1):
        job.report(worker, 507, loss=1.0)
    job.killed(W1)
    job.wait(0.4)
    return job


def test_after_a_kill_all_others_are_ended_and_no_more() -> None:
    job = lose_worker_1()
    ends = sent(job.instructions, EndProcesses)
    assert [(agent, each.members, each.grace) for agent, each in ends] == [(A0, [W0, S0], 5.0)]
    assert [event.rank for event in appended(job.instructions, events.WorkerLost)] == [1]
    assert job.machine.state == "running"
    assert sent(job.instructions, StopProcesses) == []


def test_the_newest_checkpoint_is_searched_when_all_processes_have_ended() -> None:
    job = lose_worker_1()
    ended(job, W0)
    assert FindRestorable() not in job.instructions
    ended(job, S0)
    assert job.instructions[-1] == FindRestorable()


def test_all_ranks_resume_from_the_checkpoint_as_new_incarnations() -> None:
    job = lose_worker_1()
    ended(job, W0, S0)
    new = job.handle(RestorableFound(AT_500))
    assert job.machine.state == "starting"
    assert sent(new, RenewStore) == [(A0, RenewStore())]
    starts = [each for each in new if isinstance(each, StartMember)]
    assert [(each.member, each.host) for each in starts] == [(again(W0), 0), (again(W1), 1), (again(S0), 0)]
    assert starts[0].environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert starts[0].environment["TORCHELASTIC_MAX_RESTARTS"] == "3"
    new = job.train_again(1)
    assert [each for each in new if isinstance(each, MakePlan)] == []
    welcomes = sent(new, Welcome)
    assert [welcome.resume for _, welcome in welcomes] == [AT_500] * 3
    (decision, *_) = [each for _, each in sent(new, Decision)]
    assert (decision.resume, decision.assignment.epoch, decision.assignment.servers[0].incarnation) == (AT_500, 1, 1)
    (restored,) = appended(new, events.Restored)
    assert (restored.checkpoint, restored.step, restored.lost) == ("digits-3@500", 500, 7)
    assert restored.reason == "worker/1 on h1: killed by signal 9 (SIGKILL)"
    assert [event.rank for event in appended(new, events.WorkerJoined)] == [0, 1]
    for worker in (W0, W1):
        job.exits(again(worker), 0)
    job.exits(again(S0), 0)
    assert (job.finished.status, job.finished.exit) == ("done", 0)


def test_without_a_checkpoint_it_starts_from_the_start_values() -> None:
    job = lose_worker_1()
    ended(job, W0, S0)
    job.handle(RestorableFound(None))
    new = job.train_again(1)
    (restored,) = appended(new, events.Restored)
    assert (restored.checkpoint, restored.step, restored.lost) == ("", 0, 507)


def test_a_lost_incarnation_is_let_in_nowhere() -> None:
    job = lose_worker_1()
    ended(job, W0, S0)
    job.handle(RestorableFound(AT_500))
    assert job.machine.why_not_expected(W1) == "worker/1 is of incarnation 0, 1 was started"
    assert job.machine.why_not_expected(again(W1)) == ""
    assert job.receive(W1, WorkerReport(900, 0, [], 1.0, 0.1, 0.1)) == []
    assert job.handle(Connected(W1)) == []


def test_checkpoints_under_way_are_given_up_and_may_be_made_again() -> None:
    job = DrivenJob(THREE).training()
    job.receive(W0, SaveBegin(600, []))
    job.killed(W1)
    job.wait(0.4)
    assert DiscardCheckpoint(600) in job.instructions
    ended(job, W0, S0)
    job.handle(RestorableFound(AT_500))
    job.train_again(1)
    for member in (again(W0), again(S0)):
        job.receive(member, SaveBegin(600, []))
        job.receive(member, SaveEnd(600))
    assert appended(job.handle(CheckpointCommitted(600, "/c", 8, 0.1)), events.CheckpointWritten)[0].step == 600


def test_an_exception_of_the_users_is_no_loss() -> None:
    job = DrivenJob(THREE).training()
    job.exits(W1, 1, "ValueError: NaN")
    job.wait(0.4)
    ended(job, W0, S0)
    assert job.finished.status == "failed"
    assert appended(job.instructions, events.Restored) == []


def test_an_exception_reported_after_the_loss_that_it_caused_ends_the_job() -> None:
    job = DrivenJob(THREE).training()
    job.exits(W0, -6, "killed by signal 6 (SIGABRT)")
    job.now = 0.1
    job.exits(W1, 1, "ValueError: NaN")
    job.wait(0.4)
    ended(job, S0)
    failure = job.finished.failure
    assert failure is not None
    assert (failure["rank"], job.finished.status) == (0, "failed")


def test_what_breaks_after_a_kill_is_taken_for_its_consequence() -> None:
    job = DrivenJob(THREE).training()
    job.killed(W0)
    job.exits(W1, 1, "ValueError: the other half of the batch is missing")
    job.wait(0.4)
    ended(job, S0)
    assert job.instructions[-1] == FindRestorable()
    assert [event.rank for event in appended(job.instructions, events.WorkerLost)] == [0]


def test_a_server_that_is_lost_is_a_loss() -> None:
    job = DrivenJob(THREE).training()
    job.killed(S0)
    job.wait(0.4)
    assert [event.rank for event in appended(job.instructions, events.ServerLost)] == [0]
    ended(job, W0, W1)
    assert job.instructions[-1] == FindRestorable()


def test_after_restart_max_losses_the_next_ends_the_job_with_that_reason() -> None:
    job = DrivenJob(replace(ORDER, restarts=1)).training()
    job.killed(W1)
    job.wait(0.4)
    ended(job, W0, S0)
    job.handle(RestorableFound(None))
    job.train_again(1)
    job.killed(again(W1))
    job.wait(0.4)
    ended(job, again(W0), again(S0))
    failure = job.finished.failure
    assert failure is not None
    assert failure["exception"] == "killed by signal 9 (SIGKILL)"
    assert failure["hint"].startswith("the job has survived 1 losses")


def test_the_same_failure_at_the_same_step_ends_the_job_at_once() -> None:
    job = DrivenJob(THREE).training()
    lost = "RuntimeError: Connection closed by peer"
    job.exits(W1, 1, lost)
    job.wait(5.1)
    ended(job, W0, S0)
    job.handle(RestorableFound(None))
    job.train_again(1)
    job.exits(again(W1), 1, lost)
    job.wait(5.1)
    ended(job, again(W0), again(S0))
    failure = job.finished.failure
    assert failure is not None
    assert "the same failure came again at the same step" in failure["hint"]


def test_a_lost_hosts_workers_move_to_slots_of_others_and_the_plan_is_made_again() -> None:
    job = DrivenJob(ROOMY).training()
    job.handle(ConnectionLost(A1, "no word for 5 s"), ConnectionLost(W1, "no word for 5 s"))
    job.wait(0.4)
    ended(job, W0, S0)
    new = job.handle(RestorableFound(AT_500))
    starts = [each for each in new if isinstance(each, StartMember)]
    assert [(each.member, each.host, each.local_rank) for each in starts] == [(again(W0), 0, 0), (again(W1), 0, 1)]
    assert starts[1].environment["LOCAL_WORLD_SIZE"] == "2"
    for worker in (W0, W1):
        job.handle(Connected(again(worker)))
        job.receive(again(worker), Join(1))
        new = job.receive(again(worker), Prepare(LAYOUT, ()))
    (plan,) = [each for each in new if isinstance(each, MakePlan)]
    assert [host.workers for host in plan.order.hosts] == [2, 0]
    back = job.receive(A1, Register((W1,)))
    assert [(member, each.members) for member, each in sent(back, EndProcesses)] == [(A1, [W1])]


def test_a_lost_host_without_room_elsewhere_is_the_jobs_end() -> None:
    job = DrivenJob(THREE).training()
    job.handle(ConnectionLost(A1, "no word for 5 s"), ConnectionLost(W1, "no word for 5 s"))
    job.wait(0.4)
    ended(job, W0, S0)
    job.handle(RestorableFound(AT_500))
    failure = job.finished.failure
    assert failure is not None
    assert failure["exception"].startswith("HostLost: h1 is lost")


def test_a_process_that_does_not_end_is_named() -> None:
    job = lose_worker_1()
    ended(job, S0)
    job.wait(40)
    failure = job.finished.failure
    assert failure is not None
    assert "worker/0 on h0 did not end when it was ordered to" in failure["hint"]


def test_damaged_checkpoints_are_named_and_unreadable_ones_end_the_job() -> None:
    job = lose_worker_1()
    ended(job, W0, S0)
    new = job.handle(RestorableFound(None, ["digits-3@500 skipped: x is torn"], "digits-1@7 is damaged"))
    assert "digits-3@500 skipped: x is torn" in [event.text for event in appended(new, events.Notice)]
    failure = job.finished.failure
    assert failure is not None
    assert "digits-1@7 is damaged" in failure["hint"]


@pytest.mark.parametrize("phase", ["settling", "ending", "choosing"])
def test_a_stop_in_the_midst_of_a_restart_ends_the_job(phase: str) -> None:
    job = DrivenJob(THREE).training()
    job.killed(W1)
    if phase != "settling":
        job.wait(0.4)
    if phase == "choosing":
        ended(job, W0, S0)
    job.receive(A0, StopWanted(False, False, "psctl stop"))
    if phase != "choosing":
        ended(job, W0, S0)
    job.handle(RestorableFound(AT_500))
    assert job.finished.status == "stopped"
    assert [each for each in job.instructions if isinstance(each, StartMember) and each.member.incarnation] == []


def test_shards_are_made_when_all_prepared_and_all_servers_listen_whichever_is_first() -> None:
    job = lose_worker_1()
    ended(job, W0, S0)
    job.handle(RestorableFound(None))
    job.handle(Connected(again(S0)))
    job.receive(again(S0), Join(1))
    assert job.receive(again(S0), MemberReady(Address("10.0.0.1", 4001))) == []
    for worker in (W0, W1):
        job.handle(Connected(again(worker)))
        job.receive(again(worker), Join(1))
        new = job.receive(again(worker), Prepare(LAYOUT, ()))
    assert [each for each in new if isinstance(each, MakeShards)] == [MakeShards(LAYOUT, 1, near=False)]


UNFIT = StepUnfit(0, "the gradient of parameter w changed after it was pushed to the servers")
AUTO = replace(ORDER, update="auto", restarts=0)


def test_a_first_step_that_servers_cannot_take_starts_again_with_the_optimizer_on_workers() -> None:
    job = DrivenJob(AUTO).training()
    new = job.receive(W1, UNFIT)
    assert "so all start again with `update: worker`" in appended(new, events.Notice)[0].text
    assert {member for _, each in sent(new, EndProcesses) for member in each.members} == {W0, W1, S0}
    assert job.receive(W0, UNFIT) == [], "the others may say so too"
    for member in (W0, W1, S0):
        job.exits(member, -15)
    assert job.instructions[-1] == FindRestorable()
    job.handle(RestorableFound(None))
    for worker in (again(W0), again(W1)):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        new = job.receive(worker, Prepare(LAYOUT, ()))
    (plan,) = [each for each in new if isinstance(each, MakePlan)]
    assert (plan.order.update, plan.order.strategy) == ("worker", "ps")
    assert not appended(job.instructions, events.WorkerLost)
    assert job.machine.state == "running"


def test_a_first_step_that_workers_cannot_make_in_parts_starts_again_with_whole_optimizers() -> None:
    job = ring_training(replace(RING, update="auto", restarts=0), update="sharded")
    text = appended(job.receive(W1, UNFIT), events.Notice)[0].text
    assert "so all start again with `update: worker`" in text
    assert "to keep the optimizer sharded, clip with run.clip_grad_norm" in text


@pytest.mark.parametrize(
    ("order", "step"), [(replace(AUTO, update="server"), 0), (AUTO, 4), (replace(AUTO, staleness=1), 0)]
)
def test_where_a_step_was_applied_or_servers_were_requested_the_script_is_at_fault(order, step: int) -> None:
    job = DrivenJob(order).training()
    job.receive(W1, replace(UNFIT, step=step))
    for member in (W0, W1, S0):
        job.exits(member, -15)
    assert job.finished.status == "failed"
    assert job.finished.failure is not None
    assert job.finished.failure["exception"] == UNFIT.reason
    assert "set `update: worker`" in job.finished.failure["hint"]
