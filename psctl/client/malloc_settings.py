"""Has freed memory kept for what comes next: pages that the kernel takes back cost more to get again than to fill.

By default the C library gives blocks of some hundred KB and more back when they are freed, and each page that is
touched anew is a fault that the kernel answers with zeros: for messages of a few MB that is a third of all the time
that a store takes. Up to KEPT bytes at the end of each heap stay instead.
"""

from __future__ import annotations

import ctypes

KEPT = 64 << 20
"""Bytes of freed memory that stay with the process (of each of the C library's arenas)."""

LARGEST = 32 << 20
"""Bytes of a block that is taken from the heap; the C library allows no more."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Have freed memory kept from now on; returns False where the C library knows nothing of that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(MMAP_THRESHOLD, LARGEST) == 1, mallopt(TRIM_THRESHOLD, KEPT) == 1])
