"""Strategies of hypothesis for inputs of a job's state machine: losses, arrivals and answers in any order."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    Connected,
    ConnectionLost,
    FindRestorable,
    Input,
    MessageReceived,
    RestorableFound,
    TakenOver,
    Tick,
)
from psctl.job.checkpoint_messages import CutPosition, SaveBegin, SaveEnd
from psctl.job.membership_messages import LostWorkerClocks, ServerUnreachable, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import ProcessExited, ProcessStarted, ScaleWanted
from psctl.job.stream_messages import BatchTaken, ShardPosition, ShardWanted, StreamOpened
from psctl.job.training_messages import (
    Heartbeat,
    Join,
    MemberReady,
    NotReplaceable,
    PlaneBroken,
    Prepare,
    ScriptFinished,
    WorkerListens,
)
from psctl.types import Address, Member
from tests.helpers.driven_job import A0, A1, ELASTIC, LAYOUT, DrivenJob

ROOMY = replace(ELASTIC, hosts=[replace(host, slots=3) for host in ELASTIC.hosts])
ANYBODY = st.builds(Member, st.sampled_from(["worker", "server"]), st.integers(0, 3), st.integers(0, 2))
SERVER = st.builds(Member, st.just("server"), st.integers(0, 3), st.integers(0, 1))
AGENT = st.sampled_from([A0, A1])
ZERO = st.just(0)
CLOCKS = st.dictionaries(st.integers(0, 5), st.integers(0, 3), min_size=3)
MESSAGES = st.one_of(
    st.just(Join(1)), st.just(Prepare(LAYOUT, ())), st.builds(ScriptFinished,
    st.integers(0, 9)), st.builds(MemberReady, st.sampled_from([None, Address("10.0.0.1", 1)])),
    st.builds(SaveBegin, st.integers(1, 3), st.just([])), st.builds(SaveEnd, st.integers(1,
    3)), st.builds(CutPosition, st.integers(1, 2), st.integers(0, 9)),
    st.builds(PlaneBroken, st.integers(0, 3), st.just("reset"), st.sampled_from([(), (1,), (9,)])),
    st.builds(WorkerListens, st.just(None), st.just(b""), st.integers(0, 3)), st.just(NotReplaceable("gone")),
    st.builds(Heartbeat, st.integers(0, 9), st.just("compute"), st.booleans()),
    st.builds(StreamOpened, ZERO, ZERO, st.integers(0, 2), st.integers(0, 3), st.integers(1, 2)),
    st.builds(ShardWanted, ZERO, ZERO, st.integers(0, 2), st.integers(0, 3), st.integers(0, 1)),
    st.builds(BatchTaken, ZERO, ZERO, st.integers(0, 2), st.integers(0, 3), st.integers(0, 1), st.sampled_from(
        [(), (ShardPosition(0, 1),), (ShardPosition(0, 2), ShardPosition(1, 1))])),
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
    st.just(TakenOver(77)),
)

TIMED = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 31.0]), ANYTHING), max_size=60)
"""Inputs, each with the seconds since the one before."""


def at_their_times(job: DrivenJob, inputs: list[tuple[float, Input]]) -> Iterator[Input]:
    """Set the job's clock for each input that is possible: a question is answered once."""
    answered = 0
    for seconds, given in inputs:
        job.now += seconds
        asked = sum(isinstance(each, FindRestorable) for each in job.instructions)
        if isinstance(given, RestorableFound):
            if asked == answered:
                continue
            answered += 1
        yield given
