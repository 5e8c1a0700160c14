"""Reads `nvidia-smi topo -p2p`: whether each GPU may reach the memory of each other, and why not."""

from __future__ import annotations

from psctl.topology.readers.cells import PEER_WORDS, clean
from psctl.topology.readers.column_alignment import align
from psctl.topology.readers.text_tables import TextTable, tables
from psctl.topology.readings import PeerMatrix


def read_peers(text: str) -> PeerMatrix:
    """Return the matrix in the output of `nvidia-smi topo -p2p r` (or w, n, a, p); else one without devices.

    The words stand as they were printed; what is missing, moved or cut is left out and said in the findings.
    """
    for table in tables(clean(text), PEER_WORDS):
        if table.rows and _is_ours(table):
            grid = align(table, PEER_WORDS)
            return PeerMatrix(grid.devices, grid.words, tuple(grid.findings))
    return PeerMatrix((), {})


def _is_ours(table: TextTable) -> bool:
    """Whether the table has no titles, as that of links does, and a word of peers, or X alone and their legend."""
    words = table.words()
    ours = any(map(PEER_WORDS.match, words)) or (not words and table.of_peers())
    return not table.tails and table.has_cross() and ours
