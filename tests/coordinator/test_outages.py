"""Most hosts silent at once: the head waits, loses nobody, and lets no deadline pass; one silent host is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import AgentsSilent, CloseConnection, ConnectionLost, Instruction, PlanMade
from psctl.coordinator.state.outages import NEARLY, RETURN, SUSPECT, is_outage
from psctl.job import events
from psctl.job.process_messages import EndProcesses, Register
from psctl.job.silence import AGENT_PATIENCE, TOLERANCE
from psctl.job.training_messages import MemberReady, Prepare
from psctl.types import Member
from tests.helpers.driven_job import ELASTIC, LAYOUT, PLAN, DrivenJob, appended, notices, sent
from tests.helpers.orders import make_hosts

NAMES = ["h0", "h1", "h2", "h3"]


@pytest.fixture
def job() -> DrivenJob:
    """Four hosts with a worker each, under a schedule; the head is h0."""
    made = DrivenJob(replace(ELASTIC, hosts=make_hosts(1, 1, 1, 1), servers=0, strategy="ring", replicas=0))
    for index in range(4):
        made.receive(Member("agent", index), Register())
        made.joins(Member("worker", index), Member("agent", index))
        made.receive(Member("worker", index), Prepare(LAYOUT, ()))
    made.handle(PlanMade("ring", "worker", [], PLAN))
    for index in range(4):
        made.receive(Member("worker", index), MemberReady())
    assert made.machine.state == "running"
    return made


def silence(job: DrivenJob, hosts: list[int], until: float, since: float = 0.0) -> list[Instruction]:
    """Let hosts be silent until `until` seconds of silence; the coordinator looks every tenth of a second."""
    new = []
    for tenth in range(int(since * 10) + 1, int(until * 10) + 1):
        new += job.wait(0.1)
        new += job.handle(AgentsSilent({1: 0.2, 2: 0.2, 3: 0.2, **dict.fromkeys(hosts, tenth / 10)}))
    return new


def lost(new: list[Instruction]) -> list[str]:
    """Return the hosts of the ranks that are lost by these instructions."""
    return [event.host for event in appended(new, events.StateChanged) if event.state == "lost"]


def test_one_silent_host_is_lost_after_five_seconds(job: DrivenJob) -> None:
    assert not lost(silence(job, [2], SUSPECT - 0.1))
    new = silence(job, [2], SUSPECT, SUSPECT - 0.1)
    assert lost(new) == ["h2"]
    closed = [each.member for each in new if isinstance(each, CloseConnection)]
    assert closed == [Member("agent", 2), Member("worker", 2)], "those of processes would last for TOLERANCE"
    assert job.machine.job.outage is None


def test_a_loss_is_one_event_though_the_restart_after_it_fails(job: DrivenJob) -> None:
    new = silence(job, [2], SUSPECT)
    for _ in range(60):
        new += job.wait(1.0)  # no process ends as ordered: the restart is given up
    assert job.machine.job.ending is not None
    assert [event.rank for event in appended(new, events.WorkerLost)] == [2]


def test_a_host_that_is_lost_before_does_not_make_the_next_one_an_outage(job: DrivenJob) -> None:
    silence(job, [2], SUSPECT)
    assert lost(silence(job, [1], SUSPECT)) == ["h1"]


def test_most_hosts_silent_at_once_are_waited_for(job: DrivenJob) -> None:
    new = silence(job, [1, 2, 3], 12.0)
    (text,) = notices(new)
    assert text == (
        "no sign of life from h1, h2 and h3 at the same time: the network of the head, h0, seems to be down; the job "
        "waits until it is back"
    )
    assert not lost(new)
    (text,) = notices(job.handle(AgentsSilent({})))
    assert text == "h1, h2 and h3 reached again after 9 s: the job continues"
    assert not lost(job.wait(SUSPECT))
    assert job.machine.state == "running"


def test_hosts_that_fall_silent_within_two_seconds_are_an_outage(job: DrivenJob) -> None:
    """The first is silent for SUSPECT seconds when the others are for NEARLY."""
    new = []
    for tenth in range(30, 90):
        times = {1: tenth / 10, 2: tenth / 10 - 1.9, 3: tenth / 10 - 1.9}
        new += job.wait(0.1) + job.handle(AgentsSilent(times))
    assert not lost(new)
    assert job.machine.job.outage is not None


def test_one_that_stays_silent_when_the_others_are_back_is_lost(job: DrivenJob) -> None:
    silence(job, [1, 2, 3], 8.0)
    new = job.handle(AgentsSilent({3: 8.1}))
    assert not lost(new), "it may be reached a moment later than the others"
    job.wait(RETURN + 0.1)
    new = job.handle(AgentsSilent({3: 8.1 + RETURN}))
    assert lost(new) == ["h3"]
    assert "h1 and h2 reached again after 8 s: the job continues" in notices(new)


def test_one_that_is_reached_a_moment_after_the_others_is_not_lost(job: DrivenJob) -> None:
    silence(job, [1, 2, 3], 8.0)
    job.handle(AgentsSilent({3: 8.1}))
    job.wait(1.0)
    new = job.handle(AgentsSilent({}))
    assert not lost(new)
    assert "h1, h2 and h3 reached again after 6 s: the job continues" in notices(new)


def test_an_outage_that_comes_back_at_once_is_one_outage(job: DrivenJob) -> None:
    silence(job, [1, 2, 3], 8.0)
    job.handle(AgentsSilent({3: 8.1}))
    new = silence(job, [1, 2, 3], 12.0, 9.0)
    job.handle(AgentsSilent({3: 8.1}))
    job.wait(RETURN - 0.5)
    assert not lost([*new, *job.handle(AgentsSilent({3: 12.0}))])


def test_an_agent_whose_connection_ends_in_an_outage_is_lost_only_if_it_is_not_back_after_it(job: DrivenJob) -> None:
    silence(job, [1, 2, 3], 6.0)
    assert not lost(job.handle(ConnectionLost(Member("agent", 1), "no sign of life for 30 s")))
    assert not lost(job.handle(ConnectionLost(Member("agent", 2), "no sign of life for 30 s")))
    job.receive(Member("agent", 2), Register())
    assert not lost(job.handle(AgentsSilent({})))
    job.wait(RETURN + 0.1)
    assert lost(job.handle(AgentsSilent({}))) == ["h1"]


def test_an_outage_ends_when_agents_have_given_up(job: DrivenJob) -> None:
    """They have ended their processes then: waiting longer helps nobody."""
    assert not lost(silence(job, [1, 2, 3], NEARLY + AGENT_PATIENCE - 0.2))
    new = silence(job, [1, 2, 3], NEARLY + AGENT_PATIENCE + 0.2, NEARLY + AGENT_PATIENCE - 0.2)
    assert lost(new) == ["h1", "h2", "h3"]
    assert job.machine.job.outage is None
    assert appended([*new, *job.wait(60)], events.WorkerLost)


def test_an_outage_ends_too_when_all_connections_have_ended(job: DrivenJob) -> None:
    """As when the link is back after the agents have exited: nothing is silent, and nobody returns."""
    silence(job, [1, 2, 3], 10.0)
    for host in (1, 2, 3):
        job.handle(ConnectionLost(Member("agent", host), "connection reset"))
    new = []
    for _ in range(120):
        new += job.wait(0.1) + job.handle(AgentsSilent({}))
    assert lost(new) == ["h1", "h2", "h3"]


def test_no_deadline_passes_in_an_outage(job: DrivenJob) -> None:
    new = silence(job, [1, 2, 3], 3.5)
    job.handle(ConnectionLost(Member("worker", 1), "no sign of life"))  # it counts after the outage only
    new = job.wait(job.machine.job.order.stall_timeout + 60)
    assert not appended(new, events.Finished)
    assert not sent(new, EndProcesses)
    new = job.handle(AgentsSilent({})) + job.wait(1.0)
    assert not appended(new, events.Finished), "the deadlines are as much later"
    assert sent(job.wait(20), EndProcesses), "worker/1 runs, and has not connected again"


def test_a_restart_waits_for_the_end_of_an_outage(job: DrivenJob) -> None:
    silence(job, [1, 2, 3], 6.0)
    job.killed(Member("worker", 0), Member("agent", 0))
    assert not sent(job.wait(30), EndProcesses)
    new = job.handle(AgentsSilent({})) + job.wait(1.0)
    assert {member.rank for member, _ in sent(new, EndProcesses)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("silent", "hosts", "outage"),
    [([1], [1], False), ([1], [1, 2], False), ([1, 2], [1, 2], True), ([1, 2], [1, 2, 3], True),
     ([1, 2], [1, 2, 3, 4], False), ([1, 2, 3], [1, 2, 3, 4], True), ([], [1, 2], False)],
)  # fmt: skip
def test_an_outage_is_the_silence_of_most_hosts_and_of_two_at_least(
    silent: list[int], hosts: list[int], outage: bool
) -> None:
    assert is_outage(silent, hosts) == outage


def test_a_connection_outlasts_the_patience_of_agents() -> None:
    assert NEARLY < SUSPECT < AGENT_PATIENCE < TOLERANCE
