"""Reads RDMA ports: the probe's rows of /sys/class/infiniband, `ibstat`, `ibstatus`, `ibdev2netdev`, `rdma link`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from psctl.topology.findings import Finding
from psctl.topology.readers.pci import address
from psctl.topology.readings import RdmaPort, RdmaPorts

_ROW = re.compile(r"[^\t ]+\t[0-9]{1,3}\t[^\t]*(?:b/sec[^\t]*)?\t(?:[0-9]: ?[A-Za-z_]+)?\t")
_NETDEV = re.compile(r"(\S+) (?:\([^)]*\) .*)?port ([0-9]{1,3}) (?:\([A-Z_]+\) )?==> (\S+) \(([A-Za-z]+)\)")
_LINK = re.compile(r"(?:[0-9]+/[0-9]+: |link )(?:link )?(\S+)/([0-9]{1,3}):? .*\bstate (\w+)")
_STATUS = re.compile(r"Infiniband device '([^']+)' port ([0-9]{1,3}) status:")
_ADAPTER = re.compile(r"CA '([^']+)'")


def looks_like_rdma(line: str) -> bool:
    """Return whether only one of these outputs has such a line."""
    if line.count("\t") >= 5 and _ROW.match(line):
        return True
    if any(form.match(line.strip()) for form in (_ADAPTER, _STATUS, _LINK)):
        return True
    return "==>" in line and bool(_NETDEV.search(line))


def read_rdma(text: str) -> RdmaPorts:
    """Read the ports of all RDMA devices; no output raises an error.

    Returns:
        The ports in order. Where several outputs list one port, a value that the first does not have comes from the
        others.
    """
    found: dict[tuple[str, int], RdmaPort] = {}
    for port in (*_rows(text), *_ibstat(text), *_ibstatus(text), *_netdev(text), *_rdma_link(text)):
        known = found.get((port.device, port.port), port)
        further = [name for name in port.__struct_fields__ if not getattr(known, name) and getattr(port, name)]
        found[port.device, port.port] = replace(known, **{name: getattr(port, name) for name in further})
    # The rate of a port that is down is its slowest one, which is not its nominal rate.
    ports = tuple(port if port.active else replace(port, rate=None) for port in found.values())
    findings = () if ports else (Finding("no RDMA port could be read", "save the output whole"),)
    return RdmaPorts(ports, findings)


def _rows(text: str) -> Iterator[RdmaPort]:
    """Yield the ports of the probe's rows.

    A row is device, port, rate, state, layer, PCI address, NUMA node, interface, other interfaces as "name=port".
    """
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) < 6 or not re.fullmatch(r"[0-9]{1,3}", cells[1]):
            continue
        cells += [""] * (9 - len(cells))
        yield RdmaPort(
            device=cells[0],
            port=int(cells[1]),
            rate=_rate(cells[2]),
            active="ACTIVE" in cells[3],
            layer=cells[4],
            bus=address(cells[5]),
            numa=int(cells[6]) if re.fullmatch(r"[0-9]{1,4}", cells[6]) else None,
            interface=cells[7] or _by_number(cells[8], int(cells[1])),
        )


def _by_number(pairs: str, port: int) -> str:
    """Return the port's interface of "ib0=0 ib1=1": the kernel counts interfaces from 0, ports from 1."""
    names = [(name, number) for name, _, number in (pair.partition("=") for pair in pairs.split())]
    same = [name for name, number in names if number == str(port - 1)]
    return (same or [name for name, _ in names if len(names) == 1] or [""])[0]


def _rate(text: str) -> float | None:
    """Return the nominal bytes/s of "100 Gb/sec (4X EDR)", or of "100" in ibstat."""
    match = re.match(r"([0-9]{1,5}(?:\.[0-9]+)?)(?: ?Gb/sec.*)?$", text.strip())
    return float(match[1]) * 1e9 / 8 or None if match else None


def _blocks(text: str, begin: re.Pattern[str]) -> Iterator[tuple[re.Match[str], list[tuple[str, str]]]]:
    """Yield the blocks that begin with a matching line, each with its "key: value" lines, keys in lower case."""
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


def _ibstat(text: str) -> Iterator[RdmaPort]:
    for match, pairs in _blocks(text, _ADAPTER):
        ports: dict[int, dict[str, str]] = {}
        values: dict[str, str] = {}
        for key, value in pairs:
            if number := re.fullmatch(r"port ([0-9]{1,3})", key):
                values = ports.setdefault(int(number[1]), {})
            values[key] = value
        for port, of in ports.items():
            active = of.get("state", "").lower() == "active"
            yield RdmaPort(match[1], port, _rate(of.get("rate", "")), active, of.get("link layer", ""))


def _ibstatus(text: str) -> Iterator[RdmaPort]:
    for match, pairs in _blocks(text, _STATUS):
        of = dict(pairs)
        active = "ACTIVE" in of.get("state", "")
        yield RdmaPort(match[1], int(match[2]), _rate(of.get("rate", "")), active, of.get("link_layer", ""))


def _netdev(text: str) -> Iterator[RdmaPort]:
    """Yield ports of `ibdev2netdev` (-v): "mlx5_0 port 1 ==> ib0 (Up)"; (Up) is the state of the interface."""
    for line in text.splitlines():
        match = _NETDEV.search(line) if "==>" in line else None
        if match:
            bus = address(line.split()[0])
            yield RdmaPort(match[1], int(match[2]), active=match[4] == "Up", bus=bus, interface=match[3])


def _rdma_link(text: str) -> Iterator[RdmaPort]:
    """Yield ports of `rdma link`: "link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1f0"."""
    for line in text.splitlines():
        match = _LINK.match(line.strip())
        if match:
            interface = re.search(r"\bnetdev (\S+)", line)
            name = interface[1] if interface else ""
            yield RdmaPort(match[1], int(match[2]), active=match[3] == "ACTIVE", interface=name)
