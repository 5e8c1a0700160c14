"""Reads the matrices of nvidia-smi.

`topo -m` prints the link type of each pair of devices and the processors near each device; `topo -p2p` prints whether
each GPU can access the memory of each other, and why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from psctl.topology.findings import Finding
from psctl.topology.readers.cells import LINK_WORDS, PEER_WORDS, UNAVAILABLE, clean, is_tail, ranges, unglue_node
from psctl.topology.readers.column_alignment import AGAIN, AlignedTable, align
from psctl.topology.readers.text_tables import TextTable, tables
from psctl.topology.readings import Affinity, Matrix, PeerMatrix

_NIC = re.compile(r"(?<!\S)(NIC\d+)\s*:\s*([\w.:-]+)")


def read_matrix(text: str) -> Matrix:
    """Return the matrix in the output of `nvidia-smi topo -m`; without devices if the text has no matrix.

    Link types are kept as printed, unknown ones too. Cells that are missing, shifted or cut are left out and reported
    as findings. If the text has several matrices, the first is read.
    """
    cleaned = clean(text)
    found = [table for table in tables(cleaned, LINK_WORDS) if table.rows and _is_of_links(table)]
    if not found:
        return _header_only(cleaned)
    table = found[0]
    grid = align(table, LINK_WORDS)
    findings = grid.findings
    affinity = _affinity(grid, table.tails, findings)
    legend = _legend(table.after, not cleaned.endswith("\n"), findings)
    if len(found) > 1:
        what = f"the text holds {len(found)} matrices; the first of them is read"
        findings.append(Finding(what, "save the output of each machine in a file of its own"))
    return Matrix(grid.devices, grid.words, affinity, legend, tuple(findings))


def read_peers(text: str) -> PeerMatrix:
    """Return the matrix in the output of `nvidia-smi topo -p2p r` (or w, n, a, p); without devices if there is none.

    Codes are kept as printed. Cells that are missing, shifted or cut are left out and reported as findings.
    """
    for table in tables(clean(text), PEER_WORDS):
        if table.rows and _is_of_peers(table):
            grid = align(table, PEER_WORDS)
            return PeerMatrix(grid.devices, grid.words, tuple(grid.findings))
    return PeerMatrix((), {})


def _header_only(cleaned: str) -> Matrix:
    """Return the matrix of a text that ends after the header of its table."""
    for table in tables(cleaned, LINK_WORDS):
        if not table.rows and table.tails and table.devices:
            what = "the matrix has a header and no rows; no link is known"
            return Matrix(table.devices, {}, findings=(Finding(what, AGAIN),))
    return Matrix((), {})


def _is_of_links(table: TextTable) -> bool:
    """Return whether a table holds link types, not peer codes: a cell is a link type, or all cells are X."""
    if not table.has_cross() and not table.tails:
        return False
    words = table.words()
    peers = table.of_peers() or any(map(PEER_WORDS.fullmatch, words))
    return bool(table.tails) or any(map(LINK_WORDS.match, words)) or not peers


def _is_of_peers(table: TextTable) -> bool:
    """Return whether a table holds peer codes: no affinity columns, and a peer code or just X and their legend."""
    words = table.words()
    ours = any(map(PEER_WORDS.match, words)) or (not words and table.of_peers())
    return not table.tails and table.has_cross() and ours


def _affinity(grid: AlignedTable, titles: Sequence[str], findings: list[Finding]) -> dict[str, Affinity]:
    """Return the values after each row's cells, by the header's titles.

    A row with fewer values than others has lost one, or two of them are joined; an ambiguous row is left out.
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
            what = f"the processors near {label} are unknown: its values are incomplete, or two of them are joined"
            findings.append(Finding(what, AGAIN))
        elif value != Affinity():
            found[label] = value
    return found


def _of_end(
    label: str, tokens: Sequence[str], titles: Sequence[str], certain: dict[str, Affinity], findings: list[Finding]
) -> Affinity:
    """Return the values of the row in which the text ends, without the last one where it may be cut."""
    values = _values(tokens)[: len(titles)]
    value = _titled(values, titles)
    if value in certain.values() or (len(values) == len(titles) and UNAVAILABLE.fullmatch(values[-1])):
        return value
    what = f"the text ends without a line feed in the row of {label}; its last value may be cut and is left out"
    findings.append(Finding(what, AGAIN))
    return Affinity(**dict(zip(titles, values[:-1], strict=False)))


def _values(tokens: Iterable[str]) -> list[str]:
    """Return the leading tokens that are affinity values."""
    values: list[str] = []
    for token in tokens:
        if not is_tail(token):
            break
        values.append(token)
    return values


def _titled(tokens: Sequence[str], titles: Sequence[str]) -> Affinity:
    """Return the values by their titles.

    Where there are fewer values than titles, N/A at the end belongs to the last title, which always has a value; the
    other values fill the titles from the left.
    """
    values = _values(tokens)
    named: dict[str, str] = {}
    rest = list(titles)
    if len(values) < len(titles) and values and UNAVAILABLE.fullmatch(values[-1]):
        named[rest.pop()] = values.pop()
    named |= dict(zip(rest, values, strict=False))
    return Affinity(**named)


def _resolved(ways: list[list[str]], titles: Sequence[str], certain: dict[str, Affinity]) -> Affinity | None:
    """Return the only reading that equals another row's, or the only plausible one; None if several remain."""
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
    """Return an affinity whose processors and NUMA node were joined, split; None where the node may be missing.

    A split is accepted if another row has its result, or if it makes ranges of different length equally long, as the
    ranges of both threads of the same cores are.
    """
    ways = [Affinity(cpus, node, value.gpu_numa) for cpus, node in unglue_node(value.cpus)]
    borne = [way for way in ways if way in known]
    if not borne and "," in value.cpus and not _is_even(value.cpus):
        borne = [way for way in ways if _is_even(way.cpus)]
    return borne[0] if len(borne) == 1 else None


def _is_even(cpus: str) -> bool:
    return len({last - first for first, last in ranges(cpus) or []}) == 1


def _legend(lines: list[str], open_end: bool, findings: list[Finding]) -> dict[str, str]:
    """Return the system's names of NICs, by their names in the matrix."""
    legend: dict[str, str] = {}
    for number, line in enumerate(lines):
        last = open_end and number == len(lines) - 1
        for nic in _NIC.finditer(line):
            if last and nic.end() == len(line) and not _follows(nic[2], list(legend.values())):
                what = f"the text ends within the name of {nic[1]}, which may be cut and is left out"
                findings.append(Finding(what, AGAIN))
            else:
                legend.setdefault(nic[1], nic[2])
    return legend


def _follows(name: str, before: list[str]) -> bool:
    """Return whether the last name of a text is complete: its number is 0, or follows that of the name before it."""
    match = re.fullmatch(r"(.*?)(\d+)", name)
    if not match or match[2] == "0":
        return bool(match)
    return bool(before) and before[-1] == f"{match[1]}{int(match[2]) - 1}"
