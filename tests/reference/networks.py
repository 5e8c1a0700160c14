"""Networks whose times have closed forms."""

from __future__ import annotations

from psctl.plan.simulation.routes import Delays
from psctl.topology.graph import NETWORK, Between, ClusterGraph, HostGraph, HostNode

NO_DELAYS = Delays(0.0, 0.0, 0.0, 0.0)
"""For questions of bandwidth alone."""


def star(hosts: int, bandwidth: float, latency: float | None = None) -> ClusterGraph:
    """Return equal hosts on one switch: node0 .. each by a cable of `bandwidth` bytes/s in each direction.

    `latency` is seconds from host to host; None where it is not known.
    """
    half = None if latency is None else latency / 2
    names = [f"node{index}" for index in range(hosts)]
    return ClusterGraph(
        tuple(HostNode(name, HostGraph()) for name in names),
        tuple(Between(name, NETWORK, bandwidth, half) for name in names),
    )
