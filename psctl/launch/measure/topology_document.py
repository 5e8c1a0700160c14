"""The document of `psctl topo`, of live hosts or of saved output: the machines, their links, and a suggested strategy.

Both take the same path: text is recognised by its content, the readings of a host become a graph, and the graphs become
one document. Saved output needs nothing that reaches hosts, and this module imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from psctl import errors
from psctl.launch.measure.saved_output import read_saved
from psctl.launch.measure.strategy_suggestion import suggest
from psctl.topology.facts import HostFacts
from psctl.topology.graph import ClusterGraph, Suggestion
from psctl.topology.host.document import ClusterDocument, cluster_document
from psctl.topology.host.worker_placement import place_workers
from psctl.types import JsonObject


def saved_topology(reference: str) -> ClusterDocument:
    """Return the document of `topo -o json` for saved output; no connection is made.

    Args:
        reference: a file, a folder, or "-" for standard input.

    Raises:
        InvalidFile: it cannot be read, or contains no known output.
    """
    saved = read_saved(reference)
    document = topology_document(saved.cluster, suggest(saved.cluster), {}, {})
    for host in document["hosts"]:
        host.update(
            {key: value for key, value in saved.about.get(str(host["name"]), {}).items() if host.get(key) is None}
        )
    document["hosts"] += saved.failed
    return document


def topology_document(
    cluster: ClusterGraph, suggestion: Suggestion | None, facts: Mapping[str, HostFacts],
    failed: Mapping[str, errors.PsctlError],
) -> ClusterDocument:  # fmt: skip
    """Return the document of `topo -o json`.

    Args:
        cluster: the machines and the links between them.
        suggestion: the strategy that suits them, if any.
        facts: what else is known of each host.
        failed: the errors of hosts that are not in the cluster's graph.
    """
    rows: list[JsonObject] = [{"name": name, **error.document()} for name, error in failed.items()]
    document = cluster_document(cluster, suggestion, facts, rows)
    for host in document["hosts"]:
        node = cluster.host(str(host["name"]))
        if node is not None and "worker" in node.roles:
            host["workers"] = [msgspec.to_builtins(seat) for seat in place_workers(node.graph)]
    return document
