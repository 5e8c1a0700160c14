"""The optimizers that servers can run, and their construction over pieces.

An optimizer is fit for servers when it is elementwise: then its effect on a parameter's pieces equals its effect on
the whole. Only exact types of torch.optim are known to be fit, never subclasses, and only without step hooks, because
their effect is unknown. Unfit optimizers run on the workers (`update: worker`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import optimizer as torch_optimizer

from psctl.ps.pieces import Piece
from psctl.types import Layout, Number

FIT: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
        torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop,
        torch.optim.ASGD,
    )
}  # fmt: skip

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that is one number a parameter; all other state of the fit optimizers is elementwise."""


def fit_name(optimizer: object) -> str:
    """Return the optimizer's name in FIT, or "" when it must run on workers.

    Also unfit are optimizers with step hooks, and those with a tensor among a group's numbers: a tensor cannot be sent
    with the clock as a plain number.
    """
    name = type(optimizer).__name__
    if type(optimizer) is not FIT.get(name):
        return ""
    assert isinstance(optimizer, torch.optim.Optimizer)
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks):
        return ""
    values = [group[key] for group in optimizer.param_groups for key in optimizer.defaults]
    flat = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
    return "" if any(isinstance(value, torch.Tensor) for value in flat) else name


def scalars() -> str:
    """Return the dtype in which torch keeps an optimizer's per-parameter numbers, at present, in this process."""
    return "float64" if torch.get_default_dtype() == torch.float64 else "float32"


def untouched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer holds no state but its constructor's (Adagrad's): then servers need no state."""
    return all("step" in state and float(state["step"]) == 0.0 for state in optimizer.state.values())


GroupSettings: TypeAlias = dict[str, Any]
"""Keyword arguments of an optimizer of torch. Any: each optimizer has its own."""


def numbers(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Number], ...]:
    """Return each group's numbers and flags, unchanged, in the form that is sent: only the optimizer's own keys.

    Keys that schedulers add to a group (`initial_lr` and the like) stay on the worker.
    """
    return tuple(
        {key: _travelling(group[key]) for key in optimizer.defaults if key in group} for group in optimizer.param_groups
    )


def _travelling(value: object) -> Number:
    if isinstance(value, tuple | list):
        return [float(item) for item in value]
    if isinstance(value, torch.Tensor):  # of an unfit optimizer: its layout is only displayed
        return float(value) if value.numel() == 1 else [float(item) for item in value.flatten()]
    assert value is None or isinstance(value, float | int | bool | str), f"no number: {value!r}"
    return value


class PieceOptimizer:
    """The user's optimizer over the pieces of one shard.

    Holds one parameter a piece, a view of the shard's buffer, in the user's groups with the user's flags verbatim,
    except `capturable`: it is about CUDA graphs, and torch refuses it on the CPU, where servers compute.

    Args:
        layout: names the optimizer and its groups.
        held: the shard's pieces.
        values: the shard's buffer, which the steps change in place.
    """

    def __init__(self, layout: Layout, held: Sequence[Piece], values: torch.Tensor) -> None:
        self._held = held
        self._parameters = [torch.nn.Parameter(_view(values, piece), requires_grad=False) for piece in held]
        self._groups: dict[int, int] = {}  # group of the layout -> group of this optimizer
        given: list[GroupSettings] = []
        for index, group in enumerate(layout.groups):
            ours = [q for q, piece in zip(self._parameters, held, strict=True) if _group(layout, piece) == index]
            if ours:
                self._groups[index] = len(given)
                given.append({"params": ours, **settings(group)})
        self._optimizer = _build(layout.optimizer, given) if given else None

    def set_values(self, values: torch.Tensor) -> None:
        """Let the pieces be views of another buffer; the state stays."""
        for parameter, piece in zip(self._parameters, self._held, strict=True):
            parameter.data = _view(values, piece)

    def step(self, gradient: torch.Tensor, present: Sequence[bool], groups: Sequence[dict[str, Number]]) -> None:
        """Step once; pieces without any gradient get None, because a zero changes some optimizers' state.

        Args:
            gradient: joint gradient of the shard, flat.
            present: for each piece, whether any worker had a gradient.
            groups: numbers of each group of the layout, at this clock.
        """
        if self._optimizer is None:
            return
        for index, ours in self._groups.items():
            self._optimizer.param_groups[ours].update(settings(groups[index]))
        for parameter, piece, there in zip(self._parameters, self._held, present, strict=True):
            parameter.grad = _view(gradient, piece) if there else None
        with torch.no_grad():
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None  # the gradient's buffer is reused

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """Return the state of piece `index` by key: elementwise tensors are flat, scalars have no dimension."""
        if self._optimizer is None:
            return {}
        found = self._optimizer.state.get(self._parameters[index], {})
        return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

    def restore(self, index: int, state: dict[str, torch.Tensor]) -> None:
        """Set the state of piece `index`, in the form that `state` returns."""
        if self._optimizer is None or not state:
            return
        held, parameter = dict(state), self._parameters[index]
        if "step" in held and any(group.get("fused") for group in self._optimizer.param_groups):
            held["step"] = held["step"].to(parameter.device)  # where torch keeps it then
        self._optimizer.state[parameter] = held


def settings(group: dict[str, Number]) -> GroupSettings:
    """Return a group's numbers in the form in which a server passes them to torch."""
    given: GroupSettings = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    if "capturable" in given:
        given["capturable"] = False
    return given


def _build(name: str, given: list[GroupSettings]) -> torch.optim.Optimizer:
    """Build the optimizer; the first group's numbers are the constructor's too, for Adagrad makes its state there.

    torch wraps an optimizer's methods for its compiler, whose import takes a second. Servers compile nothing, so theirs
    has the methods as they are inside the wrappers.
    """
    kind = FIT[name]
    known = inspect.signature(kind.__init__).parameters
    arguments = {key: value for key, value in given[0].items() if key in known and key != "params"}
    plain: Callable[..., torch.optim.Optimizer] = type(
        name, (kind,), {method: inspect.unwrap(getattr(kind, method)) for method in ("add_param_group", "step")}
    )
    return plain(given, **arguments)


def _view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer.narrow(0, piece.at, piece.size)


def _group(layout: Layout, piece: Piece) -> int:
    return layout.parameters[piece.parameter].group
