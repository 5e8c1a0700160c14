"""Converts nested state (dicts and lists of tensors and plain values) to JSON and named tensors, and back.

JSON has no tuples, integer keys or infinities; each is written as a dict with one key that begins with "$". So
`unpack(pack(x))` equals x, and a checkpoint needs no pickle.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

import torch

from psctl.errors import UsageError
from psctl.types import StateValue


def pack(tree: object, prefix: str, *, drop: bool = False) -> tuple[StateValue, dict[str, torch.Tensor]]:
    """Return `tree` with each tensor replaced by its name, and the tensors by name.

    Args:
        tree: dicts, lists, tuples, tensors, numbers, text, None, nested.
        prefix: of the tensors' names ("track/ema").
        drop: leave out tensors and values of other kinds instead of raising (a tensor of one number is that number).

    Raises:
        UsageError: a value of another kind; the user's fault, the message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: object, path: str) -> StateValue:
        if isinstance(value, torch.Tensor):
            if drop:  # a tensor of one number becomes that number
                return walk(value.item(), path) if value.numel() == 1 else {"$dropped": "Tensor"}
            tensors[path] = value
            return {"$tensor": path}
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": repr(float(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if isinstance(value, Mapping):
            return _mapping(value, path, walk)
        if isinstance(value, list | tuple | deque):
            items = [walk(item, f"{path}/{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if drop:
            return {"$dropped": type(value).__name__}
        raise UsageError(
            f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, text, lists and dicts of them",
            "convert it in state_dict() and back in load_state_dict()",
        )

    return walk(tree, prefix), tensors


def _scalar(value: object) -> bool | int | float | str | None:
    """Return a plain value as exactly a JSON type: numpy's float64 is a float, but not for every encoder."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None


def _mapping(value: Mapping[object, object], path: str, walk: Callable[[object, str], StateValue]) -> StateValue:
    if isinstance(value, Counter):
        return {"$counter": [[key, count] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        plain = {key: walk(item, f"{path}/{key}") for key, item in value.items()}
        return {"$ordered": plain} if isinstance(value, OrderedDict) else plain
    return {"$pairs": [[walk(key, path), walk(item, f"{path}/{key}")] for key, item in value.items()]}


def unpack(packed: StateValue, tensors: Mapping[str, torch.Tensor]) -> StateValue:
    """Return the value that `pack` was given. Dropped values are absent from their dict, and None in a list."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((key, value),) = packed.items()
        if key == "$tensor":
            return tensors[value]
        if key == "$float":
            return float(value)
        if key == "$tuple":
            return tuple(unpack(item, tensors) for item in value)
        if key == "$counter":
            return Counter(dict(value))
        if key == "$ordered":
            return OrderedDict((name, unpack(item, tensors)) for name, item in value.items())
        if key == "$pairs":
            return {unpack(name, tensors): unpack(item, tensors) for name, item in value}
        if key == "$dropped":
            return None
    return {key: unpack(value, tensors) for key, value in packed.items() if not _dropped(value)}


def _dropped(value: object) -> bool:
    return isinstance(value, dict) and set(value) == {"$dropped"}
