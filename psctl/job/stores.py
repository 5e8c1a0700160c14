"""What is said of the servers that hold additive tables (`run.store()`); one small class a message.

A worker that opens a store says TablesWanted; the coordinator has the job's servers hold tables (ServeTables), starts
them first where there are none, and answers with all of them once each has said where its tables listen.
"""

from __future__ import annotations

import msgspec

from psctl.words import Address, Member, ServerAt


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; the class's name is its tag on the wire."""


class TablesWanted(Message, frozen=True):
    """A worker to the coordinator: I want to open a store. Answered by TablesAt."""


class ServeTables(Message, frozen=True):
    """The coordinator to a server: hold tables. Answered by TablesReady."""


class TablesReady(Message, frozen=True):
    """A server to the coordinator: my tables listen here."""

    address: Address


class TablesAt(Message, frozen=True):
    """The coordinator to a worker: these servers hold tables. Or why none does."""

    servers: list[ServerAt]
    problem: str = ""
    hint: str = ""


Kinds = TablesWanted | ServeTables | TablesReady | TablesAt


class Tables(msgspec.Struct):
    """What the coordinator knows of them."""

    since: float = 0.0
    """When the first worker wanted one."""
    asked: set[Member] = msgspec.field(default_factory=set)
    """Workers without an answer."""
    holders: list[Member] = msgspec.field(default_factory=list)
    """The servers that hold tables, once it is settled."""
    told: set[Member] = msgspec.field(default_factory=set)
    """Servers that were told to hold tables."""
    addresses: dict[Member, Address] = msgspec.field(default_factory=dict)
