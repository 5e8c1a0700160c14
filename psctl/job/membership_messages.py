"""What is said while a job trains of who takes part and who has which shard; one small class a message.

A server's death, its replacement and a move of shards are told by `Reassign`, whose assignments are numbered: of two,
the one with the larger epoch holds. A worker's death is told to servers by `WorkerGone`; their answers let the
coordinator find the last clock that counts for the dead one on every shard (`CountUntil`). Where nobody takes its
place, workers tell which clock they have not begun (`MembersAsked`); then servers hear `Members`, workers `Shared`.
"""

from __future__ import annotations

import msgspec

from psctl.types import Assignment, Count, Member, Name, Size


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; the class's name is its tag on the wire."""


# ---- the coordinator to servers and workers ------------------------------------------------------------------------


class Reassign(Message, frozen=True):
    """Which server has which shard from now on. Servers that are to hand a shard over hear it before workers do."""

    assignment: Assignment


class Members(Message, frozen=True):
    """To servers: from `clock` on, these ranks take part and no others."""

    clock: int
    ranks: list[int]


class MembersAsked(Message, frozen=True):
    """To workers: who takes part will change. Answer Drawn, and begin no clock from there on before you hear Shared."""

    ticket: int


class Shared(Message, frozen=True):
    """To workers: from `clock` on, which nobody has begun, these ranks share the examples of each clock.

    `lost`: of whom the clocks from that one on do not count: their examples of those before `clock` join it. It answers
    all MembersAsked up to this ticket.
    """

    ticket: int
    clock: int
    ranks: list[int]
    lost: dict[int, int]


class WorkerGone(Message, frozen=True):
    """To servers: that incarnation of a worker is dead. Drop its connection and its partial pushes; answer HeldOf."""

    rank: int
    incarnation: int


class CountUntil(Message, frozen=True):
    """To servers: of a dead worker's pushes and Steps those up to `clock` count, later ones are dropped."""

    rank: int
    incarnation: int
    clock: int


class HoldSlots(Message, frozen=True):
    """To an agent: so many workers have their places on this host from now on; other jobs may have the other slots."""

    workers: Count


# ---- servers and workers to the coordinator ------------------------------------------------------------------------


class HeldOf(Message, frozen=True):
    """A server's answer to WorkerGone: of each shard whose primary it is, the last clock it has whole of that rank."""

    rank: int
    incarnation: int
    clocks: dict[int, int]
    versions: dict[int, int] = msgspec.field(default_factory=dict)  # of these shards: clocks applied, or sure to be
    aside: int = -1  # the newest clock at whose start that rank's own state is here; -1: none, or shard 0 is another's
    apart: dict[int, int] = msgspec.field(default_factory=dict)  # the same without host sums, where that is less


class Drawn(Message, frozen=True):
    """A worker's answer to MembersAsked: the first clock that it has not begun."""

    ticket: int
    clock: int


class CaughtUp(Message, frozen=True):
    """A primary says that `server`, which it fills for this shard since assignment `epoch`, has the newest clock."""

    epoch: int
    shard: Size
    server: Count


class HandedOver(Message, frozen=True):
    """A server says that, as assignment `epoch` has it, it is no longer the shard's primary and answers nothing."""

    epoch: int
    shard: Size


class StepUnfit(Message, frozen=True):
    """Servers cannot take this worker's step after `step`, for what `reason` says; the worker waits to be ended.

    Sent where servers step by `update: auto`, in a worker's first step.
    """

    step: Size
    reason: Name


class ServerUnreachable(Message, frozen=True):
    """A worker's or server's connection to that server broke and could not be made again."""

    server: Count
    incarnation: Count
    reason: str


class Misbehaved(Message, frozen=True):
    """A server to the coordinator: this member sent it what it may not send; `reason` says what."""

    member: Member
    reason: Name


Kinds = (
    Reassign | Members | MembersAsked | Shared | WorkerGone | CountUntil | HoldSlots
    | HeldOf | Drawn | CaughtUp | HandedOver | ServerUnreachable | Misbehaved | StepUnfit
)  # fmt: skip
"""All that is said of it."""
