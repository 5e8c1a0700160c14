"""Rings through all GPUs of a set that share no link: the direct links cut into Hamiltonian cycles with whole widths.

A ring of width w takes w units of each link that it runs over, in both directions, since links are full duplex. The sum
of the widths W decides the time of an all-reduce: 2(p-1)/p N / (2 W b), FORMULAS 2.2 (Wang and others 2018). A ring has
two ends at every device and crosses every cut at least twice, so 2W is at most the units at any device and across any
cut. All cycles are listed, then an exact search fills the links with them: first the widest sum, then the fewest rings.
Complete graphs with equal links have a closed form (Walecki's zigzags); on a switch the order does not matter.
"""

from __future__ import annotations

import msgspec

from psctl.topology.algorithms.cycles import Filling, fill, hamiltonian, peel, zigzags
from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.algorithms.flows import flow

LISTED = 60_000
"""Steps that listing the cycles may take."""

TRIED = 1_000_000
"""Cycles that the exact search may examine."""


class DeviceRing(msgspec.Struct, frozen=True):
    """The devices of a ring in order, from the first device of the set; `width` in link units."""

    order: tuple[str, ...]
    width: int


class RingPacking(msgspec.Struct, frozen=True):
    """Rings that share no link unit, the widest first.

    `exact`: no other set of rings is wider in sum. `bound` is the most that the links at a device or across a cut
    allow. `unit` is what a link unit carries, bytes/s in one direction. On a switch (`switched`) and for two devices, a
    ring uses both directions of its links already when it runs one way; else it may run both ways at once.
    """

    rings: tuple[DeviceRing, ...]
    exact: bool
    bound: int
    unit: float
    switched: bool = False

    @property
    def width(self) -> int:
        """Link units of all rings together."""
        return sum(ring.width for ring in self.rings)

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the bytes for each ring, in proportion to its width."""
        return tuple(ring.width / self.width for ring in self.rings)


def rings(wires: DirectLinks, listed: int = LISTED, tried: int = TRIED) -> RingPacking:
    """Cut the links of a set of devices into rings.

    Args:
        wires: devices and links.
        listed: steps that listing the cycles may take; beyond it the best result so far is returned, `exact` only when
            it equals the bound.
        tried: cycles that the exact search may examine, likewise.

    Returns:
        The rings; none when no ring visits all devices.
    """
    count = len(wires.nodes)
    if wires.ports:
        width = min(wires.ports)
        return RingPacking((DeviceRing(wires.nodes, width),), True, width, wires.unit, switched=True)
    if count < 2 or not wires.connected:
        return RingPacking((), True, 0, wires.unit)
    if count == 2:
        width = wires.links[0][2]
        return RingPacking((DeviceRing(wires.nodes, width),), True, width, wires.unit)
    bound = _bound(wires)
    found, exact = _complete(wires) or _search(wires, bound, listed, tried)
    rows = sorted(((-width, cycle) for cycle, width in found.items()))
    named = tuple(DeviceRing(tuple(wires.nodes[node] for node in cycle), -width) for width, cycle in rows)
    return RingPacking(named, exact or sum(found.values()) == bound, bound, wires.unit)


def _complete(wires: DirectLinks) -> tuple[Filling, bool] | None:
    """The closed form for complete graphs with equal links; None for others. It always meets the bound."""
    count, sizes = len(wires.nodes), {units for _, _, units in wires.links}
    if count < 5 or len(sizes) != 1 or len(wires.links) != count * (count - 1) // 2:
        return None
    return zigzags(count, sizes.pop()), True


def _search(wires: DirectLinks, bound: int, listed: int, tried: int) -> tuple[Filling, bool]:
    """The widest filling, the one of fewest rings among those found; and whether no other is wider."""
    table = wires.units()
    cycles, all_ = hamiltonian(table, listed)
    found, exact = fill(wires.links, cycles, bound, tried)
    if exact and all_:
        return found, True
    other = peel(table, bound, listed // 5)
    return min(found, other, key=lambda filling: (-sum(filling.values()), len(filling))), False


def _bound(wires: DirectLinks) -> int:
    """Half of the least cut: some least cut parts device 0 from another."""
    table = wires.units()
    return min(flow(table, 0, node)[0] for node in range(1, len(table))) // 2
