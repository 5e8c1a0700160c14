"""Outputs of the servers' state machines, which the process around them carries out: one class an instruction."""

from __future__ import annotations

import msgspec

from psctl.permits import WireMessage
from psctl.ps.messages import Message
from psctl.ps.snapshot import CopiedSlice


class ToWorker(msgspec.Struct, frozen=True):
    """Send a message to a worker; without a connection to it, drop the message: the worker repeats its request.

    The payload is not copied and does not change before it is sent.
    """

    rank: int
    message: WireMessage
    """A message of messages.FromServer or table_messages, or an answer to a reader outside the job."""
    payload: memoryview | None = None


class ToReader(msgspec.Struct, frozen=True):
    """Send a message to a reader; without a connection to it, drop the message: the reader asks again.

    The payload does not change any more.
    """

    rank: int
    message: WireMessage
    payload: memoryview | None = None


class ToServer(msgspec.Struct, frozen=True):
    """Send a message to a server; without a connection to it, drop the message: it is sent again on the next one.

    The payload is not copied and does not change before it is sent.
    """

    server: int
    message: Message
    payload: memoryview | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """A shard's part of the checkpoint of `step`."""

    step: int
    shard: int
    copied: list[CopiedSlice]


class LoadTables(msgspec.Struct, frozen=True):
    """Load this shard's part of all tables from the checkpoint."""

    shard: int


class SaveSlices(msgspec.Struct, frozen=True):
    """Send these slices to the coordinator as this server's part of the checkpoint of `step`.

    `base`: the step of the complete checkpoint whose part of this server they continue; None: they are all of it.
    """

    step: int
    copied: list[CopiedSlice]
    base: int | None = None


class ReplicaCaughtUp(msgspec.Struct, frozen=True):
    """Report to the coordinator: `server` has the complete shard, and may join the chain at either end."""

    epoch: int
    shard: int
    server: int


class LeadMoved(msgspec.Struct, frozen=True):
    """Report to the coordinator: the new primary leads the shard."""

    epoch: int
    shard: int


class HeldPushes(msgspec.Struct, frozen=True):
    """Report to the coordinator the pushes held of a lost worker, for each shard that this server leads.

    `clocks`: the worker's last complete clock; `versions`: the shard's version. Under bsp the cut at c* (the least
    clock of all shards) is consistent when no version is beyond c*+1. `rank_state_clock`: the newest clock at whose
    start this server has the worker's rank state; -1 when it has none or does not lead shard 0. `separate_clocks`:
    `clocks` without unapplied host sums that hold pushes of the worker, where that is less; clocks beyond it count only
    if all ranks' orders of them are known to have arrived.
    """

    rank: int
    clocks: dict[int, int]
    versions: dict[int, int]
    rank_state_clock: int = -1
    separate_clocks: dict[int, int] = {}


ChainOutput = ToServer | ReplicaCaughtUp | LeadMoved
Output = ToWorker | ToReader | Snapshot | ChainOutput
"""Outputs of one shard."""

Instruction = ToWorker | ToReader | ToServer | SaveSlices | ReplicaCaughtUp | LeadMoved | HeldPushes
"""Outputs of one server."""
