"""Messages about changes of members while a job trains: workers, servers, and the servers of each shard.

`Reassign` announces the loss or replacement of a server and a move of shards. Assignments are numbered; the one with
the larger epoch is valid. `WorkerGone` announces the loss of a worker to servers; from their answers the coordinator
finds the last clock of the lost worker that counts on every shard (`CountUntil`). Where no replacement is started, or
where workers join or leave, workers answer `NextClockWanted` with the first clock that they have not begun; then
servers receive `Members` (and answer `MembersSet`, where workers join), workers `ExamplesShared`.
"""

from __future__ import annotations

import msgspec

from psctl.job.message import JobMessage
from psctl.types import Assignment, Count, Member, Name, Size

# ---- the coordinator to servers and workers ------------------------------------------------------------------------


class Reassign(JobMessage, frozen=True):
    """The servers of each shard from now on. A server that transfers a shard receives it before workers do."""

    assignment: Assignment


class Members(JobMessage, frozen=True):
    """To servers: from `clock` on, these ranks are the members. With a ticket it is answered by MembersSet."""

    clock: int
    ranks: list[int]
    ticket: int = 0


class NextClockWanted(JobMessage, frozen=True):
    """To workers: the members will change. Answer NextClock; begin no later clock before ExamplesShared arrives."""

    ticket: int


class ExamplesShared(JobMessage, frozen=True):
    """To workers: from `clock` on, which no worker has begun, these ranks share the examples of each clock.

    `lost`: rank -> its first clock that does not count; its examples of the clocks from there on are added to `clock`.
    A worker that is not of `ranks` leaves before that clock. It answers all NextClockWanted up to this ticket. `parts`:
    of each of `ranks`, in the examples of a clock; empty: all have as many.
    """

    ticket: int
    clock: int
    ranks: list[int]
    lost: dict[int, int]
    parts: list[int] = msgspec.field(default_factory=list)


class WorkerGone(JobMessage, frozen=True):
    """To servers: that incarnation of a worker is lost. Drop its connection and its partial pushes; answer
    LostWorkerClocks."""

    rank: int
    incarnation: int


class CountUntil(JobMessage, frozen=True):
    """To servers: of a lost worker's pushes and Steps those up to `clock` count, later ones are dropped."""

    rank: int
    incarnation: int
    clock: int


# ---- servers and workers to the coordinator ------------------------------------------------------------------------


class LostWorkerClocks(JobMessage, frozen=True):
    """A server's answer to WorkerGone: for each shard that it leads, the last complete clock of that rank.

    `versions`: of these shards, the number of clocks that are applied or certain to be. `rank_state_clock`: the newest
    clock at whose start the server has the rank's own state; -1 when it has none or does not lead shard 0.
    `separate_clocks`: `clocks` without host sums, for the shards where that is less.
    """

    rank: int
    incarnation: int
    clocks: dict[int, int]
    versions: dict[int, int] = msgspec.field(default_factory=dict)
    rank_state_clock: int = -1
    separate_clocks: dict[int, int] = msgspec.field(default_factory=dict)


class NextClock(JobMessage, frozen=True):
    """A worker's answer to NextClockWanted: the first clock that it has not begun."""

    ticket: int
    clock: int


class MembersSet(JobMessage, frozen=True):
    """A server's answer to Members: it applies no clock from there on without all of these members."""

    ticket: int


class ShardCaughtUp(JobMessage, frozen=True):
    """A primary reports that `server`, which it fills for this shard since assignment `epoch`, has the newest clock.

    `tables`: it is a shard of tables, not of parameters.
    """

    epoch: int
    shard: Size
    server: Count
    tables: bool = False


class ShardHandedOver(JobMessage, frozen=True):
    """A server reports that, by assignment `epoch`, it is no longer the shard's primary and answers nothing."""

    epoch: int
    shard: Size
    tables: bool = False


class StepUnfit(JobMessage, frozen=True):
    """Servers cannot apply this worker's step after `step`, because of `reason`; the worker waits to be ended.

    Sent in a worker's first step, where `update: auto` chose servers.
    """

    step: Size
    reason: Name


class ServerUnreachable(JobMessage, frozen=True):
    """A worker's or server's connection to that server broke and could not be made again."""

    server: Count
    incarnation: Count
    reason: str


class ProtocolViolation(JobMessage, frozen=True):
    """A server to the coordinator: this member sent it a message that it may not send, for `reason`."""

    member: Member
    reason: Name
