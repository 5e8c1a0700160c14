"""The worker that a clock waits for is named in time and once, and not when clocks are merely slow."""

from __future__ import annotations

import pytest

from psctl.coordinator.state.stalls import ClockPace
from psctl.job.training_messages import Heartbeat
from psctl.types import Member
from tests.helpers.driven_job import W0, W1, DrivenJob, notices


def steps(job: DrivenJob, first: int, last: int, seconds: float) -> None:
    for step in range(first, last + 1):
        for worker in (W0, W1):
            job.receive(worker, Heartbeat(step, "compute"))
        job.wait(seconds)


def test_a_worker_that_is_silent_in_the_midst_of_a_clock_is_named_and_again_when_it_continues() -> None:
    job = DrivenJob().training()
    steps(job, 1, 10, 0.1)
    before = len(job.instructions)
    for second in range(20):
        job.receive(
            W0,
            Heartbeat(11, "sync: waiting for values of clock 10 from server/0, which waits for worker/1"),
        )
        job.receive(Member("server", 0), Heartbeat(10, ""))
        job.wait(1)
        assert bool(notices(job.instructions[before:])) == (second >= 2), "at 3 s: 2 s, and a report's interval"
    assert notices(job.instructions[before:]) == [
        "step 11 waits for worker/1 on h1 since 3 s (usual: 0.1 s): compute, silent for 3 s",
    ]
    for worker in (W0, W1):
        job.receive(worker, Heartbeat(11, "compute"))
    job.wait(0.1)
    assert notices(job.instructions[before:])[1:] == ["worker/1 on h1 continues: step 11, after 20 s"]
    assert job.machine.state == "running"


def test_one_that_computes_long_is_named_with_what_it_does() -> None:
    job = DrivenJob().training()
    steps(job, 1, 10, 0.1)
    before = len(job.instructions)
    for _ in range(8):
        job.receive(W0, Heartbeat(11, "sync: waiting for server/0"))
        job.receive(W1, Heartbeat(10, "compute"))
        job.receive(Member("server", 0), Heartbeat(10, ""))
        job.wait(0.5)
    assert notices(job.instructions[before:]) == ["step 11 waits for worker/1 on h1 since 3 s (usual: 0.1 s): compute"]


def test_a_server_that_is_silent_meanwhile_is_named_too() -> None:
    """The workers' words name its primary, which waits for it."""
    job = DrivenJob().training()
    steps(job, 1, 10, 0.1)
    before = len(job.instructions)
    for _ in range(8):
        for worker in (W0, W1):
            job.receive(worker, Heartbeat(10, "sync: waiting for values of clock 10 from server/0"))
        job.wait(1)
    named = [text for text in notices(job.instructions[before:]) if "server/0 on" in text]
    assert named == ["step 11 may wait for server/0 on h0, which is silent for 4 s"]


def test_clocks_that_always_take_long_are_not_late() -> None:
    job = DrivenJob().training()
    before = len(job.instructions)
    steps(job, 1, 8, 4.0)
    assert notices(job.instructions[before:]) == []


@pytest.mark.parametrize(("seconds", "late"), [(2.9, False), (3.1, True)])
def test_a_clock_is_late_after_two_seconds_and_a_report(seconds: float, late: bool) -> None:
    pace = ClockPace(0.0, 0)
    for step in range(1, 6):
        assert pace.reach(0.1 * step, step)
    assert pace.is_late(0.5 + seconds, 1.0) == late


def test_nothing_is_late_before_it_is_known_what_is_usual() -> None:
    pace = ClockPace(0.0, 0)
    pace.reach(0.1, 1)
    assert not pace.is_late(100.0, 1.0)


def test_a_step_back_at_a_restart_begins_anew() -> None:
    pace = ClockPace(0.0, 0)
    pace.reach(1.0, 5)
    assert pace.reach(2.0, 3)
    assert (pace.step, pace.since) == (3, 2.0)
