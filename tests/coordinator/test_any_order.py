"""Servers and workers that die, come, go and answer in any order: the instructions always keep these rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    AppendEvent,
    CheckpointCommitted,
    CloseCoordinator,
    Connected,
    ConnectionLost,
    FindRestorable,
    Input,
    MessageReceived,
    RestorableFound,
    StartMember,
    Tick,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CutPosition, SaveBegin, SaveEnd
from psctl.job.membership_messages import (
    CountUntil,
    LostWorkerClocks,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
)
from psctl.job.process_messages import ProcessExited, ProcessStarted, ScaleWanted, StopWanted
from psctl.job.training_messages import Join, MemberReady, Prepare, ScriptFinished
from psctl.types import Address, Member
from tests.helpers.driven_job import A0, A1, ELASTIC, LAYOUT, DrivenJob, sent, training
from tests.hypothesis_profile import examples

ROOMY = replace(ELASTIC, hosts=[replace(host, slots=3) for host in ELASTIC.hosts])
ANYBODY = st.builds(Member, st.sampled_from(["worker", "server"]), st.integers(0, 3), st.integers(0, 2))
SERVER = st.builds(Member, st.just("server"), st.integers(0, 3), st.integers(0, 1))
AGENT = st.sampled_from([A0, A1])
CLOCKS = st.dictionaries(st.integers(0, 5), st.integers(0, 3), min_size=3)
MESSAGES = st.one_of(
    st.just(Join(1)), st.just(Prepare(LAYOUT, ())), st.builds(ScriptFinished,
    st.integers(0, 9)), st.builds(MemberReady, st.sampled_from([None, Address("10.0.0.1", 1)])),
    st.builds(SaveBegin, st.integers(1, 3), st.just([])), st.builds(SaveEnd, st.integers(1,
    3)), st.builds(CutPosition, st.integers(1, 2), st.integers(0, 9)),
)  # fmt: skip
ANSWERS = st.one_of(
    st.builds(LostWorkerClocks, st.integers(0, 2), st.integers(0, 1), CLOCKS, CLOCKS),
    st.builds(ShardCaughtUp, st.integers(0, 9), st.integers(0, 6), st.integers(0, 3)),
    st.builds(ShardHandedOver, st.integers(0, 9), st.integers(0, 6)),
    st.builds(ServerUnreachable, st.integers(0, 3), st.integers(0, 1), st.just("reset")),
)  # fmt: skip
ANYTHING: st.SearchStrategy[Input] = st.one_of(
    st.builds(MessageReceived, ANYBODY, MESSAGES),
    st.builds(MessageReceived, SERVER, ANSWERS),
    st.builds(MessageReceived, AGENT, st.builds(ProcessExited, ANYBODY, st.sampled_from([0, -9, -9, 1]))),
    st.builds(MessageReceived, AGENT, st.builds(ProcessStarted, ANYBODY, st.just(5))),
    st.builds(
        MessageReceived,
        AGENT,
        st.builds(
            ScaleWanted,
            st.just(1),
            st.sampled_from([None, None, 1, 3]),
            st.sampled_from([None, 1, 2, 4]),
        ),
    ),
    st.builds(Connected, ANYBODY),
    st.builds(ConnectionLost, ANYBODY, st.just("reset")),
    st.builds(CheckpointCommitted, st.integers(1, 3)),
    st.just(RestorableFound(None)),
    st.just(Tick()),
)


@settings(max_examples=examples(200))
@given(st.sampled_from(["wait", "continue"]), st.integers(0, 1), st.lists(ANYTHING, max_size=60), st.data())
def test_whatever_happens(deaths: str, replicas: int, inputs: list[Input], data: st.DataObject) -> None:
    job = training(replace(ROOMY, on_worker_loss=deaths, replicas=replicas))
    answered = 0
    for each in inputs:
        job.now += data.draw(st.sampled_from([0.0, 0.1, 0.5, 31.0]))
        asked = sum(isinstance(each, FindRestorable) for each in job.instructions)
        if isinstance(each, RestorableFound):
            if asked == answered:
                continue  # the shell answers questions, and each once
            answered += 1
        job.handle(each)
    job.receive(A0, StopWanted(False, True, "the test"))
    job.wait(2000)
    look(job)


def look(job: DrivenJob) -> None:
    """Check the rules that all instructions keep."""
    assert job.machine.over
    ends = [
        n
        for n, each in enumerate(job.instructions)
        if isinstance(each, AppendEvent) and isinstance(each.event, events.Finished)
    ]
    assert len(ends) == 1
    assert isinstance(job.instructions[ends[0] + 1], CloseCoordinator)
    assert len(job.instructions) == ends[0] + 2
    started = [each.member for each in job.instructions if isinstance(each, StartMember)]
    assert len(started) == len(set(started)), "an incarnation is started once"
    for rank in {(each.role, each.rank) for each in started}:
        mine = [each.incarnation for each in started if (each.role, each.rank) == rank]
        assert mine == list(range(len(mine))), "incarnations rise by one"
    newest: dict[Member, int] = {}
    for member, message in sent(job.instructions, Reassign):
        assert message.assignment.epoch > newest.get(member, -1), "epochs rise for everyone who hears of them"
        newest[member] = message.assignment.epoch
        assert all(message.assignment.chains)
        alive = {at.rank for at in message.assignment.servers}
        assert {server for chain in message.assignment.chains for server in chain} <= alive
    counted = [(member, each.rank, each.incarnation) for member, each in sent(job.instructions, CountUntil)]
    assert len(counted) == len(set(counted)), "a dead worker is cut once"
