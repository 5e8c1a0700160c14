"""Buffers that other processes of the same host read where they lie: gradients on a worker, values on a server.

Theory. What is *lent* is not sent: the message says where it lies (messages.Place), and the reader maps that memory.
When a buffer may be written again is as for what is sent: a push stands until it is Pushed; values stand until the
worker says, with a push, which version it has whole (`Push.landed`), or is dead. So nothing is ever written while
someone may be reading it, and who reads needs no lock. A reader never writes into what it was lent.
"""

from __future__ import annotations

import torch

from psctl.ps.messages import SharedRange

Lent = memoryview | None
"""All bytes of a message where they lie in the memory of who sent it; None: they came with it, or there are none."""


class Lending:
    """Where a process's buffers come from, and who may read them. This one's are its own, and nobody may."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat buffer of zeros."""
        return torch.zeros(count, dtype=dtype)

    def place_for(self, rank: int, tensor: torch.Tensor) -> SharedRange | None:
        """Return where the other side's process `rank` reads the tensor; None: it must be sent."""
        return None

    def place_on_host(self, tensor: torch.Tensor) -> SharedRange | None:
        """Return where other processes of this host read the tensor; None: none of them can."""
        return None
