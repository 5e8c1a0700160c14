"""The coordinator's ends of all sessions: which messages are kept for whom, and when a session begins and ends."""

from __future__ import annotations

import pytest

from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import CloseConnection, CloseCoordinator, Input, MessageReceived, SendMessage
from psctl.coordinator.state.instructions import StartMember as Start
from psctl.job.message import JobMessage
from psctl.job.process_messages import JobFinished, NewCertificate, ProcessStarted, Register, StopProcesses
from psctl.job.session_messages import ResumeSession
from psctl.job.training_messages import Go, Heartbeat, Join, ScriptFinished
from psctl.types import Member
from tests.helpers.driven_job import A0, A1, W0, again


def of(member: Member, message: JobMessage) -> Input:
    return MessageReceived(member, message)


@pytest.fixture
def sessions() -> MemberSessions:
    """With one agent and one worker."""
    made = MemberSessions()
    assert made.on_input(of(A0, Register()))
    assert made.on_input(of(W0, Join(1)))
    return made


def start(member: Member) -> Start:
    return Start(member, 1, 0, 0, {})


def test_numbered_messages_are_counted_and_kept(sessions: MemberSessions) -> None:
    for message in (ScriptFinished(1), Heartbeat(1, ""), ScriptFinished(2)):
        assert not sessions.on_input(of(W0, message))
    assert sessions.by_member[W0].received == 2
    for message in (Go(), NewCertificate("", ""), Go()):
        sessions.on_instruction(SendMessage(W0, message))
    assert sessions.by_member[W0].unacknowledged() == [Go(), Go()]
    sessions.on_input(of(W0, ResumeSession(1)))
    assert sessions.by_member[W0].unacknowledged() == [Go()]


def test_a_resumed_session_that_claims_too_much_loses_nothing_else(sessions: MemberSessions) -> None:
    sessions.on_instruction(SendMessage(W0, Go()))
    sessions.on_input(of(W0, ResumeSession(10**9)))
    assert (sessions.by_member[W0].next, sessions.by_member[W0].waiting) == (1, 0)


def test_messages_to_a_member_without_a_session_are_not_kept(sessions: MemberSessions) -> None:
    sessions.on_instruction(SendMessage(A1, StopProcesses(0.0, "")))
    sessions.on_input(of(A1, ProcessStarted(W0, 5)))
    assert A1 not in sessions.by_member
    assert not sessions.on_input(of(A1, ResumeSession(0)))


def test_a_new_incarnation_ends_the_session_of_the_old_one(sessions: MemberSessions) -> None:
    sessions.on_instruction(start(again(W0)))
    assert W0 not in sessions.by_member
    assert sessions.by_member[A0].unacknowledged() == [start(again(W0))], "its certificate is made when it is sent"


def test_an_agent_that_knows_no_session_begins_one(sessions: MemberSessions) -> None:
    sessions.on_instruction(start(W0))
    assert not sessions.on_input(of(A0, Register(received=1))), "it resumes"
    assert sessions.by_member[A0].waiting == 0
    assert sessions.on_input(of(A0, Register())), "another agent process"
    assert sessions.by_member[A0].next == 0
    assert sessions.on_input(of(A1, Register(received=4))), "the coordinator took its host for lost"


def test_a_closed_connection_ends_the_session(sessions: MemberSessions) -> None:
    sessions.on_instruction(CloseConnection(W0, "it broke the protocol"))
    assert list(sessions.by_member) == [A0]


def test_the_end_of_the_job_is_kept_for_all_agents(sessions: MemberSessions) -> None:
    sessions.on_instruction(CloseCoordinator("done"))
    assert sessions.by_member[A0].unacknowledged() == [JobFinished("done")]
    assert sessions.by_member[W0].unacknowledged() == []
