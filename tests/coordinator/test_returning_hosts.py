"""Lost hosts that return: the job waits for them, ends their old processes first, and uses them again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CloseConnection,
    ConnectionLost,
    FindRestorable,
    RestorableFound,
    StartMember,
)
from psctl.job import events
from psctl.job.process_messages import (
    EndProcesses,
    HoldSlots,
    HostAnswer,
    HostWanted,
    ProcessExited,
    Register,
    StopWanted,
)
from psctl.job.training_messages import Resume
from psctl.orders import HostOrder
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
    again,
    appended,
    asks,
    notices,
    sent,
    training,
)
from tests.helpers.orders import make_hosts

WAIT = 600.0
PATIENT = replace(ORDER, restarts=3, restart_wait=WAIT)
AT_500 = Resume("digits-3@500", 500, {"position": 500}, [])
BACK = Register()


@pytest.fixture
def job() -> DrivenJob:
    """Two hosts with a slot each; h1 is lost, and all other processes have ended."""
    made = DrivenJob(PATIENT).training()
    made.handle(ConnectionLost(A1, "no sign of life for 5 s"), ConnectionLost(W1, "no sign of life for 5 s"))
    made.wait(0.4)
    for member in (W0, S0):
        made.exits(member, -15)
    return made


def test_the_job_waits_for_a_host_that_it_needs(job: DrivenJob) -> None:
    (waits,) = appended(job.instructions, events.Recovering)
    assert (waits.hosts, round(waits.until - waits.since)) == (["h1"], WAIT)
    assert FindRestorable() not in job.instructions
    assert any("waits up to 600 s (restart.wait) until h1 is back" in text for text in notices(job.instructions))
    job.wait(WAIT - 5)
    assert job.machine.job.ending is None


def test_it_starts_again_when_the_host_is_back(job: DrivenJob) -> None:
    job.wait(60)
    new = job.receive(A1, BACK)
    assert appended(new, events.Recovered)
    assert sent(new, HoldSlots) == [(A1, HoldSlots(1))]
    assert FindRestorable() in new
    new = job.handle(RestorableFound(AT_500))
    starts = [(each.member, each.host) for each in new if isinstance(each, StartMember)]
    assert starts == [(again(W0), 0), (again(W1), 1), (again(S0), 0)]


def test_old_processes_of_the_host_end_first(job: DrivenJob) -> None:
    new = job.receive(A1, replace(BACK, running=(W1, S0)))
    assert [each.members for _, each in sent(new, EndProcesses)] == [[S0, W1]]
    assert FindRestorable() not in new
    assert FindRestorable() not in job.receive(A1, ProcessExited(W1, -9))
    assert FindRestorable() in job.receive(A1, ProcessExited(S0, -9))


def test_a_host_that_is_lost_again_is_waited_for_again(job: DrivenJob) -> None:
    job.receive(A1, replace(BACK, running=(W1,)))
    job.handle(ConnectionLost(A1, "reset"))
    assert not job.machine.job.returning
    assert FindRestorable() in job.receive(A1, BACK)
    job.handle(ConnectionLost(A1, "reset"))
    new = job.handle(RestorableFound(AT_500))
    assert appended(new, events.Recovering)
    assert not [each for each in new if isinstance(each, StartMember)]
    assert FindRestorable() in job.receive(A1, BACK)


def test_the_job_fails_when_no_host_returns_in_time(job: DrivenJob) -> None:
    new = job.wait(WAIT + 1)
    assert appended(new, events.Recovered)
    failure = job.finished.failure
    assert failure is not None
    assert failure["exception"].startswith("HostLost: h1 is lost")
    assert "none came back within 600 s (restart.wait)" in failure["hint"]


def test_a_stop_ends_the_wait(job: DrivenJob) -> None:
    job.receive(A0, StopWanted(False, False, "Ctrl-C"))
    assert job.finished.status == "stopped"


def test_a_host_whose_workers_went_elsewhere_serves_again_when_it_is_back() -> None:
    roomy = replace(PATIENT, hosts=[replace(host, slots=2) for host in PATIENT.hosts])
    job = DrivenJob(roomy).training()
    job.handle(ConnectionLost(A1, "no sign of life for 5 s"), ConnectionLost(W1, "no sign of life for 5 s"))
    job.wait(0.4)
    for member in (W0, S0):
        job.exits(member, -15)
    assert not appended(job.instructions, events.Recovering)
    job.handle(RestorableFound(AT_500))
    assert [host.may_serve for host in job.machine.job.order.hosts] == [True, False]
    new = job.receive(A1, BACK)
    assert sent(new, HoldSlots) == [(A1, HoldSlots(0))]
    assert [host.may_serve for host in job.machine.job.order.hosts] == [True, True]
    assert job.machine.job.lost_hosts == set()
    assert any("h1 is back, and may be used again" in text for text in notices(new))


def test_an_agent_that_is_started_again_before_its_host_is_lost_waits_until_it_is() -> None:
    job = DrivenJob(PATIENT).training()
    new = job.receive(A1, Register(restarted=True))
    assert next(each.member for each in new if isinstance(each, CloseConnection)) == A1
    assert job.machine.job.lost_hosts == {1}
    job.receive(A1, Register(restarted=True))
    assert not job.machine.job.lost_hosts


# ---- hosts that are added ------------------------------------------------------------------------------------------

NEW = replace(make_hosts(1, 1, free=2).pop(), name="h2", address="10.0.0.3", workers=0, slots=2)
A2 = Member("agent", 2)


def wants(job: DrivenJob, place: int, host: HostOrder | None) -> HostAnswer:
    """Ask for the orders of a host's agent; return the answer."""
    ((member, answer),) = sent(job.receive(A0, HostWanted(7, place, host)), HostAnswer)
    assert (member, answer.ticket) == (A0, 7)
    return answer


def test_a_job_that_lacks_slots_goes_on_with_a_new_host(job: DrivenJob) -> None:
    answer = wants(job, 2, NEW)
    assert [host.name for host in answer.hosts] == ["h0", "h1", "h2"]
    assert (answer.added, answer.problem) == (1, "")
    assert not answer.hosts[2].may_serve, "nothing is placed there before its agent registers"
    assert FindRestorable() not in job.wait(5)
    new = job.receive(A2, BACK)
    assert "h2 was added to the job's hosts, and may be used" in notices(new)
    assert FindRestorable() in new
    new = job.handle(RestorableFound(AT_500))
    assert sorted(each.host for each in new if isinstance(each, StartMember) and each.member.role == "worker") == [0, 2]


def test_a_new_host_is_used_by_what_comes_next() -> None:
    job = training()
    assert wants(job, 2, NEW).problem == ""
    assert asks(job, workers=3).problem == "3 workers do not fit: the job's hosts have 2 slots"
    assert sent(job.receive(A2, BACK), HoldSlots) == [(A2, HoldSlots(0))]
    new = job.handle(ConnectionLost(A1, "no sign of life for 5 s"))
    started = {each.member.role: each.host for each in new if isinstance(each, StartMember)}
    assert started == {"worker": 2, "server": 2}
    job.handle(ConnectionLost(A2, "no sign of life for 5 s"))
    assert "h2 is back, and may be used again" in notices(job.receive(A2, BACK))


def test_a_psctl_that_was_killed_adds_its_host_again() -> None:
    job = training()
    wants(job, 2, NEW)
    answer = wants(job, 2, replace(NEW, address="10.0.0.4"))
    assert (answer.problem, answer.added, answer.hosts[2].address) == ("", 1, "10.0.0.4")
    job.receive(A2, BACK)
    assert wants(job, 2, NEW).problem == "the job has a host h2, which another psctl added"
    assert wants(job, 2, None).hosts[2].may_serve, "its agent is to be started again"


@pytest.mark.parametrize(
    ("place", "host", "problem"),
    [
        (1, NEW, "the job has 2 hosts, and this psctl knows 1: another one added some"),
        (3, NEW, "the job has 2 hosts, and this psctl knows 3: another one added some"),
        (2, replace(NEW, name="h1"), "the job has a host h1, which another psctl added"),
        (2, None, "the job has 2 hosts"),
    ],
)
def test_a_host_that_the_job_knows_otherwise_is_refused(place: int, host: HostOrder | None, problem: str) -> None:
    job = training()
    answer = wants(job, place, host)
    assert (answer.problem, answer.hosts) == (problem, [])
    assert len(job.machine.job.order.hosts) == 2


def test_no_host_is_added_before_all_agents_run_and_when_the_job_ends() -> None:
    job = DrivenJob(ELASTIC)
    assert wants(job, 2, NEW).problem == "the job's agents are being started"
    job = training()
    job.receive(A0, StopWanted(False, False, "Ctrl-C"))
    assert wants(job, 2, NEW).problem == "the job is ending"
