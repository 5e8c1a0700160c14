"""Reads the matrices of nvidia-smi.

`topo -m` has the link between each two devices and the processors near each; `topo -p2p`, whether each GPU can access
the memory of each other, and why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from psctl.topology.findings import Finding
from psctl.topology.readers.cells import LINK_WORDS, NOT_SAID, PEER_WORDS, clean, is_tail, ranges, unglue_node
from psctl.topology.readers.column_alignment import AGAIN, AlignedTable, align
from psctl.topology.readers.text_tables import TextTable, tables
from psctl.topology.readings import Affinity, Matrix, PeerMatrix

_MEANING = re.compile(r"(?:(?<=\s)|^)([A-Z][A-Z0-9]{0,5}#?)\s*= (?=\S)")
_NIC = re.compile(r"(?<!\S)(NIC\d+)\s*:\s*([\w.:-]+)")


def read_matrix(text: str) -> Matrix:
    """Return the matrix in the output of `nvidia-smi topo -m`; one without devices where the text has none.

    Words stand as they were printed, those that are not known too. What is missing, moved or cut is left out, and the
    findings say so. Where the text holds several matrices the first counts.
    """
    cleaned = clean(text)
    found = [table for table in tables(cleaned, LINK_WORDS) if table.rows and _is_of_links(table)]
    if not found:
        return _header_only(cleaned)
    table = found[0]
    grid = align(table, LINK_WORDS)
    findings = grid.findings
    affinity = _affinity(grid, table.tails, findings)
    legend, meanings = _legend(table.after, _ends_open(cleaned), findings)
    if len(found) > 1:
        what = f"the text holds {len(found)} matrices; the first of them is read"
        findings.append(Finding(what, "save the output of each machine in a file of its own"))
    return Matrix(grid.devices, grid.words, affinity, legend, meanings, tuple(findings))


def read_peers(text: str) -> PeerMatrix:
    """Return the matrix in the output of `nvidia-smi topo -p2p r` (or w, n, a, p); else one without devices.

    The words stand as they were printed; what is missing, moved or cut is left out and said in the findings.
    """
    for table in tables(clean(text), PEER_WORDS):
        if table.rows and _is_of_peers(table):
            grid = align(table, PEER_WORDS)
            return PeerMatrix(grid.devices, grid.words, tuple(grid.findings))
    return PeerMatrix((), {})


def _ends_open(text: str) -> bool:
    return not text.endswith("\n")


def _header_only(cleaned: str) -> Matrix:
    """Return the matrix of a text that ends behind the header; a last name without anything behind it may be cut."""
    for table in tables(cleaned, LINK_WORDS):
        if not table.rows and table.tails and table.devices:
            what = "the matrix has a header and no rows; no link is known"
            return Matrix(table.devices, {}, findings=(Finding(what, AGAIN),))
    return Matrix((), {})


def _is_of_links(table: TextTable) -> bool:
    """Return whether a table's rows are of links, not of peers: some word besides X is one, or there is only X."""
    if not table.has_cross() and not table.tails:
        return False
    words = table.words()
    peers = table.of_peers() or any(map(PEER_WORDS.fullmatch, words))
    return bool(table.tails) or any(map(LINK_WORDS.match, words)) or not peers


def _is_of_peers(table: TextTable) -> bool:
    """Whether the table has no titles, as that of links does, and a word of peers, or X alone and their legend."""
    words = table.words()
    ours = any(map(PEER_WORDS.match, words)) or (not words and table.of_peers())
    return not table.tails and table.has_cross() and ours


def _affinity(grid: AlignedTable, titles: Sequence[str], findings: list[Finding]) -> dict[str, Affinity]:
    """Return what stands behind each row's words, by the header's titles.

    A row of less values than others have has lost one, or two of them stick together: which is it must be certain.
    """
    counts = {label: {len(_values(tokens)) for tokens in ways} for label, ways in grid.tails.items()}
    told = [min(count) for label, count in counts.items() if label != grid.open_end]
    most = max((count for count in told if count <= len(titles)), default=0)
    certain = {
        label: _titled(ways[0], titles)
        for label, ways in grid.tails.items()
        if len(ways) == 1 and counts[label] in ({most}, {len(titles)}) and most and label != grid.open_end
    }
    found: dict[str, Affinity] = {}
    for label, ways in grid.tails.items():
        if not titles or counts[label] == {0}:
            continue
        if label == grid.open_end:
            value: Affinity | None = _of_end(label, ways[0], titles, certain, findings)
        else:
            value = certain.get(label) or _resolved(ways, titles, certain)
        if value is None:
            what = f"which processors {label} is near cannot be told: its values are not whole, or two stick together"
            findings.append(Finding(what, AGAIN))
        elif value != Affinity():
            found[label] = value
    return found


def _of_end(
    label: str, tokens: Sequence[str], titles: Sequence[str], certain: dict[str, Affinity], findings: list[Finding]
) -> Affinity:
    """Return the values of a row that the text ends in, without the last one where that may be cut."""
    values = _values(tokens)[: len(titles)]
    value = _titled(values, titles)
    if value in certain.values() or (len(values) == len(titles) and NOT_SAID.fullmatch(values[-1])):
        return value
    what = f"the text ends without a line feed in the row of {label}; its last value may be cut and is left out"
    findings.append(Finding(what, AGAIN))
    return Affinity(**dict(zip(titles, values[:-1], strict=False)))


def _values(tokens: Iterable[str]) -> list[str]:
    """Return the values that a row ends in, without what else stands behind them."""
    values: list[str] = []
    for token in tokens:
        if not is_tail(token):
            break
        values.append(token)
    return values


def _titled(tokens: Sequence[str], titles: Sequence[str]) -> Affinity:
    """Return the values under their titles.

    Where there are less values than titles, N/A at the end belongs to the last title, which always has a value; the
    others fill from the left.
    """
    values = _values(tokens)
    named: dict[str, str] = {}
    rest = list(titles)
    if len(values) < len(titles) and values and NOT_SAID.fullmatch(values[-1]):
        named[rest.pop()] = values.pop()
    named |= dict(zip(rest, values, strict=False))
    return Affinity(**named)


def _resolved(ways: list[list[str]], titles: Sequence[str], certain: dict[str, Affinity]) -> Affinity | None:
    """Return the one reading that other rows bear out, or that alone makes sense; None when there are several."""
    known = set(certain.values())
    readings = {_titled(tokens, titles) for tokens in ways if len(_values(tokens)) == len(titles)}
    if len(readings) > 1:
        borne = {reading for reading in readings if reading in known}
        sound = {reading for reading in readings if _is_sound(reading)}
        readings = borne or sound
    if len(readings) == 1:
        return readings.pop()
    short = {_titled(tokens, titles) for tokens in ways}
    if readings or len(short) > 1:
        return None
    value = short.pop()
    return _unglued(value, known) if "numa" in titles and value.cpus and not value.numa else None


def _is_sound(value: Affinity) -> bool:
    listed = ranges(value.cpus) if value.cpus[:1].isdigit() else None
    return bool(listed) and (not value.numa.isdigit() or int(value.numa) <= (listed or [(0, 0)])[-1][1])


def _unglued(value: Affinity, known: set[Affinity]) -> Affinity | None:
    """Return an affinity whose processors and node stick together taken apart; None where it may have lost its node.

    That it is glued follows from another row that has what comes of it, or from ranges that are of different length as
    they stand and of the same when taken apart, as the threads of the same cores are.
    """
    ways = [Affinity(cpus, node, value.gpu_numa) for cpus, node in unglue_node(value.cpus)]
    borne = [way for way in ways if way in known]
    if not borne and "," in value.cpus and not _is_even(value.cpus):
        borne = [way for way in ways if _is_even(way.cpus)]
    return borne[0] if len(borne) == 1 else None


def _is_even(cpus: str) -> bool:
    return len({last - first for first, last in ranges(cpus) or []}) == 1


def _legend(lines: list[str], open_end: bool, findings: list[Finding]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of NICs, and what the output says its words mean."""
    legend: dict[str, str] = {}
    meanings: dict[str, str] = {}
    word = ""
    for number, line in enumerate(lines):
        last = open_end and number == len(lines) - 1
        for nic in _NIC.finditer(line):
            if last and nic.end() == len(line) and not _follows(nic[2], list(legend.values())):
                what = f"the text ends within the name of {nic[1]}, which may be cut and is left out"
                findings.append(Finding(what, AGAIN))
            else:
                legend.setdefault(nic[1], nic[2])
        keys = [] if _NIC.search(line) else list(_MEANING.finditer(line))
        for at, key in enumerate(keys):
            word = key[1]
            stop = keys[at + 1].start() if at + 1 < len(keys) else len(line)
            meanings.setdefault(word, line[key.end() : stop].strip())
        if not keys:
            word = ""
    return legend, meanings


def _follows(name: str, before: list[str]) -> bool:
    """Whether the last name of a text is whole: its number is 0, or one more than that of the name before it."""
    match = re.fullmatch(r"(.*?)(\d+)", name)
    if not match or match[2] == "0":
        return bool(match)
    return bool(before) and before[-1] == f"{match[1]}{int(match[2]) - 1}"
