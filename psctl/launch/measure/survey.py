"""`psctl topo`: the machines of a cluster, their devices and links, and the strategy that suits them.

Live hosts and saved output are handled alike: text is recognised by its content, readings become one graph a host,
graphs become one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from psctl import errors
from psctl.launch.clusters import ChosenCluster, Progress
from psctl.launch.home import Home
from psctl.launch.hosts.converge import ClusterState
from psctl.launch.measure import calibration, link_measurement, reach
from psctl.launch.measure.link_measurement import Measurements
from psctl.launch.measure.saved_output import read_saved
from psctl.launch.measure.strategy_suggestion import suggest
from psctl.remote.fleet import Fleet
from psctl.topology.facts import HostFacts
from psctl.topology.graph import ClusterGraph, HostNode, Suggestion
from psctl.topology.host.copy_rates import with_copies
from psctl.topology.host.document import cluster_document
from psctl.topology.host.host_graph import build_host_graph
from psctl.topology.host.worker_placement import place_workers


def known_links(
    home: Home, chosen: ChosenCluster, fleet: Fleet, state: ClusterState, progress: Progress
) -> tuple[Measurements | None, list[str]]:
    """Find the addresses by which hosts reach each other, and recall what was measured between them.

    Args:
        home: where both are kept.
        chosen, fleet, state: the cluster, connections, and what was found on the hosts.
        progress: shows progress.

    Returns:
        what was measured, None where nothing was; and what went wrong, in words: that is no reason to show nothing.
    """
    try:
        reach.find(home, chosen, fleet, state, progress)
    except errors.PsctlError as error:
        return None, [f"how hosts reach each other was not found out: {error.message}"]
    return link_measurement.recall(home, chosen, state), []


def measured_links(
    home: Home, chosen: ChosenCluster, fleet: Fleet, state: ClusterState, progress: Progress
) -> tuple[Measurements, list[str]]:
    """Measure between the hosts and inside them, keep it with the cluster, and return it with what is odd about it.

    Raises:
        HostUnreachable and others: nothing could be measured.
    """
    reach.find(home, chosen, fleet, state, progress)
    found = link_measurement.measure(chosen, fleet, state, progress)
    found = msgspec.structs.replace(found, inside=link_measurement.inside(chosen, fleet, state, progress))
    link_measurement.keep(home, chosen, found)
    return found, [f"{finding.what} ({finding.cure})" for finding in link_measurement.warnings(chosen, found)]


def topology(home: Home, chosen: ChosenCluster, state: ClusterState, measured: Measurements | None) -> dict[str, Any]:
    """Return the document of `topo -o json` for hosts that were looked at; those that failed are rows with the error.

    Args:
        home: where is kept what `bench` found that messages cost.
        chosen, state: the cluster, and what was found on its hosts.
        measured: what is known of the links between and inside them.

    Raises:
        InvalidFile, HostUnreachable: a host has no address that others could use.
    """
    specs = {host.name: host for host in chosen.spec.hosts}
    copies = measured.inside if measured is not None else {}
    nodes = tuple(
        HostNode(
            name,
            with_copies(build_host_graph(site.facts.readings, site.facts), copies.get(name, ())),
            dict(specs[name].labels),
            tuple(specs[name].roles),
        )
        for name, site in state.sites.items()
    )
    cluster = ClusterGraph(nodes, link_measurement.between(chosen, state, measured) if len(nodes) > 1 else ())
    facts = {name: site.facts for name, site in state.sites.items()}
    document = _document(cluster, suggest(cluster, calibration.recall(home, chosen, state)), facts, state.failed)
    order = list(specs)
    document["hosts"].sort(key=lambda host: order.index(host["name"]))
    return document


def saved_topology(reference: str) -> dict[str, Any]:
    """Return the document of `topo -o json` for saved output; no host and no network is touched.

    Args:
        reference: a file, a folder, or "-" for standard input.

    Raises:
        InvalidFile: nothing in it is understood; whoever saved it.
    """
    saved = read_saved(reference)
    document = _document(saved.cluster, suggest(saved.cluster), {}, {})
    for host in document["hosts"]:
        host.update({key: value for key, value in saved.about.get(host["name"], {}).items() if host.get(key) is None})
    document["hosts"] += saved.failed
    return document


def _document(
    cluster: ClusterGraph, suggestion: Suggestion | None, facts: Mapping[str, HostFacts],
    failed: Mapping[str, errors.PsctlError],
) -> dict[str, Any]:  # fmt: skip
    rows = [{"name": name, **error.document()} for name, error in failed.items()]
    document = cluster_document(cluster, suggestion, facts, rows)
    for host in document["hosts"]:
        node = cluster.host(host["name"])
        if node is not None and "worker" in node.roles:
            host["workers"] = [msgspec.to_builtins(seat) for seat in place_workers(node.graph)]
    return document
