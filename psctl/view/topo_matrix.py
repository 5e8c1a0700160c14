"""A host's matrix as a table: at a terminal in blocks that fit its width, coloured by distance.

Unknown entries are printed as they are. A pipe gets one table with tabs, nothing wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from psctl.topology.graph import bonded
from psctl.types import Document
from psctl.view.console import say
from psctl.view.device_tree import matrix_entry, matrix_of
from psctl.view.text import one_line

RELATION_MEANINGS = {
    "NV#": ("bold green", "that many NVLinks, bonded"),
    "PIX": ("green", "one PCIe switch between"),
    "PXB": ("cyan", "several PCIe switches between, no processor"),
    "PHB": ("yellow", "through a processor's host bridge"),
    "NODE": ("yellow", "between host bridges of one NUMA node"),
    "SYS": ("red", "between NUMA nodes"),
    "SOC": ("red", "between processors"),
}
"""Known entries, nearest first, with their colour and meaning."""

NOTHING = "-"
"""Printed for a pair without an entry."""


def draw_matrix(console: Console, host: Document, width: int) -> None:
    """Draw the matrix of a host.

    Args:
        console: of stdout.
        host: an entry of `topo -o json`'s hosts.
        width: cells in a line; the matrix is split into blocks of columns that fit.
    """
    ids, entries = matrix_of(host)
    if not ids:
        say(console, Text("no matrix: no output describes pairs of devices", style="dim"))
        return
    numa = {str(device["id"]): device.get("numa") for device in host.get("devices") or []}
    nodes = any(numa[key] is not None for key in ids)
    heads = [*map(one_line, ids), *(["NUMA"] if nodes else [])]
    table = [
        [
            *(matrix_entry(entries, a, b) or NOTHING for b in ids),
            *([NOTHING if numa[a] is None else str(numa[a])] if nodes else []),
        ]
        for a in ids
    ]
    if not console.is_terminal:
        say(
            console,
            "\t".join(["", *heads]),
            *("\t".join([one_line(a), *row]) for a, row in zip(ids, table, strict=True)),
        )
        return
    side = max(cell_len(head) for head in heads) + 1
    widths = [max(cell_len(cell) for cell in (head, *(row[i] for row in table))) + 1 for i, head in enumerate(heads)]
    for block in _blocks(widths, width - side):
        say(console, Text.assemble(" " * side, *((_padded(heads[i], widths[i]), "bold") for i in block)))
        for a, row in zip(ids, table, strict=True):
            cells = ((_padded(row[i], widths[i]), "dim" if heads[i] == "NUMA" else _style(row[i])) for i in block)
            say(console, Text.assemble((_padded(one_line(a), side), "bold"), *cells))
    _legend(console, {cell for row in table for cell in row[: len(ids)]}, width)


def _blocks(widths: Sequence[int], space: int) -> list[list[int]]:
    """Split columns into blocks that fit; a column wider than the space is a block of its own."""
    blocks: list[list[int]] = [[]]
    left = space
    for index, width in enumerate(widths):
        if blocks[-1] and width > left:
            blocks.append([])
            left = space
        blocks[-1].append(index)
        left -= width
    return blocks


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _style(entry: str) -> str:
    if entry in ("X", NOTHING):
        return "dim"
    known = RELATION_MEANINGS.get("NV#" if bonded(entry) else entry)
    return known[0] if known else "bold magenta"


def _legend(console: Console, entries: set[str], width: int) -> None:
    """Print the meaning of the entries that occur, nearest first; unknown ones last."""
    seen = {"NV#" if bonded(entry) else entry for entry in entries} - {"X", NOTHING}
    lines = [(entry, *RELATION_MEANINGS[entry]) for entry in RELATION_MEANINGS if entry in seen]
    lines += [
        (entry, "bold magenta", "as printed by the tool; meaning unknown")
        for entry in sorted(seen - set(RELATION_MEANINGS))
    ]
    for entry, style, meaning in lines:
        line = Text.assemble((f"{_padded(entry, 5)}", style), (meaning, "dim"))
        for part in line.wrap(console, width):
            say(console, part)
