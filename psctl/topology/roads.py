"""The way that bytes take between two ranks of a cluster, and how fast each cable on it is.

Between GPUs of a host that a cable joins, that cable; else the widest path over PCIe, processors and switches. Between
hosts: out by the NIC that is the GPU's own, over the widest path of the network, in by the other's own NIC.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from psctl.topology import rates
from psctl.topology.graph import NETWORK, Between, ClusterGraph, HostNode, Link
from psctl.topology.paths import Path, Router
from psctl.topology.placing import seats
from psctl.topology.wires import is_direct

Arc = tuple[str, str, str]
"""A cable in one direction: its host ("" between hosts), the device that it leaves, the one that it reaches."""

Road = tuple[Arc, ...]

INSIDE = 16e9
"""Bytes/s of a cable in a host of which no rate is known: a PCIe 3.0 slot."""

OUTSIDE = rates.ethernet(1.25e9)
"""Bytes/s between hosts where no rate is known: 10 Gbit/s Ethernet."""


class Roads:
    """Finds roads in a cluster.

    Args:
        cluster: hosts and what lies between them; where nothing does, all hang on one network by their NICs.

    Attributes:
        bandwidth: bytes/s of each arc; where it is not known, what is taken for it.
        unknown: arcs whose rate is not known.
    """

    def __init__(self, cluster: ClusterGraph) -> None:
        self.bandwidth: dict[Arc, float] = {}
        self.unknown: set[Arc] = set()
        self._latency: dict[Arc, float] = {}
        self._roads: dict[tuple[str, str], Road] = {}
        self._hosts = {host.name: host for host in cluster.hosts}
        self._several = len(cluster.hosts) > 1
        self._own: dict[str, str] = {}
        self._routers: dict[str, Router] = {}
        self._cables: dict[str, set[frozenset[str]]] = {}
        self._paths: dict[tuple[str, str], dict[str, Path]] = {}
        self._near: dict[str, list[tuple[str, Between]]] = {}
        for host in cluster.hosts:
            self._add_host(host)
        for one in cluster.between or _assumed(cluster):
            self._add_between(one)

    def road(self, a: str, b: str) -> Road:
        """Return the arcs from one rank to another; none where no way is known.

        Args:
            a: name of a GPU, or of a host, as `islands.ranks` has it; in one host any device's id.
            b: likewise.
        """
        if (a, b) not in self._roads:
            self._roads[a, b] = self._find(a, b)
        return self._roads[a, b]

    def latency(self, road: Sequence[Arc]) -> float:
        """Return the seconds that a message takes over a road, whatever its size."""
        return math.fsum(self._latency[arc] for arc in road)

    def _add_host(self, host: HostNode) -> None:
        edges: list[Link] = []
        cables = self._cables.setdefault(host.name, set())
        for link in host.graph.edges:
            known = link.bandwidth > 0
            edges.append(link if known else msgspec.structs.replace(link, bandwidth=INSIDE))
            self._add(host.name, link.a, link.b, edges[-1].bandwidth, link.latency, link.type, known)
            if is_direct(link):
                cables.add(link.ends)
        self._routers[host.name] = Router(host.graph.devices, edges)
        self._own |= {f"{host.name}/{seat.gpu}": seat.nic for seat in seats(host.graph)}

    def _add_between(self, one: Between) -> None:
        rate = one.bandwidth or self._port(one)
        self._add("", one.a, one.b, rate or OUTSIDE, one.latency, one.type, bool(rate))
        filled = msgspec.structs.replace(one, bandwidth=rate or OUTSIDE)
        self._near.setdefault(one.a, []).append((one.b, filled))
        self._near.setdefault(one.b, []).append((one.a, filled))

    def _port(self, one: Between) -> float | None:
        host = self._hosts.get(one.a)
        nic = host.graph.device(one.via) if host and one.via else None
        return nic.bandwidth if nic else None

    def _add(self, host: str, a: str, b: str, rate: float, latency: float | None, type: str, known: bool) -> None:
        usual = rates.latency(type) if latency is None else latency
        for arc in ((host, a, b), (host, b, a)):
            self.bandwidth[arc] = self.bandwidth.get(arc, 0.0) + rate
            self._latency[arc] = usual or 0.0
            if not known:
                self.unknown.add(arc)

    def _split(self, rank: str) -> tuple[str, str]:
        """Host and device of a rank; the device is "" for a host itself."""
        if not self._several and rank not in self._hosts:
            return next(iter(self._hosts)), rank
        host, _, device = rank.partition("/")
        return host, device

    def _find(self, a: str, b: str) -> Road:
        (host, one), (other, two) = self._split(a), self._split(b)
        if host == other:
            return self._inside(host, one, two)
        ways = self._network(host, other, self._own.get(f"{host}/{one}", ""), self._own.get(f"{other}/{two}", ""))
        if not ways:
            return ()
        leaves, enters = ways[0][1], ways[-1][1]
        out = leaves.via if leaves.a == host and leaves.via else self._own.get(f"{host}/{one}", "")
        into = enters.via if enters.a == other and enters.via else self._own.get(f"{other}/{two}", "")
        outside = tuple(("", start, end) for start, end in _pairs([host, *(node for node, _ in ways)]))
        return (*self._inside(host, one, out), *outside, *self._inside(other, into, two))

    def _inside(self, host: str, a: str, b: str) -> Road:
        if not a or not b or a == b:
            return ()
        if frozenset((a, b)) in self._cables[host]:
            return ((host, a, b),)
        if (host, a) not in self._paths:
            self._paths[host, a] = self._routers[host].paths(a)
        path = self._paths[host, a].get(b)
        return tuple((host, start, end) for start, end in _pairs(path.devices)) if path else ()

    def _network(self, start: str, end: str, out: str, into: str) -> list[tuple[str, Between]]:
        """The widest path between two hosts, by their own NICs where these are on it; as (reached, by what)."""
        return self._widest(start, end, out, into) or self._widest(start, end, "", "")

    def _widest(self, start: str, end: str, out: str, into: str) -> list[tuple[str, Between]]:
        queue: list[tuple[float, int, str]] = [(-math.inf, 0, start)]
        came: dict[str, tuple[str, Between]] = {}
        best: dict[str, tuple[float, int]] = {start: (-math.inf, 0)}
        while queue:
            width, hops, node = heapq.heappop(queue)
            if (width, hops) != best[node] or (node in self._hosts and node != start):
                continue
            for other, one in self._near.get(node, []):
                if (one.a == start and out and one.via not in ("", out)) or (
                    one.a == end and into and one.via not in ("", into)
                ):
                    continue
                key = (max(width, -(one.bandwidth or 0.0)), hops + 1)
                if key < best.get(other, (0.0, 0)):
                    best[other], came[other] = key, (node, one)
                    heapq.heappush(queue, (*key, other))
        ways: list[tuple[str, Between]] = []
        node = end
        while node != start and node in came:
            ways.append((node, came[node][1]))
            node = came[node][0]
        return ways[::-1] if node == start else []


def _assumed(cluster: ClusterGraph) -> list[Between]:
    """One network for all: each host on it by all its NICs, or by itself."""
    if len(cluster.hosts) < 2:
        return []
    return [
        Between(host.name, NETWORK, via=nic)
        for host in cluster.hosts
        for nic in ([device.id for device in host.graph.of_kind("nic")] or [""])
    ]


def _pairs(nodes: Iterable[str]) -> list[tuple[str, str]]:
    return list(itertools.pairwise(nodes))
