"""Makes the document of `psctl topo` for live hosts: the machines of a cluster, their devices and links."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl import errors
from psctl.launch.clusters import Progress
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import calibration, link_measurement, reach
from psctl.launch.measure.link_measurement import Measurements
from psctl.launch.measure.strategy_suggestion import suggest
from psctl.launch.measure.topology_document import topology_document
from psctl.topology.graph import Between, ClusterGraph, HostNode
from psctl.topology.host.document import ClusterDocument
from psctl.topology.host.host_graph import build_host_graph, with_copies


def known_links(reached: ReachedCluster, progress: Progress) -> tuple[Measurements | None, list[str]]:
    """Find the addresses by which hosts reach each other, and load the saved measurements between them.

    Returns:
        The measurements, None if there are none; and warnings, since a failed search does not prevent a display.
    """
    try:
        reach.find(reached, progress)
    except errors.PsctlError as error:
        return None, [f"the network by which the hosts reach each other was not found: {error.message}"]
    return link_measurement.load(reached), []


def measured_links(reached: ReachedCluster, progress: Progress) -> tuple[Measurements, list[str]]:
    """Measure the links between the hosts and inside them, and save the results with the cluster.

    Returns:
        The measurements, and warnings about them.

    Raises:
        InvalidFile, HostUnreachable: nothing could be measured.
    """
    reach.find(reached, progress)
    found = link_measurement.measure(reached, progress)
    found = msgspec.structs.replace(found, inside=link_measurement.inside(reached, progress))
    link_measurement.save(reached, found)
    return found, [f"{finding.what} ({finding.cure})" for finding in link_measurement.warnings(reached.chosen, found)]


def topology(reached: ReachedCluster, measured: Measurements | None) -> ClusterDocument:
    """Return the document of `topo -o json` for inspected hosts; a host that failed is a row with its error.

    Args:
        reached: the cluster.
        measured: measurements of the links between and inside its hosts, if there are any.

    Raises:
        InvalidFile, HostUnreachable: a host has no address that others can use.
    """
    cluster = cluster_graph(reached, list(reached.sites), measured)
    facts = {name: site.facts for name, site in reached.sites.items()}
    document = topology_document(cluster, suggest(cluster, calibration.load(reached)), facts, reached.failed)
    order = [host.name for host in reached.chosen.spec.hosts]
    document["hosts"].sort(key=lambda host: order.index(str(host["name"])))
    return document


def cluster_graph(reached: ReachedCluster, names: Sequence[str], measured: Measurements | None) -> ClusterGraph:
    """Return the graph of the inspected hosts `names`, in that order; rates that are not measured are nominal.

    Raises:
        InvalidFile, HostUnreachable: a host has no address that others can use.
    """
    specs = {host.name: host for host in reached.chosen.spec.hosts}
    copies = measured.inside if measured is not None else {}
    nodes = []
    for name in names:
        facts = reached.sites[name].facts
        graph = with_copies(build_host_graph(facts.readings, facts), copies.get(name, ()))
        nodes.append(HostNode(name, graph, dict(specs[name].labels), tuple(specs[name].roles)))
    others = specs.keys() - set(names)
    between = link_measurement.between(reached, measured) if len(nodes) > 1 else ()
    edges = tuple(_known_via(nodes, edge) for edge in between if not {edge.a, edge.b} & others)
    return ClusterGraph(tuple(nodes), edges)


def _known_via(nodes: Sequence[HostNode], edge: Between) -> Between:
    """Return a link without its NIC where that is none of the host's devices: loopback, a bridge."""
    host = next((node for node in nodes if node.name == edge.a), None)
    if not edge.via or host is None or host.graph.device(edge.via) is not None:
        return edge
    return msgspec.structs.replace(edge, via="")
