"""Reads the answer to PROBE: text in, HostFacts out; a section that is missing or mangled leaves its facts unknown."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from psctl.topology.facts import HostFacts, Nic, NumaNode
from psctl.topology.gpus import read_gpus
from psctl.topology.networks import default_interface, read_nics

BEGIN, END = "== psctl ", "== status "
"""How lines begin that open and close a section of the answer."""


class Section(NamedTuple):
    """What one part of the probe printed, and its exit status."""

    lines: list[str]
    status: int = 127

    @property
    def first(self) -> str:
        """The first line, or ""."""
        return self.lines[0] if self.lines else ""


def sections(text: str) -> dict[str, Section]:
    """Split the probe's output; blank lines are left out."""
    found: dict[str, Section] = {}
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith(BEGIN):
            name, lines = line[len(BEGIN) :].strip(), []
        elif line.startswith(END) and name:
            found.setdefault(name, Section(lines, _number(line[len(END) :]) or 0))
            name = ""
        elif name and line.strip():
            lines.append(line)
    return found


def parse(text: str) -> HostFacts:
    """Read the output of PROBE; never raises on what a host may print."""
    parts = sections(text)

    def part(name: str) -> Section:
        return parts.get(name, Section([]))

    uname = [*part("uname").lines, "", "", ""]
    memory = _table(part("memory").lines)
    total = _kilobytes(memory.get("MemTotal", ""))
    limit = min([total, *(n for n in map(_number, part("memorylimit").lines) if n and n > 0)])
    numa = _numa(part("numa").lines)
    nvidia = part("nvidia")
    gpus, broken = read_gpus(nvidia.lines, nvidia.status, part("pci").lines, part("gpunodes").lines)
    return HostFacts(
        hostname=uname[0].strip(),
        kernel=uname[1].strip(),
        machine=uname[2].strip(),
        cores=_number(part("cores").first) or sum(node.cores for node in numa) or 1,
        cpu=_cpu(part("lscpu").lines, part("cpuinfo").first),
        numa=numa,
        memory=limit,
        memory_available=min(limit, _kilobytes(memory.get("MemAvailable", "")) or limit),
        nics=_nics(parts),
        gpus=gpus,
        findings=broken,
        disk_free=_disk(part("disk").lines),
        time=_time(part("time").first),
        default_interface=default_interface(part("route").lines),
        connected=_connected(part("connection").first),
        boot=part("boot").first.strip(),
    )


def _nics(parts: dict[str, Section]) -> tuple[Nic, ...]:
    names = ("netdev", "sysnet", "iplink", "ipaddr", "fibtrie", "inet6", "route")
    return read_nics({name: parts[name].lines for name in names if name in parts})


def _cpu(lscpu: list[str], cpuinfo: str) -> str:
    name = _table(lscpu).get("Model name", "")
    return re.sub(r"\s+", " ", name or cpuinfo.partition(":")[2]).strip().strip("-")


def _numa(lines: list[str]) -> tuple[NumaNode, ...]:
    """Lines "0<tab>0-15,32-47"; a node without cores is memory alone."""
    nodes = []
    for line in lines:
        index, _, cpus = line.partition("\t")
        ranges = re.findall(r"([0-9]+)(?:-([0-9]+))?", cpus)
        cores = sum(int(last or first) - int(first) + 1 for first, last in ranges)
        if index.isdecimal() and cores > 0:
            nodes.append(NumaNode(int(index), cores))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _disk(lines: list[str]) -> int | None:
    """The last line of `df -Pk`: file system, blocks of 1,024, used, available, share, where."""
    match = re.search(r"\s\d+\s+\d+\s+(\d+)\s+\d+%", lines[-1]) if lines else None
    return int(match[1]) * 1024 if match else None


def _time(line: str) -> float | None:
    """Seconds; busybox prints no nanoseconds."""
    match = re.match(r"[0-9]{9,11}(\.[0-9]+)?", line.strip())
    return float(match[0]) if match else None


def _connected(line: str) -> str:
    """SSH_CONNECTION: client's address and port, this host's address and port."""
    words = line.split()
    address = words[2].partition("%")[0].removeprefix("::ffff:") if len(words) == 4 else ""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


def _table(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _kilobytes(text: str) -> int:
    return (_number(text.removesuffix("kB")) or 0) * 1024


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
