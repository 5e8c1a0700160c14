"""Findings: problems of a host or of its output, with their remedies."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """A problem (something is broken, cut or contradicts itself) and its remedy."""

    what: str
    cure: str


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names as one text: the first `most` of them, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
