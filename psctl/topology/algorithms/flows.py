"""Greatest flows and least cuts in small networks with whole capacities: shortest augmenting paths (Edmonds and Karp).

By the theorem of Ford and Fulkerson the greatest flow from s to t is as large as the least cut between them.
"""

from __future__ import annotations

Table = list[list[int]]


def flow(
    capacity: Table, source: int, sink: int, enough: int | None = None, keep: bool = False
) -> tuple[int, set[int]]:
    """Return the greatest flow, and the side of a least cut that holds the source (the smallest such side).

    Args:
        capacity: from each node to each other, whole numbers.
        source: where it comes from.
        sink: where it goes to.
        enough: stop as soon as the flow is this large; the side is then that of no cut.
        keep: leave in `capacity` what is left of it.
    """
    left = capacity if keep else [row.copy() for row in capacity]
    near = [
        [other for other in range(len(left)) if left[node][other] or left[other][node]] for node in range(len(left))
    ]
    total = 0
    while enough is None or total < enough:
        came = _search(left, near, source, sink)
        if came[sink] < 0:
            return total, {node for node, before in enumerate(came) if before >= 0}
        total += _push(left, came, source, sink)
    return total, {source}


def _search(left: Table, near: Table, source: int, sink: int) -> list[int]:
    """Breadth first over what is left; the node before each that was reached, else -1."""
    came = [-1] * len(left)
    came[source] = source
    queue = [source]
    for node in queue:
        row = left[node]
        for other in near[node]:
            if row[other] > 0 and came[other] < 0:
                came[other] = node
                if other == sink:
                    return came
                queue.append(other)
    return came


def _push(left: Table, came: list[int], source: int, sink: int) -> int:
    path, node = [], sink
    while node != source:
        path.append((came[node], node))
        node = came[node]
    amount = min(left[a][b] for a, b in path)
    for a, b in path:
        left[a][b] -= amount
        left[b][a] += amount
    return amount
