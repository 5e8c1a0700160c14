"""Writes a checkpoint in the format of torch.distributed.checkpoint, as that library's own functions name its parts."""

from __future__ import annotations

from pathlib import Path

import torch

from psctl.checkpoint.disk import Disk
from psctl.checkpoint.manifest import Manifest, whole_tensors
from psctl.checkpoint.reader import read_slice, read_state
from psctl.checkpoint.writer import partial_path, remove_abandoned_for
from psctl.errors import UsageError
from psctl.train_state.dcp_calls import save_alone
from psctl.train_state.state_trees import unpack
from psctl.train_state.training_parts import states_by_name
from psctl.types import State, TensorSlice

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the written state: what `torch.distributed.checkpoint.state_dict.get_state_dict` returns."""


def export_dcp(folder: Path, manifest: Manifest, out: Path) -> int:
    """Write a checkpoint's model and optimizer as a folder of torch.distributed.checkpoint; return its bytes.

    The state is {"model": ..., "optimizer": {"state": ..., "param_groups": ...}, "step": N}, by the names of the
    model's parameters, so that `set_state_dict` takes it in a script without psctl, sharded or not.

    Args:
        folder, manifest: a checkpoint that was verified.
        out: the new folder.

    Raises:
        UsageError: `out` exists, the checkpoint has no parameters, or it lacks the members of its optimizer's groups.
    """
    if out.exists():
        raise UsageError(f"{out} exists already", hint="name another folder, or remove it")
    tensors = {each.name: _tensor(folder, manifest, each) for each in whole_tensors(manifest)}
    model = {
        name.removeprefix(prefix): one
        for prefix in ("param/", "buffer/")
        for name, one in tensors.items()
        if name.startswith(prefix)
    }
    if not model:
        raise UsageError(f"{manifest.id} holds no parameters", where=manifest.id)
    saved = read_state(folder, manifest)
    model |= {name: model[one] for name, one in (saved.get("tied") or {}).items()}
    held = {name: one for name, one in tensors.items() if name.startswith("optim/")}
    names = [name.removeprefix("param/") for name in tensors if name.startswith("param/")]
    optimizer = {
        "state": states_by_name(names, saved.get("optimizer") or {}, held, "optim"),
        "param_groups": _groups(saved, manifest.id),
    }
    remove_abandoned_for(out)
    partial, disk = partial_path(out), Disk()
    disk.remove(partial)
    try:
        save_alone({MODEL: model, OPTIMIZER: optimizer, "step": manifest.step}, partial)
        disk.rename(partial, out)
    except BaseException:
        disk.remove(partial)
        raise
    return sum(each.stat().st_size for each in out.iterdir())


def _tensor(folder: Path, manifest: Manifest, whole: TensorSlice) -> torch.Tensor:
    dtype = getattr(torch, whole.dtype)
    data = bytearray()
    for _, part in read_slice(folder, manifest, whole):
        data += part
    return torch.frombuffer(data, dtype=dtype).reshape(whole.shape) if data else torch.empty(whole.shape, dtype=dtype)


def _groups(saved: State, where: str) -> list[State]:
    """Return the optimizer's groups with the names of their parameters."""
    numbers, members = saved.get("groups") or [], saved.get("members") or []
    if len(numbers) != len(members):
        raise UsageError(
            f"{where} does not say which parameters are in which group of the optimizer: an earlier psctl wrote it",
            hint="--format safetensors writes the model alone",
            where=where,
        )
    return [unpack(dict(each), {}) | {"params": list(names)} for each, names in zip(numbers, members, strict=True)]
