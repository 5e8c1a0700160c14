"""Derives the PCIe tree from a matrix: which devices share a switch, a slot, a processor.

The link types of a matrix are distances in a tree: PIX (one bridge) is nearer than PXB (several bridges below one port
of the processor), then PHB (the processor), NODE (one NUMA node), SYS or SOC (across processors). In a tree, of the
three distances between any three devices the two longest are equal (an ultrametric); so the groups of devices that are
within one distance of each other nest, and each group within PIX or PXB is a switch with one uplink that its devices
share.

Link types that break this rule contradict each other. Groups grow from the nearest pairs, and two of them are merged
only when no distance between any of their devices contradicts it (complete linkage); the others are reported. NVn,
unknown types and missing cells carry no information on PCIe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology.findings import Finding, listed

LEVELS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}
"""Distance of each link type."""

PIX, PXB, NODE, SYS = 1, 2, 4, 5

Pair = frozenset[str]
Levels = Mapping[Pair, int]


class PcieBranch(msgspec.Struct, frozen=True):
    """A device, or a switch with the branches below it.

    `id` is "" for a switch until it is named. `rate` is that of the uplink, bytes/s in one direction, None if unknown;
    `derived`: the uplink is derived from the matrix alone.
    """

    id: str = ""
    below: tuple[PcieBranch, ...] = ()
    rate: float | None = None
    derived: bool = True
    bus: str = ""
    name: str = ""

    @property
    def leaves(self) -> tuple[str, ...]:
        """The devices at the ends."""
        return (self.id,) if not self.below else tuple(leaf for branch in self.below for leaf in branch.leaves)


class DeviceGroups:
    """Groups of devices, merged only while no known distance contradicts it.

    Args:
        start: the initial groups.
        levels: the distance of each pair with a known one.
        apart: pairs of devices that must not be in one group.
    """

    def __init__(self, start: Sequence[Sequence[str]], levels: Levels, apart: frozenset[Pair] = frozenset()) -> None:
        self._members = {index: list(group) for index, group in enumerate(start)}
        self._home = {ident: index for index, group in self._members.items() for ident in group}
        self._worst: dict[int, dict[int, int]] = {index: {} for index in self._members}
        for pair, level in [*levels.items(), *((pair, SYS + 1) for pair in apart)]:
            self._note(pair, level)

    def join(self, pairs: Sequence[tuple[str, str]], limit: int) -> list[tuple[str, str]]:
        """Merge the groups of each pair unless that puts devices further apart than `limit`; return failed pairs."""
        failed = []
        for a, b in pairs:
            one, other = self._home[a], self._home[b]
            if one == other:
                continue
            if self._worst[one].get(other, 0) > limit:
                failed.append((a, b))
            else:
                self._merge(one, other)
        return failed

    def listed(self) -> list[list[str]]:
        """Return the groups, those of earlier devices first."""
        return [self._members[index] for index in sorted(self._members)]

    def _note(self, pair: Pair, level: int) -> None:
        one, other = (self._home[ident] for ident in pair)
        if one != other:
            self._worst[one][other] = self._worst[other][one] = max(level, self._worst[one].get(other, 0))

    def _merge(self, one: int, other: int) -> None:
        keep, gone = min(one, other), max(one, other)
        self._members[keep] += self._members.pop(gone)
        for ident in self._members[keep]:
            self._home[ident] = keep
        for third, level in self._worst.pop(gone).items():
            del self._worst[third][gone]
            if third != keep:
                worst = max(level, self._worst[keep].get(third, 0))
                self._worst[keep][third] = self._worst[third][keep] = worst


def levels_of(words: Mapping[tuple[str, str], str]) -> dict[Pair, int]:
    """Return the distance of each pair whose link type has one."""
    return {frozenset(pair): LEVELS[word] for pair, word in words.items() if word in LEVELS}


def tree(ids: Sequence[str], levels: Levels) -> tuple[list[PcieBranch], list[Finding]]:
    """Return the branches at the processors' ports, and findings on link types that contradict others.

    Args:
        ids: devices in their order; instances of one GPU ("GPU0/GI0") share its slot.
        levels: the distance of each pair with a known one.
    """
    order = {ident: index for index, ident in enumerate(ids)}
    near = {limit: _pairs(levels, order, limit) for limit in (PIX, PXB)}
    groups = DeviceGroups([[ident] for ident in ids], levels)
    torn = groups.join([*_instances(ids), *near[PIX]], PIX)
    inner = [sorted(group, key=order.__getitem__) for group in groups.listed()]
    outer = DeviceGroups(inner, levels)
    torn += outer.join(near[PXB], PXB)
    switches: list[PcieBranch] = []
    for group in outer.listed():
        parts = [part for part in inner if part[0] in group]
        below = tuple(_branch(part) for part in sorted(parts, key=lambda part: order[part[0]]))
        switches.append(below[0] if len(below) == 1 else PcieBranch(below=below))
    return switches, contradictions(torn, levels)


def contradictions(torn: Sequence[tuple[str, str]], levels: Levels) -> list[Finding]:
    """Return one finding that names the pairs whose link type contradicts those of others; none if there are none."""
    pairs = list(dict.fromkeys(pair for pair in torn if frozenset(pair) in levels))
    if not pairs:
        return []
    words = {level: word for word, level in reversed(LEVELS.items())}
    named = listed((f"{a}-{b} ({words[levels[frozenset((a, b))]]})" for a, b in pairs), 3)
    what = f"the matrix contradicts itself: no PCIe tree has both {named} and the link types of the other pairs"
    cure = "save the output again; the link types are shown as printed, the switches are derived without these pairs"
    return [Finding(what, cure)]


def _branch(part: Sequence[str]) -> PcieBranch:
    return PcieBranch(part[0]) if len(part) == 1 else PcieBranch(below=tuple(PcieBranch(ident) for ident in part))


def _pairs(levels: Levels, order: Mapping[str, int], limit: int) -> list[tuple[str, str]]:
    """Return the pairs within the limit, the nearest first, then in the order of the devices."""
    found = []
    for pair, level in levels.items():
        if level <= limit:
            a, b = sorted(pair, key=order.__getitem__)
            found.append((level, order[a], order[b], a, b))
    return [(a, b) for *_, a, b in sorted(found)]


def _instances(ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return each instance of a GPU paired with the first device of that GPU."""
    first: dict[str, str] = {}
    found = []
    for ident in ids:
        parent = ident.partition("/")[0]
        if first.setdefault(parent, ident) != ident:
            found.append((first[parent], ident))
    return found
