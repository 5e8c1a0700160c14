"""What is amiss, and how it is mended: the one value that every part of this room may hand up."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """Something is broken, cut or contradicts itself, and how it is mended."""

    what: str
    cure: str
