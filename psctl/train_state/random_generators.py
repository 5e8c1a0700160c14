"""The script's own random generators, kept apart from the random numbers of steps.

Within a step (from where its batch is fetched, or from the model's forward where the script has a loader of its own, to
the end of `optimizer.step()`) python's, numpy's and torch's generators are a function of seed, clock and rank
(step_seed.py), so that a step can be done again to the bit. Everywhere else they are as the script left them: what it
draws between `prepare` and its loop, between epochs or after a step is a function of its own seeds. Their states are
in checkpoints, each rank's own, of two moments: where the epoch began, for a resumed job goes through the beginning of
that epoch again, and now, for what follows the first step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: their children are called."""


class GeneratorStates(NamedTuple):
    """The states of a process's generators."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> GeneratorStates:
        """Return them as they are."""
        numpy = sys.modules.get("numpy")
        cuda = tuple(each.get_state() for each in _on_gpus())
        return cls(random.getstate(), numpy and numpy.random.get_state(), torch.default_generator.get_state(), cuda)

    def put(self) -> None:
        """Give the generators these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.default_generator.set_state(self.cpu)
        for generator, state in zip(_on_gpus(), self.cuda, strict=False):
            generator.set_state(state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them by name, as a checkpoint holds them."""
        _, words, gauss = self.python
        found = {"python": _joined(words, gauss), "torch": self.cpu}
        if self.numpy is not None:
            _, words, at, held, gauss = self.numpy
            found["numpy"] = _joined([*words.tolist(), at], gauss if held else None)
        return found | {f"cuda/{place}": state for place, state in enumerate(self.cuda)}

    def changed(self, tensors: Mapping[str, torch.Tensor]) -> GeneratorStates:
        """Return them with those that a checkpoint holds, which may be of fewer or more generators."""
        found = self
        if "python" in tensors:
            words, gauss = _parted(tensors["python"])
            found = found._replace(python=(random.getstate()[0], tuple(words), gauss))
        if "numpy" in tensors and self.numpy is not None:
            (*words, at), gauss = _parted(tensors["numpy"])
            held = gauss is not None
            array = self.numpy[1].copy()
            array[:] = words
            found = found._replace(numpy=(self.numpy[0], array, at, int(held), gauss if held else 0.0))
        if "torch" in tensors:
            found = found._replace(cpu=tensors["torch"])
        cuda = tuple(tensors.get(f"cuda/{place}", state) for place, state in enumerate(self.cuda))
        return found._replace(cuda=cuda)

    def differing(self, before: GeneratorStates) -> dict[str, torch.Tensor]:
        """Return those of `tensors` that are not as before."""
        same = self.python == before.python and _same(self.numpy, before.numpy) and torch.equal(self.cpu, before.cpu)
        if same and not self.cuda:
            return {}
        old = before.tensors()
        return {name: one for name, one in self.tensors().items() if name not in old or not torch.equal(one, old[name])}


def _on_gpus() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one[1] == other[1]).all()) and one[2:] == other[2:]


def _joined(words: Sequence[int], gauss: float | None) -> torch.Tensor:
    """Return a Mersenne twister's state: its words, and the second number of a normal pair where one is left."""
    return torch.tensor([*words, float(gauss is not None), gauss or 0.0], dtype=torch.float64)


def _parted(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, held, gauss = state.tolist()
    return [int(word) for word in words], gauss if held else None


def place(rank: int) -> str:
    """Return where a rank's lie in a checkpoint."""
    return f"random/{rank}/"


class SavedGenerators(NamedTuple):
    """What a process goes on from: states by name, `now` and where the `epoch` began.

    `origin`: the states at the beginning of the loop, of the rank that they were taken of: a script that has others
    there seeds its ranks apart, and keeps its own. None: they are this rank's.
    """

    now: Mapping[str, torch.Tensor]
    epoch: Mapping[str, torch.Tensor]
    origin: Mapping[str, torch.Tensor] | None = None


class RandomGenerators:
    """A process's generators, as those of steps and as the script's own by turns."""

    def __init__(self) -> None:
        self._own: GeneratorStates | None = None  # within a step: the script's
        self._origin: GeneratorStates | None = None  # where the loop began, before anything that was saved was put
        self._epoch: GeneratorStates | None = None  # where the epoch began
        self._ended: GeneratorStates | None = None  # where the last step that is saved ended
        self._saved: SavedGenerators | None = None

    def resume(self, saved: SavedGenerators | None) -> None:
        """Go on with saved states, if there are: at the beginning of the resumed epoch, and after the first step."""
        self._saved = saved

    @property
    def inside(self) -> bool:
        """Whether the generators give the numbers of a step."""
        return self._own is not None

    def enter(self) -> None:
        """A step begins: put the script's states away, unless they are."""
        if self._own is None:
            now = self._loop_begins(GeneratorStates.now())
            self._own, self._saved = (now.changed(self._saved.now) if self._saved is not None else now), None

    def leave(self) -> None:
        """A step has ended: give the script its states back."""
        if self._own is not None:
            own, self._own = self._own, None
            own.put()

    def epoch_begins(self, *, resumed: bool, again: bool) -> None:
        """An epoch begins.

        Args:
            resumed: it is the one that the job goes on in.
            again: from its beginning; what came after that counts for nothing.
        """
        self.leave()
        now = self._loop_begins(GeneratorStates.now())
        if resumed and self._saved is not None:
            now = now.changed(self._saved.epoch)
            now.put()
            if again:
                self._saved = None
        self._epoch = now

    def epoch_ends(self) -> None:
        """An epoch has ended: what is saved now is saved between two."""
        self.leave()
        self._epoch = None

    def mark(self) -> None:
        """A step that is saved has ended; its part of the checkpoint may be asked for later."""
        self._ended = self._now()

    def saved(self, *, marked: bool, origin: bool) -> dict[str, torch.Tensor]:
        """Return what belongs into a checkpoint, by name.

        Args:
            marked: as it was at `mark`.
            origin: with what a rank compares its own with that has saved nothing.
        """
        now = self._ended if marked and self._ended is not None else self._now()
        found = {"now": now, "epoch": self._epoch or now} | ({"origin": self._origin or now} if origin else {})
        return {f"{moment}/{name}": one for moment, states in found.items() for name, one in states.tensors().items()}

    def left(self) -> SavedGenerators:
        """Return what another process needs that runs the script up to its loop, and goes on from here."""
        if self._origin is None:
            return SavedGenerators({}, {}, {})
        here = self._now()
        now, epoch = here.differing(self._origin), (self._epoch or here).differing(self._origin)
        return SavedGenerators(now, epoch, self._origin.tensors() if now or epoch else {})

    def _now(self) -> GeneratorStates:
        return self._own or GeneratorStates.now()

    def _loop_begins(self, now: GeneratorStates) -> GeneratorStates:
        """Note where the loop began, once; drop what was saved of a rank that the script has seeded otherwise."""
        if self._origin is None:
            self._origin, saved = now, self._saved
            if saved is not None and saved.origin:
                there = saved.origin
                if not all(torch.equal(one, there[name]) for name, one in now.tensors().items() if name in there):
                    self._saved = None
        return now


def saved_for(rank: int, names: Sequence[str]) -> list[str]:
    """Return which of a checkpoint's tensors tell a rank where its generators go on: its own, else rank 0's."""
    own = [name for name in names if name.startswith(place(rank))]
    return own or [name for name in names if name.startswith(place(0))]


def saved_from(rank: int, tensors: Mapping[str, torch.Tensor]) -> SavedGenerators | None:
    """Return what the tensors of `saved_for` say; None where there are none."""
    moments: dict[str, dict[str, torch.Tensor]] = {"now": {}, "epoch": {}, "origin": {}}
    for path, tensor in tensors.items():
        _, _, moment, name = path.split("/", 3)
        if moment in moments:
            moments[moment][name] = tensor
    own = any(path.startswith(place(rank)) for path in tensors)
    return SavedGenerators(moments["now"], moments["epoch"], None if own else moments["origin"]) if tensors else None


class StepBegins:
    """A forward pre-hook that begins a step where a batch of the script's own loader comes to the model."""

    def __init__(self, begin: Any = None) -> None:
        self._begin = begin

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if (
            self._begin is not None
            and not torch.compiler.is_compiling()
            and module.training
            and torch.is_grad_enabled()
        ):
            self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepBegins:
        return StepBegins()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepBegins, ()


class Entrances:
    """Has `begin` called before each forward of a model in training mode, with gradients.

    Args:
        model: the user's.
        begin: what is called.
    """

    def __init__(self, model: nn.Module, begin: Any) -> None:
        self._modules, self._hook = list(_entrances(model)), StepBegins(begin)
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put the hooks on."""
        self._handles = [module.register_forward_pre_hook(self._hook, prepend=True) for module in self._modules]

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take the hooks off for a while."""
        for handle in self._handles:
            handle.remove()
        try:
            yield
        finally:
            self.attach()


def _entrances(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) in CONTAINERS:
        for child in model.children():
            yield from _entrances(child)
    else:
        yield model
