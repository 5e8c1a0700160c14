"""A schedule as data: who sends which chunk to whom, in which step, and whether it is copied or reduced there.

From this one value come the proof that it keeps its promise (`checker`), its predicted time (plan/), its execution
(runtime/) and its picture. Nothing else describes a way to synchronise.

    nodes    0 .. world-1 are the ranks that contribute; world .. nodes-1 are helpers that hold nothing at first
             (servers, a host's processor)
    chunks   the vector is cut into `len(shares)` chunks; chunk i has shares[i] / sum(shares) of the bytes
    steps    all transfers of a step read what their senders hold when the step begins. What comes in for one chunk at
             one node in one step is reduced in the order of the nodes' numbers, the own value at its own place: so
             ranks that reduce the same operands get the same bits. A copy overwrites.

A step is an order, not a barrier: a transfer may start as soon as its sender holds what all earlier steps brought it
of that chunk, both ends are free on its lane, and the receiver has sent on what it would overwrite. Two that exchange
a chunk in one step send and receive side by side: what comes in is joined or written once the old value is out. What
comes in for a chunk is joined step after step, whichever comes first. Transfers between the same two nodes keep their
order on a lane; lanes run side by side (two rings over different cables).

Transfers of one step, action and lane between the same two nodes travel as one message (`messages`): one start-up
time, and it starts when its last chunk is there. A builder that wants two messages puts them in two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

Collective = Literal[
    "barrier", "broadcast", "scatter", "gather", "all-gather", "reduce", "reduce-scatter", "all-reduce", "all-to-all"
]

Action = Literal["copy", "reduce"]


class Transfer(msgspec.Struct, frozen=True, order=True):
    """One chunk on its way. Ordered by step first."""

    step: int
    source: int
    destination: int
    chunk: int
    action: Action
    lane: int = 0


class Message(msgspec.Struct, frozen=True, order=True):
    """The chunks that one node sends another in one step on one lane, in one go."""

    step: int
    source: int
    destination: int
    lane: int
    action: Action
    chunks: tuple[int, ...]


class Schedule(msgspec.Struct, frozen=True):
    """A proven way to keep a promise; built by `checker.prove` alone, so one that stands here is right.

    `owners` names, where the promise deals chunks out (scatter, gather, all-gather, reduce-scatter), the rank of each
    chunk. `members` are the ranks that take part; empty for all. `params` says what was chosen in building it (chunks,
    rings, root ...), for people.
    """

    name: str
    collective: Collective
    world: int
    nodes: int
    shares: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    root: int = 0
    params: dict[str, object] = {}
    owners: tuple[int, ...] = ()
    members: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + max((transfer.step for transfer in self.transfers), default=-1)

    def by_step(self) -> Iterator[tuple[int, tuple[Transfer, ...]]]:
        """Yield each step with its transfers, in order."""
        start = 0
        for index in range(1, len(self.transfers) + 1):
            if index == len(self.transfers) or self.transfers[index].step != self.transfers[start].step:
                yield self.transfers[start].step, self.transfers[start:index]
                start = index

    def messages(self) -> tuple[Message, ...]:
        """Return what travels together, in the order of steps."""
        together: dict[tuple[int, int, int, int, Action], list[int]] = {}
        for one in self.transfers:
            together.setdefault((one.step, one.source, one.destination, one.lane, one.action), []).append(one.chunk)
        return tuple(Message(*key, tuple(chunks)) for key, chunks in together.items())

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return the half-open range of elements of each chunk in a vector of `length` elements."""
        total, before, found = sum(self.shares), 0, []
        for share in self.shares:
            found.append((length * before // total, length * (before + share) // total))
            before += share
        return tuple(found)

    def chunk_bytes(self, size: float) -> tuple[float, ...]:
        """Return the bytes of each chunk when the vector has `size` bytes."""
        whole = sum(self.shares)
        return tuple(size * share / whole for share in self.shares)

    def sent(self, size: float) -> tuple[float, ...]:
        """Return the bytes that each node sends when the vector has `size` bytes."""
        out, whole = [0] * self.nodes, sum(self.shares)
        for transfer in self.transfers:
            out[transfer.source] += self.shares[transfer.chunk]
        return tuple(size * share / whole for share in out)
