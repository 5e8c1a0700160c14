"""Reads the GPUs in the outputs of nvidia-smi (`--query-gpu`, `-q`, `-L`, the table), and errors with their remedies.

Tools on broken hosts print errors on either stream, with any exit status, between the data, so every line is examined
by itself.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from psctl.topology.facts import Gpu
from psctl.topology.findings import Finding
from psctl.topology.readers.pci import address
from psctl.topology.readings import NVIDIA, GpuRow, GpuTable, PciDevice

QUERY = (
    "index", "name", "uuid", "memory.total", "driver_version", "pci.bus_id", "pcie.link.gen.current",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "mig.mode.current", "persistence_mode",
)  # fmt: skip
"""Fields of each GPU that the probe queries."""

SHORT = ("index", "name", "memory.total", "driver_version", "pci.bus_id")
"""Fields that the probe queries with old drivers: one unknown field makes the whole query fail."""

_KNOWN = {
    "index": "index", "name": "name", "gpu_name": "name", "uuid": "uuid", "gpu_uuid": "uuid",
    "memory.total": "memory", "driver_version": "driver", "pci.bus_id": "bus", "gpu_bus_id": "bus",
    "pcie.link.gen.current": "generation", "pcie.link.gen.gpucurrent": "generation",
    "pcie.link.gen.max": "generation_max", "pcie.link.gen.gpumax": "generation_max",
    "pcie.link.width.current": "width", "pcie.link.width.max": "width_max",
    "mig.mode.current": "mig", "persistence_mode": "persistence",
}  # fmt: skip
"""Field of a query -> field of GpuRow."""

_RESET = "look for Xid in dmesg, then reset the GPU or reboot the host"

_TROUBLES: tuple[tuple[str, str], ...] = (
    (r"Driver/library version mismatch",
     "the driver was updated under a running kernel module: reboot the host, or unload and load the nvidia module"),
    (r"GPU access blocked by the operating system",
     "WSL or a container hides the GPU: update the Windows driver, or start the container with its GPUs"),
    (r"Insufficient Permissions|Unable to open /dev/kfd|/dev/kfd.*Permission denied",
     "this user may not open the GPU's files (/dev/nvidia*, /dev/kfd): add it to the group that owns them"),
    (r"couldn't communicate with the NVIDIA driver|Driver Not Loaded|NVIDIA driver is not loaded",
     "load the kernel module (modprobe nvidia), or install the driver for the running kernel"),
    (r"Driver not initialized|amdgpu not found in modules|amdgpu .*not loaded|ROCk module is NOT loaded",
     "load the kernel module (modprobe amdgpu), or install the driver for the running kernel"),
    (r"Unable to determine the device handle|fallen off the bus|NVRM: Xid \(PCI:\S+: 79\b",
     "the GPU fell off the bus: look for Xid in dmesg, then reset it or power the host down and up"),
    (r"GPU is lost|Unknown Error|GPU requires reset", f"the GPU does not answer: {_RESET}"),
    (r"NVRM: Xid \(PCI:", f"the GPU or its driver failed: look up this Xid's number; {_RESET}"),
    (r"infoROM is corrupted",
     "the card's own memory for settings is damaged: power the host down and up; if this stays, replace the card"),
    (r"could not select device driver .*gpu|nvidia-container-cli: |no nvidia-container-(runtime|toolkit)",
     "the container cannot have GPUs: install the NVIDIA container toolkit and restart the container service"),
    (r"CUDA driver version is insufficient|API mismatch: the client has the version",
     "the driver is older than what runs on it, or was updated while it ran: update the driver and reboot the host"),
    (r"No devices (were|was) found|No AMD GPUs? (specified|found|detected)|No supported GPUs? ",
     "the driver runs and finds no GPU: look in dmesg and that the card is seated and powered, then reboot"),
    (r"couldn't find libnvidia-ml|libnvidia-ml\.so.*(not found|cannot open)|NVML Shared Library Not Found",
     "nvidia-smi does not find the driver's library: install the driver whole, or start the container with its GPUs"),
    (r"Failed to initialize NVML|NVML: (?!Unable to retrieve NVLink)|Unable to initialize rocm|rsmi_init",
     "the driver's library and its kernel module do not meet: restart the container, or reboot the host"),
    (r"(nvidia|rocm|amd)-smi['\"]?:? .*(not found|not recognized|No such file)|(not found|no such file .*): \S*-smi\b",
     "install the GPU's driver (it brings this command), or put the command on PATH"),
    (r"(nvidia|rocm|amd)-smi\S* .*Permission denied|permission denied: \S*-smi\b",
     "this user may not run the command: run it as another user, or add this one to its group"),
    (r"Field \".*\" is not a valid field to query|is not a valid field to query",
     "the driver is too old for one of the fields: leave it out of --query-gpu, or update the driver"),
    (r"Invalid combination of input arguments|Option \S+ is not recognized",
     "this version of the command does not have that option: update the driver"),
)  # fmt: skip
"""Patterns of error lines and their remedies; the first match counts."""

_ANY_TROUBLE = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _TROUBLES), re.IGNORECASE)

_LATER_LINE = re.compile(r"NVML library version|Failed to properly shut down NVML", re.IGNORECASE)
"""Lines that only continue the error before."""

_ON = {"enabled": True, "on": True, "disabled": False, "off": False}
_FIELD = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)(?: \[[^\]]*\])?")
_LISTED = re.compile(r"GPU ([0-9]{1,3}): (.*?) \(UUID: ([^)]*)\)")
_LOGGED = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_LOG = {
    "Product Name": "name", "GPU UUID": "uuid", "Persistence Mode": "persistence", "MIG Mode/Current": "mig",
    "PCIe Generation/Max": "generation_max", "PCIe Generation/Current": "generation",
    "Link Width/Max": "width_max", "Link Width/Current": "width", "FB Memory Usage/Total": "memory",
}  # fmt: skip
"""Key of `nvidia-smi -q`, with its heading where several headings have the key -> field of GpuRow."""

_BANNER = re.compile(r"\|\s+([0-9]{1,3})\s+(\S.*?)\s+(On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]+:[0-9A-Fa-f:.]+)")


def trouble(line: str) -> Finding | None:
    """Return the error that a line reports, with its remedy; None if it reports none."""
    line = line.strip()
    if not _ANY_TROUBLE.search(line) or _LATER_LINE.search(line):
        return None
    cure = next(cure for pattern, cure in _TROUBLES if re.search(pattern, line, re.IGNORECASE))
    return Finding(line[:200], cure)


def troubles(lines: Sequence[str]) -> tuple[Finding, ...]:
    """Return the errors that lines report, each once."""
    return tuple(dict.fromkeys(found for line in lines if (found := trouble(line)) is not None))


def is_query(line: str) -> bool:
    """Return whether a line is the header of a query, or a row of one of the probe's queries."""
    return is_header(line) or (line.count(",") >= len(SHORT) - 1 and _probe_columns(_cells(line)) is not None)


def is_header(line: str) -> bool:
    """Return whether a line is the header of a query."""
    return any(field in _KNOWN for field in _header(line) or ())


def read_query(text: str) -> GpuTable:
    """Read `nvidia-smi --query-gpu=... --format=csv`: any columns with a header, or those of the probe without one.

    Returns:
        A row for each GPU. Without an index column the rows are numbered from 0. N/A becomes None or "".
    """
    fields: Sequence[str] | None = None
    rows: list[GpuRow] = []
    findings: list[Finding] = []
    for line in text.splitlines():
        cells = _cells(line)
        if is_header(line):
            fields = _header(line)
        elif (columns := fields if fields and len(fields) == len(cells) else _probe_columns(cells)) is not None:
            values = dict(zip(columns, cells, strict=True))
            rows.append(_row(GpuRow(len(rows)), ((_KNOWN.get(field, ""), cell) for field, cell in values.items())))
            findings += _without_value(rows[-1].index, values)
        elif line.strip() and trouble(line) is None:
            findings.append(Finding(f"a line of the GPU table is cut or malformed: {line.strip()[:80]}", _AGAIN))
    if not rows and not findings:
        findings.append(Finding("the table of GPUs is empty", _AGAIN))
    return GpuTable(tuple(rows), tuple(dict.fromkeys(findings)))


_AGAIN = "save the output of nvidia-smi --query-gpu=... --format=csv whole"


def _header(line: str) -> list[str] | None:
    fields = []
    for cell in line.split(","):
        match = _FIELD.fullmatch(cell.strip())
        if match is None:
            return None
        fields.append(match[1])
    return fields


def _cells(line: str) -> list[str]:
    try:
        rows = list(csv.reader([line], skipinitialspace=True))
    except csv.Error:
        return line.split(",")
    return [cell.strip() for cell in rows[0]] if rows else []


def _probe_columns(cells: list[str]) -> Sequence[str] | None:
    """Return the columns of a row of the probe's queries, recognized by its index, memory and address; else None."""
    for columns in (QUERY, SHORT):
        if len(cells) == len(columns) and cells[0].isdecimal():
            of = dict(zip(columns, cells, strict=True))
            if address(of["pci.bus_id"]) and re.match(r"[0-9]+( MiB)?$|\[?[NU]", of["memory.total"]):
                return columns
    return None


def _row(row: GpuRow, cells: Iterable[tuple[str, str]]) -> GpuRow:
    """Return a row with the values of the cells, each given as (field of GpuRow or "", text)."""
    values = {name: _value(name, cell) for name, cell in cells if name}
    return replace(row, **{name: value for name, value in values.items() if value is not None})


def _value(name: str, cell: str) -> int | str | bool | None:
    """Return the value of a cell; None for "[N/A]", "[Not Supported]", "[Unknown Error]" and similar texts."""
    if re.fullmatch(r"\[.*\]|N/A|ERR!|", cell):
        return None
    if name in ("mig", "persistence"):
        return _ON.get(cell.lower())
    if name == "memory":
        match = re.fullmatch(r"([0-9]{1,9})(?: MiB)?", cell)
        return int(match[1]) << 20 if match else None
    if name == "bus":
        return address(cell) or None
    if name in ("name", "uuid", "driver"):
        return cell
    match = re.fullmatch(r"x?([0-9]{1,4})x?", cell)
    return int(match[1]) if match else None


def _without_value(index: int, cells: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding if a GPU returns an error in place of a value."""
    for field, cell in cells.items():
        if re.fullmatch(r"\[?(Unknown Error|GPU is lost|GPU requires reset|Insufficient Permissions)\]?|ERR!", cell):
            yield Finding(f"GPU {index} returns {cell} for {field}", f"the GPU does not answer: {_RESET}")
            return


def is_listed(line: str) -> bool:
    """Return whether a line names a GPU as `nvidia-smi -L` and `nvidia-smi nvlink -s` do."""
    return bool(_LISTED.match(line.strip()))


def read_listed(text: str) -> GpuTable:
    """Read `nvidia-smi -L`; MIG is on for a GPU with MIG devices below it."""
    rows: list[GpuRow] = []
    for line in text.splitlines():
        match = _LISTED.match(line.strip())
        if match:
            rows.append(GpuRow(int(match[1]), match[2], match[3]))
        elif rows and line.strip().startswith("MIG "):
            rows[-1] = replace(rows[-1], mig=True)
    return GpuTable(tuple(rows))


def is_banner(line: str) -> bool:
    """Return whether a line is a GPU, or the header, of the table that `nvidia-smi` prints without options."""
    return bool(_BANNER.match(line.strip())) or bool(re.match(r"\| NVIDIA-SMI ", line.strip()))


def read_banner(text: str) -> GpuTable:
    """Read the table of `nvidia-smi` without options: three lines a GPU; names may be cut there."""
    rows: list[GpuRow] = []
    broken: list[int] = []
    for line in text.splitlines():
        if "ERR!" in line and rows:
            broken.append(rows[-1].index)
        if match := _BANNER.match(line.strip()):
            rows.append(GpuRow(int(match[1]), match[2], driver=_driver(text), bus=address(match[4]),
                               persistence=_ON.get(match[3].lower())))  # fmt: skip
        elif rows and rows[-1].memory is None and (memory := re.search(r"/\s*([0-9]{1,9})MiB", line)):
            rows[-1] = replace(rows[-1], memory=int(memory[1]) << 20)
        elif rows and rows[-1].mig is None and (mig := re.search(r"\| +(Enabled|Disabled)\*? +\|$", line.strip())):
            rows[-1] = replace(rows[-1], mig=_ON[mig[1].lower()])
    findings = [Finding(f"GPU {index} shows ERR!", f"the GPU does not answer: {_RESET}") for index in broken]
    return GpuTable(tuple(rows), tuple(dict.fromkeys(findings)))


def _driver(text: str) -> str:
    match = re.search(r"Driver Version *: ([0-9.]+)", text)
    return match[1] if match else ""


def is_log(line: str) -> bool:
    """Return whether a line begins the output of `nvidia-smi -q`, or a GPU in it."""
    return bool(re.match(r"=+NVSMI LOG=+\s*$", line)) or bool(_LOGGED.match(line))


def read_log(text: str) -> GpuTable:
    """Read `nvidia-smi -q`: a GPU begins with its address; lines "key : value" follow headings without a colon."""
    buses: list[str] = []
    rows: list[dict[str, str]] = []
    heading = ""
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(" : "))
        if match := _LOGGED.match(line):
            buses.append(match[1])
            rows.append({})
        elif not colon:
            heading = key or heading
        elif rows and (name := _LOG.get(key) or _LOG.get(f"{heading}/{key}")):
            rows[-1].setdefault(name, value)
    read = (GpuRow(i, driver=_driver(text), bus=address(bus)) for i, bus in enumerate(buses))
    return GpuTable(tuple(_row(row, cells.items()) for row, cells in zip(read, rows, strict=True)))


def read_gpus(
    lines: list[str], status: int, cards: Sequence[PciDevice], nodes: list[str]
) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """Return the GPUs that nvidia-smi reports, and problems.

    Args:
        lines: nvidia-smi's output and errors.
        status: its exit status; 127: there is no nvidia-smi, 124: it timed out.
        cards: the devices on the host's PCI buses.
        nodes: the device files of GPUs under /dev.
    """
    numa = {card.address: card.numa for card in cards}
    table = read_query("\n".join(lines)) if status not in (124, 127) else GpuTable(())
    gpus = tuple(
        Gpu(row.index, row.name, row.memory or 0, row.driver, row.bus, numa.get(row.bus)) for row in table.gpus
    )
    displays = (0x0300, 0x0302)
    present = sum(card.vendor == NVIDIA and card.pci_class in displays for card in cards) or len(nodes)
    return gpus, tuple(_findings(lines, status, len(gpus), present))


def _findings(lines: list[str], status: int, answering: int, present: int) -> list[Finding]:
    found = list(troubles(lines)) if status != 127 else []
    if found:
        return found
    if status == 127:
        if present:
            what = f"{present} NVIDIA GPU{'s' if present > 1 else ''} in this host, and no nvidia-smi"
            found.append(Finding(what, "install NVIDIA's driver (nvidia-smi comes with it), or put it on PATH"))
    elif status == 124:
        found.append(Finding("nvidia-smi did not answer within 20 s", "look for Xid in dmesg, then reboot the host"))
    elif status != 0 or not answering:
        printed = lines[-1].strip()[:120] if lines and not answering else "nothing"
        if status != 0 or present:
            found.append(
                Finding(f"nvidia-smi exited with status {status} and printed: {printed}", "run nvidia-smi on the host")
            )
    return found
