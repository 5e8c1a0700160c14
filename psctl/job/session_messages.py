"""Messages that resume a member's session with the coordinator after its connection broke (message_session.py)."""

from __future__ import annotations

from psctl.job.message import JobMessage
from psctl.types import Size


class ResumeSession(JobMessage, frozen=True):
    """First message of a worker or server on each further connection.

    `received`: numbered messages that it has received in this session. `saving`: steps of checkpoints of which it sent
    a part on the lost connection; the part may not have arrived.
    """

    received: Size
    saving: tuple[Size, ...] = ()


class SessionResumed(JobMessage, frozen=True):
    """Answer to ResumeSession and to an agent's Register: the numbered messages of this member that were received.

    None: the coordinator has no session with this agent, so both ends begin one.
    """

    received: Size | None


class MessagesReceived(JobMessage, frozen=True):
    """Acknowledges all numbered messages of the session up to `count`."""

    count: Size
