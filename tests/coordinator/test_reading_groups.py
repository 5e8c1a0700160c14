"""Groups that read the servers: their start, what they receive, and that training goes on whatever becomes of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Connected, ConnectionLost, Instruction, StartMember
from psctl.job import events
from psctl.job.membership_messages import Reassign
from psctl.job.process_messages import EndProcesses, ProcessStarted, StopProcesses
from psctl.job.reader_messages import GroupReport, TrainingEnded
from psctl.job.table_server_messages import TablesAt, TablesReady, TablesWanted
from psctl.job.training_messages import Decision, Join, Leave, ScriptFinished
from psctl.orders import JobOrder, ReaderOrder
from psctl.types import Address, Member
from tests.helpers.driven_job import (
    A0,
    A1,
    ELASTIC,
    S0,
    SHARDS,
    W0,
    W1,
    DrivenJob,
    S,
    appended,
    asks,
    move,
    notices,
    sent,
    started,
)

R0, R1 = Member("reader", 0), Member("reader", 1)


def reader(group: str, host: int, rank: int = 0) -> ReaderOrder:
    return ReaderOrder(group, [f"{group}.py"], rank, 1, host, 0, ("*",), ("*",))


ORDER = replace(ELASTIC, restarts=2, readers=[reader("evaluate", 1), reader("serve", 0)])


class ReadJob(DrivenJob):
    """A job with two groups of one reader each."""

    def agent_of(self, member: Member) -> Member:
        if member.role == "reader":
            return (A0, A1)[self.machine.job.ranks[member].host]
        return super().agent_of(member)


def training(order: JobOrder = ORDER) -> ReadJob:
    job = ReadJob(order)
    job.training([0, 1, 0], SHARDS)
    return job


def joins(job: ReadJob, member: Member) -> list[Instruction]:
    job.receive(job.agent_of(member), ProcessStarted(member, 500 + member.rank))
    job.handle(Connected(member))
    return job.receive(member, Join(1))


def test_readers_start_with_training_on_their_hosts_and_get_the_decision() -> None:
    job = ReadJob(ORDER)
    job.prepared()
    assert not [member for member, _ in started(job.instructions) if member.role == "reader"]
    job = training()
    assert [each for each in started(job.instructions) if each[0].role == "reader"] == [(R0, 1), (R1, 0)]
    start = next(each for each in job.instructions if isinstance(each, StartMember) and each.member == R0)
    assert (start.environment["PSCTL_ROLE"], start.environment["PSCTL_GROUP"]) == ("reader", "evaluate")
    assert "RANK" not in start.environment
    ((member, decision),) = sent(joins(job, R0), Decision)
    assert member == R0
    assert decision.shards == SHARDS
    assert len(decision.assignment.chains) == len(SHARDS)


def test_a_reader_follows_the_servers_of_parameters_and_tables() -> None:
    job = training()
    joins(job, R0)
    assert sent(job.receive(R0, TablesWanted()), TablesAt) == [], "no worker has opened a store"
    before = len(job.instructions)
    job.receive(W0, TablesWanted())
    for server in S:
        job.receive(server, TablesReady(Address("10.0.0.1", 6000 + server.rank)))
    tables = sent(job.instructions[before:], TablesAt)
    assert {member for member, _ in tables} == {W0, R0}
    before = len(job.instructions)
    assert asks(job, servers=2).problem == ""
    move(job)
    assert R0 in {member for member, _ in sent(job.instructions[before:], Reassign)}
    assert R1 not in {member for member, _ in sent(job.instructions[before:], Reassign)}, "it has not joined"


def test_reports_of_readers_are_events_with_their_group() -> None:
    job = training()
    joins(job, R1)
    (event,) = appended(job.receive(R1, GroupReport(7, {"accuracy": 0.5})), events.GroupReported)
    assert (event.group, event.rank, event.step, event.metrics) == ("serve", 0, 7, {"accuracy": 0.5})


def test_a_failed_reader_is_started_again_as_often_as_the_job_allows_and_training_goes_on() -> None:
    job = training(replace(ORDER, readers=[reader("evaluate", 1)]))
    member = R0
    for count in (1, 2):
        joins(job, member)
        new = job.exits(member, 1)
        (text,) = notices(new)
        assert text.startswith("reader/0 (evaluate) on ")
        assert f"it is started again ({count} of 2)" in text
        member = replace(member, incarnation=count)
        assert started(new) == [(member, 1)]
    joins(job, member)
    new = job.exits(member, 1)
    assert "it is not started again after 2 new starts" in notices(new)[0]
    assert started(new) == []
    job.wait(60)
    assert job.machine.state == "running"
    assert job.machine.job.losses.survived == 0, "losses of readers count for the job"
    ends(job)
    assert job.finished.status == "done"


def ends(job: ReadJob) -> None:
    """Let the workers and then the servers end."""
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(3))
        job.exits(worker, 0)
        job.handle(ConnectionLost(worker, "it has ended"))
    job.wait(1)
    for server in S:
        job.exits(server, 0)
    job.wait(1)


def test_a_lost_host_takes_its_reader_to_another_one() -> None:
    """The worker of that host is lost too, which is survived on its own."""
    job = training(replace(ORDER, readers=[reader("evaluate", 1)], on_worker_loss="continue"))
    joins(job, R0)
    new = job.handle(ConnectionLost(A1, "silence"))
    found = [each for each in started(new) if each[0].role == "reader"]
    assert found == [(replace(R0, incarnation=1), 0)]
    assert any("reader/0 (evaluate)" in text and "is lost" in text for text in notices(new))


def test_a_reader_without_its_connection_is_ended_and_started_again() -> None:
    job = training()
    joins(job, R0)
    job.handle(ConnectionLost(R0, "reset"))
    new = job.wait(12)
    ((agent, order),) = sent(new, EndProcesses)
    assert (agent, order.members) == (A1, [R0])
    assert job.machine.state == "running"
    new = job.exits(R0, -9)
    assert started(new) == [(replace(R0, incarnation=1), 1)]


def test_servers_stay_until_readers_have_the_last_values() -> None:
    job = training()
    for member in (R0, R1):
        joins(job, member)
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(3))
        job.exits(worker, 0)
        job.handle(ConnectionLost(worker, "it has ended"))
    assert {member for member, _ in sent(job.instructions, TrainingEnded)} == {R0, R1}
    assert len(sent(job.instructions, TrainingEnded)) == 2
    job.wait(20)
    assert not sent(job.instructions, Leave)
    job.exits(R0, 0)
    job.exits(R1, 0)
    job.wait(1)
    assert {member for member, _ in sent(job.instructions, Leave)} == set(S)
    for server in S:
        job.exits(server, 0)
    job.wait(1)
    assert job.finished.status == "done"


def test_a_reader_that_does_not_end_is_ended_after_a_minute() -> None:
    job = training()
    joins(job, R0)
    joins(job, R1)
    for worker in (W0, W1):
        job.receive(worker, ScriptFinished(3))
        job.exits(worker, 0)
        job.handle(ConnectionLost(worker, "it has ended"))
    new = job.wait(62)
    assert {member for member, _ in sent(new, Leave)} >= set(S)
    for server in S:
        job.exits(server, 0)
    new = job.wait(20)
    assert sent(new, StopProcesses)
    for member in (R0, R1):
        job.exits(member, -15)
    job.wait(1)
    assert job.finished.status == "done"


def test_a_restart_of_all_processes_starts_readers_again_when_they_train() -> None:
    job = training(replace(ORDER, on_worker_loss="restart", replicas=0, readers=[reader("evaluate", 1)]))
    joins(job, R0)
    job.killed(S0)
    job.wait(2)
    assert any(R0 in order.members for _, order in sent(job.instructions, EndProcesses))


@pytest.mark.parametrize("phase", ["placing", "training"])
def test_a_job_without_groups_has_no_readers(phase: str) -> None:
    job = training(ELASTIC) if phase == "training" else ReadJob(ELASTIC)
    job.wait(2)
    assert not [member for member, _ in started(job.instructions) if member.role == "reader"]
