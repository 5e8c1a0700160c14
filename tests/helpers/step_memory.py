"""The memory of a worker's step times, as an agent makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from psctl.process import step_ring


@contextmanager
def step_memory() -> Iterator[int]:
    """Give the descriptor of memory that no worker has begun."""
    descriptor = os.memfd_create("steps")
    try:
        os.ftruncate(descriptor, step_ring.SIZE)
        yield descriptor
    finally:
        os.close(descriptor)
