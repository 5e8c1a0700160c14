"""What copies between a host's devices were measured to carry, laid over its graph."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.topology.graph import HostGraph, Link


def with_copies(graph: HostGraph, copies: Sequence[Link]) -> HostGraph:
    """Return a host's graph in which measured rates stand in place of nominal ones.

    A measured pair alone is what a relation tells, so the relation of the pair takes the figures; where the two are
    joined by a cable of their own (NVn, or a slot), that cable does. A pair of which nothing is said gets a relation
    of type "copy". Copies of devices that the graph does not have are left out.

    Args:
        graph: what is inside the host.
        copies: measured links between its devices, each pair once.
    """
    known = {device.id for device in graph.devices}
    found = {copy.ends: copy for copy in copies if copy.ends <= known}
    links = [_measured(link, found[link.ends]) if link.ends in found else link for link in graph.links]
    told = {link.ends for link in graph.links}
    return msgspec.structs.replace(graph, links=(*links, *(copy for ends, copy in found.items() if ends not in told)))


def _measured(link: Link, copy: Link) -> Link:
    return msgspec.structs.replace(link, bandwidth=copy.bandwidth, latency=copy.latency, measured=True)
