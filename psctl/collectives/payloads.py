"""The values that a training script gives to collectives: tensors, or plain Python values as msgpack.

Nothing that is received is executed: plain values are None, numbers, text, bytes, and lists, tuples and dicts of them.
A tuple arrives as a list.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from psctl.collectives.reduce_operations import name_of

TENSOR, OBJECT, NOTHING = "tensor", "object", "nothing"

MOST = 1 << 31
"""Bytes of a plain value, at most."""


class Payload:
    """What one rank gives: tensors of one type and device, or encoded values.

    Args:
        kind: TENSOR, OBJECT or NOTHING.
        tensors: the tensors, or each value's bytes.
        problem: why it cannot be sent; "" when it can.
    """

    def __init__(self, kind: str, tensors: Sequence[torch.Tensor] = (), problem: str = "") -> None:
        self.kind, self.tensors, self.problem = kind, list(tensors), problem

    @property
    def dtype(self) -> torch.dtype:
        """The tensors' type."""
        return self.tensors[0].dtype if self.tensors else torch.uint8

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [tuple(each.shape) for each in self.tensors]

    @property
    def place(self) -> str:
        """The kind of device on which the tensors are."""
        return self.tensors[0].device.type if self.tensors else "cpu"


def payload_of(value: object) -> Payload:
    """Return what a rank gives as one value."""
    return _together([value])


def payload_of_each(value: object, count: int) -> Payload:
    """Return what a rank gives as a value for each of `count` ranks: a list, or a tensor that is cut evenly."""
    if isinstance(value, torch.Tensor):
        if not value.dim() or value.shape[0] % count:
            text = (
                f"a tensor of shape {list(value.shape)} cannot be cut evenly for {count} ranks; give a list of tensors"
            )
            return Payload(TENSOR, (), text)
        return _together(torch.tensor_split(value, count))
    if not isinstance(value, list | tuple) or len(value) != count:
        given = f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
        return Payload(OBJECT, (), f"it gave {given}; expected a list with one value for each of {count} ranks")
    return _together(value)


def number(value: object) -> torch.Tensor | None:
    """Return a Python number as a tensor that can be reduced; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64)
    except (RuntimeError, OverflowError):
        return None  # more than 64 bits


def decode(data: torch.Tensor) -> object:
    """Return the value in these bytes."""
    return msgspec.msgpack.decode(bytes(data.numpy()))


def _together(values: Sequence[object]) -> Payload:
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    if len(tensors) == len(values):
        return _of_tensors(tensors)
    if tensors:
        return Payload(TENSOR, (), "it gave tensors and other values in one list")
    encoded = []
    for each in values:
        try:
            data = msgspec.msgpack.encode(each)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Payload(OBJECT, (), f"its value cannot be sent: {error}")
        if len(data) > MOST:
            return Payload(OBJECT, (), f"its value has {len(data)} bytes as msgpack, more than {MOST}; send a tensor")
        encoded.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return Payload(OBJECT, encoded)


def _of_tensors(tensors: Sequence[torch.Tensor]) -> Payload:
    plain = [each.detach() for each in tensors]
    for each in plain:
        if each.layout != torch.strided or each.is_quantized or each.device.type not in ("cpu", "cuda"):
            what = f"{each.layout}".removeprefix("torch.") if each.layout != torch.strided else each.device.type
            return Payload(TENSOR, (), f"its tensor is {what}; collectives take dense tensors on the CPU or a GPU")
    kinds = {(each.dtype, each.device) for each in plain}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{name_of(dtype)} on {device}" for dtype, device in kinds))
        return Payload(TENSOR, (), f"its tensors differ: {names}")
    return Payload(TENSOR, plain)


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether a result can be written into a tensor: it holds no element twice."""
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
