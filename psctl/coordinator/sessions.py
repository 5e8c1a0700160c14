"""The coordinator's ends of the sessions with all members: which messages were received, and which are to be sent.

Part of the replicated state (journal.py): a successor of the coordinator has the same sessions. No connection is needed
to compute them; connections.py sends.
"""

from __future__ import annotations

from psctl.coordinator.state.instructions import (
    CloseConnection,
    CloseCoordinator,
    Input,
    Instruction,
    MessageReceived,
    SendMessage,
    StartMember,
)
from psctl.job.message import JobMessage
from psctl.job.message_session import MessageSession, is_numbered
from psctl.job.process_messages import JobFinished, Register
from psctl.job.session_messages import ResumeSession
from psctl.job.training_messages import Join
from psctl.types import Member

SessionMessage = JobMessage | StartMember
"""What a session keeps. A StartMember is sent as a StartProcess, whose certificate is issued when it is sent."""


class MemberSessions:
    """The session of each member that has one."""

    def __init__(self) -> None:
        self.by_member: dict[Member, MessageSession[SessionMessage]] = {}

    def on_input(self, given: Input) -> bool:
        """Take an input, before the state machine does: sessions begin, and messages are counted.

        Returns:
            Whether it is the first message of a member on a connection, and a new session begins.
        """
        if not isinstance(given, MessageReceived):
            return False
        member, message = given.member, given.message
        session = self.by_member.get(member)
        if isinstance(message, Join) or (isinstance(message, Register) and (message.received is None or not session)):
            self.by_member[member] = MessageSession()
            return True
        if session is None:
            return False
        if isinstance(message, Register | ResumeSession):
            session.acknowledge(min(message.received or 0, session.next))
        elif is_numbered(message):
            session.received += 1
        return False

    def on_instruction(self, instruction: Instruction) -> None:
        """Take an instruction, before it is carried out: messages are kept until they are acknowledged, and the session
        of a member that is lost ends."""
        match instruction:
            case SendMessage(member=member, message=message) if is_numbered(message):
                self._keep(member, message)
            case StartMember(member=member, host=host):
                for old in [each for each in self.by_member if _same_rank(each, member)]:
                    del self.by_member[old]
                self._keep(Member("agent", host), instruction)
            case CloseConnection(member=member):
                self.by_member.pop(member, None)
            case CloseCoordinator(status=status):
                for member in self.agents:
                    self._keep(member, JobFinished(status))

    @property
    def agents(self) -> list[Member]:
        """The agents that have a session."""
        return sorted(member for member in self.by_member if member.role == "agent")

    def _keep(self, member: Member, message: SessionMessage) -> None:
        session = self.by_member.get(member)
        if session is not None:
            session.keep(message)


def _same_rank(one: Member, other: Member) -> bool:
    return (one.role, one.rank) == (other.role, other.rank)
