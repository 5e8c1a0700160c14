"""Widest paths over the edges of a host: the rate of a pair of devices without other traffic.

The width of a path is that of its narrowest edge. Dijkstra's algorithm finds the widest path if each step settles the
device with the widest known path: extending a path never widens it, so no later path to a settled device is wider.
Processors and switches forward traffic; GPUs and NICs do not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable

import msgspec

from psctl.topology.graph import Device, Link, bonded


class Path(msgspec.Struct, frozen=True):
    """A path between two devices: the devices on it in order, its width in bytes/s, its latency in seconds.

    `latency` is None if that of any edge is unknown. `bottleneck` is the first of the narrowest edges.
    """

    devices: tuple[str, ...]
    edges: tuple[Link, ...]

    @property
    def bottleneck(self) -> Link:
        """The edge that limits the path."""
        return min(self.edges, key=lambda edge: edge.bandwidth)

    @property
    def bandwidth(self) -> float:
        """Bytes/s in each direction."""
        return self.bottleneck.bandwidth

    @property
    def latency(self) -> float | None:
        """Seconds one way."""
        known = [edge.latency for edge in self.edges if edge.latency is not None]
        return math.fsum(known) if len(known) == len(self.edges) else None


class Router:
    """Finds paths in one host.

    Args:
        devices: the devices of the host.
        edges: its cables and slots; edges with an end that is no device of the host are ignored.
    """

    def __init__(self, devices: Iterable[Device], edges: Iterable[Link]) -> None:
        self._forwards = {device.id: device.kind in ("cpu", "switch") for device in devices}
        self._near: dict[str, list[tuple[str, Link]]] = {ident: [] for ident in self._forwards}
        for edge in edges:
            if edge.a in self._near and edge.b in self._near:
                self._near[edge.a].append((edge.b, edge))
                self._near[edge.b].append((edge.a, edge))
        self._fabric = frozenset(
            ident
            for ident, near in self._near.items()
            if self._forwards[ident] and near and all(edge.type == "NVLink" for _, edge in near)
        )
        self._known: dict[tuple[str, bool], dict[str, Path]] = {}

    def pair(self, a: str, b: str, word: str) -> Path | None:
        """Return the path of a pair with this link type in a matrix, None if there is none.

        It is the shortest of the widest paths. Only paths of NVn may lead through an NVSwitch; other types are PCIe.
        """
        key = (a, bonded(word) > 0)
        if key not in self._known and a in self._near:
            self._known[key] = self.paths(a, () if key[1] else self._fabric)
        return self._known.get(key, {}).get(b)

    def paths(self, a: str, avoid: Collection[str] = ()) -> dict[str, Path]:
        """Return the widest path from a device to every other that can be reached.

        Args:
            a: id of the device at which the paths begin.
            avoid: ids of devices through which no path may lead.
        """
        came: dict[str, tuple[str, Link]] = {}
        settled: dict[str, Path] = {}
        queue: list[tuple[float, int, str]] = [(-math.inf, 0, a)]
        best: dict[str, tuple[float, int]] = {a: (-math.inf, 0)}
        while queue:
            width, hops, ident = heapq.heappop(queue)
            if ident in settled or (width, hops) != best[ident]:
                continue
            if ident == a:
                settled[a] = Path((a,), ())
            else:
                previous, edge = came[ident]
                settled[ident] = Path((*settled[previous].devices, ident), (*settled[previous].edges, edge))
                if not self._forwards[ident] or ident in avoid:
                    continue
            for other, edge in self._near[ident]:
                key = (max(width, -edge.bandwidth), hops + 1)
                if other not in settled and key < best.get(other, (0.0, 1 << 30)):
                    best[other], came[other] = key, (ident, edge)
                    heapq.heappush(queue, (*key, other))
        del settled[a]
        return settled
