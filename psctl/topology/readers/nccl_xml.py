"""Reads topology files of NCCL and RCCL: XML in which processors contain PCI slots, and slots contain GPUs and NICs.

The text is untrusted: it may not define entities, and at most 8 MB of it are read. A file that is cut or malformed is
read up to that point.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from msgspec.structs import replace

from psctl.topology.findings import Finding
from psctl.topology.readers.pci import address, gigatransfers, hexadecimal, lanes
from psctl.topology.readings import NcclGpu, NcclNet, NcclTopology, PciDevice

LARGEST = 8_000_000
"""Characters; a machine of 16 GPUs takes 20,000."""

DEEPEST = 32
"""Levels of elements; a GPU behind two switches stands at level 7."""

BEGIN = re.compile(r"<system\b|<cpu\s[^>]*numaid=|<pci\s[^>]*busid=")
"""Elements that no other XML has."""

_WHOLE = "save the file again, whole: NCCL_TOPO_DUMP_FILE=topo.xml"


class _Builder:
    """Collects the elements as the parser's target; the open elements are the slot and processor of each element."""

    def __init__(self) -> None:
        self.open: list[tuple[str, dict[str, str]]] = []
        self.pci: list[PciDevice] = []
        self.gpus: list[NcclGpu] = []
        self.nets: list[NcclNet] = []
        self.cpus: dict[int, str] = {}
        self.hosts: set[str] = set()

    def start(self, tag: str, of: dict[str, str]) -> None:
        """Handle the start of an element; raise ParseError if elements are nested deeper than in any machine's file."""
        if len(self.open) >= DEEPEST:
            raise ET.ParseError(f"more than {DEEPEST} levels of elements")
        slots = [_bus(attributes) for name, attributes in self.open if name == "pci"]
        numa = next((_number(attributes.get("numaid")) for name, attributes in self.open if name == "cpu"), None)
        if tag == "cpu":
            node = -1 if of.get("numaid") == "-1" else _number(of.get("numaid"))  # -1: a machine without nodes
            if node is not None:
                self.cpus[node] = of.get("vendor") or of.get("arch", "")
            self.hosts.add(of.get("host_hash", ""))
        elif tag == "pci":
            self.pci.append(_slot(of, tuple(slots), numa))
        elif tag == "gpu":
            dev = _number(of.get("dev"))
            self.gpus.append(NcclGpu(len(self.gpus) if dev is None else dev, slots[-1] if slots else ""))
        elif tag in ("nvlink", "xgmi") and self.gpus and any(name == "gpu" for name, _ in self.open):
            target = address(of.get("target", "")) or of.get("target", "").lower()
            gpu, count = self.gpus[-1], _number(of.get("count")) or 0
            if tag == "xgmi":
                self.gpus[-1] = replace(gpu, xgmis=(*gpu.xgmis, (target, count)))
            else:
                self.gpus[-1] = replace(gpu, nvlinks=(*gpu.nvlinks, (target, count, _class(of.get("tclass", "")))))
        elif tag == "net":
            speed = _number(of.get("speed"))
            rate = speed * 1e6 / 8 if speed else None  # Mbit/s
            self.nets.append(NcclNet(of.get("name", ""), rate, slots[-1] if slots else "", numa))
        self.open.append((tag, of))

    def end(self, _: str) -> None:
        """Handle the end of the innermost open element."""
        self.open.pop()

    def close(self) -> None:
        """Handle the end of the text."""

    def result(self, findings: tuple[Finding, ...]) -> NcclTopology:
        """Return the elements that were read."""
        return NcclTopology(tuple(self.pci), tuple(self.gpus), tuple(self.nets), self.cpus, findings)


def read_nccl(text: str) -> NcclTopology:
    """Read a topology file; no text raises an error.

    Returns:
        Slots, GPUs and NICs in the order of the text. Speeds of NICs are nominal bytes/s in one direction; speeds of
        slots are the GT/s and lanes that both ends support, as NCCL writes them.
    """
    if len(text) > LARGEST:
        what = f"this XML has {len(text):,} characters, more than any machine's topology"
        return _unread(what, "give a file that NCCL_TOPO_DUMP_FILE wrote")
    if re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        what = "this XML defines entities, which NCCL's files never do; it is not read"
        return _unread(what, "give a file that NCCL_TOPO_DUMP_FILE wrote")
    begin = BEGIN.search(text)
    if begin is None:
        return _unread("this XML is no topology file of NCCL", _WHOLE)
    builder = _Builder()
    problem = _feed(text[begin.start() :], builder)
    findings = [Finding(problem, _WHOLE)] if problem else []
    if len(builder.hosts) > 1:
        what = f"the topology file holds {len(builder.hosts)} hosts, which are shown as one"
        findings.append(Finding(what, "save a file on each host, with ranks of that host alone"))
    return builder.result(tuple(findings))


def _unread(what: str, cure: str) -> NcclTopology:
    return NcclTopology((), (), (), {}, (Finding(what, cure),))


def _feed(text: str, builder: _Builder) -> str:
    """Parse the text; return a description of its error, "" if there is none."""
    headless = not text.startswith("<system")
    end = text.rfind("</system>")
    whole = ("<system>" if headless else "") + (text if end < 0 else text[: end + len("</system>")])
    parser = ET.XMLParser(target=builder, encoding="utf-8")  # noqa: S314 - it defines no entity, and its size is bounded
    wrong = ""
    try:
        parser.feed(whole.encode(errors="replace"))
        parser.close()
    except ET.ParseError as error:
        wrong = f"the XML is cut or broken ({error})"
    if headless:
        return "the beginning of the topology file is missing"
    return f"{wrong}; what stands before was read" if wrong else ""


def _slot(of: dict[str, str], path: tuple[str, ...], numa: int | None) -> PciDevice:
    return PciDevice(
        address=_bus(of),
        pci_class=_class(of.get("class", "")),
        vendor=hexadecimal(of.get("vendor", "")),
        device=hexadecimal(of.get("device", "")),
        path=path,
        speed=gigatransfers(of.get("link_speed", "")),
        width=lanes(of.get("link_width", "")),
        numa=numa,
    )


def _bus(of: dict[str, str]) -> str:
    text = of.get("busid", "")
    return address(text) or text.lower()


def _class(text: str) -> int | None:
    """Return class 0x0302 of "0x030200"; where NCCL has only the base class it writes "0x03"."""
    number = hexadecimal(text)
    if number is None:
        return None
    return number >> 8 if number > 0xFF else number << 8


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,12}", text) else None
