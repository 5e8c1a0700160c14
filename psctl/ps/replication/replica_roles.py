"""The roles of a server in one shard's chain, as a transition table, and the protocol of the replicated state.

replica_chain.py describes the behaviour of each role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec


class ReplicatedState(Protocol):
    """A deterministic state machine: on every server the same entry takes the same version to the same next version."""

    @property
    def version(self) -> int | None:
        """The number of applied entries; None: it has no state yet."""

    @property
    def copy_limit(self) -> int:
        """Upper bound of the bytes of a copy."""

    @property
    def entry_limit(self) -> int:
        """Upper bound of the bytes of an entry's payload."""

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return the buffer for an entry's payload of `size` bytes; `release` returns it."""

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> object:
        """Apply an entry; if `kept`, the payload must not change until `release`."""

    def release(self, payload: memoryview) -> None:
        """Release a payload of `entry_buffer`, or one that was kept."""

    def snapshot(self) -> tuple[bytes, memoryview]:
        """Return the whole state: a head, and bytes that do not change."""

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Replace the state by another server's `snapshot`."""


class StagedState(Protocol):
    """What the primary has staged and not applied: a new primary receives it with the lead."""

    @property
    def staged_limit(self) -> int:
        """Upper bound of the bytes of the staged state."""

    def staged_state(self) -> tuple[bytes, memoryview]:
        """Return the staged state, in the form of `ReplicatedState.snapshot`."""

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Restore the staged state that another server's `staged_state` returned."""


Role = Literal["none", "copying", "member", "promoting", "primary", "demoting"]
ChainPosition = Literal["out", "copy", "chain", "head"]

ROLES: dict[tuple[Role, ChainPosition], tuple[Role, Role]] = {
    # (role before, position now): role if the former primary (for the former primary: the new one) is alive, else
    ("none", "out"): ("none", "none"),
    ("none", "copy"): ("copying", "copying"),
    ("none", "chain"): ("member", "member"),
    ("none", "head"): ("promoting", "primary"),
    ("copying", "out"): ("none", "none"),
    ("copying", "copy"): ("copying", "copying"),
    ("copying", "chain"): ("member", "member"),
    ("copying", "head"): ("promoting", "primary"),
    ("member", "out"): ("none", "none"),
    ("member", "copy"): ("copying", "copying"),
    ("member", "chain"): ("member", "member"),
    ("member", "head"): ("promoting", "primary"),
    ("promoting", "out"): ("none", "none"),
    ("promoting", "copy"): ("copying", "copying"),
    ("promoting", "chain"): ("member", "member"),
    ("promoting", "head"): ("promoting", "primary"),
    ("primary", "out"): ("demoting", "none"),
    ("primary", "copy"): ("demoting", "copying"),
    ("primary", "chain"): ("demoting", "member"),
    ("primary", "head"): ("primary", "primary"),
    ("demoting", "out"): ("demoting", "none"),
    ("demoting", "copy"): ("demoting", "copying"),
    ("demoting", "chain"): ("demoting", "member"),
    ("demoting", "head"): ("primary", "primary"),
}

AFTER_HANDING: dict[ChainPosition, Role] = {"out": "none", "copy": "copying", "chain": "member", "head": "primary"}


def position_of(server: int, chain: Sequence[int], copies: Sequence[int]) -> ChainPosition:
    """Return a server's position in an assignment."""
    if server in chain:
        return "head" if chain[0] == server else "chain"
    return "copy" if server in copies else "out"


class ReplicaPosition(msgspec.Struct):
    """The role and the assignment of one server for one shard, by the newest assignment that it has received."""

    me: int
    epoch: int  # the assignment's number
    role: Role = "none"
    chain: list[int] = []
    copies: list[int] = []  # servers that are to receive a copy
    void: bool = False  # the state here counts only if no server is left that has more (replica_chain.py)

    @property
    def before(self) -> int | None:
        """The server before this one in the chain, or the one that copies to it."""
        if self.role == "copying":
            return self.chain[0]
        if self.role == "member" or (self.role == "demoting" and self.me in self.chain):
            return self.chain[self.chain.index(self.me) - 1]
        return None


class ChainFollower(msgspec.Struct):
    """The known state of a server that receives entries from this one."""

    counts: bool  # entries wait for its acknowledgement
    acked: int = -1  # the version that it, and all after it, have
    has: int = -1  # the version that it last reported
    reported_epoch: int = -1  # the newest assignment under which it reported
    copied: int = -1  # version of the copy that was sent
    copy: str = ""  # the copy that it has not acknowledged; until then its reports concern an older state
    filled: bool = False  # it has, or was sent, a version to start from
