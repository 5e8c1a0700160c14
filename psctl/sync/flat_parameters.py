"""Copies gradients and values between the model's parameters and the parameter client's flat buffers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import nn

from psctl.client.dense_client import ParameterClient
from psctl.process.step_ring import StepRecorder
from psctl.ps.pieces import Piece, pieces
from psctl.types import Layout, PeerBytes, Shard


class FlatParameters:
    """Copies between the trainable parameters and flat buffers, shard by shard.

    Args:
        layout: what is synchronized.
        shards: ranges of the flat spaces.
        parameters: the model's trainable parameters, in the layout's order; on the CPU (GpuParameters takes others).
    """

    def __init__(self, layout: Layout, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        self.shards = list(shards)
        self.parameters = parameters
        trainable = [index for index, info in enumerate(layout.parameters) if info.trainable]
        assert len(trainable) == len(parameters), "the layout was made from these parameters"
        position = {index: at for at, index in enumerate(trainable)}
        self._pieces: list[list[tuple[int, Piece]]] = [
            [(position[piece.parameter], piece) for piece in held] for held in pieces(layout, shards)
        ]
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}  # of the pieces, by buffer and shard
        self.members = [sorted({at for at, _ in held}) for held in self._pieces]
        """For each shard the indices of the parameters that have a piece in it."""
        self.shards_of: list[list[int]] = [[] for _ in parameters]
        """For each parameter the shards that hold it."""
        for shard, held in enumerate(self.members):
            for at in held:
                self.shards_of[at].append(shard)

    # ---- gradients out ----

    def push(self, client: ParameterClient, clock: int, shard: int, weight: float) -> None:
        """Push a shard's gradients of `clock` with this weight."""
        present = self.fill(client.send_buffer(clock), shard)
        client.push(clock, shard, present, weight)

    def finish_pushes(self) -> None:
        """Return when the client has all pushes."""

    def fill(self, flat: Mapping[str, torch.Tensor], shard: int) -> list[bool]:
        """Copy the shard's gradients into `flat`; return which pieces have one; the others are not changed."""
        present = []
        key = flat[self.shards[shard].dtype].data_ptr(), shard
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = [self._at(flat, shard, piece) for _, piece in self._pieces[shard]]
        for (at, piece), part in zip(self._pieces[shard], parts, strict=True):
            gradient = self.parameters[at].grad
            present.append(gradient is not None)
            if gradient is not None:
                part.copy_(elements_of(gradient.detach(), piece))
        return present

    # ---- values in ----

    def read(self, shard: int, values: torch.Tensor, wanted: Container[int] | None) -> None:
        """Copy a shard's values, a flat tensor of the shard's length, into these parameters (None: all)."""
        with torch.no_grad():
            for at, piece in self._pieces[shard]:
                if wanted is None or at in wanted:
                    write_piece(self.parameters[at], piece, _part_of(values, piece))

    def read_sums(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        """Copy a shard's sums into the gradients (allocated where there is none) of the pieces that `present` marks."""
        for (at, piece), there in zip(self._pieces[shard], present, strict=True):
            if there:
                write_piece(gradient_of(self.parameters[at]).detach(), piece, _part_of(values, piece))
        return True

    def finish_reads(self) -> None:
        """Return when the host memory that values were copied from may be overwritten."""

    def write(self, flat: Mapping[str, torch.Tensor], indices: Iterable[int]) -> None:
        """Copy from `flat` into these parameters."""
        wanted = set(indices)
        with torch.no_grad():
            for shard, held in enumerate(self._pieces):
                for at, piece in held:
                    if at in wanted:
                        write_piece(self.parameters[at], piece, self._at(flat, shard, piece))

    def values(self) -> dict[str, torch.Tensor]:
        """Return the parameters' values as flat buffers, by dtype."""
        sizes: dict[str, int] = {}
        for one in self.shards:
            sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.range.stop)
        flat = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in sizes.items()}
        for shard, held in enumerate(self._pieces):
            for at, piece in held:
                self._at(flat, shard, piece).copy_(elements_of(self.parameters[at].detach(), piece))
        return flat

    def close(self) -> None:
        """Release threads and memory."""

    def _at(self, flat: Mapping[str, torch.Tensor], shard: int, piece: Piece) -> torch.Tensor:
        whole = self.shards[shard]
        return flat[whole.dtype].narrow(0, whole.range.start + piece.at, piece.size)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient; allocated where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter.detach())
    return parameter.grad


def _part_of(values: torch.Tensor, piece: Piece) -> torch.Tensor:
    return values if piece.size == values.numel() else values.narrow(0, piece.at, piece.size)


def elements_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the piece's elements of a tensor laid flat in its logical order, whatever its strides."""
    flat = tensor.reshape(-1)
    return flat if piece.size == flat.numel() else flat.narrow(0, piece.within, piece.size)


def write_piece(target: torch.Tensor, piece: Piece, source: torch.Tensor) -> None:
    if target.is_contiguous():
        elements_of(target, piece).copy_(source)
    elif piece.size == target.numel():
        target.copy_(source.view(target.shape))
    else:  # a cut parameter with strides of its own (channels_last): through a copy in logical order
        whole = target.reshape(-1)
        whole.narrow(0, piece.within, piece.size).copy_(source)
        target.copy_(whole.view(target.shape))


class ServerReducer:
    """A reducer over servers that only sum (`update: worker`).

    Args:
        client: after `start`.
        flat: where parameters lie in the client's buffers.
        spans: records the times of pushes and pulls.
    """

    def __init__(self, client: ParameterClient, flat: FlatParameters, spans: StepRecorder | None = None) -> None:
        self._client, self._flat = client, flat
        self._spans = spans or StepRecorder()
        self._began = 0  # when the first push of the clock was made, and its sums were requested
        self._clock = client.base
        self._pull_sent = False
        self.buckets = flat.members
        client.deliver(flat.read_sums)

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self._client.bytes_by_peer

    @property
    def activity(self) -> str:
        return self._client.activity

    def send(self, bucket: int, weight: float) -> None:
        if not self._pull_sent:  # before the pushes, so that sums arrive while later shards are still sent
            self._pull_sent, self._began = True, self._spans.now()
            self._flat.finish_reads()
            self._client.pull(self._clock + 1)
        self._flat.push(self._client, self._clock, bucket, weight)

    def finish(self) -> None:
        self._flat.finish_pushes()
        self._spans.pushed(self._began)
        self._flat.finish_reads()
        self._client.wait(self._clock + 1)
        self._spans.pulled(self._began, self._client.answered_at)
        self._pull_sent = False
        self._clock += 1

    def close(self, reason: str, *, failed: bool) -> None:
        if not failed:
            self._flat.finish_pushes()
            self._client.settle()
        self._flat.close()
        self._client.close(reason)
