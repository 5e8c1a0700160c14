"""The messages that a connection allows, as data: one row for each message, checked before any handler.

A row states the roles of sender and receiver, the permitted states of the sender, the largest sizes of the message and
its payload, and a check of its fields. transport/peer_connection.py enforces the rows; the tables are in
job/job_permits.py (the coordinator with agents, servers and workers) and ps/permits.py (workers and servers). Limits of
single fields are part of the fields' types, so that decoding refuses them before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, TypeAlias

import msgspec

from psctl.errors import MessageRefused
from psctl.types import Member, Role

WireMessage: TypeAlias = msgspec.Struct
"""A message of any kind, as connections carry it. Its receiver matches on the class; the permits name the classes."""

Direction = tuple[Role, Role]
"""(sender, receiver)"""

NEW = "new"
"""The state of every sender when its connection begins."""

SHORT = 64 << 10
"""Bytes that a message may have, without its payload, where its row has no other limit."""

LISTS = 1 << 20
"""The same for a message that lists shards, ranks or lines of text."""

LAYOUTS = 16 << 20
"""The same for a message that lists all parameters of a model."""


class Permit(msgspec.Struct, frozen=True):
    """The permitted senders of a message, their states, and its largest size."""

    message: type[WireMessage]
    directions: tuple[Direction, ...]
    states: Mapping[Role, tuple[str, ...]] = {}
    """By role of the sender: the states that permit the message; a role that is not listed may send it always."""
    next_state: str = ""
    """The sender's state afterwards; "": unchanged."""
    rank: int | None = None
    """The only permitted rank of the sender's role; None: all ranks."""
    size: int = SHORT
    """Most bytes of the message."""
    payload: int = 0
    """Most bytes of its payload."""
    check: Callable[[Member, Any], str] | None = None  # Any: a message of this row's class, which differs by row
    """Called with (sender, message): returns why its fields are refused, or ""."""

    @property
    def name(self) -> str:
        """The message's name, which is also its tag on the wire."""
        return self.message.__name__


MessageKinds: TypeAlias = type[WireMessage] | UnionType
"""One class of messages, or a tagged union of classes."""


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
    def union(self) -> MessageKinds:
        """The type of all messages."""
        kinds: MessageKinds = reduce(or_, (row.message for row in self.rows))
        return kinds

    def to(self, receiver: Role) -> dict[Role, dict[type[WireMessage], Permit]]:
        """Return the rows for a receiver: by the sender's role, by message."""
        found: dict[Role, dict[type[WireMessage], Permit]] = {}
        for row in self.rows:
            for sender, to in row.directions:
                if to == receiver:
                    found.setdefault(sender, {})[row.message] = row
        return found


def why_refused(row: Permit | None, sender: Member, message: WireMessage, state: str, payload: int) -> str:
    """Return why a message is refused, or "".

    Args:
        row: the row of this message, sender and receiver; None: no row exists.
        sender: as its certificate names it.
        state: of the sender.
        payload: bytes.
    """
    name = type(message).__name__
    if row is None:
        return f"{name} is no message that a {sender.role} may send here"
    if row.rank is not None and sender.rank != row.rank:
        return f"{name} is for {sender.role}/{row.rank} to send"
    if state not in row.states.get(sender.role, (state,)):
        return f"{name} in state {state!r}, not {' or '.join(row.states[sender.role])}"
    if payload > row.payload:
        return f"{name} with {payload} bytes of payload, more than {row.payload}"
    why = row.check(sender, message) if row.check is not None else ""
    return f"{name}: {why}" if why else ""


class SenderPermits:
    """What one sender may send on one connection. Calls must not overlap.

    Args:
        permits: of all messages of the connection.
        receiver: the role of this end.
        sender: as its certificate names it.
    """

    def __init__(self, permits: Permits, receiver: Role, sender: Member) -> None:
        self.state = NEW
        """The sender's state."""
        self._sender, self._rows = sender, permits.to(receiver).get(sender.role, {})
        self.always = {
            kind: row.payload
            for kind, row in self._rows.items()
            if row.check is None and not row.next_state and row.rank is None and sender.role not in row.states
        }
        """By kind of message that needs no `check` and no `admit`, because it is permitted in every state with any
        fields: the most bytes of its payload."""

    def check(self, message: WireMessage, payload: int) -> None:
        """Check a message with so many bytes of payload, before memory is taken for them.

        Raises:
            MessageRefused: no row permits it now.
        """
        why = why_refused(self._rows.get(type(message)), self._sender, message, self.state, payload)
        if why:
            raise MessageRefused(f"it broke the protocol: {why}", where=str(self._sender))

    def admit(self, message: WireMessage, *, checked: bool) -> None:
        """Admit a message that has arrived; `checked`: `check` was called with its payload.

        Raises:
            MessageRefused: as `check`.
        """
        if not checked:
            self.check(message, 0)
        self.state = self._rows[type(message)].next_state or self.state
