"""Machines made by hand, for what follows from the graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.graph import Device, HostGraph, Link

DGX1V = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip
"""The hybrid cube mesh of eight V100: (GPU, GPU, NVLinks), as `nvidia-smi topo -m` of the captured machines has it."""

XGMI16 = (
    (0, 1, 4), (0, 2, 1), (0, 4, 2), (1, 2, 1), (1, 3, 1), (1, 5, 1), (2, 3, 4), (2, 6, 1), (3, 7, 2), (4, 5, 4),
    (4, 12, 1), (5, 13, 1), (5, 14, 1), (6, 7, 4), (6, 13, 1), (6, 14, 1), (7, 15, 1), (8, 9, 4), (8, 10, 1),
    (8, 12, 2), (9, 10, 1), (9, 11, 1), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2), (12, 13, 4), (14, 15, 4),
)  # fmt: skip
"""16 GPUs joined by xGMI, as RCCL's topology file of such a machine has them."""


def named(count: int) -> tuple[str, ...]:
    return tuple(f"GPU{index}" for index in range(count))


def mesh(count: int, links: Iterable[tuple[int, int, int]], unit: float = 25e9) -> DirectLinks:
    return DirectLinks(named(count), tuple(sorted(links)), unit)


def part(links: Iterable[tuple[int, int, int]], ids: Sequence[int], unit: float = 25e9) -> DirectLinks:
    """Some of the GPUs, and the links among them."""
    place = {ident: index for index, ident in enumerate(ids)}
    kept = sorted((place[a], place[b], units) for a, b, units in links if a in place and b in place)
    return DirectLinks(tuple(f"GPU{ident}" for ident in ids), tuple(kept), unit)


def complete(count: int, units: int) -> DirectLinks:
    return mesh(count, ((a, b, units) for a, b in itertools.combinations(range(count), 2)))


def cube(units: int = 1) -> DirectLinks:
    """The hypercube of 16, which is the torus of 4 by 4 as well."""
    return mesh(16, ((a, a ^ 1 << k, units) for a in range(16) for k in range(4) if a < a ^ 1 << k))


def dgx1v(rate: float = 25e9) -> HostGraph:
    """Eight V100 with PCIe switches for two GPUs and a NIC each, two processors."""
    devices = [Device("CPU0", "cpu", 0), Device("CPU1", "cpu", 1)]
    devices += [Device(f"SW{at}", "switch", at // 2, "PCIe switch", True) for at in range(4)]
    devices += [Device(f"GPU{at}", "gpu", at // 4) for at in range(8)]
    devices += [Device(f"mlx5_{at}", "nic", at // 2, bandwidth=12.5e9) for at in range(4)]
    links = [Link(f"GPU{a}", f"GPU{b}", f"NV{n}", n * rate, switched=False) for a, b, n in DGX1V]
    links += [Link(f"GPU{at}", f"SW{at // 2}", "PCIe", 16e9) for at in range(8)]
    links += [Link(f"mlx5_{at}", f"SW{at}", "PCIe", 16e9) for at in range(4)]
    links += [Link(f"SW{at}", f"CPU{at // 2}", "PCIe", 16e9) for at in range(4)]
    links += [Link("CPU0", "CPU1", "SMP", 41.6e9)]
    return HostGraph(tuple(devices), tuple(links))


def behind_switch(gpus: int, rate: float = 16e9, **more: object) -> HostGraph:
    """GPUs on one PCIe switch with one slot to the processor."""
    devices = [Device("CPU0", "cpu", 0), Device("SW0", "switch", 0, "PCIe switch", True)]
    devices += [Device(f"GPU{at}", "gpu", 0) for at in range(gpus)]
    links = [Link(f"GPU{at}", "SW0", "PCIe", rate) for at in range(gpus)] + [Link("SW0", "CPU0", "PCIe", rate)]
    return HostGraph(tuple(devices), tuple(links))


def nvswitch(gpus: int, rate: float = 300e9) -> HostGraph:
    """GPUs on an NVSwitch, each on a PCIe slot of its own."""
    devices = [Device("CPU0", "cpu", 0), Device("NVSW0", "switch", None, "NVSwitch", True)]
    devices += [Device(f"GPU{at}", "gpu", 0) for at in range(gpus)]
    links = [Link(f"GPU{at}", "NVSW0", "NVLink", rate) for at in range(gpus)]
    links += [Link(f"GPU{at}", "CPU0", "PCIe", 16e9) for at in range(gpus)]
    links += [
        Link(f"GPU{a}", f"GPU{b}", "NV12", rate, switched=True) for a, b in itertools.combinations(range(gpus), 2)
    ]
    return HostGraph(tuple(devices), tuple(links))


@st.composite
def meshes(draw: st.DrawFn, least: int = 2, most: int = 6) -> DirectLinks:
    """Links between some pairs, joined or not."""
    count = draw(st.integers(least, most))
    pairs = list(itertools.combinations(range(count), 2))
    units = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3]), min_size=len(pairs), max_size=len(pairs)))
    return mesh(count, ((a, b, n) for (a, b), n in zip(pairs, units, strict=True) if n))


def partitions(items: Sequence[int]) -> Iterable[list[list[int]]]:
    """All ways to cut items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for at, group in enumerate(smaller):
            yield [*smaller[:at], [first, *group], *smaller[at + 1 :]]
