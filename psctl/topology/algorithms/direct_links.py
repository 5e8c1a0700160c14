"""The direct links between GPUs (NVLink, xGMI), counted in link units.

A unit is one NVLink, or one xGMI link of the narrowest bundle. Rings and trees are packed into whole units, so that
their arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.topology.graph import HostGraph, Link, components


class DirectLinks(msgspec.Struct, frozen=True):
    """Devices and the direct links among them.

    `links` are sorted (index, index, units), one a pair, with the lower index first. Each unit carries `unit` bytes/s
    in each direction, 0.0 where that is unknown. Where one switch joins all devices, there are no links, and `ports`
    has the units between each device and the switch.
    """

    nodes: tuple[str, ...]
    links: tuple[tuple[int, int, int], ...] = ()
    unit: float = 0.0
    ports: tuple[int, ...] = ()

    @property
    def connected(self) -> bool:
        """Whether every device reaches every other over the links or the switch."""
        return bool(self.ports) or len(components(range(len(self.nodes)), (link[:2] for link in self.links))) <= 1

    def units(self) -> list[list[int]]:
        """Return the units between each two devices, by index."""
        table = [[0] * len(self.nodes) for _ in self.nodes]
        for a, b, count in self.links:
            table[a][b] = table[b][a] = count
        return table


def direct_links(graph: HostGraph, ids: Sequence[str] | None = None) -> DirectLinks:
    """Return the direct links among GPUs of a host: NVn that is not switched, NVLink, xGMI.

    Args:
        graph: the host.
        ids: the GPUs, in the order of the result; None for all.
    """
    nodes = tuple(ids) if ids is not None else tuple(device.id for device in graph.of_kind("gpu"))
    place = {ident: index for index, ident in enumerate(nodes)}
    ports = _ports(graph, nodes)
    if ports:
        unit = _unit(ports)
        return DirectLinks(nodes, (), unit, tuple(_count(port, unit) for port in ports))
    direct = [link for link in graph.edges if is_direct(link) and link.ends <= place.keys() and link.a != link.b]
    unit = _unit(direct)
    counts: dict[tuple[int, int], int] = {}
    for link in direct:
        a, b = sorted((place[link.a], place[link.b]))
        counts[a, b] = counts.get((a, b), 0) + _count(link, unit)
    return DirectLinks(nodes, tuple((a, b, count) for (a, b), count in sorted(counts.items())), unit)


def is_direct(link: Link) -> bool:
    """Return whether a link is an edge between GPUs: NVn, NVLink or xGMI."""
    return link.edge and (link.width > 0 or link.type in ("NVLink", "xGMI"))


def _ports(graph: HostGraph, nodes: Sequence[str]) -> list[Link]:
    """Return the link of each device to the switch that joins all of them; [] if there is no such switch."""
    for switch in graph.of_kind("switch"):
        leading = [link for link in graph.edges if is_direct(link) and switch.id in link.ends and link.a != link.b]
        to = {(link.b if link.a == switch.id else link.a): link for link in leading}
        if len(nodes) > 1 and to.keys() >= set(nodes):
            return [to[ident] for ident in nodes]
    return []


def _unit(links: Sequence[Link]) -> float:
    """Return the bytes/s of one unit: those of the slowest single link; 0.0 where the rate of any link is unknown."""
    rates = [link.bandwidth / max(1, link.width) for link in links]
    return min(rates, default=0.0)


def _count(link: Link, unit: float) -> int:
    """Return the units of a bundle: its NVLinks, or its rate in units, with 5% tolerance for measured rates."""
    if link.width:
        return link.width
    return max(1, int(link.bandwidth / unit + 0.05)) if unit > 0 else 1
