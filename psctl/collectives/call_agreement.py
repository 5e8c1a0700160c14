"""All ranks of a collective compare their calls before any data moves, so that one rank's mistake is an error on all.

Each rank sends every other one the description of its call: the collective, its group, root, operation, type and
shapes. All compare the same descriptions, so all raise the same error, which names the ranks that differ; nothing was
moved, and the next collective works. The exchange is also the barrier, and the place where a rank waits for late ones.

Ranks that give different groups do not wait for the same ranks. The one that finds it out ends all collectives of the
job's script with an error that says so.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import msgspec
import torch

from psctl.collectives.channel import UNUSED_TAG, Channel
from psctl.errors import UsageError
from psctl.schedule.groups import spans

TAG, MORE = UNUSED_TAG - 2, UNUSED_TAG - 3
"""Tags of descriptions, and of the rest of long ones."""

FIRST = 256
"""Bytes of a description that are sent at once."""

_PREFIX = struct.Struct(">II")
"""Bytes of the description, and a checksum of the group."""

DIFFERENT_GROUPS = "ranks called a collective with different groups"
"""The text by which a peer's reason is recognized."""


class CallDescription(msgspec.Struct, frozen=True, array_like=True):
    """One rank's call of a collective among `ranks`; `kind`, `dtype`, `shapes` and `place` are those of its payload.

    `call` is its name for people, such as "run.all_reduce".
    """

    call: str
    ranks: tuple[int, ...]
    root: int = 0
    operation: str = ""
    kind: str = ""
    dtype: str = ""
    shapes: list[tuple[int, ...]] = []
    place: str = "cpu"
    problem: str = ""
    shares_gpu: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallDescription)


class GroupsDiffer(UsageError):
    """Ranks gave different groups to a collective."""


def exchange(channel: Channel, me: int, peers: Sequence[int], mine: CallDescription) -> dict[int, CallDescription]:
    """Return the descriptions of all ranks of a call, by rank, this one's included.

    Args:
        channel: to the peers.
        me: this rank.
        peers: the other ranks of the group.
        mine: this rank's call.

    Raises:
        GroupsDiffer: a peer gave another group; its rank is named.
        RuntimeError: a peer is lost.
    """
    data = _encoder.encode(mine)
    group = zlib.crc32(_encoder.encode(sorted((me, *peers))))
    whole = _PREFIX.pack(len(data), group) + data
    found = channel.swap(_padded(whole, FIRST), peers, TAG)
    first = {peer: bytes(each.numpy()) for peer, each in found.items()}
    sizes = {peer: _PREFIX.unpack_from(each) for peer, each in first.items()}
    other = sorted(peer for peer, (_, theirs) in sizes.items() if theirs != group)
    if other:
        raise GroupsDiffer(_different_groups(mine, me, other[0], first[other[0]]), "every rank of a group must give it")
    longest = max([len(whole), *(_PREFIX.size + size for size, _ in sizes.values())])
    if longest > FIRST:
        rest = channel.swap(_padded(whole[FIRST:], longest - FIRST), peers, MORE)
        first = {peer: first[peer] + bytes(rest[peer].numpy()) for peer in peers}
    calls = {peer: _decoder.decode(first[peer][_PREFIX.size : _PREFIX.size + sizes[peer][0]]) for peer in peers}
    return dict(sorted({**calls, me: mine}.items()))


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _different_groups(mine: CallDescription, me: int, peer: int, first: bytes) -> str:
    size, _ = _PREFIX.unpack_from(first)
    theirs = "another group"
    if _PREFIX.size + size <= FIRST:
        call = _decoder.decode(first[_PREFIX.size : _PREFIX.size + size])
        theirs = f"{call.call} with {_group(call.ranks)}"
    return f"{DIFFERENT_GROUPS}: rank {peer} called {theirs}, rank {me} {mine.call} with {_group(mine.ranks)}"


def _group(ranks: Sequence[int]) -> str:
    return f"group {list(ranks)}"


# ---- the comparison --------------------------------------------------------------------------------------------------


def check(calls: dict[int, CallDescription], same: Sequence[str]) -> None:
    """Compare the calls of all ranks.

    Args:
        calls: by rank; the same on every rank.
        same: the fields that must be equal.

    Raises:
        UsageError: a rank's call is wrong or differs; names the rank.
    """
    names = {each.call for each in calls.values()}
    if len(names) == 1:
        for rank, call in calls.items():
            if call.problem:
                raise UsageError(f"{call.call}: rank {rank}: {call.problem}")
    title = next(iter(names)) if len(names) == 1 else "collectives"
    fields: dict[str, tuple[str, Callable[[CallDescription], Hashable], Callable[[CallDescription], str]]] = {
        "call": ("calls", lambda call: call.call, lambda call: call.call),
        "ranks": ("groups", lambda call: tuple(call.ranks), lambda call: _group(call.ranks)),
        "root": ("roots", lambda call: call.root, lambda call: f"root={call.root}"),
        "operation": ("operations", lambda call: call.operation, lambda call: f"op={call.operation!r}"),
        "kind": ("values", lambda call: call.kind, _kind),
        "place": ("devices", lambda call: call.place, lambda call: f"a tensor on {call.place}"),
        "dtype": ("types", lambda call: call.dtype, lambda call: call.dtype),
        "shapes": ("shapes", lambda call: tuple(map(tuple, call.shapes)), lambda call: _shapes(call.shapes)),
    }
    for field in ("call", "ranks", *same):
        what, key, text = fields[field]
        found = {rank: key(call) for rank, call in calls.items()}
        if len(set(found.values())) > 1:
            texts = {value: text(calls[rank]) for rank, value in reversed(found.items())}
            raise UsageError(f"{title}: ranks gave different {what}: {_who_differs(found, texts)}")


def _who_differs(found: dict[int, Hashable], texts: dict[Hashable, str]) -> str:
    """Return which ranks differ from the others, these last; among equally many, lower ranks count as the others."""
    counts = Counter(found.values())
    first = {value: min(rank for rank, each in found.items() if each == value) for value in counts}
    usual = max(counts, key=lambda value: (counts[value], -first[value]))
    order = [*sorted((value for value in counts if value != usual), key=lambda value: first[value]), usual]
    parts = []
    for value in order:
        ranks = [rank for rank, each in found.items() if each == value]
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}: {texts[value]}")
    return "; ".join(parts)


def _kind(call: CallDescription) -> str:
    return {"tensor": "a tensor", "object": "a plain value"}.get(call.kind, "nothing")


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(each)) for each in shapes[:4]) + (" ..." if len(shapes) > 4 else "")
