"""Recognizes outputs by their content and reads them.

A line that only one command prints is an anchor. An anchor of another kind than the one before begins a new output; all
other lines belong to the output before them. So a file with the outputs of several commands is split into them, and
banners, prompts and errors around an output are ignored.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from psctl.topology.findings import Finding
from psctl.topology.readers import gpus, nccl_xml, pci, rdma, rocm
from psctl.topology.readers.cells import LINK_WORDS, PEER_WORDS
from psctl.topology.readers.matrix import read_matrix, read_peers
from psctl.topology.readers.nvlink import read_nvlink
from psctl.topology.readings import FailedOutput, Reading, UnknownOutput

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_HEADER = re.compile(
    r"[\s|]*(?:\[[0-9;]*m)?\s*GPU[0-9]{1,3}(?:/\S+)?(?:GPU[0-9]|[\s|]+(?:GPU|NIC|CPU|[a-z]\w*[0-9]\b)|[\s|]*$)"
)
_ROW = re.compile(r"[\s|]*GPU([0-9]{1,3})(?:/\S+)?[\s|]+(?!GPU|NIC|CPU)(?:[A-Z]{1,4}[0-9]{0,2}|N/A)(?:[\s|]|$)")
_LINK = re.compile(r"\s*Link [0-9]{1,2}:|NVML: Unable to retrieve NVLink")
_PROMPT = re.compile(
    r"\s*(?:\S.{0,80}[$#>%] ?|[!+$#>%=*-]+ ?)?(?:sudo )?(?:/\S*/)?(?:nvidia-smi|rocm-smi|amd-smi|lspci|ibstat|ibstatus|"
    r"ibdev2netdev|rdma|cat|ls|hostname|date)(?: -?[\w-]\S*){0,8}[\s=*#:-]*$|== (?:psctl|status) "
)
_QUOTE = re.compile(r"[>#;]+|//+|(?!\S*-smi:)[a-zA-Z][\w.-]*:(?= |\t|$)")
_WITHIN = {"rocm": re.compile(r"\s*GPU[0-9]"), "amd": re.compile(r"\s*[0-9a-f]{4}:[0-9a-f]{2}:")}
"""Lines of an output's own that would otherwise be anchors of another output."""

_PEER_LEGEND = re.compile(r"\s*(?:OK|CNS|GNS|TNS|NS|DR)\s*=\s")
_LINK_LEGEND = re.compile(r"\s*(?:SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*=\s")
LONGEST = 20_000
"""Characters of one line; no output has longer lines, which are not examined."""

MOST = 64
"""Outputs that are read of one text."""

MOST_LINES = 2048
"""Lines of one matrix, including lines that a terminal broke; the time to read it grows with their square."""


class _OutputLines(NamedTuple):
    """The lines of one output. `seen` holds the anchors that one output has only once, such as a GPU's line."""

    kind: str
    lines: list[str]
    seen: set[str]


def decode(data: bytes) -> str:
    """Return the text of a saved output; no bytes raise an error.

    The encoding is UTF-8 or UTF-16 (which ">" in PowerShell writes), with or without a byte order mark, else Latin-1.
    Line ends become "\\n".
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16", errors="replace")
    elif _every_second(data, 1):
        text = data.decode("utf-16-le", errors="replace")
    elif _every_second(data, 0):
        text = data.decode("utf-16-be", errors="replace")
    else:
        text = _eight_bits(data)
    return re.sub(r"\r+\n|\r", "\n", text.replace("\ufeff", "").replace("\0", ""))


def _every_second(data: bytes, first: int) -> bool:
    """Return whether most of every second byte are 0, as in ASCII text in UTF-16 without a byte order mark."""
    some = data[:2000]
    return len(some) > 3 and some[first::2].count(0) > len(some) * 0.4


def _eight_bits(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data"  # in the middle of a letter
        return data.decode("utf-8-sig", errors="ignore") if cut else data.decode("latin-1")


def read_all(text: str) -> tuple[Reading, ...]:
    """Read a text with any number of outputs; no text raises an error.

    Returns:
        The readings in the order of the outputs, then a FailedOutput with all error lines; an UnknownOutput if the text
        has neither.
    """
    text = _ANSI.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = "\n".join(_unquoted(text.split("\n")))
    found: list[Reading] = []
    rest = text
    while (xml := nccl_xml.BEGIN.search(rest)) and len(found) < MOST:
        begin, end = _xml_ends(rest, xml.start())
        found.append(nccl_xml.read_nccl(rest[begin:end]))
        rest = f"{rest[:begin]}\n{rest[end:]}"
    parts, errors = _parts(rest.split("\n"))
    found += [reading for part in parts[: MOST - len(found)] for reading in _READERS[part.kind]("\n".join(part.lines))]
    findings = gpus.troubles(errors)
    if xml or len(parts) > MOST:
        what = f"the text holds more than {MOST} outputs; the rest was not read"
        findings = (*findings, Finding(what, "save the outputs of each host in a file of their own"))
    if findings:
        found.append(FailedOutput(findings))
    return tuple(found) or (UnknownOutput(next((line.strip() for line in text.split("\n") if line.strip()), "")),)


def _unquoted(lines: list[str]) -> list[str]:
    """Remove a prefix that all lines have: "> " of a mail, "# " of a comment, "node7: " of a parallel shell."""
    filled = [line for line in lines if line.strip()]
    match = _QUOTE.match(filled[0]) if len(filled) > 1 else None
    if match is None or not all(line.startswith(match[0].rstrip()) for line in filled):
        return lines
    return [re.sub(rf"{re.escape(match[0].rstrip())} ?", "", line, count=1) for line in lines]


def _xml_ends(text: str, begin: int) -> tuple[int, int]:
    """Return where the XML document around an element begins and ends; at the end of the text if it is cut."""
    head = re.search(r"(?:<\?xml|<!)[^\0]*\Z", text[:begin])
    end = text.find("</system>", begin)
    return (head.start() if head else begin), (end + len("</system>") if end >= 0 else len(text))


def _parts(lines: list[str]) -> tuple[list[_OutputLines], list[str]]:
    """Return the outputs, split at their anchors, and the lines that report an error."""
    parts: list[_OutputLines] = []
    errors: list[str] = []
    current: _OutputLines | None = None
    for line in lines:
        within = current.kind if current else ""
        if 0 < len(line.strip()) <= LONGEST and _is_error(line, within):
            errors.append(line)
            continue
        kind, once = _anchor(line, within)
        if kind == "prompt":
            current = None
            continue
        if kind and (current is None or kind != within or (once and once in current.seen)):
            current = _OutputLines(kind, [], set())
            parts.append(current)
            if len(parts) > MOST:
                break
        if current is None:
            continue
        current.lines.append(line)
        current.seen.add(_seen(kind, once))
        if kind == "rocm" and rocm.ends_rocm(line):
            current = None
    return parts, errors


def _is_error(line: str, within: str) -> bool:
    """Return whether a line reports an error; cells of a query and details of lspci may contain the same words."""
    if within == "query" and "," in line and re.search(r"\[[A-Z]|ERR!", line):
        return False
    return not (within.startswith("pci") and line[:1] in " \t") and gpus.trouble(line) is not None


def _seen(kind: str, once: str) -> str:
    """Return what may not occur again in this output; a matrix's header may, until a row follows it."""
    if kind == "matrix":
        return "" if once else "header"
    return once


def _anchor(line: str, within: str) -> tuple[str, str]:
    """Return the only kind of output that has such a line, else ""; and the part that one output has only once."""
    if not line.strip() or len(line) > LONGEST:
        return "", ""
    tool, title = rocm.form(line)
    if tool:
        return tool, title
    if within in _WITHIN and _WITHIN[within].match(line):
        return "", ""
    if gpus.is_listed(line):
        return "listed", line.strip()
    if _LINK.match(line):
        return "listed", ""
    if _HEADER.match(line):
        first = re.search(r"GPU0(?![0-9])", line) and len(line.split()) > 1
        return "matrix", "header" if first else "more"
    if _ROW.match(line):
        return "matrix", ""
    if gpus.is_query(line):
        return "query", "header" if gpus.is_header(line) else ""
    if gpus.is_log(line):
        return "log", line.strip()
    if gpus.is_banner(line):
        return "banner", "head" if "NVIDIA-SMI" in line else ""
    if form := pci.form(line):
        return form, ""
    if rdma.looks_like_rdma(line):
        return "rdma", ""
    return ("prompt", "") if _PROMPT.match(line) else ("", "")


def _matrix(text: str) -> Iterator[Reading]:
    """Read a matrix of link types or of peer codes, by the majority of its cells, else by its legend."""
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        what = f"a matrix of {len(lines):,} lines is not read; at most {MOST_LINES:,} are"
        yield FailedOutput((Finding(what, "save the output of one host"),))
        return
    words = [word for line in lines if _ROW.match(line) for word in line.split()[1:]]
    peers, links = (sum(bool(form.fullmatch(word)) for word in words) for form in (PEER_WORDS, LINK_WORDS))
    if peers == links:
        peers, links = (sum(bool(form.match(line)) for line in lines) for form in (_PEER_LEGEND, _LINK_LEGEND))
    yield read_peers(text) if peers > links else read_matrix(text)


def _listed(text: str) -> Iterator[Reading]:
    yield read_nvlink(text) if any(_LINK.match(line) for line in text.split("\n")) else gpus.read_listed(text)


def _rocm(text: str) -> Iterator[Reading]:
    cards, topology = rocm.read_cards(text), rocm.read_rocm(text)
    if topology.devices or not cards.gpus:
        yield topology
    if cards.gpus:
        yield cards


def _one(reader: Callable[[str], Reading]) -> Callable[[str], Iterator[Reading]]:
    return lambda text: iter((reader(text),))


_READERS: dict[str, Callable[[str], Iterator[Reading]]] = {
    "matrix": _matrix, "listed": _listed, "rocm": _rocm, "amd": _rocm, "query": _one(gpus.read_query),
    "banner": _one(gpus.read_banner), "log": _one(gpus.read_log), "pci-rows": _one(pci.read_pci),
    "pci-tree": _one(pci.read_pci), "pci-list": _one(pci.read_pci), "rdma": _one(rdma.read_rdma),
}  # fmt: skip
