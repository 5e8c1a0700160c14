"""What the script asked to be part of checkpoints beside model, optimizer and scheduler: `run.track(ema=ema)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from psctl.errors import UsageError
from psctl.train_state.state_trees import pack, unpack


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class TrackedState:
    """Things by key, and the state that waits for those that are not tracked yet."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self._waiting: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, key: str, thing: object) -> None:
        """Track a thing; gives it its saved state if the job goes on from a checkpoint that has one.

        Raises:
            UsageError: the key is taken, or the thing's state is not tensors and plain values; the script's fault.
        """
        if key in self._things:
            raise UsageError(f"run.track({key}=...): that name is tracked already", "take another name")
        if not isinstance(thing, Stateful):
            raise UsageError(
                f"run.track({key}=...): {type(thing).__name__} has no state_dict and load_state_dict",
                "give it both; state_dict may return tensors, numbers, text, lists and dicts of them",
            )
        pack(thing.state_dict(), f"track/{key}")
        self._things[key] = thing
        self._restore(key)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return everything's state: plain values by key, and tensors by name (track/KEY/...)."""
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for key, thing in self._things.items():
            plain[key], found = pack(thing.state_dict(), f"track/{key}")
            tensors.update(found)
        return plain, tensors

    def resume(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Give saved state to what is tracked; the rest waits until it is."""
        self._waiting, self._tensors = dict(plain), dict(tensors)
        for key in self._things:
            self._restore(key)

    def _restore(self, key: str) -> None:
        if key in self._waiting:
            self._things[key].load_state_dict(unpack(self._waiting.pop(key), self._tensors))
