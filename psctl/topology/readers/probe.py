"""The probe: a fixed shell script that runs on each host, and the reader of its output.

The script is POSIX sh and contains no input from users. It needs no root, no systemd and no tool beyond a shell and
coreutils: the section of a missing tool is empty, and other sections replace it (`ip` and /proc/net; lscpu and
/proc/cpuinfo). Interfaces are read from /proc/net/dev, which belongs to the caller's network namespace; /sys may show
another namespace. A section begins with a line "== psctl NAME" and ends with "== status N", the exit status of its last
command.

/sys is read by the shell's `read`: a process for each file would take a second on a host with 300 PCI devices. The
vendors' tools take up to 2 s each, so they run at the same time, as a pipeline in which every stage first runs its own
tool and then copies the output of the stages before it. The script creates no file.

The reader raises no error on any output: facts of a section that is missing or malformed stay unknown.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from psctl.topology.facts import HostFacts, NumaNode
from psctl.topology.findings import Finding
from psctl.topology.readers.gpus import QUERY, SHORT, read_gpus
from psctl.topology.readers.networks import default_interface, read_nics
from psctl.topology.readers.recognise import read_all
from psctl.topology.readings import FailedOutput, PciTree, Reading

_BASE = r"""
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib:/usr/local/nvidia/bin:/opt/rocm/bin"
export PATH
tab=$(printf '\t')
have() { command -v "$1" >/dev/null 2>&1; }
begin() { printf '\n== psctl %s\n' "$1"; }
end() { printf '\n== status %s\n' "$?"; }
word() { word=; { IFS= read -r word <"$1"; } 2>/dev/null; }
last() { link=$(readlink "$1" 2>/dev/null) && printf '%s' "${link##*/}"; }
patient() { if have timeout; then timeout 20 "$@"; else "$@"; fi; }

begin uname; uname -m; end
begin time; date +%s.%N; end
begin connection; printf '%s\n' "${SSH_CONNECTION:-}"; end
begin boot; cat /proc/sys/kernel/random/boot_id 2>/dev/null; end
begin netns; readlink /proc/self/ns/net 2>/dev/null; end
begin cores; { nproc || getconf _NPROCESSORS_ONLN; } 2>/dev/null; end
begin cpuinfo; grep -m 1 -E '^(model name|Model|Hardware|cpu model)[[:space:]]*:' /proc/cpuinfo 2>/dev/null; end
begin lscpu; have lscpu && lscpu 2>/dev/null; end
begin numa
for node in /sys/devices/system/node/node[0-9]*; do
  word "$node/cpulist"; [ -n "$word" ] && printf '%s\t%s\n' "${node##*/node}" "$word"
done; end
begin memory; cat /proc/meminfo 2>/dev/null; end
begin memorylimit
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; end
begin netdev; cat /proc/net/dev 2>/dev/null; end
begin sysnet
for path in /sys/class/net/*; do
  [ -e "$path/mtu" ] || continue
  kind=virtual; driver=; [ -e "$path/device" ] && kind=physical && driver=$(last "$path/device/driver")
  [ -e "$path/bridge" ] && kind=bridge
  row=${path##*/}
  for name in operstate mtu speed; do word "$path/$name"; row="$row$tab$word"; done
  word "$path/device/numa_node"
  printf '%s\t%s\t%s\t%s\n' "$row" "$driver" "$kind" "$word"
done; end
begin iplink; have ip && ip -o link show 2>/dev/null; end
begin ipaddr; have ip && ip -o addr show 2>/dev/null; end
begin fibtrie; cat /proc/net/fib_trie 2>/dev/null; end
begin inet6; cat /proc/net/if_inet6 2>/dev/null; end
begin route; cat /proc/net/route 2>/dev/null; end
begin gpunodes; ls -d /dev/nvidia[0-9]* 2>/dev/null; end
"""

_SYS = r"""
slot() {
  row=${1##*/}
  for name in class vendor device numa_node current_link_speed max_link_speed current_link_width max_link_width; do
    word "$1/$name"; row="$row$tab$word"
  done
  printf '%s\t%s\n' "$row" "$1"
}
begin pci
( told=' '
for path in /sys/bus/pci/devices/*; do
  word "$path/class"
  case "$word" in
    0x0300*|0x0302*|0x0380*|0x12*|0x02*) ;;
    0x0680*) word "$path/vendor"; [ "$word" = 0x10de ] || continue ;;
    *) continue ;;
  esac
  if cd -P "$path" 2>/dev/null; then above=$PWD; else above=$path; fi
  slot "$above"
  while above=${above%/*}; do
    case "${above##*/}" in [0-9a-f]*:[0-9a-f][0-9a-f]:*.[0-7]) ;; *) break ;; esac
    case "$told" in *" $above "*) break ;; esac
    told="$told$above "; slot "$above"
  done
done ); end
begin rdma
( for path in /sys/class/infiniband/*/ports/*; do
  [ -e "$path/state" ] || continue
  device=${path%/ports/*}
  row="${device##*/}$tab${path##*/}"
  for name in rate state link_layer; do word "$path/$name"; row="$row$tab$word"; done
  word "$path/gid_attrs/ndevs/0"; shown=$word; nets=
  for net in "$device"/device/net/*; do
    [ -e "$net" ] || continue
    word "$net/dev_port"; nets="$nets ${net##*/}=$word"
  done
  word "$device/device/numa_node"; bus=
  cd -P "$device/device" 2>/dev/null && bus=${PWD##*/}
  printf '%s\t%s\t%s\t%s\t%s\n' "$row" "$bus" "$word" "$shown" "$nets"
done ); end
"""

_TOOLS = r"""
say() { name=$1; shift; said=$("$@" </dev/null 2>&1); status=$?; tell; }
also() { name=$1; shift; said=$(patient "$@" </dev/null 2>&1); status=$?; cat; tell; }
tell() { begin "$name"; printf '%s\n' "$said"; printf '\n== status %s\n' "$status"; }
query() {
  answer=$(patient nvidia-smi --query-gpu={QUERY} --format=csv 2>&1); status=$?
  case "$answer" in
    *'valid field'*) patient nvidia-smi --query-gpu={SHORT} --format=csv 2>&1 ;;
    *) printf '%s\n' "$answer"; return "$status" ;;
  esac
}
if have nvidia-smi; then
  say nvidia query | also nvidiatopo nvidia-smi topo -m | also nvidiapeers nvidia-smi topo -p2p r |
    also nvlink nvidia-smi nvlink -s
else begin nvidia; (exit 127); end; fi
if have rocm-smi; then
  say rocm patient rocm-smi --showtopo | also rocmcards rocm-smi --showproductname --showbus --showmeminfo vram
elif have amd-smi; then say rocm patient amd-smi topology; fi
"""

PROBE = _BASE + _SYS + _TOOLS.replace("{QUERY}", ",".join(QUERY)).replace("{SHORT}", ",".join(SHORT))
"""The script, for the standard input of `sh` or as the argument of `sh -c`; it takes up to 20 s on some hosts."""

BEGIN, END = "== psctl ", "== status "
"""Prefixes of the lines that open and close a section of the output."""

TOOLS = {
    "nvidia": "nvidia-smi --query-gpu", "nvidiatopo": "nvidia-smi topo -m", "nvidiapeers": "nvidia-smi topo -p2p r",
    "nvlink": "nvidia-smi nvlink -s", "pci": "", "rdma": "", "rocm": "rocm-smi --showtopo",
    "rocmcards": "rocm-smi --showproductname",
}  # fmt: skip
"""Sections that are read like saved outputs, with the command of each that may hang."""

WRONG_USE = 2
"""nvidia-smi's exit status for an unknown option, which means an old driver and no fault."""


class ProbeSection(NamedTuple):
    """The output of one section of the probe, and its exit status."""

    lines: list[str]  # without blank lines
    status: int = 127
    text: str = ""  # the unchanged output

    @property
    def first(self) -> str:
        """The first line, or ""."""
        return self.lines[0] if self.lines else ""


def sections(text: str) -> dict[str, ProbeSection]:
    """Return the sections of the probe's output by name."""
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
    """Return the facts in the output of PROBE; no output raises an error."""
    parts = sections(text)

    def part(name: str) -> ProbeSection:
        return parts.get(name, ProbeSection([]))

    machine = part("uname").lines[-1:] or [""]  # the last line: `uname -n` and `-r` stand first in older outputs
    total = (_number(_table(part("memory").lines).get("MemTotal", "").removesuffix("kB")) or 0) * 1024
    limit = min([total, *(n for n in map(_number, part("memorylimit").lines) if n and n > 0)])
    numa = _numa(part("numa").lines)
    lscpu = _table(part("lscpu").lines)
    readings = {name: read_all(parts[name].text) for name in TOOLS if name in parts and parts[name].lines}
    cards = [card for one in readings.get("pci", ()) if isinstance(one, PciTree) for card in one.devices]
    nvidia = part("nvidia")
    gpus, broken = read_gpus(nvidia.lines, nvidia.status, cards, part("gpunodes").lines)
    return HostFacts(
        machine=machine[0].strip(),
        cores=_number(part("cores").first) or sum(node.cores for node in numa) or 1,
        cpu=_cpu(lscpu.get("Model name", ""), part("cpuinfo").first),
        numa=numa,
        memory=limit,
        nics=read_nics({name: section.lines for name, section in parts.items()}),
        gpus=gpus,
        findings=tuple(dict.fromkeys((*broken, *_failures(parts, readings)))),
        time=_time(part("time").first),
        default_interface=default_interface(part("route").lines),
        connected=_connected(part("connection").first),
        boot=part("boot").first.strip(),
        netns=part("netns").first.strip(),
        sockets=_number(lscpu.get("Socket(s)", "")) or 0,
        readings=tuple(one for some in readings.values() for one in some),
    )


def _failures(parts: Mapping[str, ProbeSection], readings: Mapping[str, tuple[Reading, ...]]) -> Iterator[Finding]:
    """Yield the errors of all tools but the query, and the tools that hang although the query succeeds."""
    for name in [name for name, command in TOOLS.items() if command and name != "nvidia" and name in parts]:
        if parts[name].status == 124 and parts.get("nvidia", ProbeSection([])).status != 124:
            yield Finding(f"{TOOLS[name]} did not answer within 20 s", "look in dmesg, then reboot the host")
        elif parts[name].status != WRONG_USE:
            yield from (
                found for one in readings.get(name, ()) if isinstance(one, FailedOutput) for found in one.findings
            )


def _cpu(name: str, cpuinfo: str) -> str:
    return re.sub(r"\s+", " ", name or cpuinfo.partition(":")[2]).strip().strip("-")


def _numa(lines: list[str]) -> tuple[NumaNode, ...]:
    """Return the nodes of lines "0<tab>0-15,32-47", without nodes that have memory and no cores."""
    nodes = []
    for line in lines:
        index, _, cpus = line.partition("\t")
        ranges = re.findall(r"([0-9]+)(?:-([0-9]+))?", cpus)
        cores = sum(int(last or first) - int(first) + 1 for first, last in ranges)
        if index.isdecimal() and cores > 0:
            nodes.append(NumaNode(int(index), cores, cpus.strip()))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _time(line: str) -> float | None:
    """Return seconds since the epoch; busybox prints no nanoseconds."""
    match = re.match(r"[0-9]{9,11}(\.[0-9]+)?", line.strip())
    return float(match[0]) if match else None


def _connected(line: str) -> str:
    """Return this host's address in SSH_CONNECTION: client's address and port, this host's address and port."""
    words = line.split()
    address = words[2].partition("%")[0].removeprefix("::ffff:") if len(words) == 4 else ""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


def _table(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
