"""Buffers from which a worker pushes: gradients in rotating flat buffers or, where they are coded, rotating codes.

Plain gradients are sent directly from the buffer that they were written to, and stay there until they are Pushed. A
code is made when the shard is pushed: from then on its gradients may change, so that one gradient buffer is enough for
all clocks; the code stays until it is Pushed and is sent again unchanged. Host sums that this worker pushes for its
group (host_collection.py) have buffers of their own, in the same rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psctl.ps.compression.error_feedback import coder, residual_dtype
from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.dense.client.receive_buffers import flat_buffers
from psctl.ps.dense.shard_state import Terms
from psctl.ps.pieces import Piece, Stretch, stretch, torch_dtype
from psctl.ps.shards import spaces
from psctl.types import Shard


class SendBuffers:
    """A worker's send buffers. Called by the user's thread, except `sent_bytes` and `sum_buffer`.

    Args:
        terms: the terms of the job.
        shards: all of them.
        held: their pieces.
        rank: this worker's rank.
        allocator: allocates buffers that other processes may read.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        held: Sequence[Sequence[Piece]],
        rank: int,
        allocator: BufferAllocator,
    ) -> None:
        self._shards, self._held, self._rank, self._allocator = shards, held, rank, allocator
        self._turns = terms.buffers
        types = {name: torch_dtype(name) for name in spaces(terms.layout)}
        self._coders = {name: coder(terms.compression, dtype) for name, dtype in types.items()}
        coded = flat_buffers(terms, only=[name for name, one in self._coders.items() if one is not None])
        plain = [name for name, one in self._coders.items() if one is None]
        self._flat = [coded | flat_buffers(terms, allocator, only=plain) for _ in range(self._turns)]
        self._plain: list[dict[int, Stretch]] = [{} for _ in range(self._turns)]
        self._codes: list[dict[int, torch.Tensor]] = [{} for _ in range(self._turns)]
        self._sizes: list[dict[int, int]] = [{} for _ in range(self._turns)]
        self._sums: list[dict[int, torch.Tensor]] = [{} for _ in range(self._turns)]
        self.residual: dict[str, torch.Tensor] = {}
        """Residuals of the pushes so far, by dtype, flat; empty without error feedback."""
        if terms.compression.feedback:
            for name in coded:
                self.residual[name] = torch.zeros(spaces(terms.layout)[name], dtype=residual_dtype(types[name]))

    def gradients(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the buffers for the gradients of `clock`, by dtype."""
        return self._flat[clock % self._turns]

    def encode(self, clock: int, shard: int, present: Sequence[bool]) -> None:
        """Code a shard's gradients of `clock`, which may change afterwards; do nothing where they are not coded."""
        one = self._coders[self._shards[shard].dtype]
        if one is None:
            return
        turn, held = clock % self._turns, self._held[shard]
        codes = self._codes[turn]
        if shard not in codes:
            codes[shard] = self._allocator.zeros(one.limit(held), torch.uint8)
        residual = self._part(self.residual, shard) if self.residual else None
        gradients = self._part(self._flat[turn], shard)
        seed = clock, self._rank, shard
        self._sizes[turn][shard] = one.encode(gradients, held, present, residual, codes[shard], seed)

    def sent_bytes(self, clock: int, shard: int) -> Stretch:
        """Return the bytes to send of a shard that has a gradient."""
        turn = clock % self._turns
        if shard in self._codes[turn]:
            return stretch(self._codes[turn][shard][: self._sizes[turn][shard]])
        found = self._plain[turn].get(shard)
        if found is None:
            found = self._plain[turn][shard] = stretch(self._part(self._flat[turn], shard))
        return found

    def sum_buffer(self, clock: int, shard: int) -> torch.Tensor:
        """Return the buffer for a host sum of a shard; it is kept as long as the send buffer of its clock."""
        sums, one = self._sums[clock % self._turns], self._shards[shard]
        if shard not in sums:
            sums[shard] = torch.empty(len(one.range), dtype=torch_dtype(one.dtype))
        return sums[shard]

    def _part(self, flat: Mapping[str, torch.Tensor], shard: int) -> torch.Tensor:
        one = self._shards[shard]
        return flat[one.dtype].narrow(0, one.range.start, len(one.range))
