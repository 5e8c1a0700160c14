"""Cut the flat spaces into shards. No torch: the coordinator does this.

All trainable parameters of one dtype lie one after the other, in the model's order, in one flat space [0, N). A shard
is a range of it: small parameters share one, a large one is cut. A shard is also a bucket: it is pushed when all
gradients in it are ready, so shards are cut small enough that the first leaves long before backward ends, and large
enough that the cost of a message does not count. Between processes of one host bytes stay where they are and a message
costs as much as ever, so there shards are larger.

Inside a parameter cuts fall on multiples of ALIGN elements counted from its first: torch's vector loops then meet their
scalar tail at the same element as on the uncut parameter, and results are equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from psctl.types import Layout, Range, Shard

ALIGN = 64
"""Elements; twice the widest vector step of torch's kernels (AVX-512, two vectors of 16 floats)."""

LARGEST = 4 << 20
"""Bytes; as BytePS found, parts of 4 MB keep both directions busy."""

LARGEST_NEAR = 8 << 20
"""Bytes, where all processes are on one host; 16 MiB saves a tenth more and leaves less to overlap."""

SMALLEST = 64 << 10
"""Bytes; below this the message costs more than its bytes."""

SHARDS_A_SERVER = 16
"""So that the balance is within a sixteenth of a server, and the first push leaves early: what can't overlap of pushes
and pulls is one shard."""

SHARDS_A_SERVER_NEAR = 4
"""Where all are on one host: servers share its processors and its memory, so that balance between them says little."""

_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
}  # fmt: skip


def bytes_of(dtype: str) -> int:
    """Return how many bytes one element takes; raises KeyError on a dtype that cannot have gradients."""
    return _BYTES[dtype]


def offsets(layout: Layout) -> list[int | None]:
    """Return where each parameter starts in its dtype's flat space; None for frozen ones, which have no place there."""
    ends: dict[str, int] = {}
    starts: list[int | None] = []
    for parameter in layout.parameters:
        if not parameter.trainable:
            starts.append(None)
            continue
        start = ends.get(parameter.dtype, 0)
        starts.append(start)
        ends[parameter.dtype] = start + parameter.size
    return starts


def spaces(layout: Layout) -> dict[str, int]:
    """Return the number of elements of each dtype's flat space."""
    sizes: dict[str, int] = {}
    for parameter in layout.parameters:
        if parameter.trainable:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.size
    return sizes


def target(total: int, servers: int, *, near: bool) -> int:
    """Return about how many bytes a shard has.

    Args:
        total: bytes of all shards.
        servers: how many hold them.
        near: all workers and servers are on one host.
    """
    most, pieces = (LARGEST_NEAR, SHARDS_A_SERVER_NEAR) if near else (LARGEST, SHARDS_A_SERVER)
    return min(most, max(SMALLEST, total // (max(1, servers) * pieces)))


def cut(layout: Layout, servers: int, target_bytes: int | None = None, *, near: bool = False) -> list[Shard]:
    """Cut the layout's flat spaces into shards of about `target_bytes`.

    Args:
        layout: what is synchronised.
        servers: how many servers will hold them.
        target_bytes: None: as `target` says.
        near: all workers and servers are on one host.

    Returns:
        Shards in the model's order of their first parameter; together they hold every element exactly once.
    """
    if target_bytes is None:
        total = sum(count * bytes_of(dtype) for dtype, count in spaces(layout).items())
        target_bytes = target(total, servers, near=near)
    ordered: list[tuple[int, int, str, Range]] = []  # (first parameter, start, dtype, range)
    for dtype in spaces(layout):
        ordered += _cut_space(layout, dtype, max(1, target_bytes // bytes_of(dtype)))
    ordered.sort()
    return [Shard(index, dtype, where) for index, (_, _, dtype, where) in enumerate(ordered)]


def _cut_space(layout: Layout, dtype: str, target: int) -> list[tuple[int, int, str, Range]]:
    """Cut one dtype's space into ranges of about `target` elements."""
    found: list[tuple[int, int, str, Range]] = []
    start = end = 0  # the shard being filled
    first: int | None = None
    for index, parameter in enumerate(layout.parameters):
        if not parameter.trainable or parameter.dtype != dtype:
            continue
        if end > start and end - start + parameter.size > target:  # it would overflow: close, begin anew
            found.append((first or 0, start, dtype, Range(start, end)))
            start, first = end, None
        first = index if first is None else first
        for part in _parts(parameter.size, target):
            if end > start and end - start + part > target:
                found.append((first, start, dtype, Range(start, end)))
                start, first = end, index
            end += part
    found.append((first or 0, start, dtype, Range(start, end)))
    return found


def _parts(size: int, target: int) -> list[int]:
    """Return the lengths that a parameter is cut into: equal ones, rounded up to ALIGN, the last one shorter."""
    if size <= target:
        return [size]
    length = math.ceil(math.ceil(size / math.ceil(size / target)) / ALIGN) * ALIGN
    return [min(length, size - at) for at in range(0, size, length)]


def sizes(shards: Sequence[Shard]) -> list[int]:
    """Return the bytes of each shard."""
    return [len(shard.range) * bytes_of(shard.dtype) for shard in shards]
