"""The state machine of a job: tables of inputs, and any order of deaths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.coordinator.state import checkpoints
from psctl.coordinator.state.instructions import (
    AppendEvent,
    CheckpointCommitted,
    CheckpointCopyFailed,
    CloseCoordinator,
    CommitCheckpoint,
    Connected,
    ConnectionLost,
    DiscardCheckpoint,
    FindRestorable,
    Input,
    MakePlan,
    MakeShards,
    MessageReceived,
    PlanMade,
    RestorableFound,
    SendCheckpointCopy,
    ShardsMade,
    StartMember,
    Tick,
)
from psctl.job import events, failures
from psctl.job.checkpoint_messages import (
    CheckpointCopyDone,
    CheckpointSaved,
    CutAt,
    CutPosition,
    ProposeCut,
    SaveBegin,
    SaveEnd,
)
from psctl.job.process_messages import (
    HostSample,
    ProcessExited,
    ProcessFailure,
    ProcessStarted,
    ProcessUsage,
    Register,
    StopProcesses,
    StopWanted,
)
from psctl.job.training_messages import (
    Decision,
    Go,
    Heartbeat,
    Join,
    Leave,
    MemberReady,
    Prepare,
    ScriptFinished,
    WorkerReport,
)
from psctl.types import Address, Layout, Member, ServerAt
from tests.helpers.driven_job import (
    A0,
    A1,
    LAYOUT,
    ORDER,
    PLAN,
    S0,
    W0,
    W1,
    DrivenJob,
    appended,
    commits,
    sent,
)
from tests.hypothesis_profile import examples


def test_the_first_event_is_started_and_workers_are_ordered_when_all_agents_are_there() -> None:
    job = DrivenJob()
    first = job.instructions[0]
    assert isinstance(first, AppendEvent)
    assert isinstance(first.event, events.Started)
    assert first.event.time == 1000.0
    assert [each for each in job.receive(A0, Register()) if isinstance(each, StartMember)] == []
    starts = [each for each in job.receive(A1, Register()) if isinstance(each, StartMember)]
    assert [(start.member, start.host, start.local_rank) for start in starts] == [(W0, 0, 0), (W1, 1, 0)]
    assert starts[1].environment["RANK"] == "1"
    assert job.machine.state == "starting"


def test_the_whole_way_to_training_under_ps() -> None:
    job = DrivenJob().prepared()
    assert isinstance(job.instructions[-1], MakePlan)
    new = job.handle(PlanMade("ps", "server", [0], PLAN))
    assert [each.member for each in new if isinstance(each, StartMember)] == [S0]
    job.receive(A0, ProcessStarted(S0, 102))
    job.handle(Connected(S0))
    job.receive(S0, Join(102))
    assert job.receive(S0, MemberReady(Address("10.0.0.1", 4000))) == [MakeShards(LAYOUT, 1, near=False)]
    decisions = sent(job.handle(ShardsMade([], [])), Decision)
    assert [member for member, _ in decisions] == [S0, W0, W1]
    assert decisions[0][1].assignment.servers == [ServerAt(0, 0, Address("10.0.0.1", 4000))]
    assert sent(job.receive(W0, MemberReady()), Go) == []
    assert [member for member, _ in sent(job.receive(W1, MemberReady()), Go)] == [
        S0,
        W0,
        W1,
    ]


@pytest.mark.parametrize(("workers", "near"), [(2, True), (1, False)])
def test_shards_are_cut_for_one_host_where_no_process_is_on_another(workers: int, near: bool) -> None:
    hosts = [replace(ORDER.hosts[0], slots=3, workers=workers), replace(ORDER.hosts[1], workers=2 - workers)]
    job = DrivenJob(replace(ORDER, hosts=hosts)).registered()
    for rank, agent in enumerate((A0, A0 if near else A1)):
        job.receive(agent, ProcessStarted(Member("worker", rank), 100 + rank))
        job.handle(Connected(Member("worker", rank)))
        job.receive(Member("worker", rank), Join(100))
        job.receive(Member("worker", rank), Prepare(LAYOUT, ()))
    job.handle(PlanMade("ps", "server", [0], PLAN))
    job.receive(A0, ProcessStarted(S0, 102))
    job.handle(Connected(S0))
    job.receive(S0, Join(102))
    assert job.receive(S0, MemberReady(Address("10.0.0.1", 4000))) == [MakeShards(LAYOUT, 1, near)]


def test_native_needs_no_servers() -> None:
    job = DrivenJob().prepared()
    new = job.handle(PlanMade("native", "worker", [], replace(PLAN, chosen="native")))
    assert [member for member, _ in sent(new, Decision)] == [W0, W1]


def test_what_a_schedule_is_built_with_goes_to_every_rank() -> None:
    told_to = {"order": [1, 0], "pieces": 4}
    plan = PlanMade("ring", "worker", [], replace(PLAN, chosen="ring"), options=told_to)
    decisions = sent(DrivenJob().prepared().handle(plan), Decision)
    assert [(member, each.strategy, each.options) for member, each in decisions] == [
        (W0, "ring", told_to), (W1, "ring", told_to),
    ]  # fmt: skip


def test_a_job_is_done_when_its_workers_are_and_servers_are_ordered_to_leave() -> None:
    job = DrivenJob().training()
    job.exits(W0)
    assert [member for member, _ in sent(job.exits(W1), Leave)] == [S0]
    job.exits(S0)
    assert (job.finished.status, job.finished.exit, job.finished.failure) == ("done", 0, None)


def test_the_end_waits_for_what_was_saved_last() -> None:
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.receive(worker, SaveBegin(7, []))
        job.receive(worker, SaveEnd(7))
    job.exits(W0)
    job.exits(W1)
    assert job.machine.state == "stopping"
    job.receive(S0, SaveBegin(7, []))
    new = job.receive(S0, SaveEnd(7))
    assert [each.step for each in new if isinstance(each, CommitCheckpoint)] == [7]
    job.exits(S0)
    new = job.handle(CheckpointCommitted(7, "/c/7", 8, 0.1))
    assert appended(new, events.CheckpointWritten)[0].path == "/c/7"
    assert SendCheckpointCopy(7, A1) in new
    assert job.machine.state == "stopping"
    job.receive(A1, CheckpointCopyDone(7))
    assert job.finished.status == "done"


def test_the_first_real_failure_is_named_not_the_loss_that_was_reported_first() -> None:
    job = DrivenJob().training()
    job.exits(W0, 1, "PeerLost: worker/1 left", code="peer-lost")
    job.now = 0.2
    job.exits(W1, 1, "ValueError: NaN")
    job.wait(0.3)
    job.exits(S0, -15)
    last = job.finished
    assert (last.status, last.exit) == ("failed", 1)
    assert last.failure is not None
    assert (last.failure["rank"], last.failure["exception"]) == (1, "ValueError: NaN")
    assert last.failure["stopped"] == ["server/0"]  # psctl ended it; worker/0 ended by itself
    assert [(each["rank"], each["exception"]) for each in last.failure["failed"]] == [
        ("worker/0", "PeerLost: worker/1 left")
    ]
    assert [event.rank for event in appended(job.instructions, events.WorkerLost)] == [1]


def test_ranks_that_fail_together_have_each_failed_and_none_was_stopped() -> None:
    job = DrivenJob().training()
    job.exits(W1, 1, "ValueError: NaN")
    job.exits(W0, 1, "KeyError: 'x'")
    job.wait(0.5)
    job.exits(S0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert (failure["rank"], failure["stopped"]) == (1, ["server/0"])
    assert failure["failed"] == [{"rank": "worker/0", "host": "h0", "status": 1, "exception": "KeyError: 'x'"}]


def test_a_loss_alone_is_named_when_no_better_cause_is_reported() -> None:
    job = DrivenJob().training()
    job.exits(W0, 1, "PeerLost: worker/1 left", code="peer-lost")
    assert sent(job.wait(4.5), StopProcesses) == []
    assert [member for member, _ in sent(job.wait(1), StopProcesses)] == [A0, A1]


def test_the_checkpoint_and_the_commands_are_in_the_failure() -> None:
    job = DrivenJob().training()
    for member in (W0, S0):
        job.receive(member, SaveBegin(500, []))
        job.receive(member, SaveEnd(500))
    job.handle(CheckpointCommitted(500, "/c", 8, 0.1))
    job.receive(A1, CheckpointCopyDone(500))
    job.receive(W1, Heartbeat(507, "compute"))
    job.exits(W1, 1, "ValueError: NaN")
    job.wait(0.5)
    job.exits(W0, -15)
    job.exits(S0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert failure["step"] == 507
    assert failure["checkpoint"] == "digits-3@500"
    assert failure["resume"] == "psctl train JOB.yaml --resume latest"  # a restore would replay the error
    assert failure["log"] == "psctl logs digits-3 -r worker:1"


@pytest.mark.parametrize(
    ("member", "status", "exception", "code", "command"),
    [
        ("worker/1", 1, "ValueError: NaN", "", "psctl train JOB.yaml --resume latest"),
        ("worker/1", 3, "SystemExit: 3", "", "psctl train JOB.yaml --resume latest"),
        ("worker/1", 0, "TimedOut: stands still", "timed-out", "psctl train JOB.yaml --resume latest"),
        ("worker/1", -9, "killed by signal 9 (SIGKILL)", "", "psctl checkpoint restore digits-3@500"),
        ("worker/1", 0, "HostLost: h1 is lost", "", "psctl checkpoint restore digits-3@500"),
        ("server/0", 1, "ended with status 1", "", "psctl checkpoint restore digits-3@500"),
        ("coordinator/0", 1, "psctl's coordinator was lost", "", "psctl checkpoint restore digits-3@500"),
    ],
)
def test_a_restore_is_offered_for_losses_and_training_again_for_errors_in_the_code(
    member: str, status: int, exception: str, code: str, command: str
) -> None:
    failure = ProcessFailure(member, "h1", status, 1.0, 507, exception, [], [], code)
    assert failures.resume_command(failure, "digits-3@500") == command
    assert failures.resume_command(failure, None) is None


def test_a_lost_host_takes_its_ranks_with_it() -> None:
    job = DrivenJob().training()
    job.handle(ConnectionLost(A1, "no word for 5 s"), ConnectionLost(W1, "no word for 5 s"))
    job.wait(0.5)
    assert [member for member, _ in sent(job.instructions, StopProcesses)] == [A0]
    job.exits(W0, -15)
    job.exits(S0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert failure["exception"].startswith("HostLost: h1 is lost")
    assert (failure["role"], failure["rank"], failure["host"]) == ("worker", 1, "h1")


def test_a_server_that_ends_early_is_a_failure_whatever_its_status() -> None:
    job = DrivenJob().training()
    job.exits(S0, 0)
    assert job.machine.state == "stopping"
    job.wait(0.5)
    assert [event.rank for event in appended(job.instructions, events.ServerLost)] == [0]


@pytest.mark.parametrize(
    ("prepare", "missing", "text"),
    [
        (
            lambda job: job.receive(A0, Register()),
            "agent/1",
            "psctl's agent on h1 did not register",
        ),
        (
            lambda job: job.running() and job.receive(W0, Join(1)),
            "worker/1",
            "did not call psctl.init",
        ),
        (
            lambda job: (
                job.running() and [job.receive(w, Join(1)) for w in (W0, W1)] and job.receive(W1, Prepare(LAYOUT, ()))
            ),
            "worker/0",
            "did not call prepare",
        ),
        (lambda job: job.prepared().handle(PlanMade("ps", "server", [0], PLAN)), "server/0", "did not begin to listen"),
    ],
)
def test_the_rank_that_keeps_the_job_from_starting_is_named(prepare: Any, missing: str, text: str) -> None:
    job = DrivenJob()
    prepare(job)
    job.wait(160)
    last = job.finished
    assert (last.status, last.exit) == ("failed", 5)
    assert last.failure is not None
    assert f"{last.failure['role']}/{last.failure['rank']}" == missing
    assert text in last.failure["exception"]


def test_a_plain_script_may_run_as_long_as_it_likes() -> None:
    job = DrivenJob().running()
    for _ in range(40):
        job.wait(100)
        job.receive(A0, HostSample(0.1, [W0]))
    assert job.machine.state == "running"


def test_the_traffic_of_hosts_is_logged_when_it_changes() -> None:
    job = DrivenJob().training()
    job.receive(A0, HostSample(0.1, [], [], 1234567.0, 50.0))
    job.receive(A1, HostSample(0.1, [], [], float("nan"), 50.0))  # of another machine: not to be believed
    found = appended(job.wait(6), events.HostTraffic)
    assert [(each.host, each.sent, each.received) for each in found] == [("h0", 1.23e6, 50.0)]
    job.receive(A0, HostSample(0.1, [], [], 1234568.0, 50.0))
    assert appended(job.wait(6), events.HostTraffic) == [], "the same to three digits"


def test_what_workers_move_between_hosts_is_logged_by_pair() -> None:
    job = DrivenJob().training()
    job.wait(6)
    job.instructions.clear()
    moved = (("worker/1", 6000, 999), ("worker/0", 5, 5), ("", 7, 7), ("worker/9", 7, 7), ("agent/1", 7, 7))
    job.receive(W0, WorkerReport(1, 0, [], 8.0, 3.0, 1.0, moved))
    job.receive(W1, WorkerReport(1, 0, [], 8.0, 3.0, 1.0, (("worker/0", 600, 6000),)))
    (found,) = appended(job.wait(6), events.HostFlows)
    assert [(each.source, each.target) for each in found.flows] == [("h0", "h1"), ("h1", "h0")]
    assert [each.rate for each in found.flows] == pytest.approx([6000 / 5.1, 600 / 5.1], rel=0.05)
    assert [each.flows for each in appended(job.wait(6), events.HostFlows)] == [[]], "nothing moves any more"
    assert appended(job.wait(6), events.HostFlows) == []


def test_the_gpus_of_hosts_and_their_processes_are_logged_when_they_change() -> None:
    job = DrivenJob().training()
    sample = HostSample(
        0.1, [], [ProcessUsage(W0, 1, 1, (), 97, 61 << 30)], gpus=(("NVIDIA H100", 97, 62 << 30, 80 << 30),)
    )
    job.receive(A0, sample)
    (found,) = appended(job.wait(6), events.HostGpus)
    assert (found.host, found.gpus) == ("h0", [events.GpuState("NVIDIA H100", 97, 62 << 30, 80 << 30)])
    job.receive(A0, sample)
    assert appended(job.wait(6), events.HostGpus) == []
    logged = [each.event for each in job.instructions if isinstance(each, AppendEvent)]
    states = [each for each in logged if isinstance(each, events.StateChanged)]
    used = [each for each in states if (each.role, each.rank) == ("worker", 0)]
    assert (used[-1].gpu, used[-1].gpu_memory) == (97, 61 << 30)


def test_what_a_process_uses_is_in_its_next_state() -> None:
    job = DrivenJob().training()
    job.receive(A0, HostSample(0.1, [W0], [ProcessUsage(W0, 150, 10**9), ProcessUsage(W1, 7, 7)]))  # W1: another host
    report = WorkerReport(1, 0, [], 8.0, 3.0, 1.0, (("worker/1", 60, 40), ("", 20, 0)))
    job.receive(W0, report)
    job.receive(W1, replace(report, sync_seconds=float("nan")))
    job.wait(30)
    found = [each.event for each in job.instructions if isinstance(each, AppendEvent)]
    states = {each.rank: each for each in found if isinstance(each, events.StateChanged) and each.role == "worker"}
    assert (states[0].cpu, states[0].memory, states[0].sync) == (150, 10**9, 25)
    assert (states[0].sends, states[0].receives) == (20.0, 10.0), "80 and 40 bytes in 4 seconds"
    assert (states[1].cpu, states[1].memory, states[1].sync) == (0, 0, 0)


def test_a_rank_that_ends_before_prepare_is_noticed_at_once() -> None:
    job = DrivenJob().running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
    job.receive(W0, Prepare(LAYOUT, ()))
    job.exits(W1, 0)
    job.wait(1)
    job.exits(W0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert (failure["rank"], "ended before it called prepare" in failure["exception"]) == (1, True)


def test_a_stall_is_named_after_30_s_and_ended_after_the_limit() -> None:
    job = DrivenJob().training()
    for step in range(1, 4):
        job.receive(W0, Heartbeat(step, "sync: waiting for server/0"))
        job.receive(W1, Heartbeat(step, "compute"))
    notices = [event.text for event in appended(job.wait(31), events.Notice)]
    assert notices == ["worker/1 on h1 is at step 3 since 30 s: compute, silent for 30 s"]
    assert appended(job.wait(200), events.Notice) == []
    job.wait(120)
    assert (job.finished.exit, job.finished.status) == (5, "failed")
    assert job.finished.failure is not None
    assert job.finished.failure["rank"] == 1


def left_at_7(how: str) -> DrivenJob:
    """Worker 1 leaves in good order after step 7; worker 0 goes on to step 8."""
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.receive(worker, Heartbeat(7, "compute"))
    if how == "sys.exit":
        job.receive(W1, ScriptFinished(7))
    job.exits(W1, 0)
    job.receive(
        W0,
        Heartbeat(8, "sync: waiting for values of clock 8 from server/0, which waits for worker/1"),
    )
    return job


@pytest.mark.parametrize(
    ("how", "text"),
    [("sys.exit", "left after step 7"), ("os._exit", "ended with status 0 in the middle of training")],
)
def test_a_worker_that_leaves_while_others_train_is_named_when_they_have_waited_for_it(how: str, text: str) -> None:
    job = left_at_7(how)
    job.wait(9.5)
    assert job.machine.state == "running"
    job.wait(1)
    job.exits(W0, -15)
    job.exits(S0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert (failure["rank"], failure["host"], failure["step"]) == (1, "h1", 7)
    assert text in failure["exception"]
    assert "worker/0 on h0 is at step 8, sync: waiting" in failure["exception"]
    assert "break" in failure["hint"]
    assert job.finished.steps == 8


def test_a_worker_that_trains_on_alone_after_the_last_common_step_is_no_failure() -> None:
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.receive(worker, Heartbeat(7, "compute"))
    job.receive(W1, ScriptFinished(7))
    job.exits(W1, 0)
    job.receive(W0, Heartbeat(7, "sync: waiting for values of clock 7 from server/0"))
    job.wait(25)
    assert job.machine.state == "running"
    job.receive(W0, ScriptFinished(7))
    job.exits(W0, 0)
    job.exits(S0, 0)
    assert job.finished.status == "done"


def test_a_loss_of_a_worker_that_left_early_names_that_worker() -> None:
    job = left_at_7("sys.exit")
    job.exits(W0, 1, "RuntimeError: Connection closed by peer")
    job.wait(5.1)
    job.exits(S0, -15)
    failure = job.finished.failure
    assert failure is not None
    assert failure["rank"] == 1
    assert "worker/0: RuntimeError: Connection closed by peer" in failure["exception"]


def test_a_polite_stop_cuts_one_step_beyond_the_furthest_and_saves() -> None:
    job = DrivenJob().training()
    new = job.receive(A1, StopWanted(False, False, "psctl stop"))
    assert sent(new, ProposeCut) == [
        (W0, ProposeCut(1)),
        (W1, ProposeCut(1)),
    ]
    assert sent(job.receive(W0, CutPosition(1, 7)), CutAt) == []
    cut = CutAt(1, 9, True, True)
    assert sent(job.receive(W1, CutPosition(1, 8)), CutAt) == [
        (W0, cut),
        (W1, cut),
    ]
    for member in (W0, S0):
        job.receive(member, SaveBegin(9, []))
        job.receive(member, SaveEnd(9))
    job.handle(CheckpointCommitted(9, "/c/9", 8, 0.1))
    job.receive(A1, CheckpointCopyDone(9))
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(9))
        job.exits(worker)
    job.exits(S0)
    assert (job.finished.status, job.finished.exit, job.finished.failure) == ("stopped", 1, None)


def test_a_stop_whose_checkpoint_does_not_fit_is_reported() -> None:
    job = DrivenJob().training()
    job.receive(A0, StopWanted(True, False, "SIGTERM"))
    job.receive(W0, CutPosition(1, 8))
    job.receive(W1, CutPosition(1, 8))
    job.receive(W0, SaveBegin(9, []))
    new = job.handle(CheckpointCommitted(9, problem="no space left"))
    assert sent(new, CheckpointSaved) == [
        (W0, CheckpointSaved(9, "no space left")),
        (W1, CheckpointSaved(9, "no space left")),
    ]
    job.exits(W0)
    job.exits(W1)
    job.exits(S0)
    assert (job.finished.status, job.finished.exit) == ("stopped", 143)
    assert job.finished.failure is not None
    assert "no space left" in job.finished.failure["exception"]


def test_a_forced_stop_kills_at_once_also_during_a_polite_one() -> None:
    job = DrivenJob().training()
    job.receive(A0, StopWanted(True, False, "Ctrl-C"))
    new = job.receive(A0, StopWanted(False, True, "Ctrl-C"))
    kill = StopProcesses(0.0, "stopped by Ctrl-C")
    assert sent(new, StopProcesses) == [(A0, kill), (A1, kill)]
    for member in (W0, W1, S0):
        job.exits(member, -9)
    assert (job.finished.status, job.finished.exit) == ("stopped", 130)


def test_a_script_that_ends_before_the_stop_reaches_it_is_done() -> None:
    job = DrivenJob().training()
    job.receive(A0, StopWanted(False, False, "psctl stop"))
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(8))
        job.exits(worker)
    job.exits(S0)
    assert (job.finished.status, job.finished.exit, job.finished.steps) == ("done", 0, 8)


def test_checkpoints_by_the_clock_are_cut_too() -> None:
    job = DrivenJob(replace(ORDER, checkpoint=replace(ORDER.checkpoint, every_seconds=10.0))).training()
    assert [member for member, _ in sent(job.wait(10.1), ProposeCut)] == [W0, W1]
    job.receive(W0, CutPosition(1, 3))
    cuts = sent(job.receive(W1, CutPosition(1, 3)), CutAt)
    assert cuts[0][1] == CutAt(1, 4, True, False)
    assert sent(job.wait(5), ProposeCut) == []


def test_a_checkpoint_whose_sender_was_lost_is_given_up() -> None:
    job = DrivenJob().training()
    job.receive(W0, SaveBegin(500, []))
    new = job.handle(ConnectionLost(W0, "reset"))
    assert DiscardCheckpoint(500) in new


def test_progress_has_the_last_complete_step() -> None:
    job = DrivenJob().training()
    job.report(W0, 1, loss=1.0)
    job.report(W1, 1, loss=3.0)
    job.report(W0, 2, loss=1.0)
    progress = appended(job.wait(1.1), events.Progress)
    assert [(event.step, event.metrics) for event in progress] == [(1, {"loss": 2.0})]
    assert appended(job.wait(3), events.Progress) == []


def test_a_number_of_few_steps_has_a_progress_event_of_its_step() -> None:
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.report(worker, 1, loss=4.0)
    assert [event.step for event in appended(job.wait(1.1), events.Progress)] == [1]
    for worker in (W0, W1):  # an accuracy of a step that the log has already, then one of a step that it has not
        job.report(worker, 1, loss=4.0, accuracy=0.5)
        job.report(worker, 2, loss=3.0)
        job.report(worker, 3, loss=2.0, accuracy=0.7)
        job.report(worker, 4, loss=1.0, rate=0.1)
        job.report(worker, 5, loss=0.5)
    progress = appended(job.wait(1.1), events.Progress)
    assert [(event.step, event.metrics) for event in progress] == [
        (3, {"loss": 2.0, "accuracy": 0.7}),
        (4, {"loss": 1.0, "rate": 0.1}),
        (5, {"loss": 0.5}),
    ]
    assert len({event.examples_per_second for event in progress}) == 1, "of the whole interval"
    assert appended(job.wait(3), events.Progress) == []


def test_a_number_of_few_steps_that_comes_late_has_an_event() -> None:
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.report(worker, 1, loss=4.0)
    job.wait(1.1)
    for worker in (W0, W1):
        job.report(worker, 1, loss=4.0, accuracy=0.5)
        job.report(worker, 2, loss=3.0)
    progress = appended(job.wait(1.1), events.Progress)
    assert [(event.step, event.metrics) for event in progress] == [
        (1, {"loss": 4.0, "accuracy": 0.5}),
        (2, {"loss": 3.0}),
    ]


def test_a_number_that_is_none_is_reported_and_left_out() -> None:
    job = DrivenJob().training()
    for worker in (W0, W1):
        job.report(worker, 1, loss=float("nan"), accuracy=0.5)
    new = job.wait(1.1)
    assert appended(new, events.Progress)[0].metrics == {"accuracy": 0.5}
    assert [event.text for event in appended(new, events.Notice)] == ["loss is nan at step 1"]
    assert [events.from_line(events.to_line(each.event)) for each in new if isinstance(each, AppendEvent)]


def test_an_agent_speaks_for_its_own_host_only() -> None:
    job = DrivenJob().training()
    job.receive(A0, ProcessExited(W1, 0))
    assert job.machine.state == "running"
    assert "which it may not send" in appended(job.receive(W1, StopWanted(False, True, "me")), events.Notice)[0].text


def test_unknown_members_and_other_incarnations_are_not_expected() -> None:
    machine = DrivenJob().machine
    assert machine.why_not_expected(W0) == ""
    assert machine.why_not_expected(Member("worker", 2)) == "worker/2 is not of this job"
    assert machine.why_not_expected(Member("agent", 2)) == "agent/2 is not of this job"
    assert machine.why_not_expected(Member("server", 0)) == "server/0 is not of this job"
    assert "incarnation 1" in machine.why_not_expected(Member("worker", 0, 1))


# ---- any order of anything -----------------------------------------------------------------------------------------

MEMBERS = st.sampled_from([Member(each.role, each.rank, start) for each in (W0, W1, S0) for start in (0, 0, 1)])
ANYTHING = st.one_of(
    st.builds(
        MessageReceived,
        MEMBERS,
        st.builds(Heartbeat, st.integers(0, 9), st.sampled_from(["compute", "sync: x"])),
    ),
    st.builds(MessageReceived, MEMBERS, st.builds(CutPosition, st.integers(1, 3), st.integers(0, 9))),
    st.builds(MessageReceived, MEMBERS, st.builds(SaveBegin, st.integers(1, 3), st.just([]))),
    st.builds(MessageReceived, MEMBERS, st.builds(SaveEnd, st.integers(1, 3))),
    st.builds(MessageReceived, MEMBERS, st.builds(ScriptFinished, st.integers(0, 9))),
    st.builds(MessageReceived, MEMBERS, st.just(Prepare(LAYOUT, ()))),
    st.builds(
        MessageReceived,
        MEMBERS,
        st.builds(MemberReady, st.sampled_from([None, Address("10.0.0.1", 1)])),
    ),
    st.builds(MessageReceived, MEMBERS, st.builds(Join, st.just(1))),
    st.builds(
        MessageReceived,
        st.sampled_from([A0, A1]),
        st.builds(StopWanted, st.booleans(), st.booleans(), st.just("x")),
    ),
    st.builds(
        MessageReceived,
        st.sampled_from([A0, A1]),
        st.builds(ProcessExited, MEMBERS, st.sampled_from([0, 1, -9])),
    ),
    st.builds(MessageReceived, st.sampled_from([A0, A1]), st.builds(ProcessStarted, MEMBERS, st.just(5))),
    st.builds(MessageReceived, st.sampled_from([A0, A1]), st.just(Register())),
    st.builds(CheckpointCommitted, st.integers(1, 3), problem=st.sampled_from(["", "disk full"])),
    st.builds(CheckpointCopyFailed, st.integers(1, 3), st.sampled_from([A0, A1]), st.just("gone")),
    st.builds(Connected, MEMBERS),
    st.builds(ConnectionLost, st.one_of(MEMBERS, st.sampled_from([A0, A1])), st.just("reset")),
    st.just(PlanMade("ps", "server", [0], PLAN)),
    st.just(ShardsMade([], [])),
    st.just(RestorableFound(None)),
    st.just(Tick()),
)


@settings(max_examples=examples(300))
@given(
    st.sampled_from(["registered", "running", "prepared", "training"]),
    st.sampled_from([0, 2]),
    st.lists(ANYTHING, max_size=40),
    st.data(),
)
def test_whatever_happens_the_job_ends_once_and_starts_nothing_after_it_began_to(
    stage: str, restarts: int, inputs: list[Input], data: st.DataObject
) -> None:
    job = getattr(DrivenJob(replace(ORDER, restarts=restarts)), stage)()
    for each in inputs:
        job.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 40.0]))
        if _possible(job, each):
            job.handle(each)
    job.receive(A0, StopWanted(False, True, "the test"))
    job.wait(2000)
    assert job.machine.over
    ends = [
        index
        for index, each in enumerate(job.instructions)
        if isinstance(each, AppendEvent) and isinstance(each.event, events.Finished)
    ]
    assert len(ends) == 1
    assert isinstance(job.instructions[ends[0] + 1], CloseCoordinator)
    assert ends[0] + 2 == len(job.instructions)
    stopping = next(
        index
        for index, each in enumerate(job.instructions)
        if isinstance(each, AppendEvent)
        and isinstance(each.event, events.StateChanged)
        and each.event.state == "stopping"
    )
    assert not [each for each in job.instructions[stopping:] if isinstance(each, StartMember | MakePlan | MakeShards)]
    final = {
        (each.event.role, each.event.rank): each.event.state
        for each in job.instructions
        if isinstance(each, AppendEvent) and isinstance(each.event, events.StateChanged)
    }
    assert all(state in ("done", "failed", "lost", "stopped") for state in final.values())
    started = [each.member for each in job.instructions if isinstance(each, StartMember)]
    assert len(started) == len(set(started))
    epochs = [each.assignment.epoch for _, each in sent(job.instructions, Decision)]
    assert epochs == sorted(epochs)
    assert job.handle(MessageReceived(A0, StopWanted(False, True, "late"))) == []


def _possible(job: DrivenJob, each: Input) -> bool:
    """The shell answers its questions, and nothing else: answers without a question are left out."""
    asked = [type(each) for each in job.instructions if isinstance(each, MakePlan | MakeShards | FindRestorable)]
    if isinstance(each, PlanMade):
        return bool(asked) and asked[-1] is MakePlan
    if isinstance(each, ShardsMade):
        return bool(asked) and asked[-1] is MakeShards
    if isinstance(each, RestorableFound):
        return bool(asked) and asked[-1] is FindRestorable
    return True


def test_where_ranks_step_apart_each_has_its_part_in_a_checkpoint() -> None:
    job = DrivenJob(replace(ORDER, period=8)).prepared()
    new = job.handle(PlanMade("native", "worker", [], replace(PLAN, chosen="native")))
    assert [each.period for _, each in sent(new, Decision)] == [8, 8]
    for worker in (W0, W1):
        job.receive(worker, MemberReady())
    job.receive(W0, SaveBegin(8, []))
    assert not [each for each in job.receive(W0, SaveEnd(8)) if isinstance(each, CommitCheckpoint)]
    job.receive(W1, SaveBegin(8, []))
    assert [each.step for each in job.receive(W1, SaveEnd(8)) if isinstance(each, CommitCheckpoint)] == [8]


def test_an_outer_optimizer_is_every_ranks_or_none() -> None:
    job = DrivenJob().running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, (), worker == W1))
    job.wait(1)
    for member in (W0, W1):
        job.exits(member, -15)
    assert "given an outer optimizer, on worker/0 none" in job.finished.failure["exception"]


def test_a_checkpoint_has_the_metrics_of_its_own_step_over_all_ranks() -> None:
    job = DrivenJob().training()
    for step in (459, 460):
        job.report(W0, step, loss=step + 1.0, rested=step)
    job.report(W1, 459, loss=459.0, rested=459)
    assert job.saves(460) == [], "rank 1 may still report of step 460"
    assert commits(job.report(W1, 460, early=5.0, rested=459)) == [], "and may report more of it"
    assert [(each.step, each.metrics) for each in commits(job.report(W1, 460, loss=467.0, rested=460))] == [
        (460, {"early": 5.0, "loss": 464.0})
    ]
    job.handle(CheckpointCommitted(460, "/c", 8, 0.1))
    job.report(W0, 462, loss=1.0, rested=462)
    job.report(W1, 462, loss=1.0, rested=462)
    assert [each.metrics for each in job.saves(463)] == [{}], "nobody reported of step 463: no other step's stand in"


def test_a_checkpoint_does_not_wait_for_reports_of_ranks_that_have_ended_or_are_far_behind() -> None:
    job = DrivenJob().training()
    job.report(W0, 7, loss=1.0, rested=7)
    assert job.saves(7) == []
    assert [each.metrics for each in commits(job.wait(checkpoints.REPORTS_WAIT + 0.1))] == [{}], (
        "one rank's are not all"
    )
    job.report(W0, 9, loss=2.0, rested=9)
    assert job.saves(9) == []
    assert [each.metrics for each in commits(job.exits(W1))] == [{"loss": 2.0}]


def test_a_checkpoint_that_was_sent_is_whole_though_the_job_starts_again() -> None:
    job = DrivenJob(replace(ORDER, restarts=3)).training()
    job.report(W0, 7, loss=1.0, rested=7)
    assert job.saves(7) == []
    new = [*job.exits(S0, -9), *job.wait(6)]
    assert [each.metrics for each in commits(new)] == [{}]
    assert DiscardCheckpoint(7) not in new


def followed(step: int, **options: Any) -> DrivenJob:
    """Return a job whose workers follow a library's loop, and train."""
    job = DrivenJob(replace(ORDER, **{"strategy": "auto", **options})).running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(Layout((), "", ()), (), follows=step))
    job.receive(W0, MemberReady())
    job.receive(W1, MemberReady())
    return job


def test_a_librarys_loop_has_no_plan_and_saves_and_stops_at_a_common_step() -> None:
    job = followed(30)
    assert job.machine.job.training
    assert not [each for each in job.instructions if isinstance(each, MakePlan)]
    assert not [
        each for each in job.instructions if isinstance(each, AppendEvent) and isinstance(each.event, events.Planned)
    ]
    job.receive(A0, StopWanted(True, False, "psctl stop"))
    job.receive(W0, CutPosition(1, 33))
    new = job.receive(W1, CutPosition(1, 34))
    cuts = [each.message for each in new if isinstance(getattr(each, "message", None), CutAt)]
    assert cuts == [CutAt(1, 35, save=True, stop=True)] * 2
    for worker in (W0, W1):
        job.receive(worker, SaveBegin(35, [], {"library_path": "/out"} if worker == W0 else None))
        job.receive(worker, SaveEnd(35))
        job.receive(worker, ScriptFinished(35))
    assert [each.step for each in commits(job.instructions)] == [35]
    job.handle(CheckpointCommitted(35, "/saved", 10, 0.1))
    job.exits(W0, 0)
    job.exits(W1, 0)
    job.wait(70)  # for the second copy, which does not come
    (end,) = [
        each.event
        for each in job.instructions
        if isinstance(each, AppendEvent) and isinstance(each.event, events.Finished)
    ]
    assert (end.status, end.steps) == ("stopped", 5)


def test_of_a_followed_loop_the_checkpoint_needs_no_parameters_though_psctl_sums_its_gradients() -> None:
    job = DrivenJob().running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, (), hooked=True, follows=0))
    job.handle(PlanMade("ring", "worker", [], PLAN))
    for worker in (W0, W1):
        job.receive(worker, MemberReady())
    for worker in (W0, W1):
        job.receive(worker, SaveBegin(10, [], {"library_path": "/out"} if worker == W0 else None))
        job.receive(worker, SaveEnd(10))
    job.wait(11)
    assert [each.parameters for each in commits(job.instructions)] == [[]]


def test_a_library_may_evaluate_for_long_between_two_steps() -> None:

    job = followed(0, stall_timeout=60.0)
    for _ in range(100):
        job.wait(2)
        for agent, worker in ((A0, W0), (A1, W1)):
            job.receive(agent, HostSample(0.1, [worker]))
    assert job.machine.job.ending is None
    job.wait(90)
    assert job.machine.job.ending is not None, "nothing uses the processor any more"


def test_a_strategy_for_a_librarys_loop_is_refused() -> None:
    job = followed(0, strategy="ring")
    job.wait(3)
    assert job.machine.job.ending is not None
    assert "which sums gradients itself" in job.machine.job.ending.failures[0].exception


def test_ranks_that_follow_from_different_steps_are_refused() -> None:
    job = DrivenJob().running()
    for worker, step in ((W0, 10), (W1, 0)):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(Layout((), "", ()), (), follows=step))
    assert job.machine.job.ending is not None
    assert "continues after step 0, that of worker/0 is a library's and continues after step 10" in (
        job.machine.job.ending.failures[0].exception
    )


def test_a_script_with_a_loop_of_its_own_saves_nothing_and_leaves_at_a_stop() -> None:
    job = DrivenJob().running()
    for worker in (W0, W1):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, (), hooked=True))
    assert [each.hooked for each in job.instructions if isinstance(each, MakePlan)] == [True]
    job.handle(PlanMade("ring", "worker", [], PLAN))
    job.receive(W0, MemberReady())
    job.receive(W1, MemberReady())
    assert job.machine.state == "running"
    new = job.receive(A0, StopWanted(True, False, "psctl stop"))
    assert not [each for each in job.instructions if isinstance(getattr(each, "message", None), ProposeCut)]
    assert [each for each in new if isinstance(getattr(each, "message", None), StopProcesses)], new


@pytest.mark.parametrize("sealed", [True, False])
def test_the_log_says_that_data_is_not_encrypted(sealed: bool) -> None:
    job = DrivenJob(replace(ORDER, sealed=sealed))
    found = [event.text for event in appended(job.instructions, events.Notice)]
    assert any("network.encryption: off" in text for text in found) == (not sealed)
