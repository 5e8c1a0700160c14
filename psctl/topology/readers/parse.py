"""Reads the answer to PROBE: text in, HostFacts out; a section that is missing or mangled leaves its facts unknown."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from psctl.topology.facts import HostFacts, Nic, NumaNode
from psctl.topology.findings import Finding
from psctl.topology.readers.gpus import read_gpus
from psctl.topology.readers.networks import default_interface, read_nics
from psctl.topology.readers.recognise import read_all
from psctl.topology.readings import FailedOutput, PciTree, Reading

BEGIN, END = "== psctl ", "== status "
"""How lines begin that open and close a section of the answer."""

TOOLS = {
    "nvidia": "nvidia-smi --query-gpu", "nvidiatopo": "nvidia-smi topo -m", "nvidiapeers": "nvidia-smi topo -p2p r",
    "nvlink": "nvidia-smi nvlink -s", "pci": "", "rdma": "", "rocm": "rocm-smi --showtopo",
    "rocmcards": "rocm-smi --showproductname",
}  # fmt: skip
"""Sections that are read as saved outputs are, and the command of each that may hang."""

WRONG_USE = 2
"""nvidia-smi's exit status when it does not know an option: an old driver, and nothing that is broken."""


class ProbeSection(NamedTuple):
    """What one part of the probe printed, and its exit status."""

    lines: list[str]  # without the blank ones
    status: int = 127
    text: str = ""  # as it was printed

    @property
    def first(self) -> str:
        """The first line, or ""."""
        return self.lines[0] if self.lines else ""


def sections(text: str) -> dict[str, ProbeSection]:
    """Split the probe's output."""
    found: dict[str, ProbeSection] = {}
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith(BEGIN):
            name, lines = line[len(BEGIN) :].strip(), []
        elif line.startswith(END) and name:
            filled = [line for line in lines if line.strip()]
            found.setdefault(name, ProbeSection(filled, _number(line[len(END) :]) or 0, "\n".join(lines)))
            name = ""
        else:
            lines.append(line)
    return found


def parse_probe(text: str) -> HostFacts:
    """Read the output of PROBE; never raises on what a host may print."""
    parts = sections(text)

    def part(name: str) -> ProbeSection:
        return parts.get(name, ProbeSection([]))

    uname = [*part("uname").lines, "", "", ""]
    memory = _table(part("memory").lines)
    total = _kilobytes(memory.get("MemTotal", ""))
    limit = min([total, *(n for n in map(_number, part("memorylimit").lines) if n and n > 0)])
    numa = _numa(part("numa").lines)
    lscpu = _table(part("lscpu").lines)
    readings = {name: read_all(parts[name].text) for name in TOOLS if name in parts and parts[name].lines}
    cards = [card for one in readings.get("pci", ()) if isinstance(one, PciTree) for card in one.devices]
    nvidia = part("nvidia")
    gpus, broken = read_gpus(nvidia.lines, nvidia.status, cards, part("gpunodes").lines)
    return HostFacts(
        hostname=uname[0].strip(),
        kernel=uname[1].strip(),
        machine=uname[2].strip(),
        cores=_number(part("cores").first) or sum(node.cores for node in numa) or 1,
        cpu=_cpu(lscpu.get("Model name", ""), part("cpuinfo").first),
        numa=numa,
        memory=limit,
        memory_available=min(limit, _kilobytes(memory.get("MemAvailable", "")) or limit),
        nics=_nics(parts),
        gpus=gpus,
        findings=tuple(dict.fromkeys((*broken, *_failures(parts, readings)))),
        disk_free=_disk(part("disk").lines),
        time=_time(part("time").first),
        default_interface=default_interface(part("route").lines),
        connected=_connected(part("connection").first),
        boot=part("boot").first.strip(),
        netns=part("netns").first.strip(),
        sockets=_number(lscpu.get("Socket(s)", "")) or 0,
        readings=tuple(one for some in readings.values() for one in some),
    )


def _failures(parts: Mapping[str, ProbeSection], readings: Mapping[str, tuple[Reading, ...]]) -> Iterator[Finding]:
    """What the tools beside the query said is wrong, and which of them hang while it answers."""
    for name in [name for name, command in TOOLS.items() if command and name != "nvidia" and name in parts]:
        if parts[name].status == 124 and parts.get("nvidia", ProbeSection([])).status != 124:
            yield Finding(f"{TOOLS[name]} did not answer within 20 s", "look in dmesg, then reboot the host")
        elif parts[name].status != WRONG_USE:
            yield from (
                found for one in readings.get(name, ()) if isinstance(one, FailedOutput) for found in one.findings
            )


def _nics(parts: dict[str, ProbeSection]) -> tuple[Nic, ...]:
    names = ("netdev", "sysnet", "iplink", "ipaddr", "fibtrie", "inet6", "route")
    return read_nics({name: parts[name].lines for name in names if name in parts})


def _cpu(name: str, cpuinfo: str) -> str:
    return re.sub(r"\s+", " ", name or cpuinfo.partition(":")[2]).strip().strip("-")


def _numa(lines: list[str]) -> tuple[NumaNode, ...]:
    """Lines "0<tab>0-15,32-47"; a node without cores is memory alone."""
    nodes = []
    for line in lines:
        index, _, cpus = line.partition("\t")
        ranges = re.findall(r"([0-9]+)(?:-([0-9]+))?", cpus)
        cores = sum(int(last or first) - int(first) + 1 for first, last in ranges)
        if index.isdecimal() and cores > 0:
            nodes.append(NumaNode(int(index), cores, cpus.strip()))
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
