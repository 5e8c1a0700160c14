"""The links between GPUs without a processor between them (NVLink, xGMI), counted in link units.

A unit is one NVLink, or one xGMI link of the narrowest bundle. Rings and trees are packed into units, so that their
arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from psctl.topology.graph import HostGraph, Link


class DirectLinks(msgspec.Struct, frozen=True):
    """Devices and the direct links among them.

    `links` are (index, index, units) with the lower index first, once a pair, in order. Each unit carries `unit`
    bytes/s in each direction, 0.0 where that is not known. Where all devices are on one switch instead, `ports` has
    the units between each device and the switch, and there are no links.
    """

    nodes: tuple[str, ...]
    links: tuple[tuple[int, int, int], ...] = ()
    unit: float = 0.0
    ports: tuple[int, ...] = ()

    @property
    def connected(self) -> bool:
        """Whether every device reaches every other over the links, or over the switch."""
        return bool(self.ports) or len(components(len(self.nodes), ((a, b) for a, b, _ in self.links))) <= 1

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
        ids: GPUs that count, in the order wanted; None for all.
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


def components(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the groups of 0 .. count-1 that pairs join, each in order, by their lowest member."""
    label = list(range(count))
    for a, b in pairs:
        old, new = max(label[a], label[b]), min(label[a], label[b])
        if old != new:
            label = [new if one == old else one for one in label]
    return [[node for node in range(count) if label[node] == one] for one in sorted(set(label))]


def _ports(graph: HostGraph, nodes: Sequence[str]) -> list[Link]:
    """Return the link of each device to the switch of all of them; none when there is no such switch."""
    for switch in graph.of_kind("switch"):
        to = {(link.b if link.a == switch.id else link.a): link for link in graph.edges if _leads(link, switch.id)}
        if len(nodes) > 1 and to.keys() >= set(nodes):
            return [to[ident] for ident in nodes]
    return []


def _leads(link: Link, switch: str) -> bool:
    return is_direct(link) and switch in link.ends and link.a != link.b


def _unit(links: Sequence[Link]) -> float:
    """Bytes/s of one unit: the slowest single link; 0.0 where the rate of any is not known."""
    rates = [link.bandwidth / max(1, link.width) for link in links]
    return min(rates, default=0.0)


def _count(link: Link, unit: float) -> int:
    """Units of a bundle: its NVLinks, or how often the narrowest fits, though it be measured a little short."""
    if link.width:
        return link.width
    return max(1, int(link.bandwidth / unit + 0.05)) if unit > 0 else 1
