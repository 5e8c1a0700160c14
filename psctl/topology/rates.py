"""Nominal rates of cables, slots and links: one table, a source for each figure.

All rates are bytes/s in one direction. A figure without a source is marked as assumed; values that a matrix does not
show (the generation of a slot, the number of links between two processors) are assumed until they are measured.
"""

from __future__ import annotations

import re

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """A rate (bytes/s in one direction), a share (of 1) or a latency (seconds), and its source."""

    value: float
    source: str
    assumed: bool = False


FIGURES: dict[str, Figure] = {
    # Share of the raw bit rate that carries packets.
    "PCIe 1 coding": Figure(8 / 10, "PCI Express Base 1.0a: 2.5 GT/s a lane, 8b/10b"),
    "PCIe 2 coding": Figure(8 / 10, "PCI Express Base 2.0: 5 GT/s a lane, 8b/10b"),
    "PCIe 3 coding": Figure(128 / 130, "PCI Express Base 3.0: 8 GT/s a lane, 128b/130b"),
    "PCIe 4 coding": Figure(128 / 130, "PCI Express Base 4.0: 16 GT/s a lane, 128b/130b"),
    "PCIe 5 coding": Figure(128 / 130, "PCI Express Base 5.0: 32 GT/s a lane, 128b/130b"),
    "PCIe 6 coding": Figure(236 / 256, "PCI Express Base 6.0: 64 GT/s a lane, 236 bytes of each 256-byte flit"),
    "PCIe": Figure(16e9, "PCIe 3.0 x16 as the textbooks have it (8 GT/s x 16 lanes): generation unknown", True),
    # One NVLink.
    "NVLink 1": Figure(20e9, "NVIDIA Tesla P100 whitepaper: 4 links, 160 GB/s both ways"),
    "NVLink 2": Figure(25e9, "NVIDIA Tesla V100 whitepaper: 6 links, 300 GB/s both ways"),
    "NVLink 3": Figure(25e9, "NVIDIA A100 whitepaper: 12 links, 600 GB/s both ways"),
    "NVLink 3 x4": Figure(14.0625e9, "NVIDIA GA102 whitepaper: 4 links, 14.0625 GB/s each way a link"),
    "NVLink 4": Figure(25e9, "NVIDIA H100 whitepaper: 18 links, 900 GB/s both ways"),
    "NVLink 5": Figure(50e9, "NVIDIA Blackwell brief: 18 links, 1.8 TB/s both ways"),
    "NVLink": Figure(25e9, "as NVLink 2 to 4: the GPU's name is unknown", True),
    "C2C": Figure(450e9, "NVIDIA Grace Hopper whitepaper: NVLink-C2C, 900 GB/s both ways"),
    "C2C GB10": Figure(300e9, "NVIDIA GB10 as presented in 2025: C2C, 600 GB/s both ways"),
    # One link of AMD's between GPUs.
    "xGMI 2": Figure(46e9, "AMD CDNA whitepaper: 16 bits at 23 GT/s"),
    "xGMI 2+": Figure(50e9, "AMD CDNA 2 whitepaper: 16 bits at 25 GT/s"),
    "xGMI 3": Figure(64e9, "AMD CDNA 3 whitepaper: 16 bits at 32 GT/s"),
    "xGMI": Figure(50e9, "as MI200's links: the GPU's name is unknown", True),
    # All links between two processors.
    "QPI": Figure(2 * 19.2e9, "Intel QPI: 9.6 GT/s x 16 bits; that there are two links is assumed", True),
    "UPI": Figure(2 * 20.8e9, "Intel UPI 1: 10.4 GT/s x 16 bits; that there are two links is assumed", True),
    "UPI 2": Figure(3 * 32e9, "Intel UPI 2: 16 GT/s; 16 bits of data and three links are assumed", True),
    "Infinity Fabric 2": Figure(3 * 36e9, "EPYC 7002 and 7003: xGMI of 16 bits at 18 GT/s; three links assumed", True),
    "Infinity Fabric 3": Figure(3 * 64e9, "EPYC 9004 and later: xGMI of 16 bits at 32 GT/s; three links assumed", True),
    "Infinity Fabric": Figure(21.3e9, "EPYC 7001: 42.6 GB/s both ways between two dies; as such for other AMD", True),
    "SMP": Figure(2 * 20.8e9, "as UPI 1: the processor is unknown", True),
    # Shares of a network's nominal rate.
    "Ethernet": Figure(0.956, "MTU of 1500: 1,448 bytes of TCP in a frame of 1,514, as shapers count (a wire: 1,538)"),
    "InfiniBand": Figure(4096 / 4122, "MTU of 4096: 26 bytes of headers and checksums a packet (IBA 1.3)"),
    "InfiniBand 8b/10b": Figure(0.8, "IBA: SDR, DDR and QDR name the rate before 8b/10b coding"),
    "InfiniBand 64b/66b": Figure(56.25 * 64 / 66 / 56, "IBA: FDR is 4 lanes of 14.0625 Gbit/s, coded 64b/66b"),
    # Seconds one way.
    "PCIe latency": Figure(0.3e-6, "a slot and its port; makers of switches state 0.1 to 0.15 us a switch", True),
    "NVLink latency": Figure(0.5e-6, "order of what tests of GPU pairs show, less the software", True),
    "SMP latency": Figure(0.15e-6, "order of what remote memory costs beyond local", True),
    "Ethernet latency": Figure(25e-6, "TCP within a rack; not measured", True),
    "InfiniBand latency": Figure(1.5e-6, "order of what verbs tests show within a rack; not measured", True),
}  # fmt: skip
"""Every nominal figure."""

_GIGATRANSFERS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

_NVLINKS: tuple[tuple[str, str], ...] = (
    (r"\bP100\b", "NVLink 1"),
    (r"\b(V100|GV100|TITAN RTX|RTX 20[78]0|Quadro RTX)\b", "NVLink 2"),
    (r"\b(A100X?|A800|A30X?|PG509)\b", "NVLink 3"),
    (r"\b(RTX 3090|RTX A[4-6][05]00|A40|A4500|A5000|A5500|A6000)\b", "NVLink 3 x4"),
    (r"\b(G?H100|G?H200|H800|H20)\b", "NVLink 4"),
    (r"\bG?B[123]00\b", "NVLink 5"),
)
"""Patterns of GPU names -> their NVLinks."""

_RAW: tuple[tuple[float, str], ...] = (
    (19.531e9, "NVLink 1"), (25.781e9, "NVLink 2"), (26.562e9, "NVLink 4"), (14.062e9, "NVLink 3 x4"),
    (53.125e9, "NVLink 5"),
)  # fmt: skip
"""Rates that nvidia-smi prints for a link: signalling rates, including the coding."""

_XGMI: tuple[tuple[str, str], ...] = ((r"MI100\b", "xGMI 2"), (r"MI2[0-9]{2}", "xGMI 2+"), (r"MI3[0-9]{2}", "xGMI 3"))

_SMP: tuple[tuple[str, str], ...] = (
    (r"EPYC 7\w\w1\b", "Infinity Fabric"),
    (r"EPYC 7", "Infinity Fabric 2"),
    (r"EPYC (9|8)", "Infinity Fabric 3"),
    (r"AMD|EPYC", "Infinity Fabric"),
    (r"Xeon.* E[57]", "QPI"),
    (r"Xeon.* (Max|[3-9][4-9][0-9]{2}|6[0-9]{3}[PE])", "UPI 2"),
    (r"Xeon", "UPI"),
)
"""Patterns of processor names -> the links between two of them."""

LANES = 16
"""Lanes of a slot for a GPU or a fast NIC."""


def pcie(speed: float | None = None, width: int | None = None) -> float:
    """Return the rate of a PCIe link: speed x width x coding / 8.

    Args:
        speed: GT/s a lane; None if unknown, which counts as PCIe 3.0 with the textbooks' 16e9 bytes/s.
        width: lanes; None if unknown, which counts as 16.

    Returns:
        Bytes/s in one direction: 15.754e9 for 8 GT/s and 16 lanes, 16e9 if neither is known.
    """
    lanes = width or LANES
    if not speed:
        return FIGURES["PCIe"].value * lanes / LANES
    generation = _GIGATRANSFERS.get(speed) or min(6, sum(speed > known for known in _GIGATRANSFERS) + 1)
    return speed * 1e9 * lanes / 8 * FIGURES[f"PCIe {generation} coding"].value


def speed_of(generation: int | None) -> float | None:
    """Return the GT/s a lane of a PCIe generation, None for an unknown one."""
    return next((speed for speed, known in _GIGATRANSFERS.items() if known == generation), None)


def nvlink(name: str = "", raw: float | None = None) -> float:
    """Return the rate of one NVLink, bytes/s in one direction.

    Args:
        name: name of the GPU; a known name takes precedence over `raw`.
        raw: the rate that `nvidia-smi nvlink -s` prints for a link, bytes/s.
    """
    known = _first(_NVLINKS, name)
    if known is None and raw:
        known = next((key for printed, key in _RAW if abs(raw - printed) < 0.02e9), None)
        if known is None:
            return raw
    return FIGURES[known or "NVLink"].value


def coherent(name: str) -> float | None:
    """Return the rate between a GPU and the processor of its package (NVLink-C2C), bytes/s; None for other GPUs."""
    if re.search(r"\bG(H|B)[0-9]00\b", name):
        return FIGURES["C2C"].value
    return FIGURES["C2C GB10"].value if re.search(r"\bGB10\b", name) else None


def xgmi(name: str = "") -> float:
    """Return the rate of one link between two AMD GPUs, bytes/s in one direction."""
    return FIGURES[_first(_XGMI, name) or "xGMI"].value


def smp(processor: str = "") -> float:
    """Return the total rate of all links between two processors of a machine, bytes/s in one direction."""
    return FIGURES[_first(_SMP, processor) or "SMP"].value


def ethernet(nominal: float) -> float:
    """Return the payload rate of an Ethernet port with this nominal rate, bytes/s in one direction."""
    return nominal * FIGURES["Ethernet"].value


def infiniband(nominal: float) -> float:
    """Return the payload rate of an InfiniBand port, bytes/s; nominal rates up to QDR and of FDR include coding."""
    gigabits = nominal * 8 / 1e9
    coding = 1.0
    if gigabits < 41:
        coding = FIGURES["InfiniBand 8b/10b"].value
    elif 53 < gigabits < 57:
        coding = FIGURES["InfiniBand 64b/66b"].value
    return nominal * coding * FIGURES["InfiniBand"].value


def latency(type: str) -> float | None:
    """Return the seconds that an edge of this type adds one way, None for types without a figure."""
    sort = "NVLink" if re.fullmatch(r"NV[0-9]+|xGMI", type) else type
    figure = FIGURES.get(f"{sort} latency")
    return figure.value if figure else None


def _first(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((key for pattern, key in table if re.search(pattern, name)), None)
