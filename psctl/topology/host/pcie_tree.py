"""The PCIe tree as the host lists it: the bridges above each device, and the rate of each slot.

A bridge with one device of interest below it is left out; a switch (one port up, several down) is one device. An uplink
is as wide as the narrowest link that it combines. Idle GPUs lower their slot's speed to save power, so the speed is the
maximum of both ends; they do not change the width, so the width is the current one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology import rates
from psctl.topology.host.pcie_derivation import PcieBranch
from psctl.topology.readings import AMD, BRIDGE, NVIDIA, PciDevice

WIDEST = 32
"""Lanes; a larger number comes from a register that is not set."""

EMULATED = frozenset({0x104C, 0x1B36})
"""Vendors of the bridges that virtual machines emulate; their registers (2.5 GT/s, x1) describe no hardware."""


def gpus(functions: Sequence[PciDevice], vendor: int | None = None) -> list[PciDevice]:
    """Return the GPUs that compute, in the order of their addresses, which is the order of their numbers.

    Args:
        functions: of the host.
        vendor: PCI vendor; None for all. A board's own display (ASPEED, Matrox ...) is not a GPU that computes.
    """
    found = [one for one in functions if _computes(one) and (vendor is None or one.vendor in (vendor, None))]
    return sorted(found, key=lambda one: one.address)


def nics(functions: Sequence[PciDevice]) -> list[PciDevice]:
    """Return the network controllers (Ethernet and InfiniBand), in the order of their addresses."""
    return sorted((one for one in functions if one.pci_class in (0x0200, 0x0207)), key=lambda one: one.address)


def rooted(function: PciDevice) -> bool:
    """Return whether the bridges above the function are known: plain `lspci` does not show them."""
    return bool(function.path) or function.address.split(":")[-2] == "00"


def link(function: PciDevice) -> float | None:
    """Return the rate of the function's link, bytes/s in one direction; None where it is unknown."""
    if function.pci_class == BRIDGE and function.vendor in EMULATED:
        return None
    speed = function.speed_max or function.speed
    width = function.width or function.width_max
    width = width if width is not None and 0 < width <= WIDEST else None
    return rates.pcie(speed, width) if speed or width else None


def tree(functions: Sequence[PciDevice], slots: Mapping[str, str]) -> list[PcieBranch]:
    """Return the branches at the processors' ports.

    Args:
        functions: of the host: bridges and devices.
        slots: PCI address of each device of interest, by the device's id, in order.

    Returns:
        Devices and switches (without an id yet); a device whose address is not among the functions is left out.
    """
    by_address = {one.address: one for one in functions}
    children: dict[str, list[str]] = {"": []}
    placed: set[str] = set()  # where two paths contradict each other the first one counts, so that there is no cycle
    for ident, address in slots.items():
        if address not in by_address:
            continue
        above = ""
        for node in (*by_address[address].path, f"={ident}"):
            if node not in placed:
                placed.add(node)
                children.setdefault(above, []).append(node)
            above = node
    return [_grow(node, children, by_address, slots, None) for node in children[""]]


def hang(tops: Sequence[PcieBranch], ident: str, neighbour: str) -> list[PcieBranch]:
    """Return the tree with one more device on the switch of the device `neighbour`, else on the processor."""
    grown = [_hung(top, ident, neighbour) for top in tops]
    return [*grown] if any(ident in top.leaves for top in grown) else [*grown, PcieBranch(ident)]


def _hung(branch: PcieBranch, ident: str, neighbour: str) -> PcieBranch:
    if any(below.id == neighbour for below in branch.below):
        return msgspec.structs.replace(branch, below=(*branch.below, PcieBranch(ident)))
    return msgspec.structs.replace(branch, below=tuple(_hung(below, ident, neighbour) for below in branch.below))


def _grow(
    node: str, children: Mapping[str, list[str]], functions: Mapping[str, PciDevice], slots: Mapping[str, str],
    above: float | None,
) -> PcieBranch:  # fmt: skip
    """Return a node as a branch; `above` is the narrowest of the links that its uplink combines."""
    ident = node[1:] if node.startswith("=") else ""
    address = slots[ident] if ident else node
    function = functions.get(address)
    own = link(function) if function else None
    known = [rate for rate in (own, above) if rate is not None]
    rate = min(known) if known else None
    if ident:
        return PcieBranch(ident, (), rate, derived=False, bus=address)
    below = children.get(node, [])
    if len(below) == 1:
        return _grow(below[0], children, functions, slots, rate)
    grown = tuple(_grow(child, children, functions, slots, None) for child in below)
    name = "PCIe card" if len({one.bus.rpartition(".")[0] for one in grown}) == 1 and grown[0].bus else "PCIe switch"
    return PcieBranch("", grown, rate, derived=False, bus=address, name=name)


def _computes(function: PciDevice) -> bool:
    if function.pci_class == 0x0302 or (function.pci_class == 0x1200 and function.vendor in (NVIDIA, AMD)):
        return True
    return function.pci_class in (0x0300, 0x0380) and function.vendor in (NVIDIA, AMD)
