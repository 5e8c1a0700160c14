"""Makes the hosts of a cluster ready: the code that `up`, `train` and `bench` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from psctl.launch.clusters import ChosenCluster, Connect, Progress
from psctl.launch.home import PARTIAL, READY, Home
from psctl.launch.hosts import converge
from psctl.launch.hosts.site import ENDS_JOBS, KEEP_JOBS
from psctl.launch.measure import link_measurement


@contextlib.contextmanager
def inspect(
    home: Home, chosen: ChosenCluster, connect: Connect, codes: Sequence[str] = ()
) -> Iterator[converge.ReachedCluster]:
    """Connect to every host and decide what each lacks, measurements of its links among it; see `converge.inspect`.

    Raises:
        VersionMismatch: the hosts' Pythons or torches would not work together.
    """
    with converge.inspect(home, chosen, connect, codes) as reached:
        converge.check_versions(reached)
        link_measurement.plan(reached)
        yield reached


def carry_out(reached: converge.ReachedCluster, progress: Progress) -> tuple[str, ...]:
    """Do what was decided, and keep the cluster file; a host that fails is in `reached.failed`.

    Returns:
        warnings: what was odd about the links, or why they could not be measured; hosts that end jobs at logout.
    """
    chosen = reached.chosen
    converge.carry_out(reached, progress)
    warnings = link_measurement.carry_out(reached, progress)
    if not chosen.embedded and len(reached.failed) < len(chosen.spec.hosts):
        known = msgspec.structs.replace(chosen.known, state=PARTIAL if reached.failed else READY)
        reached.home.save_cluster(known)
    ending = [site.name for site in reached.sites.values() if site.logout_kills]
    return (*warnings, f"{', '.join(ending)}: {ENDS_JOBS}; {KEEP_JOBS}") if ending else warnings
