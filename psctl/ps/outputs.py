"""What the minds of servers ask their shell to do; one small class an instruction."""

from __future__ import annotations

from typing import Any

import msgspec

from psctl.ps.messages import Message
from psctl.ps.snapshot import CopiedSlice


class ToWorker(msgspec.Struct, frozen=True):
    """Send a message to a worker; without a connection to it, drop the message: the worker asks again.

    The payload is not copied and does not change before it is sent.
    """

    rank: int
    message: Any
    """Of messages.FromServer or table_messages, or a SnapshotAnswer."""
    payload: memoryview | None = None


class ToServer(msgspec.Struct, frozen=True):
    """Send a message to a server; without a connection to it, drop the message: it is sent again on the next one.

    The payload is not copied and does not change before it is sent.
    """

    server: int
    message: Message
    payload: memoryview | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """These bytes are this shard's part of the checkpoint of `step`."""

    step: int
    shard: int
    copied: list[CopiedSlice]


class LoadTables(msgspec.Struct, frozen=True):
    """Bring what the checkpoint has of this shard of all tables (TableMind.loaded)."""

    shard: int


class SaveSlices(msgspec.Struct, frozen=True):
    """Send these slices to the coordinator as this server's part of the checkpoint of `step`."""

    step: int
    copied: list[CopiedSlice]


class ReplicaCaughtUp(msgspec.Struct, frozen=True):
    """Tell the coordinator: `server` holds all of the shard, and is kept so; it may join the chain at either end."""

    epoch: int
    shard: int
    server: int


class LeadMoved(msgspec.Struct, frozen=True):
    """Tell the coordinator: the new primary leads the shard; workers may be told."""

    epoch: int
    shard: int


class HeldPushes(msgspec.Struct, frozen=True):
    """Tell the coordinator what is here of a worker that is gone, for each shard that this server leads.

    `clocks`: the last clock of it that is whole; `versions`: the shard's version. Under bsp the cut at c* (the least
    clock of all shards) is consistent when no version is beyond c*+1. `aside`: the newest clock whose Aside is here, by
    who leads shard 0; else -1. `apart`: `clocks` without host sums that hold pushes of it and are not applied, where
    that is less; what is more counts only if all ranks' orders of it are known to be in.
    """

    rank: int
    clocks: dict[int, int]
    versions: dict[int, int]
    aside: int = -1
    apart: dict[int, int] = {}


ChainOutput = ToServer | ReplicaCaughtUp | LeadMoved
Output = ToWorker | Snapshot | ChainOutput
"""Of one shard."""

Instruction = ToWorker | ToServer | SaveSlices | ReplicaCaughtUp | LeadMoved | HeldPushes
"""Of a server."""
