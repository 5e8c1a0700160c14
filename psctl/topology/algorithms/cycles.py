"""Hamiltonian cycles of small graphs: lists them, packs them into links, and builds those of complete graphs.

Devices are numbers. A cycle starts at 0 and continues with the lower of 0's two neighbours in it, so that each cycle is
listed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Cycle = tuple[int, ...]
Filling = dict[Cycle, int]
"""Cycles and their widths."""


def hamiltonian(table: Sequence[Sequence[int]], steps: int) -> tuple[list[Cycle], bool]:
    """Return the cycles through all devices, in order, and whether the list is complete.

    A partial path is discarded once an unvisited device has fewer than two neighbours left.

    Args:
        table: link units between each two devices.
        steps: maximum number of partial paths to examine.
    """
    count = len(table)
    near = [sum(1 << other for other, units in enumerate(row) if units) for row in table]
    found: list[Cycle] = []
    everything = (1 << count) - 1
    stack: list[tuple[Cycle, int]] = [((0,), 1)]
    while stack and steps > 0:
        steps -= 1
        path, seen = stack.pop()
        last = path[-1]
        if seen == everything:
            if near[last] & 1 and path[1] < last:
                found.append(path)
            continue
        free = everything & ~seen
        open_ = free | 1 | 1 << last
        if all((near[node] & open_).bit_count() >= 2 for node in range(1, count) if free >> node & 1):
            reached = near[last] & free
            stack += [((*path, node), seen | 1 << node) for node in range(count - 1, 0, -1) if reached >> node & 1]
    return found, not stack


def fill(
    links: Sequence[tuple[int, int, int]], cycles: Sequence[Cycle], bound: int, tries: int
) -> tuple[Filling, bool]:
    """Return cycles with widths whose sum is the largest that fits the links, and whether that is proven.

    Of packings with the same sum, one with the fewest cycles is preferred.

    Args:
        links: (a, b, units) of each link.
        cycles: the cycles to choose from.
        bound: an upper bound of the sum.
        tries: maximum number of cycles to examine.
    """
    search = _Search(links, cycles, tries)
    best: Filling = {}
    for target in range(bound, 0, -1):
        found = search.find(target, len(cycles))
        if found is not None:
            best = found
            break
    proven = search.tries > 0
    search.tries = max(search.tries, tries // 4)
    for most in range(1, len(best)):
        found = search.find(sum(best.values()), most)
        if found is not None:
            return found, proven
    return best, proven


class _Search:
    """Depth-first search for cycles whose widths add up to a sum.

    Each step decides one link: of the links at the device with the fewest spare units, the one that the fewest cycles
    use. Either a cycle over it is taken, widest first, or its remaining units stay unused.
    """

    def __init__(self, links: Sequence[tuple[int, int, int]], cycles: Sequence[Cycle], tries: int) -> None:
        self.tries = tries
        self._links = links
        index = {pair: at for at, (a, b, _) in enumerate(links) for pair in ((a, b), (b, a))}
        self._cycles = cycles
        self._over = [[index[pair] for pair in itertools.pairwise((*cycle, 0))] for cycle in cycles]
        self._masks = [sum(1 << at for at in over) for over in self._over]

    def find(self, target: int, most: int) -> Filling | None:
        """Return at most `most` cycles with widths that add up to the target, None if none are found."""
        left = [units for _, _, units in self._links]
        picked = self._go(left, list(range(len(self._cycles))), target, most)
        return None if picked is None else {self._cycles[at]: width for at, width in picked}

    def _go(self, left: list[int], live: list[int], target: int, most: int) -> list[tuple[int, int]] | None:
        if target == 0:
            return []
        spare = self._spare(left, target)
        if most == 0 or self.tries <= 0 or min(spare) < 0:
            return None
        at = self._decide(left, live, spare)
        if at is None:
            return None
        over = [cycle for cycle in live if self._masks[cycle] >> at & 1]
        rest = [cycle for cycle in live if not self._masks[cycle] >> at & 1]
        while over and self.tries > 0:
            cycle = over.pop(0)
            for width in range(min(target, *(left[link] for link in self._over[cycle])), 0, -1):
                less = list(left)
                for link in self._over[cycle]:
                    less[link] -= width
                found = self._go(less, self._fitting(less, over + rest), target - width, most - 1)
                if found is not None:
                    return [(cycle, width), *found]
        none = list(left)
        none[at] = 0
        return self._go(none, rest, target, most)

    def _spare(self, left: list[int], target: int) -> list[int]:
        """Return the units of each device beyond the two that each ring needs there."""
        spare: dict[int, int] = {}
        for (a, b, _), units in zip(self._links, left, strict=True):
            spare[a] = spare.get(a, -2 * target) + units
            spare[b] = spare.get(b, -2 * target) + units
        return [spare[node] for node in sorted(spare)]

    def _decide(self, left: list[int], live: list[int], spare: list[int]) -> int | None:
        """Return the index of the link to decide next, None if no remaining cycle uses a remaining link."""
        self.tries -= 4 * len(live)
        uses = [0] * len(left)
        for cycle in live:
            for over in self._over[cycle]:
                uses[over] += 1
        order = [
            (min(spare[a], spare[b]), uses[at], at) for at, (a, b, _) in enumerate(self._links) if left[at] and uses[at]
        ]
        return min(order)[2] if order else None

    def _fitting(self, left: list[int], live: list[int]) -> list[int]:
        self.tries -= len(live)
        gone = sum(1 << at for at, units in enumerate(left) if not units)
        return [cycle for cycle in live if not self._masks[cycle] & gone]


def zigzags(count: int, units: int) -> Filling:
    """Return a maximum packing of cycles in a complete graph of `count` devices with `units` between each two.

    Walecki's construction: one device is fixed; the others form a circle over which a zigzag is rotated step by step.
    If the circle is even, half of the rotations use each link once; if it is odd, all rotations use each link twice.
    With an even number of devices and an odd number of units, the last device is inserted into the others' cycles.
    """
    found: Filling = {}
    pairs, single = divmod(units, 2) if count % 2 == 0 else (0, units)
    for turn in range((count - 1) if pairs else 0):
        _add(found, _zigzag(count - 1, turn), pairs)
    if single and count % 2:
        for turn in range((count - 1) // 2):
            _add(found, _zigzag(count - 1, turn), single)
    elif single:
        for turn in range((count - 2) // 2):
            # The links that halve the circle are a matching, one in each zigzag: the last device is inserted there.
            cycle = _zigzag(count - 2, turn)
            _add(found, [*cycle[: count // 2], count - 1, *cycle[count // 2 :]], single)
    return found


def _zigzag(ring: int, turn: int) -> list[int]:
    """Return 0, then the devices 1 .. ring in a zigzag that starts at `turn`."""
    steps = [0, *(side * far for far in range(1, ring) for side in (1, -1))][:ring]
    return [0, *(1 + (turn + step) % ring for step in steps)]


def _add(found: Filling, cycle: Sequence[int], width: int) -> None:
    ordered = tuple(cycle) if cycle[1] < cycle[-1] else (cycle[0], *reversed(cycle[1:]))
    found[ordered] = found.get(ordered, 0) + width


def peel(table: Sequence[Sequence[int]], bound: int, steps: int) -> Filling:
    """Return a greedy packing: one cycle after another over the links with the most units left, until none is found.

    For graphs with too many cycles to list: the packing is not proven optimal, but cycles are found quickly.

    Args:
        table: link units between each two devices.
        bound: stop when the widths add up to this.
        steps: maximum number of partial paths to examine for all cycles together.
    """
    left = [list(row) for row in table]
    found: Filling = {}
    for _ in range(bound):
        cycle, steps = _one(left, steps)
        if cycle is None:
            break
        _add(found, cycle, 1)
        for a, b in itertools.pairwise((*cycle, 0)):
            left[a][b] -= 1
            left[b][a] -= 1
    return found


def _one(left: Sequence[Sequence[int]], steps: int) -> tuple[Cycle | None, int]:
    """Return a cycle by depth-first search over the devices with the fewest free links, and the steps left."""
    count = len(left)
    stack: list[Cycle] = [(0,)]
    while stack and steps > 0:
        steps -= 1
        path = stack.pop()
        last, free = path[-1], [node for node in range(count) if node not in path]
        if not free and left[last][0]:
            return path, steps
        open_ = [*free, 0, last]
        degrees = {node: sum(1 for other in open_ if left[node][other]) for node in free}
        if all(degree >= 2 for degree in degrees.values()):
            onward = sorted(
                (node for node in free if left[last][node]), key=lambda node: (-degrees[node], left[last][node])
            )
            stack += [(*path, node) for node in onward]
    return None, steps
