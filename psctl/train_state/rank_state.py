"""Rank 0's own state at the start of a clock, as bytes: what a worker that joins in mid-run cannot get otherwise.

Parameters and the optimizer's state are on the servers. What is left is rank 0's alone: where it is in its data, the
scheduler, the groups' numbers, buffers, tracked things, the script's random generators where it has drawn from them in
its loop. It leaves them with the servers at the start of each clock.
Frozen parameters never change, so of them only a fingerprint travels: a joining worker's own must be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from psctl.errors import UsageError
from psctl.ps.pieces import bytes_view, torch_dtype
from psctl.train_state.data_position import DataPosition, position_of
from psctl.train_state.example_sharing import Batch
from psctl.train_state.random_generators import RandomGenerators, SavedGenerators
from psctl.train_state.tracked_state import TrackedState
from psctl.train_state.training_parts import TrainingParts


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RankState(msgspec.Struct, frozen=True):
    """All of it."""

    position: dict[str, int]
    groups: list[dict[str, Any]]
    scheduler: Any
    tracked: dict[str, Any]
    tensors: list[StoredTensor]
    frozen: str
    batches: dict[int, list[Batch]]


_DECODER = msgspec.msgpack.Decoder(RankState)


def capture(
    parts: TrainingParts, tracked: TrackedState, generators: RandomGenerators, position: DataPosition, frozen: str,
    batches: dict[int, list[Batch]],
) -> bytes:  # fmt: skip
    """Return the state of now.

    Args:
        position: the next batch to train on.
        frozen: `fingerprint` of the frozen parameters.
        batches: what each loader handed out last, where members may change.
    """
    plain, more = tracked.state()
    found = {f"buffer/{name}": one for name, one in parts.buffers().items()} | more
    for moment, states in generators.left()._asdict().items():
        found |= {f"random/{moment}/{name}": one for name, one in states.items()}
    tensors = [_kept(name, one) for name, one in found.items()]
    where = msgspec.structs.asdict(position)
    return msgspec.msgpack.encode(
        RankState(where, parts.groups(), parts.scheduler_state(), plain, tensors, frozen, batches)
    )


def restore(
    data: bytes, parts: TrainingParts, tracked: TrackedState, generators: RandomGenerators, *, own: bool
) -> tuple[DataPosition, dict[int, list[Batch]]]:
    """Give this worker the state that `capture` returned; returns where to go on, and the last batches.

    Args:
        own: it is this rank's, not another's.

    Raises:
        UsageError: this worker's frozen parameters are not rank 0's; the script's fault.
    """
    aside = _DECODER.decode(data)
    if aside.frozen != fingerprint(parts):
        raise UsageError(
            "a worker that takes a lost one's place built frozen parameters that differ from worker/0's",
            "make their values on every rank from the job's seed or from one file",
        )
    tensors = {
        each.name: torch.frombuffer(bytearray(each.data), dtype=torch_dtype(each.dtype)).reshape(each.shape)
        if each.data
        else torch.empty(each.shape, dtype=torch_dtype(each.dtype))
        for each in aside.tensors
    }
    parts.load_values(tensors, [name for name in tensors if name.startswith("buffer/")])
    parts.load_groups(aside.groups)
    parts.load_scheduler(aside.scheduler)
    tracked.resume(aside.tracked, {name: one for name, one in tensors.items() if name.startswith("track/")})
    now, epoch, origin = ({name: tensors[path] for path, name in _below(tensors, f"random/{moment}/")}
                          for moment in ("now", "epoch", "origin"))  # fmt: skip
    generators.resume(SavedGenerators(now, epoch, None if own else origin))
    return position_of(aside.position), aside.batches


def _below(tensors: Iterable[str], place: str) -> list[tuple[str, str]]:
    return [(path, path.removeprefix(place)) for path in tensors if path.startswith(place)]


def fingerprint(parts: TrainingParts) -> str:
    """Return what tells one set of frozen parameters from another; "" where there are none."""
    found = hashlib.sha256()
    frozen = {name: one for name, one in parts.parameters().items() if not one.requires_grad}
    for name, one in frozen.items():
        found.update(name.encode())
        found.update(_flat(one))
    return found.hexdigest() if frozen else ""


def _kept(name: str, tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(name, dtype, tuple(tensor.shape), bytes(_flat(tensor)))


def _flat(tensor: torch.Tensor) -> memoryview:
    return bytes_view(tensor.detach().cpu().contiguous().reshape(-1))
