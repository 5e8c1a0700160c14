"""The scripted model: a few parameters, gradients that are a function of what was read, and what training must give.

The gradient of rank r at clock c is 0.25 * values + a vector that depends on r, c and the examples that r takes, so a
worker that read the wrong version, or took the wrong examples, ends elsewhere. The undisturbed run is one process that
adds the same gradients in rank order and lets torch's own optimizer step whole parameters; it shares no code with
psctl. All work on elements is torch's, on tensors of a dozen elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from psctl.job import examples
from psctl.types import Layout, Number, ParameterInfo

DTYPES = {"float32": torch.float32, "float64": torch.float64}

SHAPES: tuple[tuple[int, ...], ...] = ((3,), (2, 2), (5,), (1,), (6,))


@dataclass(frozen=True)
class Spec:
    """All that the values of an undisturbed run depend on."""

    optimizer: str  # "SGD" | "AdamW"
    dtype: str
    parameters: int
    wide: bool  # the first parameter has 150 elements, so it can be cut into pieces
    sparse: bool  # some ranks have no gradient of some parameters at some clocks
    clips: bool  # the joint gradient is scaled at some clocks
    counted: bool  # asp: every push leaves a digit of its own in the values (see Script)
    world: int
    batch: int
    examples: int
    steps: int


def layout(spec: Spec) -> Layout:
    """Return the model as psctl is told of it; a frozen parameter lies among the others."""
    shapes = [SHAPES[index % len(SHAPES)] for index in range(spec.parameters)]
    if spec.wide:
        shapes[0] = (150,)
    infos = [ParameterInfo(f"p{index}", shape, spec.dtype, index % 2) for index, shape in enumerate(shapes)]
    infos.insert(1, ParameterInfo("frozen", (4,), spec.dtype, 0, trainable=False))
    groups = groups_at(spec, 0) if len(shapes) > 1 else groups_at(spec, 0)[:1]
    return Layout(tuple(infos), spec.optimizer, tuple(groups))


def groups_at(spec: Spec, clock: int) -> list[dict[str, Number]]:
    """Return the numbers of both groups at a clock; the learning rate falls, so they must travel with it."""
    if spec.counted:
        return [{"lr": 1.0}, {"lr": 1.0}][: 1 if spec.parameters == 1 else 2]
    both = [{"lr": 0.1 / (1 + clock)}, {"lr": 0.05 / (1 + clock)}]
    more: dict[str, Number] = {"momentum": 0.9} if spec.optimizer == "SGD" else {"weight_decay": 0.1}
    return [{**each, **more} for each in both][: 1 if spec.parameters == 1 else 2]


def scale_at(spec: Spec, clock: int) -> float | None:
    """Return what the joint gradient of a clock is multiplied by."""
    return 0.5 if spec.clips and clock % 3 == 1 else None


def clock_of(spec: Spec, clock: int) -> tuple[int, int]:
    """Return (epoch, clock within it)."""
    return divmod(clock, examples.clocks_in_epoch(spec.examples, spec.batch, spec.world))


def taken(spec: Spec, clock: int, rank: int) -> tuple[int, range, int]:
    """Return (epoch, positions that a rank takes at a clock, how many all ranks take)."""
    epoch, within = clock_of(spec, clock)
    of = examples.positions(spec.examples, spec.batch, spec.world, within)
    mine = examples.share(of, spec.world, rank)
    return epoch, range(mine.start, mine.stop), len(of)


def weight(spec: Spec, mine: int, together: int) -> float:
    """Return the weight of a rank's gradient, as runtime's Share has it."""
    return 1.0 if mine * spec.world == together else mine * spec.world / together


class Script:
    """What all ranks compute; immutable after it was made.

    Under asp the values depend on the order of arrival, so there the gradient of each push is a power of 4 of its own,
    the step is minus one times it, and the values begin at 0: read in base 4 they say which pushes are in, and how
    often (two of the same make a digit 2). In float64 that is exact for 26 pushes.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.layout = spec, layout(spec)
        trainable = [info for info in self.layout.parameters if info.trainable]
        self.sizes = [info.size for info in trainable]
        self.starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        total = sum(self.sizes)
        self.dtype = DTYPES[spec.dtype]
        ramp = torch.arange(1, total + 1, dtype=torch.float64)
        self.initial = torch.zeros(total, dtype=self.dtype) if spec.counted else torch.sin(ramp).to(self.dtype)
        self._pattern = torch.cos(ramp * 0.7).to(self.dtype)

    def has(self, clock: int, rank: int, parameter: int) -> bool:
        """Has this rank a gradient of the parameter at this clock?"""
        return not self.spec.sparse or (clock * 7 + rank * 3 + parameter) % 4 != 0

    def gradient(
        self, values: torch.Tensor, clock: int, rank: int, positions: Sequence[int], epoch: int
    ) -> torch.Tensor:
        """Return a rank's flat gradient at what it read."""
        if self.spec.counted:
            return torch.full_like(values, 4.0 ** (clock * self.spec.world + rank))
        about = 1.0 + sum(positions) * 0.01 + epoch * 0.1 + rank * 0.3 + clock * 0.05
        return values * 0.25 + self._pattern * about

    def together(
        self, clock: int, parameter: int, gradients: Mapping[int, tuple[torch.Tensor, float]]
    ) -> torch.Tensor | None:
        """Return the sum of a parameter's gradients by rank, times their weights; None: nobody has one."""
        start, size, total = self.starts[parameter], self.sizes[parameter], None
        for rank in sorted(gradients):
            gradient, share = gradients[rank]
            if self.has(clock, rank, parameter):
                part = gradient[start : start + size]
                part = part * share if share != 1.0 else part
                total = part if total is None else total + part
        return total

    def numbers(self, clock: int) -> list[dict[str, Number]]:
        return groups_at(self.spec, clock)

    def optimizer(self, flat: torch.Tensor) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
        """Return torch's optimizer over whole parameters, views of `flat`."""
        parameters = [
            torch.nn.Parameter(flat.narrow(0, start, size), requires_grad=False)
            for start, size in zip(self.starts, self.sizes, strict=True)
        ]
        infos = [info for info in self.layout.parameters if info.trainable]
        given: list[dict[str, Any]] = []
        for group, numbers in enumerate(self.numbers(0)):
            members = [parameter for parameter, info in zip(parameters, infos, strict=True) if info.group == group]
            given.append({"params": members, **numbers})
        return getattr(torch.optim, self.spec.optimizer)(given), parameters


def by_host(hosts: Sequence[Sequence[int]], ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks as they are summed: a host's together, at the place of the first of them."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        mate = next((line for line in found for host in hosts if rank in host and line[0] in host), None)
        if mate is None:
            found.append([rank])
        else:
            mate.append(rank)
    return found


class Truth:
    """Training as it must come out: one process, clock by clock, from what each rank pushed."""

    def __init__(self, script: Script, hosts: Sequence[Sequence[int]] = ()) -> None:
        self._script, self._flat, self._hosts = script, script.initial.clone(), hosts
        self._optimizer, self._parameters = script.optimizer(self._flat)
        self.clock = 0
        self.means: list[torch.Tensor] = []
        self.versions: list[torch.Tensor] = [self._flat.clone()]

    def step(self, gradients: dict[int, tuple[torch.Tensor, float]], divide: float) -> None:
        """Take one clock: flat gradients and weights by rank, summed host by host, and in rank order on each."""
        script, clock = self._script, self.clock
        joint = torch.zeros_like(self._flat)
        there = [False] * len(script.sizes)
        for ranks in by_host(self._hosts, gradients):
            for index, (start, size) in enumerate(zip(script.starts, script.sizes, strict=True)):
                part = script.together(clock, index, {rank: gradients[rank] for rank in ranks})
                if part is None:
                    continue
                where = joint.narrow(0, start, size)
                where.copy_(where + part if there[index] else part)
                there[index] = True
        mean = joint.div_(divide)
        self.means.append(mean.clone())
        scale = scale_at(script.spec, clock)
        if scale is not None:
            mean.mul_(scale)
        for group, numbers in zip(self._optimizer.param_groups, script.numbers(clock), strict=True):
            group.update(numbers)
        for index, (start, size) in enumerate(zip(script.starts, script.sizes, strict=True)):
            self._parameters[index].grad = mean[start : start + size] if there[index] else None
        self._optimizer.step()
        self.clock += 1
        self.versions.append(self._flat.clone())


@lru_cache(maxsize=512)
def undisturbed(spec: Spec, hosts: tuple[tuple[int, ...], ...] = ()) -> Truth:
    """Return the run that nothing disturbs, all ranks in one process: every version of the values."""
    script = Script(spec)
    truth = Truth(script, hosts)
    for clock in range(spec.steps):
        values = truth.versions[-1]
        pushed = {}
        for rank in range(spec.world):
            epoch, mine, together = taken(spec, clock, rank)
            gradient = script.gradient(values, clock, rank, mine, epoch)
            pushed[rank] = (gradient, weight(spec, len(mine), together))
        truth.step(pushed, spec.world)
    return truth
