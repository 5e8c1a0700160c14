"""Reads RDMA ports: the probe's rows of /sys/class/infiniband, `ibstat`, `ibstatus`, `ibdev2netdev`, `rdma link`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from psctl.topology.findings import Finding
from psctl.topology.readers.pci import address
from psctl.topology.readings import RdmaPort, RdmaPorts

_ROW = re.compile(r"[^\t ]+\t[0-9]{1,3}\t[^\t]*(?:b/sec[^\t]*)?\t(?:[0-9]: ?[A-Za-z_]+)?\t")
_NETDEV = re.compile(r"(\S+) (?:\([^)]*\) .*)?port ([0-9]{1,3}) (?:\([A-Z_]+\) )?==> (\S+) \(([A-Za-z]+)\)")
_LINK = re.compile(r"(?:[0-9]+/[0-9]+: |link )(?:link )?(\S+)/([0-9]{1,3}):? .*\bstate (\w+)")
_STATUS = re.compile(r"Infiniband device '([^']+)' port ([0-9]{1,3}) status:")
_ADAPTER = re.compile(r"CA '([^']+)'")


def looks_like_rdma(line: str) -> bool:
    """Whether a line can only be of one of these outputs."""
    if line.count("\t") >= 5 and _ROW.match(line):
        return True
    if any(form.match(line.strip()) for form in (_ADAPTER, _STATUS, _LINK)):
        return True
    return "==>" in line and bool(_NETDEV.search(line))


_LEARNT = msgspec.json.Decoder(RdmaPort)
"""Threads that have msgspec learn a type at the same moment crash it: learnt here, and hosts are read in parallel."""


def read_rdma(text: str) -> RdmaPorts:
    """Read the ports of all RDMA devices; never raises.

    Returns:
        A port once each, in order; where outputs tell different things of a port, what each tells.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name, port, told in (*_rows(text), *_ibstat(text), *_ibstatus(text), *_netdev(text), *_rdma_link(text)):
        known = found.setdefault((name, port), {"device": name, "port": port})
        known.update({key: value for key, value in told.items() if value not in (None, "") and not known.get(key)})
    ports = tuple(_settled(msgspec.convert(one, RdmaPort)) for one in found.values())
    findings = () if ports else (Finding("no RDMA port could be read", "save the output whole"),)
    return RdmaPorts(ports, findings)


def _settled(port: RdmaPort) -> RdmaPort:
    """A port that is down tells its slowest rate, which is none."""
    return port if port.active else msgspec.structs.replace(port, rate=None)


_Told = tuple[str, int, dict[str, Any]]


def _rows(text: str) -> Iterator[_Told]:
    """Rows of the probe: device, port, rate, state, layer, PCI address, node, interface, others "name=port"."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) < 6 or not re.fullmatch(r"[0-9]{1,3}", cells[1]):
            continue
        cells += [""] * (9 - len(cells))
        port = int(cells[1])
        yield cells[0], port, {
            "rate": _rate(cells[2]),
            "active": "ACTIVE" in cells[3],
            "layer": cells[4],
            "bus": address(cells[5]),
            "numa": int(cells[6]) if re.fullmatch(r"[0-9]{1,4}", cells[6]) else None,
            "interface": cells[7] or _by_number(cells[8], port),
        }  # fmt: skip


def _by_number(pairs: str, port: int) -> str:
    """ "ib0=0 ib1=1": the kernel counts a device's interfaces from 0, its ports from 1."""
    names = [(name, number) for name, _, number in (pair.partition("=") for pair in pairs.split())]
    same = [name for name, number in names if number == str(port - 1)]
    return (same or [name for name, _ in names if len(names) == 1] or [""])[0]


def _rate(text: str) -> float | None:
    """ "100 Gb/sec (4X EDR)", or ibstat's bare "100": nominal bytes/s."""
    match = re.match(r"([0-9]{1,5}(?:\.[0-9]+)?)(?: ?Gb/sec.*)?$", text.strip())
    return float(match[1]) * 1e9 / 8 or None if match else None


def _blocks(text: str, begin: re.Pattern[str]) -> Iterator[tuple[re.Match[str], list[tuple[str, str]]]]:
    """Parts that begin with a line of a form, each with its "key: value" lines, keys in small letters."""
    current: tuple[re.Match[str], list[tuple[str, str]]] | None = None
    for line in text.splitlines():
        match = begin.match(line.strip())
        if match:
            if current:
                yield current
            current = match, []
        elif current:
            key, _, value = line.strip().partition(":")
            current[1].append((key.strip().lower(), value.strip()))
    if current:
        yield current


def _ibstat(text: str) -> Iterator[_Told]:
    for match, pairs in _blocks(text, _ADAPTER):
        port, told = 0, dict[str, Any]()
        for key, value in pairs:
            if number := re.fullmatch(r"port ([0-9]{1,3})", key):
                if port:
                    yield match[1], port, told
                port, told = int(number[1]), {}
            elif key == "state":
                told["active"] = value.lower() == "active"
            elif key == "rate":
                told["rate"] = _rate(value)
            elif key == "link layer":
                told["layer"] = value
        if port:
            yield match[1], port, told


def _ibstatus(text: str) -> Iterator[_Told]:
    for match, pairs in _blocks(text, _STATUS):
        of = dict(pairs)
        active = "ACTIVE" in of.get("state", "")
        told = {"active": active, "rate": _rate(of.get("rate", "")), "layer": of.get("link_layer", "")}
        yield match[1], int(match[2]), told


def _netdev(text: str) -> Iterator[_Told]:
    """`ibdev2netdev`, with -v or not: "mlx5_0 port 1 ==> ib0 (Up)"; (Up) is the interface, not the port."""
    for line in text.splitlines():
        match = _NETDEV.search(line) if "==>" in line else None
        if match:
            bus = address(line.split()[0])
            yield match[1], int(match[2]), {"interface": match[3], "bus": bus, "active": match[4] == "Up"}


def _rdma_link(text: str) -> Iterator[_Told]:
    """`rdma link`: "link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1f0"."""
    for line in text.splitlines():
        match = _LINK.match(line.strip())
        if match:
            interface = re.search(r"\bnetdev (\S+)", line)
            yield match[1], int(match[2]), {
                "active": match[3] == "ACTIVE", "interface": interface[1] if interface else "",
            }  # fmt: skip
