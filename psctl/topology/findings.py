"""A problem of a machine or of its output, and its remedy."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """A problem (something is broken, cut or contradicts itself) and its remedy."""

    what: str
    cure: str
