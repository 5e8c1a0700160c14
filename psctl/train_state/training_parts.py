"""The parts of a worker's state in checkpoints, as named tensors and JSON values: model, optimizer, tracked objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from psctl.errors import CheckpointIncomplete, UsageError
from psctl.job.training_messages import Resume
from psctl.ps.server_optimizers import SCALARS
from psctl.train_state.prepared_model import plain_class
from psctl.train_state.state_trees import pack, unpack
from psctl.types import State, StateValue, TensorSlice


class TrainingParts:
    """The model, optimizer and scheduler given to `prepare`.

    Args:
        model: prepared or not.
        optimizer, scheduler: None: not given.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Stateful | None) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, without waiting for their values."""
        return dict(plain_class(self.model).named_parameters(self.model))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, without waiting."""
        return {name: one for name, one in self.parameters().items() if one.requires_grad}

    @property
    def on_gpus(self) -> bool:
        """Whether parameters lie on GPUs."""
        return any(one.is_cuda for one in self.parameters().values())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return all buffers by name, including those not in checkpoints."""
        return dict(self.model.named_buffers())

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that checkpoints hold (torch calls them persistent)."""
        found = {}
        for place, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{place}.{name}" if place else name] = buffer
        return found

    def values(self, on_servers: bool) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that workers save; servers save those they hold."""
        found: dict[str, torch.Tensor] = {
            f"param/{name}": one for name, one in self.parameters().items() if not (on_servers and one.requires_grad)
        }
        found |= {f"buffer/{name}": one for name, one in self.saved_buffers().items()}
        return found

    # ---- optimizer and scheduler ----

    def optimizer_state(self, prefix: str = "optim") -> tuple[State, dict[str, torch.Tensor]]:
        """Return the optimizer's state: plain values by parameter name, tensors as `prefix`/NAME/KEY."""
        return state_of(self.optimizer, self.parameters(), prefix)

    def load_optimizer(self, plain: Mapping[str, StateValue], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the optimizer's state; `tensors` are those under optim/."""
        load_state(self.optimizer, self.parameters(), plain, tensors, "optim")

    def groups(self) -> list[State]:
        """Return the numbers of the optimizer's groups (lr, betas ...), also those added by schedulers."""
        if self.optimizer is None:
            return []
        return [
            pack({key: _number(value) for key, value in group.items() if key != "params"}, "groups", drop=True)[0]
            for group in self.optimizer.param_groups
        ]

    def tied(self) -> dict[str, str]:
        """Return the further names of parameters that have several, each with the one that checkpoints use."""
        names = {id(one): name for name, one in self.parameters().items()}
        every = plain_class(self.model).named_parameters(self.model, remove_duplicate=False)
        return {name: names[id(one)] for name, one in every if name != names[id(one)]}

    def group_members(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        names = {id(one): name for name, one in self.parameters().items()}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [[names[id(one)] for one in group["params"] if id(one) in names] for group in groups]

    def load_groups(self, groups: Sequence[Mapping[str, StateValue]]) -> None:
        """Set the groups' numbers.

        Raises:
            UsageError: the optimizer has another number of groups than the checkpoint's.
        """
        if self.optimizer is None or not groups:
            return
        if len(groups) != len(self.optimizer.param_groups):
            raise UsageError(
                f"the checkpoint's optimizer has {len(groups)} groups, the script's {len(self.optimizer.param_groups)}",
                "build the optimizer as in the job that saved it, or start from the beginning with --resume never",
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in unpack(dict(saved), {}).items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def scheduler_state(self) -> StateValue:
        """Return the scheduler's state as JSON values, without values of other types."""
        return pack(self.scheduler.state_dict(), "scheduler", drop=True)[0] if self.scheduler is not None else None

    def load_scheduler(self, saved: StateValue) -> None:
        """Restore the scheduler's state."""
        if self.scheduler is not None and saved is not None:
            self.scheduler.load_state_dict(unpack(saved, {}))

    def load_values(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        """Write tensors into the parameters and buffers of these names (param/..., buffer/...)."""
        own: dict[str, torch.Tensor] = {f"param/{name}": one for name, one in self.parameters().items()}
        own |= {f"buffer/{name}": one for name, one in self.buffers().items()}
        with torch.no_grad():
            for name in names:
                here, there = tuple(own[name].shape), tuple(tensors[name].shape)
                if here != there:
                    raise CheckpointIncomplete(
                        f"{name} has shape {there} in the checkpoint and {here} in this model",
                        "use the job file and code that the checkpoint's manifest names",
                    )
                own[name].copy_(tensors[name])


def local_prefix(rank: int) -> str:
    """Return the prefix of the optimizer state of a rank above 0 in a checkpoint, when each rank has its own."""
    return f"local/{rank}"


def state_of(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter], prefix: str
) -> tuple[State, dict[str, torch.Tensor]]:
    """Return an optimizer's state: plain values by parameter name, tensors as `prefix`/NAME/KEY.

    Args:
        optimizer: None: there is none, and the state is empty.
        parameters: by name; state of others is left out.
        prefix: of the tensors' names.
    """
    plain: State = {}
    tensors: dict[str, torch.Tensor] = {}
    names = {id(one): name for name, one in parameters.items()}
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        name = names.get(id(parameter))
        if name is None:
            continue
        packed, found = pack(state, f"{prefix}/{name}")
        plain[name] = {key: value for key, value in packed.items() if not _is_tensor(value)}
        tensors.update(found)
    return plain, tensors


def load_state(
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    plain: Mapping[str, StateValue],
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
) -> None:
    """Restore an optimizer's state, as `state_of` returned it."""
    if optimizer is None:
        return
    held = [one for group in optimizer.param_groups for one in group["params"]]
    index_of = {id(one): at for at, one in enumerate(held)}
    found = states_by_name([name for name, one in parameters.items() if id(one) in index_of], plain, tensors, prefix)
    whole = optimizer.state_dict()
    whole["state"] = {index_of[id(parameters[name])]: state for name, state in found.items()}
    optimizer.load_state_dict(whole)


def states_by_name(
    names: Iterable[str], plain: Mapping[str, StateValue], tensors: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, State]:
    """Return the saved states of parameters that have one, by name; the arguments are those of `load_state`."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.removeprefix(f"{prefix}/").rpartition("/")
        by_name.setdefault(name, {})[key] = tensor.reshape(()) if key in SCALARS else tensor
    states = {name: by_name.get(name, {}) | unpack(dict(plain.get(name, {})), tensors) for name in names}
    return {name: state for name, state in states.items() if state}


def load_saved(
    resume: Resume, names: Sequence[str], load: Callable[[Sequence[TensorSlice]], list[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return tensors of the checkpoint that the job resumes from, by name.

    Args:
        load: reads slices of the checkpoint, which are whole tensors.

    Raises:
        CheckpointIncomplete: some are missing; names the first.
    """
    there = {each.name: each for each in resume.tensors}
    missing = [name for name in names if name not in there]
    if missing:
        raise CheckpointIncomplete(
            f"checkpoint {resume.checkpoint} has no {missing[0]}"
            + (f" (and {len(missing) - 1} more)" if missing[1:] else ""),
            "use the job file and code that the checkpoint's manifest names",
        )
    return dict(zip(names, load([there[name] for name in names]), strict=True))


def _is_tensor(packed: object) -> bool:
    return isinstance(packed, dict) and set(packed) == {"$tensor"}


def _number(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# ---- run.track ----


@runtime_checkable
class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> StateValue: ...
    def load_state_dict(self, state: StateValue, /) -> object: ...


class TrackedState:
    """Objects given to `run.track`, by key, and the saved state of objects that are not tracked yet."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self._waiting: State = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, key: str, thing: object) -> None:
        """Track an object; restores its state if the job resumes from a checkpoint that has one.

        Raises:
            UsageError: the key is taken, or the state is not tensors and plain values; the script's fault.
        """
        if key in self._things:
            raise UsageError(f"run.track({key}=...): the name is in use", "use another name")
        if not isinstance(thing, Stateful):
            raise UsageError(
                f"run.track({key}=...): {type(thing).__name__} has no state_dict and load_state_dict",
                "give it both; state_dict may return tensors, numbers, text, lists and dicts of them",
            )
        pack(thing.state_dict(), f"track/{key}")
        self._things[key] = thing
        self._restore(key)

    def state(self) -> tuple[State, dict[str, torch.Tensor]]:
        """Return all states: plain values by key, and tensors by name (track/KEY/...)."""
        plain: State = {}
        tensors: dict[str, torch.Tensor] = {}
        for key, thing in self._things.items():
            plain[key], found = pack(thing.state_dict(), f"track/{key}")
            tensors.update(found)
        return plain, tensors

    def resume(self, plain: Mapping[str, StateValue], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of tracked objects; the rest is kept until they are tracked."""
        self._waiting, self._tensors = dict(plain), dict(tensors)
        for key in self._things:
            self._restore(key)

    def _restore(self, key: str) -> None:
        if key in self._waiting:
            self._things[key].load_state_dict(unpack(self._waiting.pop(key), self._tensors))
