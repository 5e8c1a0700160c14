"""What is amiss in a machine by its outputs, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from psctl.topology.facts import Finding
from psctl.topology.graph import HostGraph
from psctl.topology.inventory import Said


def findings(all_: Said, graph: HostGraph) -> Iterator[Finding]:
    """Yield what is amiss.

    Args:
        all_: the readings of the host.
        graph: what was built of them.
    """
    yield from ()
