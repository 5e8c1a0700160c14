"""What workers and servers say to each other; one small class a message.

Clocks count from 0: clock c is the c-th step of the job. *Version* v of a shard holds the clocks 0 .. v-1, so version 0
is the start values and a pull at clock c is answered by version c-s or newer (s: staleness, 0 under bsp).
A message that carries a payload says so. Bytes of one shard to one peer travel in order, in parts of at most PART
bytes, each part's `offset` being where the one before ended.
"""

from __future__ import annotations

import msgspec

from psctl.words import Number

PART = 512 * 1024
"""Bytes of one part: large enough that the cost of a message vanishes, small enough to sum from the cache."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; the class's name is its tag on the wire."""


# ---- a worker to a server ----------------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """Payload: start values of the shard, from byte `offset`. Rank 0 alone sends them."""

    shard: int
    offset: int


class Push(Message, frozen=True):
    """First part of a worker's gradients of one shard at one clock. Payload: bytes from 0 on.

    `present` has one byte a piece, 1 where this worker had a gradient; no bytes follow when all are 0.
    `landed` is the newest version of the shard that this worker holds whole: older ones may be overwritten.
    """

    shard: int
    clock: int
    weight: float
    present: bytes
    landed: int


class PushPart(Message, frozen=True):
    """Payload: further bytes of the Push before it, from byte `offset`."""

    shard: int
    clock: int
    offset: int


class Step(Message, frozen=True):
    """All pushes of `clock` are on their way: step with these numbers a group.

    The joint gradient is multiplied by `scale` first (clipping); None: left alone. `save`: the result is a checkpoint.
    """

    clock: int
    groups: list[dict[str, Number]]
    scale: float | None = None
    save: bool = False


class SaveNow(Message, frozen=True):
    """Version `version`, which no step has ordered to be saved, is a checkpoint too. Any rank may say so, all may."""

    version: int


class Norms(Message, frozen=True):
    """Send NormsOf of `clock` for each of your shards, once all pushes are in."""

    clock: int


class Pull(Message, frozen=True):
    """Send these shards, in this order of wish, at a version that clock `clock` may read."""

    clock: int
    shards: list[int]


class Why(Message, frozen=True):
    """I have waited for the version that `clock` reads: who keeps you? Also proves that the server lives."""

    clock: int


# ---- a server to a worker ----------------------------------------------------------------------------------------


class Pushed(Message, frozen=True):
    """The push of this clock is taken in whole (or was, before): its bytes may be given up."""

    shard: int
    clock: int


class NormsOf(Message, frozen=True):
    """Squares of the 2-norm of the joint gradient of each piece, in piece order; None where nobody had a gradient."""

    shard: int
    clock: int
    squares: list[float | None]


class Values(Message, frozen=True):
    """First part of a shard at one version, all of it the same version. Payload: bytes from 0 on.

    `present` tells for each piece whether any worker had a gradient at the clock that made this version.
    """

    shard: int
    version: int
    present: bytes


class ValuesPart(Message, frozen=True):
    """Payload: further bytes of the Values before it, from byte `offset`."""

    shard: int
    version: int
    offset: int


class Because(Message, frozen=True):
    """Answer to Why: these workers' pushes or step orders are missing (none: it is being worked on)."""

    clock: int
    workers: list[int]


class Refused(Message, frozen=True):
    """The job cannot go on, and whose fault it is: two ranks asked for different steps, for example."""

    reason: str
    hint: str


FromWorker = Begin | Push | PushPart | Step | SaveNow | Norms | Pull | Why
FromServer = Pushed | NormsOf | Values | ValuesPart | Because | Refused
Kinds = FromWorker | FromServer
"""All that may travel on a connection between a worker and a server."""
