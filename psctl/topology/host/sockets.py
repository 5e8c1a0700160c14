"""Finds the processor of each PCIe slot from the NUMA nodes of its devices and the link types of a matrix.

A known NUMA node decides. Devices that PHB or NODE joins are on one processor. Each other device is assigned to the
first processor that no SYS excludes, and to a new one if there is none: the fewest processors that fit. Where devices
of one NUMA node are SYS to each other, the matrix carries no information on processors (a virtual machine shows each
device at a root of its own), and SYS then excludes nothing from that node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from psctl.topology.graph import Device
from psctl.topology.host.pcie_derivation import NODE, SYS, DeviceGroups, Levels, Pair, PcieBranch
from psctl.topology.readings import Affinity


def by_cores(affinity: Mapping[str, Affinity]) -> dict[str, int]:
    """Return a number for each device by its list of cores, {} if all lists are equal.

    Old drivers print no NUMA node. Equal lists are no evidence of one node: a job with few cores sees only those.
    """
    first = {ident: _first(near.cpus) for ident, near in affinity.items()}
    starts = sorted({start for start in first.values() if start is not None})
    if len(starts) < 2:
        return {}
    return {ident: starts.index(start) for ident, start in first.items() if start is not None}


def place(
    tops: Sequence[PcieBranch],
    numa: Mapping[str, int],
    levels: Levels,
    known: Sequence[Device] = (),
    *,
    nodes: bool = True,
) -> tuple[list[Device], list[str]]:
    """Return the processors, and for each of `tops` the id of its processor.

    Args:
        tops: the branches at the processors' ports.
        numa: NUMA node of each device, where it is known.
        levels: distance of each pair, where it is known.
        known: processors that the host listed; others are derived.
        nodes: whether `numa` holds NUMA nodes; else its numbers only distinguish processors.
    """
    homes = [next((numa[leaf] for leaf in top.leaves if leaf in numa), None) for top in tops]
    groups = _joined(tops, homes, levels)
    blind = _blind(tops, homes, levels)
    cpus = list(known)
    on: dict[int, str] = {}
    for group in sorted(groups, key=lambda group: homes[group[0]] is None):
        home = next((homes[index] for index in group if homes[index] is not None), None)
        if home is not None:
            cpu = _cpu(cpus, home, nodes)
        else:
            cpu = _free(cpus, [tops[index] for index in group], tops, on, levels, blind, listed=bool(known))
        on.update(dict.fromkeys(group, cpu))
    return sorted(cpus, key=lambda cpu: _number(cpu.id)), [on[index] for index in range(len(tops))]


def _joined(tops: Sequence[PcieBranch], homes: Sequence[int | None], levels: Levels) -> list[list[int]]:
    """Return groups of indices of `tops` that PHB or NODE joins and that have no different NUMA nodes."""
    ids = [str(index) for index in range(len(tops))]
    top_of = {leaf: ident for ident, top in zip(ids, tops, strict=True) for leaf in top.leaves}
    worst: dict[Pair, int] = {}
    least: dict[Pair, int] = {}
    for pair, level in levels.items():
        ends = frozenset(top_of[leaf] for leaf in pair if leaf in top_of)
        if len(ends) == 2:
            worst[ends] = max(level, worst.get(ends, 0))
            least[ends] = min(level, least.get(ends, SYS))
    apart = frozenset(
        frozenset((ids[one], ids[other]))
        for one in range(len(tops))
        for other in range(one)
        if homes[one] is not None and homes[other] is not None and homes[one] != homes[other]
    )
    near = sorted((level, *sorted(map(int, pair))) for pair, level in least.items() if level <= NODE)
    groups = DeviceGroups([[ident] for ident in ids], worst, apart)
    groups.join([(ids[one], ids[other]) for _, one, other in near], NODE)
    return [sorted(map(int, group)) for group in groups.listed()]


def _blind(tops: Sequence[PcieBranch], homes: Sequence[int | None], levels: Levels) -> frozenset[int]:
    """Return the NUMA nodes with devices that are SYS to each other."""
    home = {leaf: number for top, number in zip(tops, homes, strict=True) for leaf in top.leaves}
    pairs = [[home.get(leaf) for leaf in pair] for pair, level in levels.items() if level == SYS]
    return frozenset(one for one, other in pairs if one is not None and one == other)


def _free(
    cpus: list[Device], group: Sequence[PcieBranch], tops: Sequence[PcieBranch], on: Mapping[int, str], levels: Levels,
    blind: frozenset[int], *, listed: bool,
) -> str:  # fmt: skip
    """Return the first processor that no SYS excludes; else a new one, unless the host listed its processors."""
    own = [leaf for top in group for leaf in top.leaves]
    for cpu in cpus:
        there = [leaf for index, ident in on.items() if ident == cpu.id for leaf in tops[index].leaves]
        seen = _number(cpu.id) not in blind
        if not seen or all(levels.get(frozenset((a, b)), 0) < SYS for a in own for b in there):
            return cpu.id
    if listed:
        return cpus[0].id
    taken = {cpu.id for cpu in cpus}
    cpus.append(Device(next(f"CPU{n}" for n in range(len(taken) + 1) if f"CPU{n}" not in taken), "cpu", derived=True))
    return cpus[-1].id


def _cpu(cpus: list[Device], home: int, nodes: bool) -> str:
    ident = f"CPU{home}"
    if all(cpu.id != ident for cpu in cpus):
        cpus.append(Device(ident, "cpu", home if nodes else None, derived=True))
    return ident


def _number(ident: str) -> int:
    return int(ident.removeprefix("CPU"))


def _first(cpus: str) -> int | None:
    match = re.match(r"\s*([0-9]+)", cpus)
    return int(match[1]) if match else None
