"""Converts inspected hosts to `Machine` records, and to the document of `topo -o json`, for placement and plan."""

from __future__ import annotations

from collections.abc import Sequence

from psctl import errors
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import link_measurement, reach
from psctl.launch.measure.link_measurement import PAYLOAD
from psctl.launch.measure.survey import cluster_graph
from psctl.launch.placement.roster import Machine
from psctl.topology.host.document import cluster_document
from psctl.topology.network.addresses import rdma_of
from psctl.types import JsonObject


def machines_of(reached: ReachedCluster) -> dict[str, Machine]:
    """Return the inspected hosts as the roster takes them, each with the address that others reach it at.

    Where links were measured (`link_measurement.load`), a host's rate is its port's, else the nominal one.

    Raises:
        InvalidFile, HostUnreachable: a host has no usable address; the cluster file's fault.
    """
    addresses = reach.addresses(reached)
    machines = {}
    for name, site in reached.sites.items():
        at = addresses[name]
        nic = next((nic for nic in site.facts.nics if nic.name == at.interface), None)
        busy: dict[str, int] = {}
        for running in site.jobs:
            busy[running.job] = busy.get(running.job, 0) + running.workers
        nominal = (nic.speed or 0.0) * PAYLOAD if nic else 0.0
        machines[name] = Machine(
            name=name, address=at.address, interface=at.interface, cores=site.facts.cores or site.cores,
            gpus=len(site.facts.gpus), rate=reached.rates.get(name, nominal), busy=busy,
            rdma=rdma_of(site.facts, at.interface), kernel=site.facts.boot, reason=at.reason,
        )  # fmt: skip
    return machines


def machines_document(reached: ReachedCluster, names: Sequence[str]) -> JsonObject | None:
    """Return the document of some of the inspected hosts, in the order of `names`.

    Args:
        reached: the cluster, after `reach.find` or `reach.settled`; rates that were not measured are nominal.
        names: the hosts.

    Returns:
        The document; None if no host has an address that others can use: the plan then has nominal rates only.
    """
    measured = link_measurement.load(reached)
    try:
        return dict(cluster_document(cluster_graph(reached, names, measured)))
    except errors.PsctlError:
        return None
