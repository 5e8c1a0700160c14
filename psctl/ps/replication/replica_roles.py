"""What a server is to one shard's chain of replicas, as a table; chain.py says what each role does.

The state machine that a chain of servers replicates, as a protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec


class ReplicatedState(Protocol):
    """A state machine: the same entries take the same version to the same next one, on every server."""

    @property
    def version(self) -> int | None:
        """How many entries are applied; None: it has no state yet."""

    @property
    def copy_limit(self) -> int:
        """Bytes that a copy, or what is handed over, may take at most."""

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return where an entry's payload of `size` bytes goes; `release` gives it back."""

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> object:
        """Apply an entry; when it is `kept`, its payload must stay as it is."""

    def release(self, payload: memoryview) -> None:
        """Take back a payload of `room`, or one that was kept."""

    def snapshot(self) -> tuple[bytes, list[memoryview]]:
        """Return all of the state: a head, and bytes that stay as they are."""

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Become what another's `snapshot` was."""

    def staged_state(self) -> tuple[bytes, list[memoryview]]:
        """Return what is taken in and not applied; in the form of `snapshot`."""

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Take over what another's `staged` returned."""


Role = Literal["none", "copying", "member", "heir", "primary", "handing"]
ChainPosition = Literal["out", "copy", "chain", "head"]

ROLES: dict[tuple[Role, ChainPosition], tuple[Role, Role]] = {
    # (role before, place now): role if the former primary lives (for who led until now: if the new one does), else
    ("none", "out"): ("none", "none"),
    ("none", "copy"): ("copying", "copying"),
    ("none", "chain"): ("member", "member"),
    ("none", "head"): ("heir", "primary"),
    ("copying", "out"): ("none", "none"),
    ("copying", "copy"): ("copying", "copying"),
    ("copying", "chain"): ("member", "member"),
    ("copying", "head"): ("heir", "primary"),
    ("member", "out"): ("none", "none"),
    ("member", "copy"): ("copying", "copying"),
    ("member", "chain"): ("member", "member"),
    ("member", "head"): ("heir", "primary"),
    ("heir", "out"): ("none", "none"),
    ("heir", "copy"): ("copying", "copying"),
    ("heir", "chain"): ("member", "member"),
    ("heir", "head"): ("heir", "primary"),
    ("primary", "out"): ("handing", "none"),
    ("primary", "copy"): ("handing", "copying"),
    ("primary", "chain"): ("handing", "member"),
    ("primary", "head"): ("primary", "primary"),
    ("handing", "out"): ("handing", "none"),
    ("handing", "copy"): ("handing", "copying"),
    ("handing", "chain"): ("handing", "member"),
    ("handing", "head"): ("primary", "primary"),
}

AFTER_HANDING: dict[ChainPosition, Role] = {"out": "none", "copy": "copying", "chain": "member", "head": "primary"}


def position_of(server: int, chain: Sequence[int], copies: Sequence[int]) -> ChainPosition:
    """Return where an assignment has a server."""
    if server in chain:
        return "head" if chain[0] == server else "chain"
    return "copy" if server in copies else "out"


class ReplicaPosition(msgspec.Struct):
    """What one server is to one shard in the newest assignment that it knows."""

    me: int
    epoch: int  # the assignment's number
    role: Role = "none"
    chain: list[int] = []
    copies: list[int] = []  # those that are to be filled
    void: bool = False  # what is here counts only if nobody is left who has more (chain.py)

    @property
    def before(self) -> int | None:
        """The server before this one in the chain, or the one that fills it."""
        if self.role == "copying":
            return self.chain[0]
        if self.role == "member" or (self.role == "handing" and self.me in self.chain):
            return self.chain[self.chain.index(self.me) - 1]
        return None


class ChainFollower(msgspec.Struct):
    """What is known of a server that gets entries from here."""

    counts: bool  # entries wait for its acknowledgement
    acked: int = -1  # the version that it, and all after it, have
    has: int = -1  # the version that it has, as it last said
    told: int = -1  # the newest assignment that it has acknowledged by
    copied: int = -1  # version of the copy that was sent
    copy: str = ""  # the one that it has not said that it has; until then its word is about something else
    filled: bool = False  # it has, or was sent, a version to start from
