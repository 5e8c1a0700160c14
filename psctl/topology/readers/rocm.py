"""Reads `rocm-smi --showtopo` and `amd-smi topology`: one table a property, over all pairs of GPUs.

The two differ in their titles ("Link Type between two GPUs" between rulers, "LINK TYPE TABLE:") and in the names of the
rows (GPU0, 0000:0c:00.0). In both, the terminal may wrap a row, even within a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from psctl.topology.findings import Finding
from psctl.topology.readers.pci import address
from psctl.topology.readings import GpuRow, GpuTable, RocmTopology

_TITLES = (
    ("weight", r"[=*-]* *Weight between two \w+ *[=*-]*|WEIGHT TABLE:"),
    ("hops", r"[=*-]* *Hops between two \w+ *[=*-]*|HOPS TABLE:"),
    ("type", r"[=*-]* *Link Type between two \w+ *[=*-]*|LINK TYPE TABLE:"),
    ("access", r"[=*-]* *Link accessibility between two \w+ *[=*-]*|ACCESS TABLE:"),
    ("bandwidth", r"[=*-]* *Bandwidth(?: between two \w+)? *[=*-]+|NUMA BW TABLE:"),
    ("numa", r"[=*-]* *Numa Nodes *[=*-]*"),
    ("other", r"[=*-]+ [A-Za-z].* [=*-]+|[A-Z][A-Z -]+ TABLE:|Legend:"),
)
_TITLE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _TITLES))
_END = re.compile(r"=+ *End of ROCm SMI Log *=+")
_GPU = re.compile(r"GPU[0-9]{1,3}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_ABOUT = re.compile(r"GPU ?\[?([0-9]{1,3})\]?\s*:\s*(.+?)\s*:\s*(.*)")
_AGAIN = "save the output of rocm-smi --showtopo whole"


def form(line: str) -> tuple[str, str]:
    """Return the only tool that prints such a line ("rocm", "amd" or ""), and the line's title, which occurs once."""
    line = line.strip()
    if re.fullmatch(r"=+ *(ROCm System Management Interface|.*ROCm SMI Log) *=+", line):
        return "rocm", line.strip("= ")
    match = _TITLE.fullmatch(line)
    if match and match.lastgroup != "other":
        return ("amd" if line.endswith(":") else "rocm"), match.lastgroup or ""
    return ("rocm", "") if re.match(r"GPU\[[0-9]{1,3}\]\s*:", line) else ("", "")


def ends_rocm(line: str) -> bool:
    """Return whether rocm-smi ends its output with this line."""
    return bool(_END.fullmatch(line.strip()))


def read_rocm(text: str) -> RocmTopology:
    """Read the tables of a topology; no output raises an error.

    Returns:
        The GPUs in the order of the columns, as GPU0 ..., and the tables; the table of a missing section is empty.
    """
    sections = _sections(text)
    findings: list[Finding] = []
    names: dict[str, str] = {}
    tables: dict[str, dict[tuple[str, str], str]] = {}
    for title in ("weight", "hops", "type", "access", "bandwidth"):
        columns, cells, lacking = _table(sections.get(title, []))
        for column in columns:
            names.setdefault(column, column if column.startswith("GPU") else f"GPU{len(names)}")
        tables[title] = {(names[a], names[b]): word for (a, b), word in cells.items() if a in names and b in names}
        findings += [Finding(f"the table of {_WORDS[title]} {what}", _AGAIN) for what in lacking]
    types = {pair: word for pair, word in tables["type"].items() if pair[0] != pair[1] and word != "N/A"}
    numa = dict(_numa(text.splitlines()))
    devices = tuple(names.values()) or tuple(numa)
    if not types and len(devices) > 1:
        findings.append(Finding("there is no table of link types: the links between the GPUs are unknown", _AGAIN))
    return RocmTopology(
        devices=devices,
        types=types,
        hops={
            pair: int(word)
            for pair, word in tables["hops"].items()
            if pair[0] != pair[1] and re.fullmatch("[0-9]{1,6}", word)
        },
        numa=numa,
        bandwidths=dict(_bandwidths(tables["bandwidth"])),
        buses={name: address(bus) for bus, name in names.items() if address(bus)},
        findings=(*findings, *_barred(tables["access"])),
    )


_WORDS = {
    "weight": "weights", "hops": "hops", "type": "link types", "access": "accesses", "bandwidth": "bandwidths",
}  # fmt: skip


def read_cards(text: str) -> GpuTable:
    """Read names, addresses and memory from `rocm-smi --showproductname --showbus --showmeminfo vram`."""
    rows: dict[int, GpuRow] = {}
    for match in filter(None, map(_ABOUT.match, map(str.strip, text.splitlines()))):
        index, key, value = int(match[1]), match[2].strip().lower(), match[3].strip()
        row = rows.get(index, GpuRow(index))
        if key in ("card series", "device name") and value and value != "N/A":
            rows[index] = replace(row, name=row.name or value)
        elif key == "pci bus":
            rows[index] = replace(row, bus=address(value))
        elif key == "vram total memory (b)" and re.fullmatch(r"[0-9]{1,15}", value):
            rows[index] = replace(row, memory=int(value))
    return GpuTable(tuple(row for _, row in sorted(rows.items())))


def _sections(text: str) -> dict[str, list[str]]:
    """Return the lines under each title; of several sections with one title, the first."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        match = _TITLE.fullmatch(line.strip())
        if match or _END.fullmatch(line.strip()):
            lines = []
            if match:
                found.setdefault(match.lastgroup or "", lines)
        elif line.strip():
            lines.append(line)
    return found


def _table(lines: list[str]) -> tuple[list[str], dict[tuple[str, str], str], list[str]]:
    """Return columns, cells and errors. The columns are all GPUs before the first that occurs a second time."""
    columns: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    wrong: list[str] = []
    rows: dict[str, list[str]] = {}
    row: list[str] | None = None
    for token in " ".join(_unwrapped(lines)).split():
        if _GPU.fullmatch(token):
            if row is None and token not in columns:
                columns.append(token)
            else:
                row = rows.setdefault(token, [])
        elif row is not None:
            row.append(token)
    for name, words in rows.items():
        if len(words) != len(columns) or name not in columns:
            wrong.append(f"is cut or mangled in the row of {name}")
        cells |= {(name, column): word for column, word in zip(columns, words, strict=False) if name in columns}
    wrong += [f"lacks the row of {name}" for name in columns if name not in rows]
    return columns, cells, wrong


def _unwrapped(lines: list[str]) -> list[str]:
    """Return the rows without the terminal's line breaks: a line that begins with no GPU continues the line before."""
    lines = [line for line in lines if not re.match(r"\s*(GPU\[|WARNING|ERROR)", line)]
    width = max((len(line) for line in lines), default=0)
    found: list[str] = []
    for line in lines:
        broken = found and not line.startswith(" ") and not re.match(r"\s*(GPU[0-9]|[0-9a-f]{4}:)", line)
        if broken and len(found[-1]) % width == 0:
            found[-1] += line
        else:
            found.append(line)
    return found


def _bandwidths(table: dict[tuple[str, str], str]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the maximum of each "50000-50000" (minimum and maximum in MB/s)."""
    for pair, word in table.items():
        match = re.fullmatch(r"[0-9]{1,7}-([0-9]{1,7})", word)
        if match and int(match[1]) and pair[0] != pair[1]:
            yield pair, int(match[1]) * 1e6


def _barred(table: dict[tuple[str, str], str]) -> Iterator[Finding]:
    pairs = [pair for pair, word in table.items() if pair[0] < pair[1] and word in ("False", "DISABLED")]
    if pairs:
        some = ", ".join(f"{a} and {b}" for a, b in pairs[:3]) + (" and others" if len(pairs) > 3 else "")
        cure = "enable large BARs and disable the IOMMU (or set iommu=pt), then reboot the host"
        yield Finding(f"{some} cannot reach each other's memory directly", cure)


def _numa(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield each GPU and its NUMA node: "GPU[0]   : (Topology) Numa Node: 0"; -1 stands for none."""
    for line in lines:
        match = re.match(r"\s*GPU ?\[?([0-9]{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*([0-9]{1,4})\s*$", line)
        if match:
            yield f"GPU{match[1]}", int(match[2])
