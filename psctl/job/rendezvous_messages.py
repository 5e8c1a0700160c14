"""How workers that play a schedule over psctl's own data plane find each other; one small class a message.

A worker that is to play a schedule listens and says where (Listens). When all workers of this start have, each is
told of all (WorkersAt): over the connections to the coordinator, which are sealed, so a secret among them stays one.
"""

from __future__ import annotations

import msgspec

from psctl.types import Address


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; the class's name is its tag on the wire."""


class Listens(Message, frozen=True):
    """A worker to the coordinator: others reach me here (None: none of another host needs to); those of my host show me
    this secret. Answered by WorkersAt."""

    address: Address | None
    secret: bytes


class WorkerAt(msgspec.Struct, frozen=True):
    """A worker, which start of it, and how it is reached; the secret is told on its own host alone."""

    rank: int
    incarnation: int
    address: Address | None
    secret: bytes


class WorkersAt(Message, frozen=True):
    """The coordinator to a worker: all workers, in rank order."""

    workers: list[WorkerAt]


Kinds = Listens | WorkersAt
