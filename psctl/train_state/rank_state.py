"""A rank's own state at the start of a clock, as bytes, for a worker that replaces a lost one during the run.

Parameters and the optimizer's state are on the servers. The rest is rank 0's (under asp each rank's): its position in
the data, the scheduler, the groups' numbers, buffers, tracked objects, and the script's random generators if the loop
has drawn from them. It is stored on the servers at the start of each clock. Frozen parameters never change, so only
their fingerprint is stored: a replacement must have built the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch

from psctl.errors import UsageError
from psctl.ps.pieces import bytes_view, torch_dtype
from psctl.train_state.example_sharing import Batch, DataPosition, position_from
from psctl.train_state.random_generators import RandomGenerators, SavedGenerators
from psctl.train_state.training_parts import TrackedState, TrainingParts
from psctl.types import State, StateValue


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RankState(msgspec.Struct, frozen=True):
    """The encoded state. `position` has the fields of DataPosition, `batches` the last batches of each loader, `clocks`
    the number of finished clocks of each store: all workers of a store have as many between two steps."""

    position: dict[str, int]
    groups: list[State]
    scheduler: StateValue
    tracked: State
    tensors: list[StoredTensor]
    frozen: str
    batches: dict[int, list[Batch]]
    clocks: dict[str, int]


_DECODER = msgspec.msgpack.Decoder(RankState)


def capture(
    parts: TrainingParts, tracked: TrackedState, generators: RandomGenerators, position: DataPosition, frozen: str,
    batches: dict[int, list[Batch]], clocks: dict[str, int],
) -> bytes:  # fmt: skip
    """Return the current state.

    Args:
        position: the next batch to train on.
        frozen: `fingerprint` of the frozen parameters.
        batches: the last ones of each loader, where members may change.
        clocks: of the stores.
    """
    plain, more = tracked.state()
    found = {f"buffer/{name}": one for name, one in parts.buffers().items()} | more
    for moment, states in generators.for_replacement()._asdict().items():
        found |= {f"random/{moment}/{name}": one for name, one in states.items()}
    tensors = [_stored(name, one) for name, one in found.items()]
    where = msgspec.structs.asdict(position)
    return msgspec.msgpack.encode(
        RankState(where, parts.groups(), parts.scheduler_state(), plain, tensors, frozen, batches, clocks)
    )


def restore(
    data: bytes, parts: TrainingParts, tracked: TrackedState, generators: RandomGenerators, *, own: bool
) -> tuple[DataPosition, dict[int, list[Batch]], dict[str, int]]:
    """Restore the state that `capture` returned; returns the position in the data, the last batches, and the clocks.

    Args:
        own: this rank stored the state itself.

    Raises:
        UsageError: this worker's frozen parameters are not rank 0's; the script's fault.
    """
    state = _DECODER.decode(data)
    if state.frozen != fingerprint(parts):
        raise UsageError(
            "a worker that replaces a lost one built frozen parameters that differ from worker/0's",
            "make their values on every rank from the job's seed or from one file",
        )
    tensors = {each.name: _tensor(each) for each in state.tensors}
    parts.load_values(tensors, [name for name in tensors if name.startswith("buffer/")])
    parts.load_groups(state.groups)
    parts.load_scheduler(state.scheduler)
    tracked.resume(state.tracked, {name: one for name, one in tensors.items() if name.startswith("track/")})
    now, epoch, origin = (
        {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        for prefix in ("random/now/", "random/epoch/", "random/origin/")
    )
    generators.resume(SavedGenerators(now, epoch, None if own else origin))
    return position_from(state.position), state.batches, state.clocks


def buffers_of(data: bytes) -> dict[str, torch.Tensor]:
    """Return the buffers in a state that `capture` returned, by name."""
    found = [each for each in _DECODER.decode(data).tensors if each.name.startswith("buffer/")]
    return {each.name.removeprefix("buffer/"): _tensor(each) for each in found}


def has_own_state(data: bytes) -> bool:
    """Return whether a state that `capture` returned has tracked objects, or random numbers of the script's own."""
    state = _DECODER.decode(data)
    return bool(state.tracked) or any(not each.name.startswith("buffer/") for each in state.tensors)


def with_buffers(data: bytes, buffers: Mapping[str, torch.Tensor]) -> bytes:
    """Return a state that `capture` returned with these buffers, by name, instead of its own."""
    state = _DECODER.decode(data)
    others = [each for each in state.tensors if not each.name.startswith("buffer/")]
    found = [_stored(f"buffer/{name}", one) for name, one in buffers.items()]
    return msgspec.msgpack.encode(msgspec.structs.replace(state, tensors=found + others))


def fingerprint(parts: TrainingParts) -> str:
    """Return a digest of the names and values of the frozen parameters; "" where there are none."""
    found = hashlib.sha256()
    frozen = {name: one for name, one in parts.parameters().items() if not one.requires_grad}
    for name, one in frozen.items():
        found.update(name.encode())
        found.update(_flat(one))
    return found.hexdigest() if frozen else ""


def _tensor(stored: StoredTensor) -> torch.Tensor:
    dtype = torch_dtype(stored.dtype)
    if not stored.data:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=dtype).reshape(stored.shape)


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(name, dtype, tuple(tensor.shape), bytes(_flat(tensor)))


def _flat(tensor: torch.Tensor) -> memoryview:
    return bytes_view(tensor.detach().cpu().contiguous().reshape(-1))
