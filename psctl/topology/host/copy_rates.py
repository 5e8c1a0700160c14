"""Replaces nominal rates in a host's graph by measured rates of copies between its devices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.topology.graph import HostGraph, Link


def with_copies(graph: HostGraph, copies: Sequence[Link]) -> HostGraph:
    """Return a host's graph with measured rates in place of nominal ones.

    A pair is measured while no other pair copies, so its relation gets the figures; where an edge joins the two devices
    (NVn, or a slot), the edge gets them. A pair without a link gets a relation of type "copy". Copies between devices
    that the graph lacks are ignored.

    Args:
        graph: the devices and links inside the host.
        copies: measured links between its devices, each pair once.
    """
    known = {device.id for device in graph.devices}
    found = {copy.ends: copy for copy in copies if copy.ends <= known}
    links = [_measured(link, found[link.ends]) if link.ends in found else link for link in graph.links]
    linked = {link.ends for link in graph.links}
    return msgspec.structs.replace(graph, links=(*links, *(copy for ends, copy in found.items() if ends not in linked)))


def _measured(link: Link, copy: Link) -> Link:
    return msgspec.structs.replace(link, bandwidth=copy.bandwidth, latency=copy.latency, measured=True)
