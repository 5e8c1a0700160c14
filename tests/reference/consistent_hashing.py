"""Consistent hashing with virtual servers: an assignment that does not depend on the assignment before.

Every server has many points (its *virtual servers*) on a circle of 2**64 hash values, a key has one; the server
of a key is the first that follows it, its replicas are the next ones of other servers. When a server joins, only the
keys of its arcs move to it; when it leaves, they move to the servers that follow. So of n servers' keys about 1/(n+1)
move at a join and 1/n at a leave, and every process that knows the servers' ranks computes the same assignment (Karger
and others 1997; Dynamo; the parameter server of OSDI'14).

The price is balance: an arc's length is random. With v points a server the share of one is a sum of v spacings of
the circle, nearly a gamma distribution whose deviation is 1/sqrt(v) of its mean, so the fullest of n holds about
1 + sqrt(2 ln n / v) + ln n / v times the mean: 1.45 with 64 points and a hundred servers. Jobs use
`coordinator/policies/assignment.py`, which starts from the assignment before, is level to within one shard, and moves
no more. `bench/assignment.py` measures both.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain, islice

from psctl.coordinator.policies.assignment import Chains

SPACE = 1 << 64
"""Number of hash values."""

VIRTUAL = 64
"""Points of one server on the circle."""


def point(name: str) -> int:
    """Return where a name lies on the circle; the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


class Ring:
    """The circle with its servers.

    Args:
        servers: rank -> number of its host.
        virtual: points a server; twice as many on a server that should hold twice as much.
    """

    def __init__(self, servers: Mapping[int, int], virtual: int | Mapping[int, int] = VIRTUAL) -> None:
        assert servers, "a ring needs a server"
        count = virtual if isinstance(virtual, Mapping) else dict.fromkeys(servers, virtual)
        at = sorted((point(f"server/{rank}/{each}"), rank) for rank in servers for each in range(count[rank]))
        self._points = [where for where, _ in at]
        self._ranks = [rank for _, rank in at]
        self._host = servers

    def owner(self, where: int) -> int:
        """Return the server of a point: the first at or after it."""
        return self._ranks[bisect_left(self._points, where) % len(self._points)]

    def chain(self, where: int, replicas: int) -> list[int]:
        """Return the server of a point and those of its replicas, on hosts of their own as far as there are hosts."""
        start = bisect_left(self._points, where) % len(self._points)
        around = dict.fromkeys(chain(islice(self._ranks, start, None), islice(self._ranks, start)))
        apart: dict[int, int] = {}  # by host: the first server of it
        for rank in around:
            apart.setdefault(self._host[rank], rank)
        ordered = dict.fromkeys([*apart.values(), *around])
        return list(islice(ordered, replicas + 1))

    def shares(self) -> dict[int, float]:
        """Return what part of the circle each server is first for; together 1."""
        found = dict.fromkeys(self._host, 0.0)
        before = self._points[-1] - SPACE
        for where, rank in zip(self._points, self._ranks, strict=True):
            found[rank] += (where - before) / SPACE
            before = where
        return found


def assign_hashed(
    names: Sequence[str], servers: Mapping[int, int], replicas: int, virtual: int | Mapping[int, int] = VIRTUAL
) -> Chains:
    """Return the chain of every shard by its name.

    Args:
        names: what the shards are called; a shard stays where it is as long as its name does.
        servers: rank -> number of its host.
        replicas: copies of each shard beyond the first.
        virtual: points a server.
    """
    ring = Ring(servers, virtual)
    return [ring.chain(point(name), replicas) for name in names]
