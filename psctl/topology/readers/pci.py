"""Reads PCI trees: `lspci` in its forms (plain, -n, -nn, -v, -vv, -t, -tv), and the probe's rows of /sys.

The tree comes from one of three sources: /sys nests folders as bridges nest; `lspci -t` draws it; `lspci -v` prints the
range of bus numbers behind every bridge, so that the bridges above a device are those whose range contains its bus, the
widest range first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from psctl.topology.findings import Finding
from psctl.topology.readings import AMD, BRIDGE, NVIDIA, PciDevice, PciTree

_CLASSES = {
    "PCI bridge": BRIDGE, "Host bridge": 0x0600, "VGA compatible controller": 0x0300, "3D controller": 0x0302,
    "Display controller": 0x0380, "Ethernet controller": 0x0200, "Infiniband controller": 0x0207,
    "InfiniBand controller": 0x0207, "Fabric controller": 0x0208, "Network controller": 0x0280, "Bridge": 0x0680,
    "Processing accelerators": 0x1200, "Non-Volatile memory controller": 0x0108,
}  # fmt: skip
"""PCI classes that psctl uses, by lspci's names of them."""

_VENDORS = {
    "NVIDIA Corporation": NVIDIA, "Advanced Micro Devices": AMD, "Mellanox": 0x15B3, "Intel": 0x8086,
    "ASPEED": 0x1A03, "Matrox": 0x102B, "Amazon.com": 0x1D0F, "Broadcom": 0x14E4,
}  # fmt: skip
"""PCI vendors by the beginning of lspci's names of them."""

_AMD_BRIDGES = 0x1022
"""AMD's second vendor number, for devices other than GPUs."""

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.([0-7])")
_LINE = re.compile(rf"({_ADDRESS.pattern}) (\S.*)")
_SYSFS = re.compile(rf"{_ADDRESS.pattern}\t0x[0-9a-f]{{6}}\t")
_TREE = re.compile(
    r"[ |]*[-+\\][-+]*-?\[(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}(?:-[0-9a-f]{2})?\]|[ |]+[+\\]-[01][0-9a-f]\.[0-7]"
)
_TOKEN = re.compile(
    r"\[(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2})(?:-[0-9a-f]{2})?\]"
    r"|(?P<slot>[01][0-9a-f]\.[0-7])(?P<name> +[^-\s].*)?|(?P<fork>[+\\])|[-| ]+"
)


def address(text: str) -> str:
    """Return a PCI address as /sys writes it ("0000:3b:00.0"), from any notation; "" if the text is no address.

    nvidia-smi prints a domain of eight digits in capitals, lspci often none.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return ""
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def gigatransfers(text: str) -> float | None:
    """Return the GT/s a lane of "16.0 GT/s PCIe", "8GT/s (downgraded)" and similar texts; None if unknown."""
    match = re.search(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?GT/s", text)
    return float(match[1]) or None if match else None


def lanes(text: str) -> int | None:
    """Return the number of lanes of "16" or "x16"; None for 0 (no link) and 255 (unknown)."""
    match = re.fullmatch(r"x?([0-9]{1,3})", text.strip())
    return int(match[1]) if match and 0 < int(match[1]) <= 64 else None


def form(line: str) -> str:
    """Return the only form that has such a line: "pci-rows" of the probe, "pci-tree", "pci-list" of lspci; else ""."""
    if _SYSFS.match(line):
        return "pci-rows"
    if _TREE.match(line):
        return "pci-tree"
    return "pci-list" if _LINE.fullmatch(line.rstrip()) else ""


def read_pci(text: str) -> PciTree:
    """Read the output of `lspci` or the probe's rows; no output raises an error.

    Returns:
        The devices in the order of the text; each with the bridges above it where the text shows them.
    """
    lines = text.splitlines()
    if any(_SYSFS.match(line) for line in lines):
        return _tree(list(_rows(lines)), ())
    return _drawn(lines) if any(_TREE.match(line) for line in lines) else _listed(lines)


def _tree(devices: list[PciDevice], findings: tuple[Finding, ...]) -> PciTree:
    """Return the tree of these devices; of two entries with one address, the one with a class."""
    found: dict[str, PciDevice] = {}
    for device in devices:
        before = found.get(device.address)
        if before is None or (before.pci_class is None and device.pci_class is not None):
            found[device.address] = device
    return PciTree(tuple(found.values()), findings)


def _rows(lines: list[str]) -> Iterator[PciDevice]:
    """Yield the devices of the probe's rows.

    A row is address, class, vendor, device, NUMA node, speed, its maximum, width, its maximum, folder.
    """
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not _SYSFS.match(line):
            continue
        cells += [""] * (10 - len(cells))
        at = address(cells[0])
        path = tuple(above for part in cells[9].split("/") if (above := address(part)) and above != at)
        yield PciDevice(
            address=at,
            pci_class=hexadecimal(cells[1], 8),
            vendor=hexadecimal(cells[2]),
            device=hexadecimal(cells[3]),
            path=path,
            speed=gigatransfers(cells[5]),
            speed_max=gigatransfers(cells[6]),
            width=lanes(cells[7]),
            width_max=lanes(cells[8]),
            numa=int(cells[4]) if re.fullmatch(r"[0-9]{1,4}", cells[4]) else None,
        )


def hexadecimal(text: str, shift: int = 0) -> int | None:
    """Return the number "0x10de", shifted right; None for other text."""
    return int(text, 16) >> shift if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None


def _listed(lines: list[str]) -> PciTree:
    """Return the devices of plain lspci, or of -v and -vv with the indented lines under each device."""
    blocks: list[tuple[PciDevice, list[str]]] = []
    for line in lines:
        match = _LINE.fullmatch(line.rstrip())
        if match:
            blocks.append((_head(address(match[1]), match[6]), []))
        elif blocks and line[:1] in ("\t", " "):
            blocks[-1][1].append(line.strip())
    spans = {device.address: span for device, below in blocks if (span := _span(device.address, below))}
    devices = [
        msgspec.structs.replace(_with_details(device, below), path=_above(device.address, spans))
        for device, below in blocks
    ]
    findings: tuple[Finding, ...] = ()
    if any("<access denied>" in line for _, below in blocks for line in below):
        what = "lspci was run without root, so it hides the speed and width of the slots"
        findings = (Finding(what, "save the output of `sudo lspci -vv`"),)
    return _tree(devices, findings)


def _head(at: str, text: str) -> PciDevice:
    """Return the device of a first line: "3D controller [0302]: NVIDIA Corporation GH100 [10de:2330] (rev a1)"."""
    kind, _, name = text.partition(": ")
    number = re.search(r"\[([0-9a-f]{4})\]$", kind) or re.fullmatch(r"([0-9a-f]{4})", kind)
    ids = re.search(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", name) or re.match(r"([0-9a-f]{4}):([0-9a-f]{4})\b", name)
    pci_class = int(number[1], 16) if number else _CLASSES.get(kind)
    vendor = int(ids[1], 16) if ids else _vendor(name, pci_class)
    return PciDevice(at, pci_class, vendor, int(ids[2], 16) if ids else None, _clean(name))


def _vendor(name: str, pci_class: int | None) -> int | None:
    number = next((number for begin, number in _VENDORS.items() if name.startswith(begin)), None)
    graphics = pci_class is not None and pci_class >> 8 in (0x03, 0x12)
    return _AMD_BRIDGES if number == AMD and not graphics else number


def _clean(name: str) -> str:
    """Return the name without numbers, revision and programming interface."""
    return re.sub(r" (\((rev|prog-if) [^)]*\)|\[[0-9a-f]{4}:[0-9a-f]{4}\])", "", name).strip()


def _with_details(device: PciDevice, below: list[str]) -> PciDevice:
    text = "\n".join(below)
    numa = re.search(r"NUMA node:? ([0-9]{1,4})", text)
    able, now = re.search(r"^LnkCap:.*", text, re.MULTILINE), re.search(r"^LnkSta:.*", text, re.MULTILINE)
    return msgspec.structs.replace(
        device,
        speed=gigatransfers(now[0]) if now else None,
        speed_max=gigatransfers(able[0]) if able else None,
        width=_width(now[0]) if now else None,
        width_max=_width(able[0]) if able else None,
        numa=int(numa[1]) if numa else None,
    )


def _width(line: str) -> int | None:
    match = re.search(r"Width (x[0-9]+)", line)
    return lanes(match[1]) if match else None


def _span(at: str, below: list[str]) -> tuple[str, int, int] | None:
    """Return the buses behind a bridge (domain, first, last): "Bus: primary=00, secondary=01, subordinate=03"."""
    for line in below:
        match = re.match(r"Bus: primary=[0-9a-f]+, secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})", line)
        if match:
            return at.split(":")[0], int(match[1], 16), int(match[2], 16)
    return None


def _above(at: str, spans: dict[str, tuple[str, int, int]]) -> tuple[str, ...]:
    domain, bus = at.split(":")[0], int(at.split(":")[1], 16)
    holding = [
        (last - first, bridge)
        for bridge, (where, first, last) in spans.items()
        if where == domain and 0 < first <= bus <= last and bridge != at
    ]
    return tuple(bridge for _, bridge in sorted(holding, key=lambda one: -one[0]))


class _Branch(NamedTuple):
    """A branch of the drawn tree: its bus, and the bridges above it."""

    domain: str = ""
    bus: str = ""
    path: tuple[str, ...] = ()


def _drawn(lines: list[str]) -> PciTree:
    """Return the devices of `lspci -t`: a line that begins in column c continues the last fork in that column."""
    forks: dict[int, _Branch] = {}
    devices: list[PciDevice] = []
    unread = 0
    for line in lines:
        if _TREE.match(line):
            found, whole = _branch(line, forks)
            devices += found
            unread += not whole
    findings = (Finding(f"{unread} lines of lspci's tree could not be read", "save the output of `lspci -t` whole"),)
    return _tree(devices, findings if unread else ())


def _branch(line: str, forks: dict[int, _Branch]) -> tuple[list[PciDevice], bool]:
    """Return the devices of a line, and whether the whole line was read; add its forks to `forks`."""
    here, at = _Branch(), 0
    devices: list[PciDevice] = []
    bridge: PciDevice | None = None
    while at < len(line):
        token = _TOKEN.match(line, at)
        if token is None:
            return devices, False
        if token["fork"]:
            here = forks.get(at, here) if here == _Branch() else here
            forks[at] = here
        elif token["bus"]:
            path = here.path
            if bridge is not None:
                devices[-1] = msgspec.structs.replace(bridge, pci_class=BRIDGE)
                path = (*path, bridge.address)
            here, bridge = _Branch(token["domain"] or here.domain or "0000", token["bus"], path), None
        elif token["slot"] and here.bus:
            head = _head(address(f"{here.domain}:{here.bus}:{token['slot']}"), f": {(token['name'] or '').strip()}")
            bridge = msgspec.structs.replace(head, path=here.path)
            devices.append(bridge)
        at = token.end()
    return devices, True
