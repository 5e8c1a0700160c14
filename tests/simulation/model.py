"""The simulated model: a few parameters, gradients as a function of the values read, and the reference training.

The gradient of rank r at clock c is 0.25 * values + a vector that depends on r, c and the examples of r. So a worker
that reads a wrong version or draws wrong examples ends with other values. The reference is one process that adds the
same gradients in rank order and steps whole parameters with torch's optimizer; it shares no code with psctl. All
elementwise work is torch's, on tensors of a dozen elements.
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
    """The inputs of an undisturbed run."""

    optimizer: str  # "SGD" | "AdamW"
    dtype: str
    parameters: int
    wide: bool  # the first parameter has 150 elements, so it can be cut into pieces
    sparse: bool  # some ranks have no gradient of some parameters at some clocks
    clips: bool  # the joint gradient is scaled at some clocks
    counted: bool  # asp: each push adds a digit of its own to the values (see Script)
    world: int
    batch: int
    examples: int
    steps: int


def make_layout(spec: Spec) -> Layout:
    """Return the layout of the model; it has a frozen parameter between the others."""
    shapes = [SHAPES[index % len(SHAPES)] for index in range(spec.parameters)]
    if spec.wide:
        shapes[0] = (150,)
    infos = [ParameterInfo(f"p{index}", shape, spec.dtype, index % 2) for index, shape in enumerate(shapes)]
    infos.insert(1, ParameterInfo("frozen", (4,), spec.dtype, 0, trainable=False))
    groups = groups_at(spec, 0) if len(shapes) > 1 else groups_at(spec, 0)[:1]
    return Layout(tuple(infos), spec.optimizer, tuple(groups))


def groups_at(spec: Spec, clock: int) -> list[dict[str, Number]]:
    """Return the numbers of both parameter groups at a clock. The learning rate falls, so it must be sent."""
    if spec.counted:
        return [{"lr": 1.0}, {"lr": 1.0}][: 1 if spec.parameters == 1 else 2]
    both = [{"lr": 0.1 / (1 + clock)}, {"lr": 0.05 / (1 + clock)}]
    more: dict[str, Number] = {"momentum": 0.9} if spec.optimizer == "SGD" else {"weight_decay": 0.1}
    return [{**each, **more} for each in both][: 1 if spec.parameters == 1 else 2]


def scale_at(spec: Spec, clock: int) -> float | None:
    """Return the factor of the joint gradient at a clock, or None."""
    return 0.5 if spec.clips and clock % 3 == 1 else None


def epoch_and_clock(spec: Spec, clock: int) -> tuple[int, int]:
    """Return (epoch, clock within the epoch)."""
    return divmod(clock, examples.clocks_in_epoch(spec.examples, spec.batch, spec.world))


def examples_taken(spec: Spec, clock: int, rank: int) -> tuple[int, range, int]:
    """Return (epoch, positions of a rank's examples at a clock, number of examples of all ranks)."""
    epoch, within = epoch_and_clock(spec, clock)
    of = examples.positions(spec.examples, spec.batch, spec.world, within)
    mine = examples.share(of, spec.world, rank)
    return epoch, range(mine.start, mine.stop), len(of)


def gradient_weight(spec: Spec, mine: int, sum_of_gradients: int) -> float:
    """Return the weight of a rank's gradient: its share of the clock's examples times the number of ranks."""
    return 1.0 if mine * spec.world == sum_of_gradients else mine * spec.world / sum_of_gradients


class Script:
    """The computation of all ranks; immutable.

    Under asp the values depend on the order of arrival. There the gradient of each push is a distinct power of 4, the
    step subtracts it, and the values begin at 0. The digits of minus a value in base 4 count how often each push was
    applied. In float64 this is exact for 26 pushes.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.layout = spec, make_layout(spec)
        trainable = [info for info in self.layout.parameters if info.trainable]
        self.sizes = [info.size for info in trainable]
        self.starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        total = sum(self.sizes)
        self.dtype = DTYPES[spec.dtype]
        ramp = torch.arange(1, total + 1, dtype=torch.float64)
        self.initial = torch.zeros(total, dtype=self.dtype) if spec.counted else torch.sin(ramp).to(self.dtype)
        self._pattern = torch.cos(ramp * 0.7).to(self.dtype)

    def has_gradient(self, clock: int, rank: int, parameter: int) -> bool:
        """Return whether a rank has a gradient of a parameter at a clock."""
        return not self.spec.sparse or (clock * 7 + rank * 3 + parameter) % 4 != 0

    def gradient(
        self, values: torch.Tensor, clock: int, rank: int, positions: Sequence[int], epoch: int
    ) -> torch.Tensor:
        """Return a rank's gradient of all parameters, as a vector, at `values`."""
        if self.spec.counted:
            return torch.full_like(values, 4.0 ** (clock * self.spec.world + rank))
        about = 1.0 + sum(positions) * 0.01 + epoch * 0.1 + rank * 0.3 + clock * 0.05
        return values * 0.25 + self._pattern * about

    def sum_of_gradients(
        self, clock: int, parameter: int, gradients: Mapping[int, tuple[torch.Tensor, float]]
    ) -> torch.Tensor | None:
        """Return the weighted sum of a parameter's gradients in rank order, or None if no rank has one."""
        start, size, total = self.starts[parameter], self.sizes[parameter], None
        for rank in sorted(gradients):
            gradient, share = gradients[rank]
            if self.has_gradient(clock, rank, parameter):
                part = gradient[start : start + size]
                part = part * share if share != 1.0 else part
                total = part if total is None else total + part
        return total

    def group_numbers(self, clock: int) -> list[dict[str, Number]]:
        return groups_at(self.spec, clock)

    def optimizer(self, flat: torch.Tensor) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
        """Return torch's optimizer and its parameters, which are views of `flat`."""
        parameters = [
            torch.nn.Parameter(flat.narrow(0, start, size), requires_grad=False)
            for start, size in zip(self.starts, self.sizes, strict=True)
        ]
        infos = [info for info in self.layout.parameters if info.trainable]
        given: list[dict[str, Any]] = []
        for group, numbers in enumerate(self.group_numbers(0)):
            members = [parameter for parameter, info in zip(parameters, infos, strict=True) if info.group == group]
            given.append({"params": members, **numbers})
        return getattr(torch.optim, self.spec.optimizer)(given), parameters


def group_by_host(hosts: Sequence[Sequence[int]], ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks in the order of summation: those of one host together, in the place of the first of them."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        group = next((line for line in found for host in hosts if rank in host and line[0] in host), None)
        if group is None:
            found.append([rank])
        else:
            group.append(rank)
    return found


class ReferenceTraining:
    """The reference: training in one process, clock by clock, from the gradients of all ranks."""

    def __init__(self, script: Script, hosts: Sequence[Sequence[int]] = ()) -> None:
        self._script, self._flat, self.hosts = script, script.initial.clone(), hosts
        self._optimizer, self._parameters = script.optimizer(self._flat)
        self.clock = 0
        self.means: list[torch.Tensor] = []
        self.versions: list[torch.Tensor] = [self._flat.clone()]

    def step(self, gradients: dict[int, tuple[torch.Tensor, float]], divide: float) -> None:
        """Apply a clock: gradients and weights by rank, summed per host and in rank order within a host."""
        script, clock = self._script, self.clock
        joint = torch.zeros_like(self._flat)
        present = [False] * len(script.sizes)
        for ranks in group_by_host(self.hosts, gradients):
            for index, (start, size) in enumerate(zip(script.starts, script.sizes, strict=True)):
                part = script.sum_of_gradients(clock, index, {rank: gradients[rank] for rank in ranks})
                if part is None:
                    continue
                part_of_joint = joint.narrow(0, start, size)
                part_of_joint.copy_(part_of_joint + part if present[index] else part)
                present[index] = True
        mean = joint.div_(divide)
        self.means.append(mean.clone())
        scale = scale_at(script.spec, clock)
        if scale is not None:
            mean.mul_(scale)
        for group, numbers in zip(self._optimizer.param_groups, script.group_numbers(clock), strict=True):
            group.update(numbers)
        for index, (start, size) in enumerate(zip(script.starts, script.sizes, strict=True)):
            self._parameters[index].grad = mean[start : start + size] if present[index] else None
        self._optimizer.step()
        self.clock += 1
        self.versions.append(self._flat.clone())


@lru_cache(maxsize=512)
def undisturbed_training(spec: Spec, hosts: tuple[tuple[int, ...], ...] = ()) -> ReferenceTraining:
    """Return the reference of a run without faults: every version of the values."""
    script = Script(spec)
    truth = ReferenceTraining(script, hosts)
    for clock in range(spec.steps):
        values = truth.versions[-1]
        pushed = {}
        for rank in range(spec.world):
            epoch, mine, sum_of_gradients = examples_taken(spec, clock, rank)
            gradient = script.gradient(values, clock, rank, mine, epoch)
            pushed[rank] = (gradient, gradient_weight(spec, len(mine), sum_of_gradients))
        truth.step(pushed, spec.world)
    return truth
