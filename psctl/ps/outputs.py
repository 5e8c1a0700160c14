"""What the minds of servers ask their shell to do; one small class an instruction."""

from __future__ import annotations

import msgspec

from psctl.ps.messages import Between, FromServer
from psctl.ps.snapshot import Copied


class Send(msgspec.Struct, frozen=True):
    """Send this to that worker; without a connection to it, drop it: it asks again.

    The payload is not to be copied; see state.py, "No torn reads".
    """

    rank: int
    message: FromServer
    payload: memoryview | None = None


class ToServer(msgspec.Struct, frozen=True):
    """Send this to that server; without a connection to it, drop it: `server_joined` makes it good."""

    server: int
    message: Between
    payload: memoryview | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """These bytes are this shard's part of the checkpoint of `step`."""

    step: int
    shard: int
    copied: list[Copied]


class Load(msgspec.Struct, frozen=True):
    """Bring what the checkpoint has of this shard of all tables (TableMind.loaded)."""

    shard: int


class Save(msgspec.Struct, frozen=True):
    """Send these slices to the coordinator as this server's part of the checkpoint of `step`."""

    step: int
    copied: list[Copied]


class CaughtUp(msgspec.Struct, frozen=True):
    """Tell the coordinator: `server` holds all of the shard, and is kept so; it may join the chain at either end."""

    epoch: int
    shard: int
    server: int


class HandedOver(msgspec.Struct, frozen=True):
    """Tell the coordinator: the new primary leads the shard; workers may be told."""

    epoch: int
    shard: int


class Held(msgspec.Struct, frozen=True):
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


ChainOutput = ToServer | CaughtUp | HandedOver
Output = Send | Snapshot | ChainOutput
"""Of one shard."""

Instruction = Send | ToServer | Save | CaughtUp | HandedOver | Held
"""Of a server."""
