"""What a server is to one shard's chain of replicas, as a table; chain.py says what each role does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

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
