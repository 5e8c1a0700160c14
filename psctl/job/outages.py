"""Silent hosts: which of them are lost, and when the head's own link is to blame.

The head hears a packet of each host every second, because idle connections carry keepalives. A host that sends nothing
for SUSPECT seconds is lost. But where most hosts fall silent at about the same time, the more likely cause is the
head's own link: their loss would end the job, or restart it on the head alone, for an outage that ends by itself. So
the head waits then. The connections to the coordinator are made to outlast such an outage (TOLERANCE), so that no
message is lost and nothing is started again. A host that cannot reach the head ends its processes after
AGENT_PATIENCE, because the head may have replaced them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SUSPECT = 5.0
"""Seconds of silence after which a host is lost, unless most hosts are silent."""

NEARLY = 3.0
"""Seconds of silence from which a host counts as silent where others do: an idle connection has a packet a second."""

AGENT_PATIENCE = 15.0
"""Seconds for which an agent that cannot reach the coordinator keeps its processes."""

TOLERANCE = 30.0
"""Seconds of silence after which a connection to the coordinator ends; longer than AGENT_PATIENCE."""


def is_outage(silent: Collection[int], hosts: Collection[int]) -> bool:
    """Return whether so many hosts are silent that the head's own link must be down.

    Args:
        silent: hosts that have sent nothing for NEARLY seconds.
        hosts: all hosts of the job but the head and those that are lost.
    """
    return len(silent) > 1 and 2 * len(silent) > len(hosts)


def nearly_silent(seconds: Mapping[int, float]) -> set[int]:
    """Return the hosts that have sent nothing for NEARLY seconds; `seconds`: of silence, by host."""
    return {host for host, silence in seconds.items() if silence >= NEARLY}
