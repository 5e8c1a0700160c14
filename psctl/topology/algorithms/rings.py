"""Packs rings: divides the direct links of a set of GPUs into Hamiltonian cycles with whole widths.

A ring of width w uses w units of each of its links, in both directions, because links are full duplex. The sum W of the
widths determines the time of an all-reduce: 2(p-1)/p N / (2 W b) (Wang and others 2018). A ring uses two links at every
device and crosses every cut at least twice, so 2W is at most the units at any device and across any cut. All cycles are
listed; an exact search then finds the largest sum of widths and, for this sum, the fewest rings. Complete graphs with
equal links have a closed form (Walecki's zigzags); on a switch, the order of the devices does not matter.
"""

from __future__ import annotations

import msgspec

from psctl.topology.algorithms.cycles import Filling, fill, hamiltonian, peel, zigzags
from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.algorithms.flows import flow

LISTED = 60_000
"""Maximum number of steps for listing the cycles."""

TRIED = 1_000_000
"""Maximum number of cycles that the exact search examines."""


class DeviceRing(msgspec.Struct, frozen=True):
    """The devices of a ring in order, from the first device of the set; `width` in link units."""

    order: tuple[str, ...]
    width: int


class RingPacking(msgspec.Struct, frozen=True):
    """Rings that share no link unit, the widest first.

    `exact`: no other packing has a larger sum of widths. `bound` is the upper bound of that sum by the links at each
    device and across each cut. `unit` is the rate of a link unit, bytes/s in one direction. On a switch (`switched`)
    and for two devices, a ring in one direction uses both directions of its links; other rings may run in both
    directions at once.
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
    """Return the rings into which the links of a set of devices are divided; none if no ring visits all devices.

    Args:
        wires: devices and links.
        listed: maximum number of steps for listing the cycles; beyond it the best packing so far is returned, `exact`
            only if it reaches the bound.
        tried: maximum number of cycles that the exact search examines, with the same effect.
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
    """Return the closed form for a complete graph with equal links, which reaches the bound; None for others."""
    count, sizes = len(wires.nodes), {units for _, _, units in wires.links}
    if count < 5 or len(sizes) != 1 or len(wires.links) != count * (count - 1) // 2:
        return None
    return zigzags(count, sizes.pop()), True


def _search(wires: DirectLinks, bound: int, listed: int, tried: int) -> tuple[Filling, bool]:
    """Return the packing with the largest sum, then the fewest rings, of those found; and whether it is optimal."""
    table = wires.units()
    cycles, all_ = hamiltonian(table, listed)
    found, exact = fill(wires.links, cycles, bound, tried)
    if exact and all_:
        return found, True
    other = peel(table, bound, listed // 5)
    return min(found, other, key=lambda filling: (-sum(filling.values()), len(filling))), False


def _bound(wires: DirectLinks) -> int:
    """Return half of the minimum cut: a minimum cut separates device 0 from some other device."""
    table = wires.units()
    return min(flow(table, 0, node)[0] for node in range(1, len(table))) // 2
