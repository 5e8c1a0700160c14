"""Derives the layout of parameters and optimizer groups from the user's model and optimizer."""

from __future__ import annotations

import torch
from torch import nn

from psctl.errors import UsageError
from psctl.job.training_messages import Decision
from psctl.ps.dense.shard_state import Terms
from psctl.ps.server_optimizers import fit_name, numbers, scalars, untouched
from psctl.types import Layout, Number, ParameterInfo

_FLOATS = ("float64", "float32", "bfloat16", "float16")


BESIDE_WORKERS = 1 / 4
"""Part of the shards that step in backward where servers share hosts with workers. Pushes use the links then, in both
directions, and more values on their way would delay the last pushes, for which the next forward waits (measured in
docs/internals/measurements.md). Servers on hosts of their own answer in the other direction: all shards step then."""


def terms_of(decision: Decision, world: int) -> Terms:
    """Return the terms of training that workers and servers share; `world`: number of workers at the start."""
    base = decision.resume.step if decision.resume else 0
    staleness, hosts = decision.staleness, decision.hosts
    return Terms(
        decision.layout, world, decision.update, base, staleness, decision.compression, hosts, bool(decision.racks),
        in_backward=_part_in_backward(decision),
    )  # fmt: skip


def _part_in_backward(decision: Decision) -> float:
    if not decision.step_in_backward or decision.update != "server":
        return 0.0
    return 1.0 if decision.servers_apart else BESIDE_WORKERS


def check_given(model: object, optimizer: object, scheduler: object) -> None:
    """Raise UsageError unless the arguments of `prepare` are a model, an optimizer and a scheduler."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"run.prepare: {type(model).__name__} is no torch.nn.Module", "pass the model as the first argument"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"run.prepare: the model is wrapped in {type(model).__name__}, which synchronises by itself",
            "pass the plain model; psctl synchronises under every strategy",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"run.prepare: {type(optimizer).__name__} is no torch.optim.Optimizer",
            "pass model, optimizer and scheduler in this order",
        )
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise UsageError(
            f"run.prepare: {type(scheduler).__name__} has no state_dict and load_state_dict", "pass a torch scheduler"
        )


def describe(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, apart: bool = False) -> Layout:
    """Return the layout of a model and the optimizer that steps it.

    Args:
        apart: each worker steps by itself: the optimizer stays on the workers.

    Raises:
        UsageError: nothing is trainable, a trainable parameter has a type that cannot be summed, or the optimizer holds
            a parameter that the model does not.
    """
    groups = _groups_by_parameter(model, optimizer)
    infos, linear = [], linear_layers(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name} of {type(model).__name__} has no shape yet",
                "run one batch through the lazy module before run.prepare",
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and dtype not in _FLOATS:
            raise UsageError(
                f"parameter {name} is trainable and of type {dtype}, which cannot be summed",
                f"convert it to one of {', '.join(_FLOATS)}, or set its requires_grad to False",
            )
        infos.append(
            ParameterInfo(
                name, tuple(parameter.shape), dtype, groups.get(id(parameter), -1), parameter.requires_grad,
                name in linear,
            )
        )  # fmt: skip
    if not any(info.trainable for info in infos):
        raise UsageError(
            f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train",
            "call run.prepare after the parameters are made and unfrozen",
        )
    if optimizer is None:
        return Layout(tuple(infos), "", ())
    # State that the servers would not receive (loaded by the script before prepare) keeps the optimizer on the workers.
    name = fit_name(optimizer) if untouched(optimizer) and not apart else ""
    return Layout(tuple(infos), name, numbers(optimizer) if name else _plain_groups(optimizer), scalars())


def _groups_by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    if optimizer is None:
        return {}
    known = {id(parameter) for parameter in model.parameters()}
    found: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UsageError(
                    f"parameter {place} of the optimizer's group {index} is not a parameter of {type(model).__name__}",
                    "give run.prepare one model that holds all the optimizer's parameters (an nn.ModuleList of several"
                    " does), and make the optimizer after the last model.to(...)",
                )
            found[id(parameter)] = index
    return found


def _plain_groups(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Number], ...]:
    """Return the groups of an optimizer that stays on the workers, for display and comparison."""
    return tuple(
        {key: one for key, one in group.items() if key != "params" and isinstance(one, bool | int | float | str | None)}
        for group in optimizer.param_groups
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return by the weight's name the linear layers whose weight is their own, as only calls of the layer use it.

    Subclasses are left out, because other modules may use their weights without a call (nn.MultiheadAttention does).
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and holders[id(module.weight)] == 1
    }
