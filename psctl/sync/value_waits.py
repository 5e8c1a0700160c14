"""The points at which a model waits for new values: before the first forward of its modules in a step.

Values change only at wait points, between steps. Each module waits, before its first forward of a step, for the
parameters of its whole subtree, because a forward may read any parameter below it (MultiheadAttention reads out_proj's
without calling it). Plain containers (exactly Sequential, ModuleList, ModuleDict) read nothing themselves, so their
children wait instead, and the first layers compute while the values of the last layers are still received. The first
forward of any module waits for shared (tied) parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

from psctl.train_state.prepared_model import ForwardHooks, PreForwardHook

PLAIN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class AwaitedValues(Protocol):
    """The parameters whose newest values are not in the model yet."""

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Return when these parameters (None: all) hold the newest values."""


class ValueWaitHook(PreForwardHook):
    """Waits for the newest values of some parameters, by their indices."""

    def __init__(self, pending: AwaitedValues, indices: set[int]) -> None:
        self._pending, self._indices = pending, indices

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self._pending.wait(self._indices)


def wait_hooks(model: nn.Module, parameters: Sequence[nn.Parameter], pending: AwaitedValues) -> ForwardHooks:
    """Have a model's modules wait before their forwards.

    Args:
        model: the user's, before its class changes.
        parameters: the trainable ones.
        pending: has their indices.
    """
    return ForwardHooks(
        [(module, ValueWaitHook(pending, indices)) for module, indices in wait_points(model, parameters)]
    )


def wait_points(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Module, set[int]]]:
    """Return the modules whose forward waits for parameters, each with the indices of these."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in index_of:
                holders[index_of[id(parameter)]] = holders.get(index_of[id(parameter)], 0) + 1
    shared = {index for index, count in holders.items() if count > 1}
    found = []
    for module in model.modules():
        below: set[int] = set()
        if type(module) not in PLAIN:
            below = {index_of[id(one)] for one in nn.Module.parameters(module) if id(one) in index_of}
        if below | shared:
            found.append((module, below | shared))
    return found
