"""Settings of malloc that keep freed memory in the process, because new pages from the kernel cost more than the copy.

By default the C library returns freed blocks of some hundred KB and more to the kernel, and the first access to each
new page is a fault, in which the kernel clears the page: for messages of a few MB that is a third of a store's time.
With these settings up to KEPT bytes at the end of each heap stay in the process.
"""

from __future__ import annotations

import ctypes

KEPT = 64 << 20
"""Bytes of freed memory that stay with the process (of each of the C library's arenas)."""

LARGEST = 32 << 20
"""Bytes of a block that is taken from the heap; the C library allows no more."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Keep freed memory from now on; return False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(MMAP_THRESHOLD, LARGEST) == 1, mallopt(TRIM_THRESHOLD, KEPT) == 1])
