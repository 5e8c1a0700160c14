"""What `topo` shows: the machines of a cluster, their devices, what joins them, and which strategy suits them."""

from __future__ import annotations

from typing import Any

import msgspec

from psctl import errors
from psctl.launch.clusters import Chosen
from psctl.launch.converge import Converging
from psctl.launch.roster import job_order, seat
from psctl.launch.submit import machines_of
from psctl.plan.choose import choose
from psctl.spec.job import JobSpec
from psctl.topology.facts import host_document
from psctl.words import HostName

LATENCY = 1e-4
"""Seconds between two hosts of one network, until it is measured."""


def topology(chosen: Chosen, state: Converging) -> dict[str, Any]:
    """Return the document of `topo -o json`.

    Raises:
        InvalidFile, HostUnreachable: a host has no address that others could use.
    """
    machines = machines_of(chosen, state.sites)
    labels = {host.name: dict(host.labels) for host in chosen.spec.hosts}
    hosts = [
        {**host_document(HostName(name), site.facts), "labels": labels[name]} for name, site in state.sites.items()
    ]
    between = [
        {"a": name, "b": "network", "bandwidth": machine.rate or None, "latency": LATENCY, "measured": False}
        for name, machine in machines.items()
    ]
    free = {name: msgspec.structs.replace(machine, busy={}) for name, machine in machines.items()}
    try:
        order = job_order("topo", chosen.spec, JOB, seat(chosen.spec, free, JOB))
    except errors.InvalidFile:  # no host may hold a worker: there is nothing to synchronise
        strategy: dict[str, Any] | None = None
    else:
        plan = choose(order, None, None, decided=False)
        ranks = [[f"{host.name}/{local}" for host in order.hosts for local in range(host.workers)]]
        strategy = {"name": plan.chosen, "reason": plan.reason, "groups": ranks if plan.chosen != "ps" else []}
    return {"hosts": hosts, "between": between if len(hosts) > 1 else [], "strategy": strategy}


JOB = JobSpec(name="topo", script="train.py")
"""A job that takes what it can get."""
