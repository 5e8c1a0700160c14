"""Random generators of python, numpy (if loaded) and torch: seeded within each step, the script's own outside of steps.

Within a step (from the fetch of its batch, or from the model's forward where the script has a loader of its own, to the
end of `optimizer.step()`) their numbers are a function of seed, clock and rank, so that a step can be repeated to the
bit. Outside of steps they have the script's own states: numbers drawn between `prepare` and the loop, between epochs or
after a step depend on the script's seeds only. Checkpoints have these states of each rank, of two moments: the start of
the epoch, because a resumed job runs the code before its first batch again, and the checkpoint itself.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import nn

from psctl.train_state.prepared_model import ForwardHooks, PreForwardHook

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: only their children are called."""


def mix(*parts: int | str) -> int:
    """Return 63 bits that depend on every part; equal parts give equal bits in every process and version of Python."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def reseed(*parts: int | str) -> None:
    """Seed python's, numpy's and torch's generators from `parts`."""
    seed = mix(*parts)
    random.seed(seed)
    _seed_torch(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _seed_torch(seed: int) -> None:
    """Seed the generators of torch that exist.

    `torch.manual_seed` takes 0.1 to 0.3 ms: for each kind of device that is not in use it keeps the call, with its
    formatted stack, until the device is used.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    elif has_devices():
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


@functools.cache
def has_devices() -> bool:
    """Whether torch has generators for devices of this machine; none is initialized for the answer."""
    if hasattr(torch, "accelerator"):  # torch before 2.6 lacks it
        try:
            kind = torch.accelerator.current_accelerator()
        except RuntimeError:  # torch 2.6, where there is none
            return False
        if kind is None or kind.type != "cuda":
            return kind is not None
    return bool(torch.cuda.device_count())


PythonState: TypeAlias = tuple[int, tuple[int, ...], float | None]
"""As `random.getstate` returns it: version, words, the next Gaussian number."""

NumpyState: TypeAlias = "tuple[str, npt.NDArray[np.uint32], int, int, float]"
"""As `numpy.random.get_state` returns it: name, words, place in them, whether there is a Gaussian number, and it."""


class GeneratorStates(NamedTuple):
    """The states of a process's generators."""

    python: PythonState
    numpy: NumpyState | None
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> GeneratorStates:
        """Return the current states."""
        numpy = sys.modules.get("numpy")
        cuda = tuple(each.get_state() for each in _on_gpus())
        other = numpy.random.get_state() if numpy is not None else None
        return cls(random.getstate(), other, torch.default_generator.get_state(), cuda)

    def apply(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.default_generator.set_state(self.cpu)
        for generator, state in zip(_on_gpus(), self.cuda, strict=False):
            generator.set_state(state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the states by name, as checkpoints hold them."""
        _, words, gauss = self.python
        found = {"python": _to_tensor(words, gauss), "torch": self.cpu}
        if self.numpy is not None:
            _, array, at, held, other = self.numpy
            found["numpy"] = _to_tensor([*array.tolist(), at], other if held else None)
        return found | {f"cuda/{index}": state for index, state in enumerate(self.cuda)}

    def with_saved(self, tensors: Mapping[str, torch.Tensor]) -> GeneratorStates:
        """Return these states updated from a checkpoint, which may have fewer or more generators."""
        found = self
        if "python" in tensors:
            state, gauss = _from_tensor(tensors["python"])
            found = found._replace(python=(random.getstate()[0], tuple(state), gauss))
        if "numpy" in tensors and self.numpy is not None:
            (*state, at), gauss = _from_tensor(tensors["numpy"])
            array = self.numpy[1].copy()
            array[:] = state
            held = (0, 0.0) if gauss is None else (1, gauss)
            found = found._replace(numpy=(self.numpy[0], array, at, *held))
        if "torch" in tensors:
            found = found._replace(cpu=tensors["torch"])
        cuda = tuple(tensors.get(f"cuda/{index}", state) for index, state in enumerate(self.cuda))
        return found._replace(cuda=cuda)

    def differing(self, before: GeneratorStates) -> dict[str, torch.Tensor]:
        """Return those of `tensors` that differ from before."""
        same = self.python == before.python and _same(self.numpy, before.numpy) and torch.equal(self.cpu, before.cpu)
        if same and not self.cuda:
            return {}
        old = before.tensors()
        return {name: one for name, one in self.tensors().items() if name not in old or not torch.equal(one, old[name])}


def _on_gpus() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def _same(one: NumpyState | None, other: NumpyState | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one[1] == other[1]).all()) and one[2:] == other[2:]


def _to_tensor(state: Sequence[int], gauss: float | None) -> torch.Tensor:
    """Return a Mersenne twister's state: its integers, and the second number of a normal pair where one is left."""
    return torch.tensor([*state, float(gauss is not None), gauss or 0.0], dtype=torch.float64)


def _from_tensor(tensor: torch.Tensor) -> tuple[list[int], float | None]:
    *state, held, gauss = tensor.tolist()
    return [int(each) for each in state], gauss if held else None


def rank_prefix(rank: int) -> str:
    """Return what the names of a rank's states in a checkpoint begin with."""
    return f"random/{rank}/"


class SavedGenerators(NamedTuple):
    """Saved states by name, of two moments: `now`, and where the `epoch` began.

    `origin`: the states at the beginning of the loop of the rank that saved them. A rank with other states there was
    seeded differently by the script, and keeps its own. None: this rank saved them.
    """

    now: Mapping[str, torch.Tensor]
    epoch: Mapping[str, torch.Tensor]
    origin: Mapping[str, torch.Tensor] | None = None


class RandomGenerators:
    """Switches a process's generators between the states of steps and the script's own."""

    def __init__(self) -> None:
        self._own: GeneratorStates | None = None  # the script's, within a step
        self._origin: GeneratorStates | None = None  # where the loop began, before saved states were applied
        self._epoch: GeneratorStates | None = None  # where the epoch began
        self._ended: GeneratorStates | None = None  # where the last step that is saved ended
        self._saved: SavedGenerators | None = None

    def resume(self, saved: SavedGenerators | None) -> None:
        """Have saved states applied at the beginning of the resumed epoch and after the first step."""
        self._saved = saved

    @property
    def in_step(self) -> bool:
        """Whether the generators have the states of a step."""
        return self._own is not None

    def begin_step(self) -> None:
        """Save the script's states, unless a step has begun already."""
        if self._own is None:
            now = self._note_origin(GeneratorStates.now())
            self._own, self._saved = (now.with_saved(self._saved.now) if self._saved is not None else now), None

    def end_step(self) -> None:
        """Restore the script's states, if a step has begun."""
        if self._own is not None:
            own, self._own = self._own, None
            own.apply()

    def begin_epoch(self, *, resumed: bool, again: bool) -> None:
        """Begin an epoch.

        Args:
            resumed: the job was resumed in this epoch.
            again: the epoch runs from its beginning, so later saved states are not applied.
        """
        self.end_step()
        now = self._note_origin(GeneratorStates.now())
        if resumed and self._saved is not None:
            now = now.with_saved(self._saved.epoch)
            now.apply()
            if again:
                self._saved = None
        self._epoch = now

    def end_epoch(self) -> None:
        """End the epoch: states saved from now on are of no epoch."""
        self.end_step()
        self._epoch = None

    def mark_step_end(self) -> None:
        """Keep the current states for `saved`: the step that has just ended is a checkpoint."""
        self._ended = self._now()

    def checkpoint_tensors(self, *, marked: bool, origin: bool) -> dict[str, torch.Tensor]:
        """Return the states for a checkpoint, by name.

        Args:
            marked: those at `mark_step_end`.
            origin: add the states where the loop began, for ranks that saved nothing.
        """
        now = self._ended if marked and self._ended is not None else self._now()
        found = {"now": now, "epoch": self._epoch or now} | ({"origin": self._origin or now} if origin else {})
        return {f"{moment}/{name}": one for moment, states in found.items() for name, one in states.tensors().items()}

    def for_replacement(self) -> SavedGenerators:
        """Return the states for a process that runs the script up to its loop and then continues at this point."""
        if self._origin is None:
            return SavedGenerators({}, {}, {})
        here = self._now()
        now, epoch = here.differing(self._origin), (self._epoch or here).differing(self._origin)
        return SavedGenerators(now, epoch, self._origin.tensors() if now or epoch else {})

    def _now(self) -> GeneratorStates:
        return self._own or GeneratorStates.now()

    def _note_origin(self, now: GeneratorStates) -> GeneratorStates:
        """Record the states where the loop began, once; drop saved states that the script's seeds contradict."""
        if self._origin is None:
            self._origin, saved = now, self._saved
            if saved is not None and saved.origin:
                there = saved.origin
                if not all(torch.equal(one, there[name]) for name, one in now.tensors().items() if name in there):
                    self._saved = None
        return now


def saved_for(rank: int, names: Sequence[str]) -> list[str]:
    """Return the names of a checkpoint's tensors with a rank's generators: its own, else rank 0's."""
    own = [name for name in names if name.startswith(rank_prefix(rank))]
    return own or [name for name in names if name.startswith(rank_prefix(0))]


def saved_from(rank: int, tensors: Mapping[str, torch.Tensor]) -> SavedGenerators | None:
    """Return the saved states from the tensors of `saved_for`; None where there are none."""
    moments: dict[str, dict[str, torch.Tensor]] = {"now": {}, "epoch": {}, "origin": {}}
    for path, tensor in tensors.items():
        _, _, moment, name = path.split("/", 3)
        if moment in moments:
            moments[moment][name] = tensor
    own = any(path.startswith(rank_prefix(rank)) for path in tensors)
    return SavedGenerators(moments["now"], moments["epoch"], None if own else moments["origin"]) if tensors else None


class StepBeginHook(PreForwardHook):
    """Calls `begin` before each forward in training mode with gradients."""

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._begin()


def step_hooks(model: nn.Module, begin: Callable[[], object]) -> ForwardHooks:
    """Return hooks that call `begin` before each training forward of a model, until they are removed."""
    return ForwardHooks((module, StepBeginHook(begin)) for module in _modules_called(model))


def _modules_called(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) in CONTAINERS:
        for child in model.children():
            yield from _modules_called(child)
    else:
        yield model
