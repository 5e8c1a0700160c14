"""The coordinator's mind: tables of happenings, and any order of deaths."""

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
    CheckpointCopySent,
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
    Register,
    StopProcesses,
    StopWanted,
)
from psctl.job.training_messages import Decision, Go, Heartbeat, Join, Leave, MemberReady, Prepare, ScriptFinished
from psctl.types import Address, Member, ServerAt
from tests.coordinator.play import A0, A1, LAYOUT, ORDER, PLAN, S0, W0, W1, Play, appended, commits, told
from tests.examples import examples


def test_the_first_event_is_started_and_workers_are_ordered_when_all_agents_are_there() -> None:
    play = Play()
    first = play.said[0]
    assert isinstance(first, AppendEvent)
    assert isinstance(first.event, events.Started)
    assert first.event.time == 1000.0
    assert [each for each in play.hear(A0, Register("h0", 1, 4, 1, 0)) if isinstance(each, StartMember)] == []
    starts = [each for each in play.hear(A1, Register("h1", 1, 4, 1, 0)) if isinstance(each, StartMember)]
    assert [(start.member, start.host, start.local_rank) for start in starts] == [(W0, 0, 0), (W1, 1, 0)]
    assert starts[1].environment["RANK"] == "1"
    assert play.mind.state == "starting"


def test_the_whole_way_to_training_under_ps() -> None:
    play = Play().prepared()
    assert isinstance(play.said[-1], MakePlan)
    new = play(PlanMade("ps", "server", [0], PLAN))
    assert [each.member for each in new if isinstance(each, StartMember)] == [S0]
    play.hear(A0, ProcessStarted(S0, 102))
    play(Connected(S0))
    play.hear(S0, Join(102))
    assert play.hear(S0, MemberReady(Address("10.0.0.1", 4000))) == [MakeShards(LAYOUT, 1, near=False)]
    decisions = told(play(ShardsMade([], [])), Decision)
    assert [member for member, _ in decisions] == [S0, W0, W1]
    assert decisions[0][1].assignment.servers == [ServerAt(0, 0, Address("10.0.0.1", 4000))]
    assert told(play.hear(W0, MemberReady()), Go) == []
    assert [member for member, _ in told(play.hear(W1, MemberReady()), Go)] == [
        S0,
        W0,
        W1,
    ]


@pytest.mark.parametrize(("workers", "near"), [(2, True), (1, False)])
def test_shards_are_cut_for_one_host_where_no_process_is_on_another(workers: int, near: bool) -> None:
    hosts = [replace(ORDER.hosts[0], slots=3, workers=workers), replace(ORDER.hosts[1], workers=2 - workers)]
    play = Play(replace(ORDER, hosts=hosts)).registered()
    for rank, agent in enumerate((A0, A0 if near else A1)):
        play.hear(agent, ProcessStarted(Member("worker", rank), 100 + rank))
        play(Connected(Member("worker", rank)))
        play.hear(Member("worker", rank), Join(100))
        play.hear(Member("worker", rank), Prepare(LAYOUT, ()))
    play(PlanMade("ps", "server", [0], PLAN))
    play.hear(A0, ProcessStarted(S0, 102))
    play(Connected(S0))
    play.hear(S0, Join(102))
    assert play.hear(S0, MemberReady(Address("10.0.0.1", 4000))) == [MakeShards(LAYOUT, 1, near)]


def test_native_needs_no_servers() -> None:
    play = Play().prepared()
    new = play(PlanMade("native", "worker", [], replace(PLAN, chosen="native")))
    assert [member for member, _ in told(new, Decision)] == [W0, W1]


def test_what_a_schedule_is_built_with_goes_to_every_rank() -> None:
    told_to = {"order": [1, 0], "pieces": 4}
    plan = PlanMade("ring", "worker", [], replace(PLAN, chosen="ring"), options=told_to)
    decisions = told(Play().prepared()(plan), Decision)
    assert [(member, each.strategy, each.options) for member, each in decisions] == [
        (W0, "ring", told_to), (W1, "ring", told_to),
    ]  # fmt: skip


def test_a_job_is_done_when_its_workers_are_and_servers_are_asked_to_leave() -> None:
    play = Play().training()
    play.exits(W0)
    assert [member for member, _ in told(play.exits(W1), Leave)] == [S0]
    play.exits(S0)
    assert (play.last.status, play.last.exit, play.last.failure) == ("done", 0, None)


def test_the_end_waits_for_what_was_saved_last() -> None:
    play = Play().training()
    for worker in (W0, W1):
        play.hear(worker, SaveBegin(7, []))
        play.hear(worker, SaveEnd(7))
    play.exits(W0)
    play.exits(W1)
    assert play.mind.state == "stopping"
    play.hear(S0, SaveBegin(7, []))
    new = play.hear(S0, SaveEnd(7))
    assert [each.step for each in new if isinstance(each, CommitCheckpoint)] == [7]
    play.exits(S0)
    new = play(CheckpointCommitted(7, "/c/7", 8, 0.1))
    assert appended(new, events.CheckpointWritten)[0].path == "/c/7"
    assert SendCheckpointCopy(7, A1) in new
    play(CheckpointCopySent(7))
    assert play.mind.state == "stopping"
    play.hear(A1, CheckpointCopyDone(7))
    assert play.last.status == "done"


def test_the_first_real_failure_is_named_not_the_loss_that_was_told_first() -> None:
    play = Play().training()
    play.exits(W0, 1, "PeerLost: worker/1 left", code="peer-lost")
    play.now = 0.2
    play.exits(W1, 1, "ValueError: NaN")
    play.wait(0.3)
    play.exits(S0, -15)
    last = play.last
    assert (last.status, last.exit) == ("failed", 1)
    assert last.failure is not None
    assert (last.failure["rank"], last.failure["exception"]) == (1, "ValueError: NaN")
    assert last.failure["stopped"] == ["server/0"]  # psctl ended it; worker/0 ended by itself
    assert [(each["rank"], each["exception"]) for each in last.failure["failed"]] == [
        ("worker/0", "PeerLost: worker/1 left")
    ]
    assert [event.rank for event in appended(play.said, events.WorkerLost)] == [1]


def test_ranks_that_fail_together_have_each_failed_and_none_was_stopped() -> None:
    play = Play().training()
    play.exits(W1, 1, "ValueError: NaN")
    play.exits(W0, 1, "KeyError: 'x'")
    play.wait(0.5)
    play.exits(S0, -15)
    failure = play.last.failure
    assert failure is not None
    assert (failure["rank"], failure["stopped"]) == (1, ["server/0"])
    assert failure["failed"] == [{"rank": "worker/0", "host": "h0", "status": 1, "exception": "KeyError: 'x'"}]


def test_a_loss_alone_is_named_when_nobody_better_comes() -> None:
    play = Play().training()
    play.exits(W0, 1, "PeerLost: worker/1 left", code="peer-lost")
    assert told(play.wait(4.5), StopProcesses) == []
    assert [member for member, _ in told(play.wait(1), StopProcesses)] == [A0, A1]


def test_the_checkpoint_and_the_commands_are_in_the_failure() -> None:
    play = Play().training()
    for member in (W0, S0):
        play.hear(member, SaveBegin(500, []))
        play.hear(member, SaveEnd(500))
    play(CheckpointCommitted(500, "/c", 8, 0.1), CheckpointCopySent(500))
    play.hear(A1, CheckpointCopyDone(500))
    play.hear(W1, Heartbeat(507, "compute"))
    play.exits(W1, 1, "ValueError: NaN")
    play.wait(0.5)
    play.exits(W0, -15)
    play.exits(S0, -15)
    failure = play.last.failure
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
    play = Play().training()
    play(ConnectionLost(A1, "no word for 5 s"), ConnectionLost(W1, "no word for 5 s"))
    play.wait(0.5)
    assert [member for member, _ in told(play.said, StopProcesses)] == [A0]
    play.exits(W0, -15)
    play.exits(S0, -15)
    failure = play.last.failure
    assert failure is not None
    assert failure["exception"].startswith("HostLost: h1 is lost")
    assert (failure["role"], failure["rank"], failure["host"]) == ("worker", 1, "h1")


def test_a_server_that_ends_early_is_a_failure_whatever_its_status() -> None:
    play = Play().training()
    play.exits(S0, 0)
    assert play.mind.state == "stopping"
    play.wait(0.5)
    assert [event.rank for event in appended(play.said, events.ServerLost)] == [0]


@pytest.mark.parametrize(
    ("prepare", "missing", "text"),
    [
        (
            lambda play: play.hear(A0, Register("h0", 1, 4, 1, 0)),
            "agent/1",
            "no word from psctl's agent on h1",
        ),
        (
            lambda play: play.running() and play.hear(W0, Join(1)),
            "worker/1",
            "did not call psctl.init",
        ),
        (
            lambda play: (
                play.running() and [play.hear(w, Join(1)) for w in (W0, W1)] and play.hear(W1, Prepare(LAYOUT, ()))
            ),
            "worker/0",
            "did not call prepare",
        ),
        (lambda play: play.prepared()(PlanMade("ps", "server", [0], PLAN)), "server/0", "did not begin to listen"),
    ],
)
def test_who_keeps_the_job_from_starting_is_named(prepare: Any, missing: str, text: str) -> None:
    play = Play()
    prepare(play)
    play.wait(160)
    last = play.last
    assert (last.status, last.exit) == ("failed", 5)
    assert last.failure is not None
    assert f"{last.failure['role']}/{last.failure['rank']}" == missing
    assert text in last.failure["exception"]


def test_a_plain_script_may_run_as_long_as_it_likes() -> None:
    play = Play().running()
    for _ in range(40):
        play.wait(100)
        play.hear(A0, HostSample("h0", 0.5, 0.1, busy=[W0]))
    assert play.mind.state == "running"


def test_a_rank_that_ends_before_prepare_is_noticed_at_once() -> None:
    play = Play().running()
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
    play.hear(W0, Prepare(LAYOUT, ()))
    play.exits(W1, 0)
    play.wait(1)
    play.exits(W0, -15)
    failure = play.last.failure
    assert failure is not None
    assert (failure["rank"], "ended before it called prepare" in failure["exception"]) == (1, True)


def test_a_stall_is_named_after_30_s_and_ended_after_the_limit() -> None:
    play = Play().training()
    for step in range(1, 4):
        play.hear(W0, Heartbeat(step, "sync: waiting for server/0"))
        play.hear(W1, Heartbeat(step, "compute"))
    notices = [event.text for event in appended(play.wait(31), events.Notice)]
    assert notices == ["worker/1 on h1 is at step 3 since 30 s: compute, silent for 30 s"]
    assert appended(play.wait(200), events.Notice) == []
    play.wait(120)
    assert (play.last.exit, play.last.status) == (5, "failed")
    assert play.last.failure is not None
    assert play.last.failure["rank"] == 1


def left_at_7(how: str) -> Play:
    """Worker 1 leaves in good order after step 7; worker 0 goes on to step 8."""
    play = Play().training()
    for worker in (W0, W1):
        play.hear(worker, Heartbeat(7, "compute"))
    if how == "sys.exit":
        play.hear(W1, ScriptFinished(7))
    play.exits(W1, 0)
    play.hear(
        W0,
        Heartbeat(8, "sync: waiting for values of clock 8 from server/0, which waits for worker/1"),
    )
    return play


@pytest.mark.parametrize(
    ("how", "text"),
    [("sys.exit", "left after step 7"), ("os._exit", "ended with status 0 in the middle of training")],
)
def test_a_worker_that_leaves_while_others_train_is_named_when_they_have_waited_for_it(how: str, text: str) -> None:
    play = left_at_7(how)
    play.wait(9.5)
    assert play.mind.state == "running"
    play.wait(1)
    play.exits(W0, -15)
    play.exits(S0, -15)
    failure = play.last.failure
    assert failure is not None
    assert (failure["rank"], failure["host"], failure["step"]) == (1, "h1", 7)
    assert text in failure["exception"]
    assert "worker/0 on h0 is at step 8, sync: waiting" in failure["exception"]
    assert "break" in failure["hint"]
    assert play.last.steps == 8


def test_a_worker_that_trains_on_alone_after_the_last_common_step_is_no_failure() -> None:
    play = Play().training()
    for worker in (W0, W1):
        play.hear(worker, Heartbeat(7, "compute"))
    play.hear(W1, ScriptFinished(7))
    play.exits(W1, 0)
    play.hear(W0, Heartbeat(7, "sync: waiting for values of clock 7 from server/0"))
    play.wait(25)
    assert play.mind.state == "running"
    play.hear(W0, ScriptFinished(7))
    play.exits(W0, 0)
    play.exits(S0, 0)
    assert play.last.status == "done"


def test_a_loss_of_a_worker_that_left_early_names_that_worker() -> None:
    play = left_at_7("sys.exit")
    play.exits(W0, 1, "RuntimeError: Connection closed by peer")
    play.wait(5.1)
    play.exits(S0, -15)
    failure = play.last.failure
    assert failure is not None
    assert failure["rank"] == 1
    assert "worker/0: RuntimeError: Connection closed by peer" in failure["exception"]


def test_a_polite_stop_cuts_one_step_beyond_the_furthest_and_saves() -> None:
    play = Play().training()
    new = play.hear(A1, StopWanted(False, False, "psctl stop"))
    assert told(new, ProposeCut) == [
        (W0, ProposeCut(1)),
        (W1, ProposeCut(1)),
    ]
    assert told(play.hear(W0, CutPosition(1, 7)), CutAt) == []
    cut = CutAt(1, 9, True, True)
    assert told(play.hear(W1, CutPosition(1, 8)), CutAt) == [
        (W0, cut),
        (W1, cut),
    ]
    for member in (W0, S0):
        play.hear(member, SaveBegin(9, []))
        play.hear(member, SaveEnd(9))
    play(CheckpointCommitted(9, "/c/9", 8, 0.1), CheckpointCopySent(9))
    play.hear(A1, CheckpointCopyDone(9))
    for worker in (W0, W1):
        play.hear(worker, ScriptFinished(9))
        play.exits(worker)
    play.exits(S0)
    assert (play.last.status, play.last.exit, play.last.failure) == ("stopped", 1, None)


def test_a_stop_whose_checkpoint_does_not_fit_says_so() -> None:
    play = Play().training()
    play.hear(A0, StopWanted(True, False, "SIGTERM"))
    play.hear(W0, CutPosition(1, 8))
    play.hear(W1, CutPosition(1, 8))
    play.hear(W0, SaveBegin(9, []))
    new = play(CheckpointCommitted(9, problem="no space left"))
    assert told(new, CheckpointSaved) == [
        (W0, CheckpointSaved(9, "no space left")),
        (W1, CheckpointSaved(9, "no space left")),
    ]
    play.exits(W0)
    play.exits(W1)
    play.exits(S0)
    assert (play.last.status, play.last.exit) == ("stopped", 143)
    assert play.last.failure is not None
    assert "no space left" in play.last.failure["exception"]


def test_a_forced_stop_kills_at_once_also_during_a_polite_one() -> None:
    play = Play().training()
    play.hear(A0, StopWanted(True, False, "Ctrl-C"))
    new = play.hear(A0, StopWanted(False, True, "Ctrl-C"))
    kill = StopProcesses(0.0, "stopped by Ctrl-C")
    assert told(new, StopProcesses) == [(A0, kill), (A1, kill)]
    for member in (W0, W1, S0):
        play.exits(member, -9)
    assert (play.last.status, play.last.exit) == ("stopped", 130)


def test_a_script_that_ends_before_the_stop_reaches_it_is_done() -> None:
    play = Play().training()
    play.hear(A0, StopWanted(False, False, "psctl stop"))
    for worker in (W0, W1):
        play.hear(worker, ScriptFinished(8))
        play.exits(worker)
    play.exits(S0)
    assert (play.last.status, play.last.exit, play.last.steps) == ("done", 0, 8)


def test_checkpoints_by_the_clock_are_cut_too() -> None:
    play = Play(replace(ORDER, checkpoint=replace(ORDER.checkpoint, every_seconds=10.0))).training()
    assert [member for member, _ in told(play.wait(10.1), ProposeCut)] == [W0, W1]
    play.hear(W0, CutPosition(1, 3))
    cuts = told(play.hear(W1, CutPosition(1, 3)), CutAt)
    assert cuts[0][1] == CutAt(1, 4, True, False)
    assert told(play.wait(5), ProposeCut) == []


def test_a_checkpoint_whose_sender_died_is_given_up() -> None:
    play = Play().training()
    play.hear(W0, SaveBegin(500, []))
    new = play(ConnectionLost(W0, "reset"))
    assert DiscardCheckpoint(500) in new


def test_progress_tells_the_last_complete_step() -> None:
    play = Play().training()
    play.report(W0, 1, loss=1.0)
    play.report(W1, 1, loss=3.0)
    play.report(W0, 2, loss=1.0)
    progress = appended(play.wait(1.1), events.Progress)
    assert [(event.step, event.metrics) for event in progress] == [(1, {"loss": 2.0})]
    assert appended(play.wait(3), events.Progress) == []


def test_a_number_that_is_none_is_said_and_left_out() -> None:
    play = Play().training()
    for worker in (W0, W1):
        play.report(worker, 1, loss=float("nan"), accuracy=0.5)
    new = play.wait(1.1)
    assert appended(new, events.Progress)[0].metrics == {"accuracy": 0.5}
    assert [event.text for event in appended(new, events.Notice)] == ["loss is nan at step 1"]
    assert [events.from_line(events.to_line(each.event)) for each in new if isinstance(each, AppendEvent)]


def test_an_agent_speaks_for_its_own_host_only() -> None:
    play = Play().training()
    play.hear(A0, ProcessExited(W1, 0))
    assert play.mind.state == "running"
    assert "not its part" in appended(play.hear(W1, StopWanted(False, True, "me")), events.Notice)[0].text


def test_strangers_and_other_incarnations_are_not_expected() -> None:
    mind = Play().mind
    assert mind.why_not_expected(W0) == ""
    assert mind.why_not_expected(Member("worker", 2)) == "worker/2 is not of this job"
    assert mind.why_not_expected(Member("agent", 2)) == "agent/2 is not of this job"
    assert mind.why_not_expected(Member("server", 0)) == "server/0 is not of this job"
    assert "incarnation 1" in mind.why_not_expected(Member("worker", 0, 1))


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
    st.builds(MessageReceived, st.sampled_from([A0, A1]), st.just(Register("h", 1, 1, 1, 0))),
    st.builds(CheckpointCommitted, st.integers(1, 3), problem=st.sampled_from(["", "disk full"])),
    st.builds(CheckpointCopySent, st.integers(1, 3), st.sampled_from(["", "gone"])),
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
    stage: str, restarts: int, happenings: list[Input], data: st.DataObject
) -> None:
    play = getattr(Play(replace(ORDER, restarts=restarts)), stage)()
    for happening in happenings:
        play.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 40.0]))
        if _possible(play, happening):
            play(happening)
    play.hear(A0, StopWanted(False, True, "the test"))
    play.wait(2000)
    assert play.mind.over
    ends = [
        index
        for index, each in enumerate(play.said)
        if isinstance(each, AppendEvent) and isinstance(each.event, events.Finished)
    ]
    assert len(ends) == 1
    assert isinstance(play.said[ends[0] + 1], CloseCoordinator)
    assert ends[0] + 2 == len(play.said)
    stopping = next(
        index
        for index, each in enumerate(play.said)
        if isinstance(each, AppendEvent)
        and isinstance(each.event, events.StateChanged)
        and each.event.state == "stopping"
    )
    assert not [each for each in play.said[stopping:] if isinstance(each, StartMember | MakePlan | MakeShards)]
    final = {
        (each.event.role, each.event.rank): each.event.state
        for each in play.said
        if isinstance(each, AppendEvent) and isinstance(each.event, events.StateChanged)
    }
    assert all(state in ("done", "failed", "lost", "stopped") for state in final.values())
    started = [each.member for each in play.said if isinstance(each, StartMember)]
    assert len(started) == len(set(started))
    epochs = [each.assignment.epoch for _, each in told(play.said, Decision)]
    assert epochs == sorted(epochs)
    assert play(MessageReceived(A0, StopWanted(False, True, "late"))) == []


def _possible(play: Play, happening: Input) -> bool:
    """The shell answers its questions, and nothing else: answers without a question are left out."""
    asked = [type(each) for each in play.said if isinstance(each, MakePlan | MakeShards | FindRestorable)]
    if isinstance(happening, PlanMade):
        return bool(asked) and asked[-1] is MakePlan
    if isinstance(happening, ShardsMade):
        return bool(asked) and asked[-1] is MakeShards
    if isinstance(happening, RestorableFound):
        return bool(asked) and asked[-1] is FindRestorable
    return True


def test_where_ranks_step_apart_each_has_its_part_in_a_checkpoint() -> None:
    play = Play(replace(ORDER, period=8)).prepared()
    new = play(PlanMade("native", "worker", [], replace(PLAN, chosen="native")))
    assert [each.period for _, each in told(new, Decision)] == [8, 8]
    for worker in (W0, W1):
        play.hear(worker, MemberReady())
    play.hear(W0, SaveBegin(8, []))
    assert not [each for each in play.hear(W0, SaveEnd(8)) if isinstance(each, CommitCheckpoint)]
    play.hear(W1, SaveBegin(8, []))
    assert [each.step for each in play.hear(W1, SaveEnd(8)) if isinstance(each, CommitCheckpoint)] == [8]


def test_an_outer_optimizer_is_every_ranks_or_none() -> None:
    play = Play().running()
    for worker in (W0, W1):
        play(Connected(worker))
        play.hear(worker, Join(1))
        play.hear(worker, Prepare(LAYOUT, (), worker == W1))
    play.wait(1)
    for member in (W0, W1):
        play.exits(member, -15)
    assert "given an outer optimizer, on worker/0 none" in play.last.failure["exception"]


def test_a_checkpoint_has_the_metrics_of_its_own_step_over_all_ranks() -> None:
    play = Play().training()
    for step in (459, 460):
        play.report(W0, step, loss=step + 1.0, rested=step)
    play.report(W1, 459, loss=459.0, rested=459)
    assert play.saves(460) == [], "rank 1 may still report of step 460"
    assert commits(play.report(W1, 460, early=5.0, rested=459)) == [], "and may report more of it"
    assert [(each.step, each.metrics) for each in commits(play.report(W1, 460, loss=467.0, rested=460))] == [
        (460, {"early": 5.0, "loss": 464.0})
    ]
    play(CheckpointCommitted(460, "/c", 8, 0.1), CheckpointCopySent(460))
    play.report(W0, 462, loss=1.0, rested=462)
    play.report(W1, 462, loss=1.0, rested=462)
    assert [each.metrics for each in play.saves(463)] == [{}], "nobody reported of step 463: no other step's stand in"


def test_a_checkpoint_does_not_wait_for_reports_of_ranks_that_are_gone_or_far_behind() -> None:
    play = Play().training()
    play.report(W0, 7, loss=1.0, rested=7)
    assert play.saves(7) == []
    assert [each.metrics for each in commits(play.wait(checkpoints.REPORTS_WAIT + 0.1))] == [{}], (
        "one rank's are not all"
    )
    play.report(W0, 9, loss=2.0, rested=9)
    assert play.saves(9) == []
    assert [each.metrics for each in commits(play.exits(W1))] == [{"loss": 2.0}]


def test_a_checkpoint_that_was_sent_is_whole_though_the_job_starts_again() -> None:
    play = Play(replace(ORDER, restarts=3)).training()
    play.report(W0, 7, loss=1.0, rested=7)
    assert play.saves(7) == []
    new = [*play.exits(S0, -9), *play.wait(6)]
    assert [each.metrics for each in commits(new)] == [{}]
    assert DiscardCheckpoint(7) not in new
