"""The base of all messages between the coordinator, agents, servers and workers of a job."""

from __future__ import annotations

import msgspec


class JobMessage(msgspec.Struct, frozen=True, tag=True):
    """A message on a connection to or from the coordinator; the class's name is its tag on the wire.

    The table in job_permits.py lists all kinds. A payload is sent after its message, never inside it.
    """
