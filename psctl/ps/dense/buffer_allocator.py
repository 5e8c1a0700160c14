"""Allocates buffers that other processes of the same host can read: gradients on a worker, values on a server.

Theory. The bytes of a *shared* buffer are not sent: the message carries their place (messages.SharedRange), and the
receiver maps that memory. A buffer may be written again under the same rule as one that is sent: a push is kept until
it is Pushed; values are kept until the worker reports, with a push, the version that it holds completely
(`Push.landed`), or is lost. So nothing is written while another process may be reading it, and readers need no lock. A
reader never writes shared memory.
"""

from __future__ import annotations

import torch

from psctl.ps.messages import SharedRange

SharedBytes = memoryview | None
"""All bytes of a message in the sender's memory; None: they were sent with the message, or there are none."""


class BufferAllocator:
    """Allocates a process's buffers, and finds their places in shared memory. The buffers of this class are private."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat buffer of zeros."""
        return torch.zeros(count, dtype=dtype)

    def place_for(self, rank: int, tensor: torch.Tensor) -> SharedRange | None:
        """Return the place at which the peer's process `rank` reads the tensor; None: it must be sent."""
        return None

    def place_on_host(self, tensor: torch.Tensor) -> SharedRange | None:
        """Return the place at which other processes of this host read the tensor; None: none of them can."""
        return None
