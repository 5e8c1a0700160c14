"""The messages that a connection allows, as data: one row for each message, checked before any handler.

A row says which role may send the message to which, in which states of the sender, how long it and its payload may be,
and what its fields must satisfy. psctl/transport/connect.py enforces the rows; the tables stand in
job/job_permits.py (coordinator
and agents, servers, workers) and ps/permits.py (workers and servers). Limits of single fields stand beside the
fields' types, so that decoding refuses them before memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union

import msgspec

from psctl.types import Member, Role

Direction = tuple[Role, Role]
"""(sender, receiver)"""

NEW = "new"
"""The state of every sender when its connection begins."""

SHORT = 64 << 10
"""Bytes that a message may have, without its payload, where its row says nothing else."""

LISTS = 1 << 20
"""The same of one that lists shards, ranks or lines of text."""

LAYOUTS = 16 << 20
"""The same of one that lists all parameters of a model."""


class Permit(msgspec.Struct, frozen=True):
    """Who may send a message, when, and how large it may be."""

    message: type
    ways: tuple[Direction, ...]
    when: Mapping[Role, tuple[str, ...]] = {}
    """By role of the sender: its states in which it may; a role that is not in it may always."""
    then: str = ""
    """The sender's state afterwards; "": as before."""
    rank: int | None = None
    """The only rank of the sender's role that may; None: all may."""
    size: int = SHORT
    """Most bytes of the message."""
    payload: int = 0
    """Most bytes of its payload."""
    check: Callable[[Member, Any], str] | None = None
    """Called with (sender, message): returns why its fields are refused, or ""."""

    @property
    def name(self) -> str:
        """The message's name, which is its tag on the wire too."""
        return self.message.__name__


class Permits:
    """All rows of one kind of connection.

    Args:
        rows: one for each message.
    """

    def __init__(self, rows: Iterable[Permit]) -> None:
        self.rows = tuple(rows)
        self.sizes = {row.name: row.size for row in self.rows}
        """The most bytes of each message, by its tag."""
        assert len(self.sizes) == len(self.rows), "one row for each message"

    @property
    def union(self) -> Any:
        """The type of all messages."""
        return Union[tuple(row.message for row in self.rows)]  # noqa: UP007  made of data

    def to(self, receiver: Role) -> dict[Role, dict[type, Permit]]:
        """Return what a receiver may be sent: by the sender's role, by message."""
        found: dict[Role, dict[type, Permit]] = {}
        for row in self.rows:
            for sender, to in row.ways:
                if to == receiver:
                    found.setdefault(sender, {})[row.message] = row
        return found


def why_refused(row: Permit | None, sender: Member, message: Any, state: str, payload: int) -> str:
    """Return why a message is refused, or "".

    Args:
        row: of this message, sender and receiver; None: there is none.
        sender: as its certificate names it.
        state: of the sender.
        payload: bytes.
    """
    name = type(message).__name__
    if row is None:
        return f"{name} is no message that a {sender.role} may send here"
    if row.rank is not None and sender.rank != row.rank:
        return f"{name} is for {sender.role}/{row.rank} to send"
    if state not in row.when.get(sender.role, (state,)):
        return f"{name} in state {state!r}, not {' or '.join(row.when[sender.role])}"
    if payload > row.payload:
        return f"{name} with {payload} bytes of payload, more than {row.payload}"
    why = row.check(sender, message) if row.check is not None else ""
    return f"{name}: {why}" if why else ""
