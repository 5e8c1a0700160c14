"""A shard's part of a checkpoint: the tensors to copy after a step, and those to request when a job continues.

Tensors are stored by parameter name with [start, stop) slices, so any number of servers can write a checkpoint and any
other number can read it. State that is one number a parameter (`step`) is a slice [0, 1) of shape (), written by the
server that holds the parameter's start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from psctl.errors import UsageError
from psctl.ps.pieces import Piece, bytes_view
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.server_optimizers import SCALARS, PieceOptimizer
from psctl.types import Layout, TensorSlice


class CopiedSlice(msgspec.Struct, frozen=True):
    """One slice and its bytes, which do not change."""

    slice: TensorSlice
    data: memoryview


class WantedSlice(msgspec.Struct, frozen=True):
    """One slice to request: `key` "" is the parameter itself, else the optimizer state of that name."""

    slice: TensorSlice
    piece: int  # index within the shard
    key: str


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the tensor's dtype in the form of layouts."""
    return str(tensor.dtype).removeprefix("torch.")


class _Array(Protocol):
    """numpy's array, as far as it is used here."""

    @property
    def data(self) -> memoryview:
        """Its memory."""


class KeptCopies:
    """Memory of a shard's copies, which the next checkpoint uses again.

    In new memory a copy takes five times as long: the kernel clears each page at its first use. Memory that anyone
    still refers to, because the last checkpoint is not sent yet, is left to them, and the copy gets new memory.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[torch.Tensor, _Array]] = {}  # a copy, and the array whose views are given out

    def copy(self, name: str, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a copy of a tensor that is contiguous and on the CPU."""
        kept = self._kept.get(name)
        if kept is not None:
            copy, array = kept
            same = (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            if same and sys.getrefcount(array) == _OWN_REFERENCES:
                copy.copy_(tensor)
                return array.data
        copy = tensor.detach().clone()
        array = copy.view(torch.uint8).numpy()
        self._kept[name] = (copy, array)
        return array.data


_OWN_REFERENCES = 3
"""References to an array of which no memoryview is left: of the pair, of the variable, of the argument that counts."""


def copy_shard(
    layout: Layout, held: Sequence[Piece], values: torch.Tensor, optimizer: PieceOptimizer, copies: KeptCopies
) -> list[CopiedSlice]:
    """Copy a shard's parameters and optimizer state in their present version."""
    copied: list[CopiedSlice] = []
    for piece in held:
        info = layout.parameters[piece.parameter]
        copied.append(_copy(f"param/{info.name}", values.narrow(0, piece.at, piece.size), info.shape, piece, copies))
    return copied + copy_states(layout, held, optimizer, copies)


def copy_states(
    layout: Layout, held: Sequence[Piece], optimizer: PieceOptimizer, copies: KeptCopies
) -> list[CopiedSlice]:
    """Copy the optimizer's state over some pieces in its present version."""
    copied: list[CopiedSlice] = []
    for index, piece in enumerate(held):
        info = layout.parameters[piece.parameter]
        for key, tensor in optimizer.state(index).items():
            name = f"optim/{info.name}/{key}"
            if key not in SCALARS:
                copied.append(_copy(name, tensor, info.shape, piece, copies))
            elif piece.within == 0:
                where = TensorSlice(name, dtype_name(tensor), (), 0, 1)
                copied.append(CopiedSlice(where, bytes_view(tensor.detach().to("cpu", copy=True).reshape(1))))
    return copied


def _copy(name: str, tensor: torch.Tensor, shape: Sequence[int], piece: Piece, copies: KeptCopies) -> CopiedSlice:
    where = TensorSlice(name, dtype_name(tensor), tuple(shape), piece.within, piece.within + piece.size)
    return CopiedSlice(where, copies.copy(name, tensor.detach().cpu()))


def wanted_slices(
    layout: Layout, held: Sequence[Piece], saved: Mapping[str, Sequence[TensorSlice]]
) -> list[WantedSlice]:
    """Return the slices of a checkpoint that a shard needs.

    Args:
        layout: of the synchronized parameters.
        held: the shard's pieces.
        saved: the checkpoint's whole tensors by parameter name, as `by_parameter` returns them.
    """
    wanted: list[WantedSlice] = []
    for index, piece in enumerate(held):
        info = layout.parameters[piece.parameter]
        for tensor in saved.get(info.name, ()):
            key = "" if tensor.name.startswith("param/") else tensor.name.rpartition("/")[2]
            start, stop = (0, 1) if key in SCALARS else (piece.within, piece.within + piece.size)
            part = TensorSlice(tensor.name, tensor.dtype, tensor.shape, start, stop)
            wanted.append(WantedSlice(part, index, key))
    return wanted


def by_parameter(tensors: Sequence[TensorSlice]) -> dict[str, list[TensorSlice]]:
    """Group a checkpoint's tensors by their parameter; buffers and tracked state are left out."""
    found: dict[str, list[TensorSlice]] = {}
    for tensor in tensors:
        kind, _, rest = tensor.name.partition("/")
        if kind == "param":
            found.setdefault(rest, []).append(tensor)
        elif kind == "optim":
            found.setdefault(rest.rpartition("/")[0], []).append(tensor)
    return found


def check_shapes(layout: Layout, saved: dict[str, list[TensorSlice]], checkpoint: str) -> None:
    """Raise UsageError when the checkpoint is of another model; the user's fault.

    Args:
        saved: as `by_parameter` sorts the checkpoint's tensors.
        checkpoint: as users name it.
    """
    hint = "resume with the model that the checkpoint was made with"
    for info in layout.parameters:
        if not info.trainable:
            continue
        found = [tensor for tensor in saved.get(info.name, ()) if tensor.name == f"param/{info.name}"]
        if not found:
            raise UsageError(f"{checkpoint} holds no parameter {info.name}, which the model has", hint)
        if found[0].shape != info.shape:
            raise UsageError(
                f"{checkpoint}: {info.name} has shape {found[0].shape}, the model's has {info.shape}", hint
            )


def shard_loadings(wanted: Mapping[int, Sequence[WantedSlice]]) -> tuple[ReceivedSlices, dict[int, ShardLoading]]:
    """Return memory for the wanted slices of several shards, and the loading of each shard from it."""
    received = ReceivedSlices([want.slice for found in wanted.values() for want in found])
    tensors = iter(received.tensors)
    return received, {shard: ShardLoading(found, [next(tensors) for _ in found]) for shard, found in wanted.items()}


class ShardLoading:
    """The slices of one shard: `tensors` receive the bytes of `wanted`."""

    def __init__(self, wanted: Sequence[WantedSlice], tensors: Sequence[torch.Tensor]) -> None:
        self._wanted, self._tensors = wanted, tensors

    def finish(self, held: Sequence[Piece], values: torch.Tensor, optimizer: PieceOptimizer) -> None:
        """Write all loaded slices into the shard's values and its optimizer."""
        states: dict[int, dict[str, torch.Tensor]] = {}
        for one, tensor in zip(self._wanted, self._tensors, strict=True):
            if one.key == "":
                piece = held[one.piece]
                values.narrow(0, piece.at, piece.size).copy_(tensor)
            else:
                scalar = one.key in SCALARS
                states.setdefault(one.piece, {})[one.key] = tensor.reshape(()) if scalar else tensor.to(values.device)
        for index, state in states.items():
            optimizer.restore(index, state)
