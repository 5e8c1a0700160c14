"""Makes the hosts of a cluster ready: the code that `up`, `train` and `bench` share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.launch.clusters import ChosenCluster, Progress
from psctl.launch.home import PARTIAL, READY, Home
from psctl.launch.hosts import converge
from psctl.launch.measure import link_measurement
from psctl.remote.fleet import Fleet


def decide(home: Home, chosen: ChosenCluster, fleet: Fleet, codes: Sequence[str] = ()) -> converge.ClusterState:
    """Look at every host that was reached and decide what it lacks, measurements of its links among it.

    Args:
        home: what was measured before is read from it.
        chosen, fleet: the cluster, and connections to its hosts; those that failed are carried over.
        codes: further archives to look for: a job's folder.

    Raises:
        VersionMismatch: the hosts' Pythons or torches would not work together.
    """
    state = converge.look_at_all(chosen, fleet, codes)
    converge.check_versions(state)
    link_measurement.plan(home, chosen, state)
    return state


def carry_out(
    home: Home, chosen: ChosenCluster, fleet: Fleet, state: converge.ClusterState, progress: Progress
) -> tuple[str, ...]:
    """Do what was decided, and keep the cluster file; a host that fails is in `state.failed`.

    Returns:
        warnings: what was odd about the links, or why they could not be measured.
    """
    converge.carry_out(state, fleet, progress)
    warnings = link_measurement.carry_out(home, chosen, fleet, state, progress)
    if not chosen.embedded and len(state.failed) < len(chosen.spec.hosts):
        known = msgspec.structs.replace(chosen.known, state=PARTIAL if state.failed else READY)
        home.save_cluster(known)
    return warnings
