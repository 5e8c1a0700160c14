"""A member that breaks the protocol: one event names it, its process ends, the job continues as after a loss."""

from __future__ import annotations

from typing import Any

import pytest

from psctl.coordinator.state.instructions import CloseConnection, Connected, MakePlan, ProtocolBroken
from psctl.job import events
from psctl.job.checkpoint_messages import SaveBegin
from psctl.job.membership_messages import LostWorkerClocks, ProtocolViolation, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import EndProcesses
from psctl.job.table_server_messages import TablesReady, TablesWanted
from psctl.job.training_messages import Heartbeat, Join, Prepare, ScriptFinished, StepReport, WorkerReport
from psctl.types import Address, Layout, Member, ParameterInfo
from tests.helpers.driven_job import (
    A1,
    W0,
    W1,
    DrivenJob,
    S,
    again,
    appended,
    asks,
    notices,
    sent,
    training,
)


def refused(job: DrivenJob, member: Member, message: Any) -> str:
    """Bring a message that must be refused; return the one event's text."""
    new = job.receive(member, message)
    (dismissed,) = [each for each in new if isinstance(each, CloseConnection)]
    assert dismissed.member == member
    (text,) = notices(new)
    assert str(member) in text
    assert type(message).__name__ in text
    return text


def test_a_worker_that_broke_the_protocol_is_ended_and_replaced_like_one_that_was_lost() -> None:
    job = training()
    reason = "worker/1 at 10.0.0.2:5: it broke the protocol: SaveBegin: only servers hold tables"
    new = job.handle(ProtocolBroken(W1, reason))
    assert sent(new, EndProcesses) == [(A1, EndProcesses([W1], 0.0, reason))]
    assert notices(new) == [f"worker/1 on h1 is refused: {reason}"]
    assert job.handle(ProtocolBroken(W1, reason)) == []
    assert job.receive(W1, ScriptFinished(9)) == []  # it was on its way
    assert "broke the protocol" in job.machine.why_not_expected(W1)
    new = job.killed(W1)
    assert [event.rank for event in appended(new, events.WorkerLost)] == [1]
    assert job.machine.state == "running"
    assert job.machine.why_not_expected(again(W1)) == ""


def test_a_server_that_broke_the_protocol_is_ended_and_the_others_continue() -> None:
    job = training()
    new = job.handle(ProtocolBroken(S[1], "it broke the protocol: Push is no message that a server may send here"))
    ((agent, ended),) = sent(new, EndProcesses)
    assert (agent, ended.members) == (A1, [S[1]])
    assert [event.rank for event in appended(job.killed(S[1]), events.ServerLost)] == [1]
    assert job.machine.state == "running"


def test_an_agent_that_broke_the_protocol_is_a_lost_host() -> None:
    job = training()
    new = job.handle(ProtocolBroken(A1, "it broke the protocol: Join is no message that an agent may send here"))
    assert notices(new)[0].startswith("agent/1 is refused: it broke the protocol: Join")
    assert "broke the protocol" in job.machine.why_not_expected(A1)
    assert 1 in job.machine.job.lost_hosts


def test_a_servers_report_on_a_worker_is_one_event_and_ends_the_worker() -> None:
    job = training()
    new = job.receive(S[0], ProtocolViolation(W1, "Begin is for worker/0 to send"))
    assert sent(new, EndProcesses)[0][1].members == [W1]
    assert notices(new) == ["worker/1 on h1 is refused: Begin is for worker/0 to send (to server/0)"]
    assert job.receive(S[1], ProtocolViolation(W1, "Begin is for worker/0 to send")) == []
    assert job.receive(S[1], ProtocolViolation(Member("worker", 1, 7), "an earlier start")) == []


@pytest.mark.parametrize(
    ("member", "message", "why"),
    [
        (W1, SaveBegin((1 << 20) + 1, []), "step 1048577, where the furthest reported step is 0"),
        (S[0], ShardCaughtUp(0, 6, 1), "shard 6 of 6"),
        (S[0], ShardCaughtUp(0, 1, 9), "server/9, which the job never had"),
        (S[0], ShardHandedOver(0, 1 << 40), "shard 1099511627776 of 6"),
        (S[0], LostWorkerClocks(1, 0, {6: 1}), "shard 6 of 6"),
        (S[0], LostWorkerClocks(1, 0, {}, {-1: 1}), "shard -1 of 6"),
        (S[0], ProtocolViolation(S[1], "x"), "a complaint about server/1"),
        (
            W0,
            WorkerReport(1, 0, [StepReport(step, 0, 1.0, {}) for step in range((1 << 17) + 1)], 1, 1, 1),
            "numbers of 131073 steps",
        ),
    ],
)
def test_what_cannot_be_in_this_job_is_refused_and_the_job_continues(member: Member, message: Any, why: str) -> None:
    job = training()
    assert why in refused(job, member, message)
    assert job.machine.state == "running"
    assert job.receive(W0, Heartbeat(1, "compute")) == []


def test_a_worker_has_a_part_in_checkpoints_from_the_decision_on() -> None:
    job = DrivenJob().running()
    job.handle(Connected(W1))
    job.receive(W1, Join(1))
    assert "it has no part in checkpoints" in refused(job, W1, SaveBegin(5, []))
    job = training()
    for worker in (W0, W1):  # each has its random generators' states
        assert notices(job.receive(worker, SaveBegin(5, []))) == []


def test_tables_shards_are_bounded_too() -> None:
    job = training()
    job.receive(W0, TablesWanted())
    for server in S:
        job.receive(server, TablesReady(Address("10.0.0.1", 4100 + server.rank)))
    assert "shard 12 of 12" in refused(job, S[0], ShardHandedOver(0, 12, tables=True))


def test_a_model_too_large_for_any_job_is_refused_before_it_is_planned() -> None:
    job = DrivenJob().running()
    job.handle(Connected(W0))
    job.receive(W0, Join(1))
    layout = Layout((ParameterInfo("w", (1 << 30, 1 << 30), "float32", 0),), "SGD", ({"lr": 0.1},))
    assert "parameters of more than 4398046511104 bytes" in refused(job, W0, Prepare(layout, ()))
    assert not any(isinstance(each, MakePlan) for each in job.instructions)


def test_300_000_servers_are_refused_at_once_and_those_that_fit_are_not() -> None:
    job = training()
    answer = asks(job, servers=300_000)
    assert answer.problem == "300000 servers do not fit: 64 a host are 128"
    assert answer.hint == "request fewer servers"
    assert asks(job, servers=129).problem
    assert asks(job, servers=4).problem == ""


def test_every_worker_has_a_part_in_checkpoints() -> None:
    job = training()
    for member in (W0, W1):
        job.receive(member, SaveBegin(5, []))
    assert job.machine.state == "running"
    assert not [each for each in job.instructions if isinstance(each, CloseConnection)]
