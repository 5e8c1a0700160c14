"""What is known of the machines of a job, as its plan wants it: the document of `topo -o json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psctl import errors
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import Home
from psctl.launch.hosts.converge import ClusterState
from psctl.launch.measure import link_measurement
from psctl.topology.graph import ClusterGraph, HostNode
from psctl.topology.host.copy_rates import with_copies
from psctl.topology.host.document import cluster_document
from psctl.topology.host.host_graph import build


def machines_document(
    home: Home, chosen: ChosenCluster, state: ClusterState, names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the document of some hosts that were looked at, in the order of `names`.

    Args:
        home: where measurements are kept; what was not measured is nominal.
        chosen, state: the cluster, and what was found on its hosts (`reach.find` or `reach.settled` was called).
        names: the hosts.

    Returns:
        the document; None where no host has an address that others could use: the plan then has nominal rates alone.
    """
    measured = link_measurement.recall(home, chosen, state)
    specs = {host.name: host for host in chosen.spec.hosts}
    copies = measured.inside if measured is not None else {}
    nodes = []
    for name in names:
        facts = state.sites[name].facts
        graph = with_copies(build(facts.readings, facts), copies.get(name, ()))
        nodes.append(HostNode(name, graph, dict(specs[name].labels), tuple(specs[name].roles)))
    try:
        between = link_measurement.between(chosen, state, measured) if len(nodes) > 1 else ()
    except errors.PsctlError:
        return None
    others = specs.keys() - set(names)
    kept = tuple(cable for cable in between if not {cable.a, cable.b} & others)
    return cluster_document(ClusterGraph(tuple(nodes), kept))
