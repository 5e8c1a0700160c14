"""A schedule as data: which node sends which chunk to which node, in which step, and whether it is copied or reduced.

From this one value follow the proof that it keeps its contract (`checker`), its predicted time (plan/), its execution
(collectives/) and its text (`describe`).

    nodes    0 .. world-1 are the ranks that contribute; world .. nodes-1 are helpers that hold nothing at first
             (servers, a host's processor)
    chunks   the vector is cut into `len(shares)` chunks; chunk i has shares[i] / sum(shares) of the bytes
    steps    all transfers of a step read what their senders hold when the step begins. The values that arrive for
             one chunk at one node in one step are reduced in the order of the nodes' numbers, the node's own included:
             so ranks that reduce the same operands get the same bits. A copy overwrites.

A step is an order, not a barrier: a transfer may start as soon as its sender holds what all earlier steps brought it
of that chunk, both ends are free on its lane, and the receiver has sent what the transfer would overwrite. Two nodes
that exchange a chunk in one step send and receive at the same time: the value that arrives is reduced or written once
the old one is sent. Values for a chunk are reduced in the order of the steps, in any order of arrival. Transfers
between the same two nodes keep their order on a lane; lanes are independent (two rings over different cables).

Transfers of one step, action and lane between the same two nodes travel as one message (`messages`): one start-up
time, and it starts when its last chunk is there. A builder that wants two messages puts them in two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Literal

import msgspec

from psctl.grouping import grouped

Action = Literal["copy", "reduce"]


class Transfer(msgspec.Struct, frozen=True, order=True, gc=False):
    """The transfer of one chunk. Ordered by step first."""

    step: int
    source: int
    destination: int
    chunk: int
    action: Action
    lane: int = 0


class ScheduleMessage(msgspec.Struct, frozen=True, order=True):
    """The chunks that one node sends another in one step on one lane."""

    step: int
    source: int
    destination: int
    lane: int
    action: Action
    chunks: tuple[int, ...]


class Schedule(msgspec.Struct, frozen=True):
    """A proven schedule. Only `checker.prove` builds one.

    Args:
        name: the algorithm's name in job files and output.
        world: number of ranks.
        nodes: number of ranks and helpers.
        shares: relative size of each chunk.
        transfers: in the order of their steps.
        params: the options that it was built with (chunks, rings, root ...), for output.
        collective: the contract that it keeps.
        root: the rank that gives or gets the whole, where the collective has one.
    """

    name: str
    world: int
    nodes: int
    shares: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    params: dict[str, object] = {}
    collective: str = "all-reduce"
    root: int = 0

    @property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + self.transfers[-1].step if self.transfers else 0

    def by_step(self) -> Iterator[tuple[int, tuple[Transfer, ...]]]:
        """Yield each step with its transfers, in order."""
        for step, transfers in groupby(self.transfers, attrgetter("step")):
            yield step, tuple(transfers)

    def messages(self) -> tuple[ScheduleMessage, ...]:
        """Return the messages, in the order of steps."""
        together = grouped(
            ((one.step, one.source, one.destination, one.lane, one.action), one.chunk) for one in self.transfers
        )
        return tuple(ScheduleMessage(*key, tuple(chunks)) for key, chunks in together.items())

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
