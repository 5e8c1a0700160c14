"""`psctl.load_start_values()`: a model's and an optimizer's start values from the files of other libraries.

A file or folder of safetensors has a model, named as Hugging Face's models name their tensors; a folder of
torch.distributed.checkpoint has a model and may have an optimizer. The names in a file may have a prefix in common,
such as "model.", which is found by comparison.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from psctl.errors import UsageError
from psctl.train_state.dcp_calls import load_alone
from psctl.types import State

INDEX = "model.safetensors.index.json"
SHOWN = 3
"""Names that an error shows."""


class SavedTensors(Protocol):
    """Named tensors of a file."""

    def names(self) -> Iterable[str]:
        """Return all names."""

    def read(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """Return these tensors."""


def load_start_values(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """Load start values from another library's files, before `run.prepare`, DistributedDataParallel or a Trainer.

        psctl.load_start_values("checkpoint-500", model, optimizer)
        model, optimizer = run.prepare(model, optimizer)

    Every rank that has the files may call it; under psctl all ranks start from rank 0's model. An optimizer that has a
    state steps on the workers (`update: worker`).

    Args:
        path: a file of safetensors; a folder with `model.safetensors`, or several files and their index; or a folder
            of torch.distributed.checkpoint, which is read as torch does: by pickle, so only from whom you trust.
        model: gets the values of its parameters and persistent buffers; each must be there.
        optimizer: gets its state and the numbers of its groups, as its `load_state_dict` does.

    Returns:
        the names in the files that the model does not have.

    Raises:
        UsageError: there is no such file, or it does not fit the model; nothing was changed. The user's fault.
    """
    place = Path(path)
    is_dcp = (place / ".metadata").is_file()
    if optimizer is not None and not is_dcp:
        raise UsageError(
            f"{place} holds no optimizer: it is no folder of torch.distributed.checkpoint",
            "leave the optimizer out; it then starts anew",
        )
    source: SavedTensors = DcpFolder(place) if is_dcp else SafetensorsFiles(place)
    own = model.state_dict()
    prefix, unused = _fit(place, source.names(), own)
    there = set(source.names())
    found = source.read([prefix + name for name in own if prefix + name in there])
    values = {name: found[prefix + name] for name in own if prefix + name in found}
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise UsageError(
                f"{name} has shape {tuple(value.shape)} in {place}, and {tuple(own[name].shape)} in this model",
                "build the model that was saved",
            )
    state = _optimizer_state(source, model, optimizer) if isinstance(source, DcpFolder) and optimizer else None
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)
    return [name for name in unused if ".state." not in name and ".param_groups" not in name]


def _fit(place: Path, names: Iterable[str], own: Mapping[str, torch.Tensor]) -> tuple[str, list[str]]:
    """Return the prefix of the model's names in a file, and the file's names that the model lacks.

    Tied tensors may be in the file once.
    """
    there = set(names)
    first = [name[: -len(one)] for one in own for name in there if name == one or name.endswith(f".{one}")]
    prefix = max(sorted(set(first), key=len), key=lambda each: sum(each + name in there for name in own), default="")
    held = {_address(one) for name, one in own.items() if prefix + name in there}
    missing = [name for name, one in own.items() if prefix + name not in there and _address(one) not in held]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        has = ", ".join(sorted(there)[:SHOWN])
        raise UsageError(
            f"{place} has no {', '.join(missing[:SHOWN])}{more}; it has {has} ...",
            "build the model that was saved; of a model inside another one, give that part alone",
        )
    return prefix, sorted(there - {prefix + name for name in own})


def _address(tensor: torch.Tensor) -> object:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else object()


class SafetensorsFiles:
    """One file, or those of a folder."""

    def __init__(self, place: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UsageError(
                "files of safetensors need the package safetensors, which is not installed",
                "pip install safetensors; on managed hosts: runtime.requirements in cluster.yaml",
            ) from error
        self._open = safe_open
        self._files: dict[str, Path] = {}
        for file in _files(place):
            with self._opened(file) as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def names(self) -> Iterable[str]:
        return self._files

    def read(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        wanted = list(names)
        for file in sorted({self._files[name] for name in wanted}):
            with self._opened(file) as opened:
                found |= {name: opened.get_tensor(name) for name in wanted if self._files[name] == file}
        return found

    # Any: the library's reader has no type.
    def _opened(self, file: Path) -> Any:
        from safetensors import SafetensorError

        try:
            return self._open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file} is no file of safetensors: {error}", "download or export it again") from error


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if (place / INDEX).is_file():
        try:
            names = sorted(set(json.loads((place / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"{place / INDEX} is no index of safetensors: {error!r}", "download it again") from error
        return [place / Path(name).name for name in names]
    if (place / "model.safetensors").is_file():
        return [place / "model.safetensors"]
    raise UsageError(
        f"{place} holds no model",
        f"name a file of safetensors, a folder with model.safetensors or {INDEX}, or one of "
        "torch.distributed.checkpoint (with .metadata)",
    )


class DcpFolder:
    """A folder of torch.distributed.checkpoint."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._kept = FileSystemReader(place).read_metadata().state_dict_metadata

    def names(self) -> Iterable[str]:
        return [name for name, each in self._kept.items() if isinstance(each, TensorStorageMetadata)]

    def all_names(self) -> Iterable[str]:
        """Return the names of tensors and of other values."""
        return self._kept

    def read(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return self.values(names)

    # Any: other values are whatever the script that saved them had.
    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return tensors and other values by name."""
        wanted: dict[str, Any] = {}
        for name in names:
            each = self._kept[name]
            if isinstance(each, TensorStorageMetadata):
                wanted[name] = torch.empty(each.size, dtype=each.properties.dtype)
            else:
                wanted[name] = io.BytesIO()
        if wanted:
            load_alone(wanted, self._place)
        return wanted


def _optimizer_state(source: DcpFolder, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's `state_dict` with the folder's states and numbers.

    Raises:
        UsageError: it has none for this model.
    """
    whole = optimizer.state_dict()
    held = [one for group in optimizer.param_groups for one in group["params"]]
    names = {id(one): name for name, one in model.named_parameters()}
    order = [names.get(id(one), "") for one in held]
    there = list(source.all_names())
    prefix = _optimizer_prefix(there, order)
    if prefix is None:
        raise UsageError(
            "the folder of torch.distributed.checkpoint has no state of this model's optimizer",
            "leave the optimizer out; it then starts anew",
        )
    wanted = {key: name for name in order for key in there if name and key.startswith(f"{prefix}state.{name}.")}
    values = source.values(wanted)
    state: dict[int, State] = {}
    for key, name in wanted.items():
        part = key.removeprefix(f"{prefix}state.{name}.")
        if "." not in part:  # else it is of a parameter whose name begins with this one's
            state.setdefault(order.index(name), {})[part] = values[key]
    whole["state"] = state
    for group, numbers in zip(whole["param_groups"], _group_numbers(source, prefix, whole, order), strict=True):
        group.update({key: value for key, value in numbers.items() if key in group and key != "params"})
    return whole


def _optimizer_prefix(there: Iterable[str], order: Iterable[str]) -> str | None:
    names = [name for name in order if name]
    for key in there:
        for name in names:
            before, found, _ = key.partition(f"state.{name}.")
            if found and (not before or before.endswith(".")):
                return before
    return None


def _group_numbers(source: DcpFolder, prefix: str, whole: State, order: list[str]) -> Iterator[State]:
    """Yield the saved numbers of each group, which are named by its index, or by the name of each of its parameters."""
    top = f"{prefix}param_groups"
    values = source.values(key for key in source.all_names() if key.startswith(f"{top}."))
    for index, group in enumerate(whole["param_groups"]):
        starts = [f"{top}.{index}."] + [f"{top}.{order[each]}." for each in group["params"][:1]]
        yield {
            key.removeprefix(start): value for start in starts for key, value in values.items() if key.startswith(start)
        }
