"""The operations by which collectives of the training script combine the ranks' values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psctl.collectives.schedule_chunks import Join

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)

JOINS: Mapping[str, Join] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""How two values are combined. NaN in an operand gives NaN; integers wrap around, as torch's do."""

_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "sum": (*FLOATS, *INTEGERS, *COMPLEX),
    "mean": (*FLOATS, *COMPLEX),
    "prod": (*FLOATS, *INTEGERS, *COMPLEX),
    "min": (*FLOATS, *INTEGERS, torch.bool),
    "max": (*FLOATS, *INTEGERS, torch.bool),
}


def why_not(operation: object, dtype: torch.dtype) -> str:
    """Return why values of a type cannot be combined by an operation; "" when they can."""
    if not isinstance(operation, str) or operation not in JOINS:
        return f"op={operation!r:.40}: expected one of {', '.join(JOINS)}"
    if dtype not in _DTYPES[operation]:
        return f"op={operation!r} of {name_of(dtype)}: no such operation; convert the tensor first"
    return ""


def finish(operation: str, total: torch.Tensor, world: int) -> None:
    """Make the result of what was joined over all ranks, in place."""
    if operation == "mean":
        total.div_(world)


def name_of(dtype: torch.dtype) -> str:
    """Return a type's name, such as "float32"."""
    return str(dtype).removeprefix("torch.")
