"""Where gradients and values lie between the model's parameters and the parameter client's flat buffers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from psctl.ps.dense.client.receive_buffers import Take
from psctl.ps.pieces import Piece, pieces
from psctl.types import Layout, Number, Shard


class Client(Protocol):
    """What is needed of a ParameterClient; see psctl.client.dense_client."""

    base: int
    landing: dict[str, torch.Tensor]
    residual: dict[str, torch.Tensor]

    @property
    def seconds_waiting(self) -> float: ...
    @property
    def seconds_under_way(self) -> float: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def doing(self) -> str: ...
    def start(self, values: Mapping[str, torch.Tensor] | None) -> None: ...
    def sending(self, clock: int) -> dict[str, torch.Tensor]: ...
    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float = 1.0) -> None: ...
    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> None: ...
    def norms(self, clock: int) -> dict[int, float]: ...
    def pull(self, clock: int) -> None: ...
    def wait(self, clock: int, shards: Sequence[int] | None = None, *, exact: bool = False) -> None: ...
    def held(self, shards: Sequence[int]) -> int: ...
    def deliver(self, take: Take) -> None: ...
    def presence(self, clock: int) -> list[bool]: ...
    def told(self, message: Any) -> None: ...
    def put_aside(self, clock: int, data: bytes) -> None: ...
    def aside(self, clock: int) -> bytes: ...
    def save(self, version: int) -> None: ...
    def settle(self) -> None: ...
    def close(self, reason: str = "") -> None: ...


class FlatParameters:
    """Copies between the trainable parameters and flat buffers, shard by shard.

    Args:
        layout: what is synchronised.
        shards: how the flat spaces are cut.
        parameters: the model's trainable parameters, in the layout's order.
    """

    def __init__(self, layout: Layout, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        self.shards = list(shards)
        self.parameters = parameters
        trainable = [index for index, info in enumerate(layout.parameters) if info.trainable]
        assert len(trainable) == len(parameters), "the layout was made from these parameters"
        place = {index: at for at, index in enumerate(trainable)}
        self._pieces: list[list[tuple[int, Piece]]] = [
            [(place[piece.parameter], piece) for piece in held] for held in pieces(layout, shards)
        ]
        self._places: dict[tuple[int, int], list[torch.Tensor]] = {}  # of the pieces, by buffer and shard
        self.members = [sorted({at for at, _ in held}) for held in self._pieces]
        """For each shard the places of the parameters that have a piece in it."""
        self.shards_of: list[list[int]] = [[] for _ in parameters]
        """For each parameter the shards that hold it."""
        for shard, held in enumerate(self.members):
            for at in held:
                self.shards_of[at].append(shard)

    def fill(self, flat: Mapping[str, torch.Tensor], shard: int) -> list[bool]:
        """Copy the shard's gradients into `flat`; returns which pieces have one (others are left as they are)."""
        present = []
        key = flat[self.shards[shard].dtype].data_ptr(), shard
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = [self._at(flat, shard, piece) for _, piece in self._pieces[shard]]
        for (at, piece), place in zip(self._pieces[shard], places, strict=True):
            gradient = self.parameters[at].grad
            present.append(gradient is not None)
            if gradient is not None:
                place.copy_(_part(gradient.detach(), piece))
        return present

    def write(self, flat: Mapping[str, torch.Tensor], places: Iterable[int], *, gradients: bool = False) -> None:
        """Copy from `flat` into these parameters, or into their gradients (made where there is none)."""
        wanted = set(places)
        held = {shard for at in wanted for shard in self.shards_of[at]}
        with torch.no_grad():
            for shard in sorted(held):
                for at, piece in self._pieces[shard]:
                    if at in wanted:
                        parameter = self.parameters[at]
                        if gradients and parameter.grad is None:
                            parameter.grad = torch.empty_like(parameter)
                        target: Any = parameter.grad if gradients else parameter
                        _write(target, piece, self._at(flat, shard, piece))

    @property
    def direct(self) -> bool:
        """Whether values that a server lends, or that came in, can be copied straight to where they belong."""
        return all(parameter.device.type == "cpu" for parameter in self.parameters)

    def read(self, shard: int, values: torch.Tensor, wanted: Container[int] | None) -> None:
        """Copy a shard's values into these parameters (None: all)."""
        with torch.no_grad():
            for at, piece in self._pieces[shard]:
                if wanted is None or at in wanted:
                    _write(self.parameters[at], piece, values.narrow(0, piece.at.start, len(piece.at)))

    def read_sums(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        """Copy a shard's sums into the gradients (made where there is none) of those that somebody had one for."""
        for (at, piece), there in zip(self._pieces[shard], present, strict=True):
            if there:
                parameter = self.parameters[at]
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter.detach())
                whole = len(piece.at) == values.numel()
                part = values if whole else values.narrow(0, piece.at.start, len(piece.at))
                _write(parameter.grad.detach(), piece, part)
        return True

    def values(self) -> dict[str, torch.Tensor]:
        """Return the parameters' values as flat buffers, by dtype."""
        sizes: dict[str, int] = {}
        for one in self.shards:
            sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.range.stop)
        flat = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in sizes.items()}
        for shard, held in enumerate(self._pieces):
            for at, piece in held:
                self._at(flat, shard, piece).copy_(_part(self.parameters[at].detach(), piece))
        return flat

    def _at(self, flat: Mapping[str, torch.Tensor], shard: int, piece: Piece) -> torch.Tensor:
        whole = self.shards[shard]
        return flat[whole.dtype].narrow(0, whole.range.start + piece.at.start, len(piece.at))


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the piece's elements of a tensor laid flat in its logical order, whatever its strides."""
    flat = tensor.reshape(-1)
    return flat if len(piece.within) == flat.numel() else flat.narrow(0, piece.within.start, len(piece.within))


def _write(target: torch.Tensor, piece: Piece, source: torch.Tensor) -> None:
    if target.is_contiguous():
        _part(target, piece).copy_(source)
    elif len(piece.within) == target.numel():
        target.copy_(source.view(target.shape))
    else:  # a cut parameter with strides of its own (channels_last): through a copy in logical order
        whole = target.reshape(-1)
        whole.narrow(0, piece.within.start, len(piece.within)).copy_(source)
        target.copy_(whole.view(target.shape))


class ServerReducer:
    """A reducer over servers that only sum (`update: worker`)."""

    def __init__(self, client: Client, flat: FlatParameters) -> None:
        self._client, self._flat = client, flat
        self._clock = client.base
        self._asked = False
        self._direct = flat.direct
        self.buckets = flat.members
        if self._direct:
            client.deliver(flat.read_sums)

    @property
    def bytes_moved(self) -> int:
        return self._client.bytes_moved

    @property
    def doing(self) -> str:
        return self._client.doing

    def send(self, bucket: int, weight: float) -> None:
        present = self._flat.fill(self._client.sending(self._clock), bucket)
        if not self._asked:  # ahead of what is pushed, so that sums come back while later shards still leave
            self._asked = True
            self._client.pull(self._clock + 1)
        self._client.push(self._clock, bucket, present, weight)

    def finish(self) -> None:
        self._client.wait(self._clock + 1)
        self._asked = False
        if not self._direct:
            there = self._client.presence(self._clock)
            self._flat.write(self._client.landing, (at for at, one in enumerate(there) if one), gradients=True)
        self._clock += 1

    def close(self, reason: str, *, failed: bool) -> None:
        if not failed:
            self._client.settle()
        self._client.close(reason)
