"""The rank that is named when training stands still: the one that others wait for, in any order of heartbeats."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Instruction, SendMessage
from psctl.job import activity, events
from psctl.job.process_messages import HostSample, OutputLines, Stacks, StacksWanted
from psctl.job.training_messages import Heartbeat
from psctl.types import Member
from tests.helpers.driven_job import A0, A1, ORDER, S0, W0, W1, DrivenJob, appended

PS = "sync: waiting for values of clock 3 from server/0, which waits for worker/1"
RING = activity.waiting("the sum of gradients", [1])
NATIVE = activity.waiting("the sum of gradients")
STORE = "waiting for server/0, which wait for the clock of worker/1"


def stalled(beats: list[tuple[Member, int, str]], apart: float, quiet: tuple[Member, ...] = ()) -> DrivenJob:
    """Train to step 2, hear these first heartbeats in this order, then each rank's last one every second."""
    job = DrivenJob(replace(ORDER, stall_timeout=20.0)).training()
    for member, step, doing in beats:
        job.receive(member, Heartbeat(step, doing))
        job.wait(apart)
    for _ in range(25):
        for member, step, doing in {each[0]: each for each in beats}.values():
            if job.machine.state == "running" and member not in quiet:
                job.receive(member, Heartbeat(step, doing))
        job.wait(1)
    for member in (W0, W1, S0):
        job.exits(member, -15)
    return job


def blamed(job: DrivenJob) -> str:
    failure = job.finished.failure
    assert failure is not None
    assert "timeouts.stall" in failure["exception"]
    assert str(failure["exception"]).startswith(f"TimedOut: {failure['role']}/{failure['rank']} ")
    return f"{failure['role']}/{failure['rank']}"


@pytest.mark.parametrize("wait", [PS, RING, NATIVE, STORE])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("apart", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_computing_rank_is_named_whichever_stopped_first(
    wait: str, ahead: int, apart: float, order: tuple[int, ...]
) -> None:
    beats = [(W0, 3 + ahead, wait), (W1, 3, "compute"), (S0, 3, "serving")]
    job = stalled([beats[at] for at in order], apart)
    assert blamed(job) == "worker/1"
    named = [event.text for event in appended(job.instructions, events.Notice) if " is at step " in event.text]
    assert named, "it was named before the end"
    assert all(text.startswith("worker/1 ") for text in named), named


def test_a_server_that_all_workers_wait_for_is_named() -> None:
    wait = "sync: waiting for values of clock 3 from server/0"
    job = stalled([(W0, 3, wait), (W1, 3, wait), (S0, 2, "serving")], 0.3, quiet=(S0,))
    assert blamed(job) == "server/0"
    assert "keeps workers waiting" in str(job.finished.failure)


def test_where_waits_have_no_end_the_silent_one_is_named() -> None:
    job = stalled(
        [(W0, 3, RING), (W1, 3, activity.waiting("the sum of gradients", [0])), (S0, 3, "serving")], 0.3, quiet=(W1,)
    )
    assert blamed(job) == "worker/1"


def test_all_that_compute_at_the_same_step_are_named() -> None:
    job = stalled([(W0, 3, "compute"), (W1, 3, "compute"), (S0, 3, "serving")], 0.0)
    assert blamed(job) == "worker/0"
    assert "worker/1 on h1 is at step 3" in str(job.finished.failure)


@pytest.mark.parametrize(
    ("doing", "names"),
    [
        (PS, {("worker", 1)}),
        (RING, {("worker", 1)}),
        (NATIVE, set()),
        ("sync: waiting for values from server/0, server/12 (no connection)", {("server", 0), ("server", 12)}),
        (STORE, {("worker", 1)}),
        ("compute", set()),
    ],
)
def test_an_activity_names_the_rank_it_waits_for(doing: str, names: set[tuple[str, int]]) -> None:
    assert activity.waited_for(doing) == names
    assert activity.is_wait(doing) == (doing != activity.COMPUTE)


def test_stacks_are_requested_with_the_notice_and_again_before_the_end() -> None:
    job = DrivenJob().training()
    job.receive(W0, Heartbeat(3, PS))
    job.receive(W1, Heartbeat(3, "compute"))
    new = job.wait(31)
    assert tells(new) == {A1: StacksWanted([W1])}
    job.receive(A1, Stacks(W1, ("train.py:9 in main: step()", "train.py:4 in step: f()"), ()))
    found = [event.text for event in appended(job.instructions, events.Notice)][-1]
    assert found.startswith("stack of worker/1 on h1")
    assert found.endswith("train.py:4 in step: f()")
    job.receive(A0, Stacks(W1, ("forged.py:1 in x",), ()))
    assert tells(job.wait(270)) == {A0: StacksWanted([W0]), A1: StacksWanted([W1])}
    job.receive(A1, Stacks(W1, ("train.py:5 in step: g()",), (("data.py:2 in load",),)))
    job.receive(A0, Stacks(W0, (), (), "it is stopped"))
    job.wait(1)
    for member in (W0, W1, S0):
        job.exits(member, -15)
    failure = job.finished.failure
    assert failure is not None
    assert (blamed(job), failure["frames"]) == ("worker/1", ["train.py:5 in step: g()"])
    assert failure["stacks"] == {
        "worker/0": ["it is stopped"],
        "worker/1": ["train.py:5 in step: g()", "another thread: data.py:2 in load"],
    }


@pytest.mark.parametrize("sign", ["prints", "computes", "none"])
def test_a_script_that_never_calls_psctl_ends_when_no_rank_shows_a_sign(sign: str) -> None:
    job = DrivenJob(replace(ORDER, stall_timeout=20.0)).running()
    for _ in range(8):
        job.wait(4)
        job.receive(A0, HostSample(0.1, []))
        if sign == "prints":
            job.receive(A1, OutputLines(W1, "stdout", ["epoch 1"]))
        elif sign == "computes":
            job.receive(A1, HostSample(0.1, [W1]))
        elif sign == "none":
            job.receive(A1, HostSample(0.1, [W0]))  # not of its host
    assert (job.machine.state != "running") == (sign == "none")


def tells(new: list[Instruction]) -> dict[Member, object]:
    """The wanted stacks in what was said, by agent."""
    found = [each for each in new if isinstance(each, SendMessage)]
    return {each.member: each.message for each in found if isinstance(each.message, StacksWanted)}
