"""A cluster as directed capacities, and the routes between two places on it.

Each edge of the graph is full duplex, so it gives two capacities, one for each direction; all flows across one share
it. A *place* is the position of a rank or a helper: `host/GPU0`, or `host` for a process of the host itself. Routes:

    on one host     the widest path, the shortest of these (`topology/host/paths`): a GPU forwards nothing. Two
                    processes of one host, and devices that no edge joins, use its memory: the host's loopback, one
                    capacity for both directions.
    between hosts   from the device to its nearest nic, out through the nic's cable, over network switches by the
                    fewest cables, in by the other end's nearest nic. GPUs whose nearest nics are the same are
                    assigned to these nics in turn, so that each has a rail of its own where there are enough.

Where several cables leave through one port, the port bounds their sum: the nic's own rate where known, else the
fastest of its cables (pairs that were measured one by one show the port, not as many cables).
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence

import msgspec

from psctl.grouping import grouped
from psctl.plan.simulation.cost_model import ALPHA, ASSUMED_RATE, LOOPBACK_RATE
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode, Link
from psctl.topology.host.paths import Router

ASSUMED_SLOT = 16e9
"""Bytes/s of an edge inside a host of unknown bandwidth: PCIe 3.0 x16."""


class Delays(msgspec.Struct, frozen=True):
    """Latencies of routes whose links have none; known latencies take precedence."""

    inside: float = 5e-6  # between devices of one host
    loopback: float = 2e-5  # two processes through the host's memory
    ethernet: float = ALPHA
    infiniband: float = 5e-6


NOMINAL = Delays()


class NetworkRoute(msgspec.Struct, frozen=True):
    """The directed links that a message crosses, by their index in the network, and its latency in seconds."""

    links: tuple[int, ...]
    latency: float


class _DirectedEdge(msgspec.Struct, frozen=True):
    """One edge in one direction: `wires` are the capacities that it uses, `back` those of the other direction."""

    origin: str
    to: str
    wires: tuple[int, ...]
    back: tuple[int, ...]
    width: float
    latency: float | None
    type: str

    def reversed(self) -> _DirectedEdge:
        return _DirectedEdge(self.to, self.origin, self.back, self.wires, self.width, self.latency, self.type)


_Path = tuple[_DirectedEdge, ...]
_Graph = dict[str, list[_DirectedEdge]]


class SimulatedNetwork:
    """Directed capacities with names for people, and the routes between places, computed on first use.

    Args:
        cluster: the graph; a host is a place too.
        delays: latencies where the graph has none.
    """

    def __init__(self, cluster: ClusterGraph, delays: Delays = NOMINAL) -> None:
        self.names: list[str] = []
        self.capacities: list[float] = []
        self.assumed: set[int] = set()
        """Links of unknown rate."""
        self._delays = delays
        self._hosts = {host.name: host for host in cluster.hosts}
        self._slots: dict[tuple[str, Link], _DirectedEdge] = {}
        self._routers = {host.name: self._router(host, len(cluster.hosts) == 1) for host in cluster.hosts}
        self._outside = self._cables(cluster.between)
        self._loopbacks = {host.name: self._wire(f"{host.name} loopback", LOOPBACK_RATE) for host in cluster.hosts}
        self._ends = {end for end in self._outside if self._host_of(end) in self._hosts}
        self._paths: dict[tuple[str, str], dict[str, _Path]] = {}
        self._routes: dict[tuple[str, str], NetworkRoute] = {}
        self._ways: dict[str, tuple[str, _Path, _Path]] = {}
        self._nics: dict[str, str] = {}
        for host in cluster.hosts:
            self._assign_nics(host)

    def route(self, a: str, b: str) -> NetworkRoute:
        """Return the route from place `a` to place `b`.

        Raises:
            KeyError: a place that is not on the network, or two that no link joins; the caller's fault.
        """
        route = self._routes.get((a, b))
        if route is None:
            route = self._routes[a, b] = self._search(a, b)
        return route

    def uniform(self, placement: Sequence[str]) -> NetworkRoute | None:
        """Return the route between any two of these hosts where they are on one switch, each by an equal cable of its
        own; None where they are not."""
        if len(placement) < 2 or len(set(placement)) < len(placement) or set(placement) - set(self._hosts):
            return None
        cables = [self._outside.get(self._exit_of(place, "")[0], []) for place in placement]
        kinds = {(step.to, step.width, step.latency, len(step.wires)) for steps in cables for step in steps}
        single = all(len(steps) == 1 for steps in cables)
        switch = len(kinds) == 1 and next(iter(kinds))[0] not in self._ends
        return self.route(placement[0], placement[1]) if single and switch else None

    # -- the graph as directed links

    def _wire(self, name: str, capacity: float) -> int:
        self.names.append(name)
        self.capacities.append(capacity)
        return len(self.names) - 1

    def _host_of(self, end: str) -> str:
        return end if end in self._hosts else end.rpartition("/")[0]

    def _router(self, host: HostNode, single: bool) -> Router:
        prefix = "" if single else f"{host.name}/"
        edges = []
        for edge in host.graph.edges:
            known = edge if edge.bandwidth else msgspec.structs.replace(edge, bandwidth=ASSUMED_SLOT)
            there = self._wire(f"{prefix}{edge.a} -> {prefix}{edge.b}", known.bandwidth)
            back = self._wire(f"{prefix}{edge.b} -> {prefix}{edge.a}", known.bandwidth)
            self.assumed |= set() if edge.bandwidth else {there, back}
            edge = known
            step = _DirectedEdge(edge.a, edge.b, (there,), (back,), edge.bandwidth, edge.latency, edge.type)
            self._slots[host.name, edge] = step
            edges.append(edge)
        return Router(host.graph.devices, edges)

    def _cables(self, between: Sequence[Between]) -> _Graph:
        """Return the cables between hosts; an end is `host/nic` where the nic is known, else the host, or a switch."""
        ends = grouped((end, cable) for cable in between for end in (self._near_end(cable), cable.b))
        ports = {end: self._port(end, cables) for end, cables in ends.items()}
        graph: _Graph = {end: [] for end in ends}
        for cable in between:
            a, b, rate = self._near_end(cable), cable.b, cable.bandwidth or self._nominal(self._near_end(cable))
            width = rate or ASSUMED_RATE
            there, back = self._wire(f"{a} -> {b}", width), self._wire(f"{b} -> {a}", width)
            self.assumed |= set() if rate else {there, back}
            (out_a, in_a), (out_b, in_b) = ports[a], ports[b]
            wires, other = (*out_a, there, *in_b), (*out_b, back, *in_a)
            least = min(self.capacities[wire] for wire in wires)
            step = _DirectedEdge(a, b, wires, other, least, cable.latency, cable.type)
            graph[a].append(step)
            graph[b].append(step.reversed())
        return graph

    def _near_end(self, cable: Between) -> str:
        return f"{cable.a}/{cable.via}" if cable.via and cable.a in self._hosts else cable.a

    def _port(self, end: str, cables: Sequence[Between]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the wires out of and into an end that bound all its cables together; none where one cable does."""
        host = self._host_of(end)
        if host not in self._hosts:
            return (), ()
        nominal = self._nominal(end)
        widest = max(cable.bandwidth or nominal or ASSUMED_RATE for cable in cables)
        measured = any(cable.measured for cable in cables)
        width = widest if nominal is None or measured else nominal
        if len(cables) == 1 and width >= widest:
            return (), ()
        return (self._wire(f"{end} port out", width),), (self._wire(f"{end} port in", width),)

    def _nominal(self, end: str) -> float | None:
        """Return the rate of the nic at an end, None where there is no nic or its rate is unknown."""
        host = self._host_of(end)
        device = self._hosts[host].graph.device(end.rpartition("/")[2]) if end != host and host in self._hosts else None
        return device.bandwidth if device is not None else None

    def _assign_nics(self, host: HostNode) -> None:
        """Assign each device of a host the nic for traffic to other hosts: the nearest; of several equally near in
        turn."""
        nics = [device.id for device in host.graph.of_kind("nic")]
        wired = [nic for nic in nics if f"{host.name}/{nic}" in self._outside]
        nics = wired or (nics if host.name in self._outside else [])
        turns: dict[tuple[str, ...], int] = {}
        for device in host.graph.devices:
            paths = self._paths_from(host.name, device.id)
            rank = {nic: _length(paths[nic]) for nic in nics if nic in paths}
            near = tuple(nic for nic, length in rank.items() if length == min(rank.values()))
            if near:
                turn = turns.get((device.kind, *near), 0)
                turns[device.kind, *near] = turn + 1
                self._nics[f"{host.name}/{device.id}"] = near[turn % len(near)]

    # -- routes

    def _search(self, a: str, b: str) -> NetworkRoute:
        (host_a, device_a), (host_b, device_b) = self._split(a), self._split(b)
        if host_a == host_b:
            return self._within(host_a, device_a, device_b)
        start, out, _ = self._way(a, host_a, device_a)
        end, _, into = self._way(b, host_b, device_b)
        paths = self._paths_from("", start)
        if end not in paths:  # its nearest nic is on another network: by any that is on this one
            ends = [other for other in paths if self._host_of(other) == host_b]
            if not ends:
                raise KeyError(f"no link joins {a!r} to {b!r}")
            end, into = min(ends, key=lambda other: (_length(paths[other]), other)), ()
        whole = (*out, *paths[end], *into)
        known = any(step.latency is not None for step in paths[end])
        fabric = all(step.type == "InfiniBand" for step in paths[end])
        return _route_over(whole, 0.0 if known else self._delays.infiniband if fabric else self._delays.ethernet)

    def _split(self, place: str) -> tuple[str, str]:
        if place in self._hosts:
            return place, ""
        host, _, device = place.rpartition("/")
        if host not in self._hosts or self._hosts[host].graph.device(device) is None:
            raise KeyError(f"no place {place!r} on this network")
        return host, device

    def _within(self, host: str, a: str, b: str) -> NetworkRoute:
        graph = self._hosts[host].graph
        if _on_cpu(graph, a) and _on_cpu(graph, b):
            path: _Path = ()
        elif a and b:
            path = self._paths_from(host, a).get(b, ()) if a != b else ()
        else:
            paths = self._paths_from(host, a or b)
            near = [paths[cpu.id] for cpu in graph.of_kind("cpu") if cpu.id in paths]
            path = min(near, key=_length, default=())
            path = path if a else tuple(step.reversed() for step in path[::-1])
        if not path:
            return NetworkRoute((self._loopbacks[host],), self._delays.loopback)
        return _route_over(path, 0.0 if any(step.latency is not None for step in path) else self._delays.inside)

    def _way(self, place: str, host: str, device: str) -> tuple[str, _Path, _Path]:
        """Return the end through which a place reaches other hosts, and the paths from the place to it and back."""
        found = self._ways.get(place)
        if found is None:
            end, out = self._exit_of(host, device)
            found = self._ways[place] = end, out, tuple(step.reversed() for step in out[::-1])
        return found

    def _exit_of(self, host: str, device: str) -> tuple[str, _Path]:
        """Return the end through which a device reaches other hosts, and its path to it inside the host."""
        nic = self._nics.get(f"{host}/{device}")
        if nic is not None:
            end = f"{host}/{nic}"
            return end if end in self._outside else host, self._paths_from(host, device)[nic]
        if host in self._outside:
            return host, ()
        ends = [end for end in self._outside if self._host_of(end) == host]
        if not ends:
            raise KeyError(f"no link joins {host!r} to other hosts")
        return max(ends, key=lambda end: max(step.width for step in self._outside[end])), ()

    def _paths_from(self, host: str, start: str) -> dict[str, _Path]:
        """Return the best paths from a device to all others of its host; from an end to all others where `host` is
        empty."""
        found = self._paths.get((host, start))
        if found is None:
            found = self._inside(host, start) if host else self._over_cables(start)
            self._paths[host, start] = found
        return found

    def _over_cables(self, start: str) -> dict[str, _Path]:
        """Return the best paths from an end or a switch to all others; from an end with one cable to a switch they are
        those of the switch, which all its ends share."""
        cables = self._outside.get(start, ())
        if start not in self._ends or len(cables) != 1 or cables[0].to in self._ends:
            return _fewest_cables(start, self._outside, self._ends)
        beyond = self._paths_from("", cables[0].to)
        return {start: (), **{end: (cables[0], *path) for end, path in beyond.items() if end != start}}

    def _inside(self, host: str, start: str) -> dict[str, _Path]:
        found: dict[str, _Path] = {start: ()}
        for device, shortest in self._routers[host].paths(start).items():
            slots = [self._slots[host, edge] for edge in shortest.edges]
            pairs = zip(slots, shortest.devices, strict=False)  # one device more than edges
            found[device] = tuple(slot if slot.origin == origin else slot.reversed() for slot, origin in pairs)
        return found


def _on_cpu(graph: HostGraph, device: str) -> bool:
    found = graph.device(device)
    return found is None or found.kind == "cpu"


def _length(path: _Path) -> tuple[int, float]:
    return len(path), -min((step.width for step in path), default=0.0)


def _route_over(path: Iterable[_DirectedEdge], unknown: float) -> NetworkRoute:
    path = tuple(path)
    wires = tuple(wire for step in path for wire in step.wires)
    return NetworkRoute(wires, unknown + sum(step.latency or 0.0 for step in path))


def _fewest_cables(start: str, graph: _Graph, stops: Container[str]) -> dict[str, _Path]:
    """Return the path with the fewest cables, of these the widest, to each end; `stops` forward nothing.

    Dijkstra on (cables, -width): the beginning of a best path is a best path, so the pair serves as a length.
    """
    found: dict[str, _Path] = {}
    queue: list[tuple[int, float, str, int, _Path]] = [(0, -float("inf"), start, 0, ())]
    pushed = 0
    while queue:
        cables, minus_width, at, _, path = heapq.heappop(queue)
        if at in found:
            continue
        found[at] = path
        if at != start and at in stops:
            continue
        for step in graph.get(at, ()):
            if step.to not in found:
                pushed += 1
                heapq.heappush(queue, (cables + 1, max(minus_width, -step.width), step.to, pushed, (*path, step)))
    return found


def places(cluster: ClusterGraph) -> tuple[str, ...]:
    """Return the default places of ranks: every GPU in order; on hosts without GPUs, the host."""
    found: list[str] = []
    for host in cluster.hosts:
        gpus = host.graph.of_kind("gpu")
        found += [f"{host.name}/{gpu.id}" for gpu in gpus] or [host.name]
    return tuple(found)
