"""A member that says what it may not: one event names it, its process ends, the job goes on as after a loss."""

from __future__ import annotations

from typing import Any

import pytest

from psctl.coordinator.state.instructions import CloseConnection, Connected, MakePlan, ProtocolBroken
from psctl.job import events
from psctl.job.checkpoint_messages import SaveBegin
from psctl.job.membership_messages import LostWorkerClocks, ProtocolViolation, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import EndProcesses
from psctl.job.table_server_messages import TablesHandedOver, TablesReady, TablesWanted
from psctl.job.training_messages import Heartbeat, Join, Prepare, ScriptFinished, StepReport, WorkerReport
from psctl.types import Address, Layout, Member, ParameterInfo
from tests.coordinator.play import A1, W0, W1, Play, appended, told
from tests.coordinator.test_scaling import asks
from tests.coordinator.test_surviving import S, again, dies, training


def texts(new: list[Any]) -> list[str]:
    return [each.text for each in appended(new, events.Notice)]


def refused(play: Play, member: Member, message: Any) -> str:
    """Bring a message that must be refused; return the one event's text."""
    new = play.hear(member, message)
    (dismissed,) = [each for each in new if isinstance(each, CloseConnection)]
    assert dismissed.member == member
    (text,) = texts(new)
    assert str(member) in text
    assert type(message).__name__ in text
    return text


def test_a_worker_that_broke_the_protocol_is_ended_and_replaced_like_one_that_died() -> None:
    play = training()
    reason = "worker/1 at 10.0.0.2:5: it broke the protocol: SaveBegin: only servers hold tables"
    new = play(ProtocolBroken(W1, reason))
    assert told(new, EndProcesses) == [(A1, EndProcesses([W1], 0.0, reason))]
    assert texts(new) == [f"worker/1 on h1 is refused: {reason}"]
    assert play(ProtocolBroken(W1, reason)) == []
    assert play.hear(W1, ScriptFinished(9)) == []  # it was on its way
    assert "broke the protocol" in play.mind.why_not_expected(W1)
    new = dies(play, W1)
    assert [event.rank for event in appended(new, events.WorkerLost)] == [1]
    assert play.mind.state == "running"
    assert play.mind.why_not_expected(again(W1)) == ""


def test_a_server_that_broke_the_protocol_is_ended_and_the_others_go_on() -> None:
    play = training()
    new = play(ProtocolBroken(S[1], "it broke the protocol: Push is no message that a server may send here"))
    ((agent, ended),) = told(new, EndProcesses)
    assert (agent, ended.members) == (A1, [S[1]])
    assert [event.rank for event in appended(dies(play, S[1]), events.ServerLost)] == [1]
    assert play.mind.state == "running"


def test_an_agent_that_broke_the_protocol_is_a_lost_host() -> None:
    play = training()
    new = play(ProtocolBroken(A1, "it broke the protocol: Join is no message that an agent may send here"))
    assert texts(new)[0].startswith("agent/1 is refused: it broke the protocol: Join")
    assert "broke the protocol" in play.mind.why_not_expected(A1)
    assert 1 in play.mind.job.lost_hosts


def test_what_a_server_says_of_a_worker_is_one_event_and_the_workers_end() -> None:
    play = training()
    new = play.hear(S[0], ProtocolViolation(W1, "Begin is for worker/0 to send"))
    assert told(new, EndProcesses)[0][1].members == [W1]
    assert texts(new) == ["worker/1 on h1 is refused: Begin is for worker/0 to send (to server/0)"]
    assert play.hear(S[1], ProtocolViolation(W1, "Begin is for worker/0 to send")) == []
    assert play.hear(S[1], ProtocolViolation(Member("worker", 1, 7), "an earlier start")) == []


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
            WorkerReport(1, 0, [StepReport(step, 0, 1.0, {}) for step in range((1 << 17) + 1)], 1, 1, 1, 0),
            "numbers of 131073 steps",
        ),
    ],
)
def test_what_cannot_be_in_this_job_is_refused_and_the_job_goes_on(member: Member, message: Any, why: str) -> None:
    play = training()
    assert why in refused(play, member, message)
    assert play.mind.state == "running"
    assert play.hear(W0, Heartbeat(1, "compute")) == []


def test_a_worker_has_a_part_in_checkpoints_from_the_decision_on() -> None:
    play = Play().running()
    play(Connected(W1))
    play.hear(W1, Join(1))
    assert "it has no part in checkpoints" in refused(play, W1, SaveBegin(5, []))
    play = training()
    for worker in (W0, W1):  # each has its random generators' states
        assert texts(play.hear(worker, SaveBegin(5, []))) == []


def test_tables_shards_are_bounded_too() -> None:
    play = training()
    play.hear(W0, TablesWanted())
    for server in S:
        play.hear(server, TablesReady(Address("10.0.0.1", 4100 + server.rank)))
    assert "shard 12 of 12" in refused(play, S[0], TablesHandedOver(0, 12))


def test_a_model_too_large_for_any_job_is_refused_before_it_is_planned() -> None:
    play = Play().running()
    play(Connected(W0))
    play.hear(W0, Join(1))
    layout = Layout((ParameterInfo("w", (1 << 30, 1 << 30), "float32", 0),), "SGD", ({"lr": 0.1},))
    assert "parameters of more than 4398046511104 bytes" in refused(play, W0, Prepare(layout, ()))
    assert not any(isinstance(each, MakePlan) for each in play.said)


def test_300_000_servers_are_refused_at_once_and_those_that_fit_are_not() -> None:
    play = training()
    answer = asks(play, servers=300_000)
    assert answer.problem == "300000 servers do not fit: 64 a host are 128"
    assert answer.hint == "ask for fewer servers"
    assert asks(play, servers=129).problem
    assert asks(play, servers=4).problem == ""


def test_every_worker_has_a_part_in_checkpoints() -> None:
    play = training()
    for member in (W0, W1):
        play.hear(member, SaveBegin(5, []))
    assert play.mind.state == "running"
    assert not [each for each in play.said if isinstance(each, CloseConnection)]
