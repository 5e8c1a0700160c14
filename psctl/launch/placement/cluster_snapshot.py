"""The machines of a cluster as placement and plan need them: `Machine` records, and the document of `topo -o json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psctl import errors
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import Home
from psctl.launch.hosts.converge import ClusterState
from psctl.launch.measure import link_measurement, reach
from psctl.launch.measure.link_measurement import PAYLOAD
from psctl.launch.placement.roster import Machine
from psctl.topology.graph import ClusterGraph, HostNode
from psctl.topology.host.copy_rates import with_copies
from psctl.topology.host.document import cluster_document
from psctl.topology.host.host_graph import build_host_graph
from psctl.topology.network.addresses import rdma_of


def machines_of(chosen: ChosenCluster, state: ClusterState) -> dict[str, Machine]:
    """Return the looked-at hosts as the roster wants them, each with the address that others reach it at.

    Where links were measured (`measure.recall`), a host's rate is its port's, else the nominal one.

    Raises:
        InvalidFile, HostUnreachable: no address is fit; the cluster file's fault.
    """
    addresses = reach.addresses(chosen.spec, state)
    machines = {}
    for name, site in state.sites.items():
        at = addresses[name]
        nic = next((nic for nic in site.facts.nics if nic.name == at.interface), None)
        busy: dict[str, int] = {}
        for running in site.jobs:
            busy[running.job] = busy.get(running.job, 0) + running.workers
        nominal = (nic.speed or 0.0) * PAYLOAD if nic else 0.0
        machines[name] = Machine(
            name=name, address=at.address, interface=at.interface, cores=site.facts.cores or site.cores,
            gpus=len(site.facts.gpus), rate=state.rates.get(name, nominal), busy=busy,
            rdma=rdma_of(site.facts, at.interface), kernel=site.facts.boot, reason=at.reason,
        )  # fmt: skip
    return machines


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
        graph = with_copies(build_host_graph(facts.readings, facts), copies.get(name, ()))
        nodes.append(HostNode(name, graph, dict(specs[name].labels), tuple(specs[name].roles)))
    try:
        between = link_measurement.between(chosen, state, measured) if len(nodes) > 1 else ()
    except errors.PsctlError:
        return None
    others = specs.keys() - set(names)
    kept = tuple(cable for cable in between if not {cable.a, cable.b} & others)
    return cluster_document(ClusterGraph(tuple(nodes), kept))
