"""Servers and workers that die, come, go and answer in any order: the instructions always keep these rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    AppendEvent,
    CloseCoordinator,
    Input,
    StartMember,
)
from psctl.job import events
from psctl.job.membership_messages import (
    CountUntil,
    Reassign,
)
from psctl.job.process_messages import StopWanted
from psctl.job.training_messages import ConnectAgain
from psctl.types import Member
from tests.helpers import ring_job
from tests.helpers.any_inputs import ROOMY, TIMED, at_their_times
from tests.helpers.driven_job import A0, DrivenJob, sent, training
from tests.hypothesis_profile import examples


@settings(max_examples=examples(200))
@given(st.sampled_from(["wait", "continue"]), st.integers(0, 1), TIMED)
def test_whatever_happens(deaths: str, replicas: int, inputs: list[tuple[float, Input]]) -> None:
    job = training(replace(ROOMY, on_worker_loss=deaths, replicas=replicas))
    for each in at_their_times(job, inputs):
        job.handle(each)
    job.receive(A0, StopWanted(False, True, "the test"))
    job.wait(2000)
    look(job)


@settings(max_examples=examples(200))
@given(TIMED)
def test_whatever_happens_to_a_ring(inputs: list[tuple[float, Input]]) -> None:
    job = ring_job.training()
    for each in at_their_times(job, inputs):
        job.handle(each)
    job.receive(A0, StopWanted(False, True, "the test"))
    job.wait(2000)
    look(job)
    epochs: dict[Member, int] = {}
    for member, message in sent(job.instructions, ConnectAgain):
        assert message.epoch > epochs.get(member, 0), "epochs rise for everyone who hears of them"
        epochs[member] = message.epoch


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
