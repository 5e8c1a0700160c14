"""The script of `psctl bench`: every worker runs it and measures together with the others; rank 0 reports the results.

Strategies of one size take turns, so that disturbances of the machines affect all equally. A time is the slowest
rank's, measured from a barrier. The ranks leave a barrier at different times, so a short sum is repeated, one after
another as in training, until that difference is small. Vectors are checked before and after: fractions on all ranks to
the bit, whole numbers exactly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from psctl.collectives.allreduce_backends import AllReduceBackend, EngineAllReduce, ScheduleAllReduce, played_on_host
from psctl.collectives.data_plane import DataPlane
from psctl.job.bench_messages import (
    FILE,
    OPERATIONS,
    BenchEffort,
    BenchProgress,
    BenchQuestion,
    BenchRound,
    BenchRow,
    collective_of,
    question_of,
    to_line,
)
from psctl.schedule.algorithms.catalog import ScheduleOptions, build
from psctl.schedule.contracts import REDUCING, Collective
from psctl.sync.bucket_allreduce import device_of_sums, init_default_group, local_device
from psctl.sync.device_copies import CudaCopies
from psctl.sync.device_sum import StagedAllReduce
from psctl.worker import bench_patterns
from psctl.worker.bench_collectives import CollectiveValues, EngineCollective, PlayedCollective
from psctl.worker.run import Run

COLD = 4.0
"""How many times as long as a measurement the first operation may take, and operations still be short."""

GROUP_BYTES = 1 << 30
"""Bytes of vectors, about, of the strategies that take turns; with large vectors fewer strategies take turns."""


class BenchRanks:
    """The process groups of ranks that measure together, and reductions over them (on a separate Gloo group): maximum,
    agreement. Every rank of the job makes it, also those that do not take part.

    Args:
        device: on which vectors are summed.
        world: how many ranks, the first of the job's.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        engine = "nccl" if device.type == "cuda" else "gloo"
        self.rank, self.world, self.device = dist.get_rank(), world, device
        self._group = _new_group(world, "gloo")
        self.engine = _new_group(world, engine)
        """The process group of the engine's own all-reduce."""
        self.played = _new_group(world, engine)
        """The process group that schedules are played over; all use it, one at a time."""
        self.played_on_host = _new_group(world, "gloo")
        self.plane: DataPlane | None = None
        """The data plane that schedules on the CPU are played over."""

    @property
    def takes_part(self) -> bool:
        """Whether this rank is one of them."""
        return self.rank < self.world

    def barrier(self) -> None:
        """Block until all ranks have called this method."""
        dist.barrier(group=self._group)

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""
        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return float(found)

    def all_true(self, mine: bool) -> bool:
        """Return whether `mine` is true on every rank."""
        return self.slowest(0.0 if mine else 1.0) == 0.0

    def all_equal(self, number: int) -> bool:
        """Return whether all ranks have the same whole number."""
        return self.slowest(number) == -self.slowest(-number)


def _new_group(world: int, backend: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(range(world), backend=backend)
    return group


class MeasuredStrategy(Protocol):
    """A strategy to measure: it sums vectors over all ranks."""

    name: str
    mean: bool

    def sum(self) -> None:
        """Sum the vectors that `fill` wrote; the result is in `result`."""

    def fill(self, source: torch.Tensor) -> None:
        """Set this rank's vector."""

    @property
    def result(self) -> torch.Tensor:
        """The sum, or the mean."""

    def close(self) -> None:
        """Release memory and threads."""


class MeasuredCollective:
    """A collective as training has it: the engine's own, or a schedule that is played.

    Args:
        name: the strategy.
        summing: sums.
        like: what is summed has this length, type and device.
    """

    mean = False

    def __init__(self, name: str, summing: AllReduceBackend, like: torch.Tensor) -> None:
        self.name, self._summing = name, summing
        self._vector = summing.buffer(like.numel(), like.dtype, like.device)

    def sum(self) -> None:
        self._summing.put(self._vector).wait()

    def fill(self, source: torch.Tensor) -> None:
        self._vector.copy_(source)

    @property
    def result(self) -> torch.Tensor:
        return self._vector

    def close(self) -> None:
        self._summing.close()


class MeasuredServers:
    """Parameter servers that sum (`update: worker`), through psctl's own run: a model of one parameter.

    Args:
        run: of this process, which prepares no other model.
        length: elements.
    """

    name = "ps"
    mean = True

    def __init__(self, run: Run, length: int) -> None:
        model = nn.Module()
        self._parameter = nn.Parameter(torch.zeros(length))
        model.register_parameter("values", self._parameter)
        # it never steps: a run without steps saves nothing
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self._gradient = torch.zeros(length)

    def sum(self) -> None:
        self._parameter.grad = None
        FixedGradient.apply(self._parameter, self._gradient).backward()  # type: ignore[no-untyped-call]

    def fill(self, source: torch.Tensor) -> None:
        self._gradient.copy_(source)

    @property
    def result(self) -> torch.Tensor:
        assert self._parameter.grad is not None, "summed"
        return self._parameter.grad

    def close(self) -> None:
        """The run ends with the process."""


class _GradientContext(Protocol):
    """The context that autograd passes from forward to backward, with the attribute that forward sets."""

    gradient: torch.Tensor


class FixedGradient(torch.autograd.Function):
    """A loss with a given gradient."""

    @staticmethod
    def forward(context: _GradientContext, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        context.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(context: _GradientContext, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Autograd uses a tensor without other references as `.grad`; it copies any other tensor first.
        return context.gradient.view_as(context.gradient), None


class BenchTurns:
    """Measures by turns.

    Args:
        effort: how often and how long.
    """

    def __init__(self, effort: BenchEffort) -> None:
        self._effort = effort

    def repeats(self, first: float, measure: Callable[[int], float]) -> int:
        """Return how many operations one measurement times.

        Args:
            first: seconds of the first operation. It may be disturbed by whatever else happens first, so one that is
                not much longer than a measurement is no reason to time single operations.
            measure: returns the seconds of an operation, from the number of operations to time.
        """
        if first > COLD * self._effort.lasting:
            return 1
        return max(1, min(200, round(self._effort.lasting / max(measure(OPERATIONS), 1e-6))))

    def times(self, measures: Mapping[str, tuple[int, Callable[[int], float]]]) -> dict[str, list[float]]:
        """Return the times of each name, measured by turns.

        Args:
            measures: by name, how many operations one measurement times, and a function that returns the slowest rank's
                seconds of one operation.
        """
        found: dict[str, list[float]] = {name: [] for name in measures}
        repeats = {name: count for name, (count, _) in measures.items()}
        while left := self._effort.unfinished(found, repeats):
            for name in left:
                count, measure = measures[name]
                found[name].append(measure(count))
        return found


class BenchMeasurement:
    """Measures strategies of one size.

    Args:
        ranks: those that measure together.
        effort: how often and how long.
        source: this rank's whole numbers, on the device.
    """

    def __init__(self, ranks: BenchRanks, effort: BenchEffort, source: torch.Tensor) -> None:
        self._ranks, self._effort, self._source = ranks, effort, source
        self._turns = BenchTurns(effort)

    def measure(self, strategies: Sequence[MeasuredStrategy]) -> list[tuple[MeasuredStrategy, list[float], bool]]:
        """Return each strategy's times, and whether its sums were correct."""
        correct, repeats = {}, {}
        for one in strategies:
            correct[one.name], first = self._check_fractions(one)
            repeats[one.name] = self._turns.repeats(first, partial(self._time, one))
        times = self._turns.times({one.name: (repeats[one.name], partial(self._time, one)) for one in strategies})
        return [(one, times[one.name], correct[one.name] and self._check_whole(one)) for one in strategies]

    def _time(self, one: MeasuredStrategy, repeats: int) -> float:
        """Return the slowest rank's seconds of one sum."""
        one.fill(self._source)
        self._synchronize_device()
        self._ranks.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            if repeats > 1:  # sums of sums would exceed the range of a float
                one.fill(self._source)
            one.sum()
        self._synchronize_device()
        return self._ranks.slowest(time.perf_counter() - began) / repeats

    def _check_fractions(self, one: MeasuredStrategy) -> tuple[bool, float]:
        """Sum fractions: near the true sum, and the same bits everywhere; the first time is not counted as one."""
        world = self._ranks.world
        mine = bench_patterns.repeat_block(bench_patterns.fractions(self._ranks.rank), self._source.numel())
        one.fill(mine.to(self._source.device))
        self._ranks.barrier()
        began = time.perf_counter()
        one.sum()
        self._synchronize_device()
        first = self._ranks.slowest(time.perf_counter() - began)
        found = one.result * world if one.mean else one.result
        same = self._ranks.all_equal(bench_patterns.bits(one.result))
        return self._ranks.all_true(bench_patterns.close(found, world, 2 if one.mean else 0)) and same, first

    def _check_whole(self, one: MeasuredStrategy) -> bool:
        return self._ranks.all_true(bench_patterns.exact(one.result, self._ranks.world, one.mean))

    def _synchronize_device(self) -> None:
        if self._source.is_cuda:
            torch.cuda.synchronize()


def measure_collectives(
    ranks: BenchRanks, effort: BenchEffort, collective: Collective, length: int, asked: Mapping[str, dict[str, object]]
) -> list[tuple[str, list[float], bool]]:
    """Measure the algorithms of a collective; return each one's times and whether its result is right.

    Args:
        ranks: those that measure together.
        effort: how often and how long.
        collective: its name.
        length: elements of the vector.
        asked: the options of each algorithm; `native` is the engine's own.
    """
    values, device = CollectiveValues(collective, ranks.rank, ranks.world, length), ranks.device
    mine, turns = values.mine().to(device), BenchTurns(effort)
    measured: list[PlayedCollective | EngineCollective] = [
        EngineCollective(collective, values, ranks.rank, ranks.engine, device) if name == "native"
        else PlayedCollective(
            name, options, values, collective, ranks.rank, ranks.world,
            ranks.plane if device.type == "cpu" else None, ranks.played, device,
        )
        for name, options in asked.items()
    ]  # fmt: skip

    def seconds(one: PlayedCollective | EngineCollective, repeats: int) -> float:
        one.vector.copy_(mine)
        _synchronize(device)
        ranks.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            if repeats > 1 and collective in REDUCING:  # sums of sums would exceed the range of a float
                one.vector.copy_(mine)
            one.run()
        _synchronize(device)
        return ranks.slowest(time.perf_counter() - began) / repeats

    def right(one: PlayedCollective | EngineCollective) -> bool:
        return ranks.all_true(values.is_right(one.vector))

    plans, correct = {}, {}
    for one in measured:
        first = seconds(one, 1)
        correct[one.name] = right(one)
        plans[one.name] = turns.repeats(first, partial(seconds, one)), partial(seconds, one)
    times = turns.times(plans)
    found = [(one.name, times[one.name], correct[one.name] and right(one)) for one in measured]
    for one in measured:
        one.close()
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Answer the question in the file that `arguments` names."""
    import psctl

    question = question_of(Path(arguments[0] if arguments else FILE).read_bytes())
    device = local_device()
    init_default_group(device)
    sums_on, run, world = device_of_sums(device), psctl.init(), dist.get_world_size()
    parts = {each.ranks or world for each in question.rounds} | {world}
    ranks = {count: BenchRanks(sums_on, count) for count in sorted(parts)}  # each rank makes each group, in this order
    plays = any(name not in ("native", "ps") for each in question.rounds for name in each.strategies)
    plane = _plane(run, world) if plays else None
    for some in ranks.values():
        some.plane = plane
    for each in question.rounds:
        some = ranks[each.ranks or world]
        if some.takes_part:
            if (collective := collective_of(question.operation)) is not None:
                _collective_round(question, collective, each, some)
            else:
                _round(question, each, run, some, torch.device("cpu") if "ps" in each.strategies else device)
        ranks[world].barrier()  # what the others would do for their next round would disturb this one
    if plane is not None:
        plane.close()
    dist.destroy_process_group()


def _plane(run: Run, world: int) -> DataPlane | None:
    """Connect this process with all others, as training does; None where psctl did not start it."""
    session = run._session
    return session.connect_plane(build("one-shot", world)) if session.has_plane else None


def _collective_round(question: BenchQuestion, name: Collective, asked: BenchRound, ranks: BenchRanks) -> None:
    _print(ranks, BenchProgress(asked.bytes, ranks.world, list(asked.strategies)))
    for algorithm, times, correct in measure_collectives(
        ranks, question.effort, name, max(ranks.world, asked.bytes // 4), asked.strategies
    ):
        _print(ranks, BenchRow(question.operation, algorithm, asked.bytes, ranks.world, times, correct))


def _round(
    question: BenchQuestion, asked: BenchRound, run: Run, ranks: BenchRanks, device: torch.device
) -> None:  # fmt: skip
    length = max(1, asked.bytes // 4)
    source = bench_patterns.repeat_block(bench_patterns.whole(ranks.rank), length).to(device)
    bench = BenchMeasurement(ranks, question.effort, source)
    names = list(asked.strategies)
    each = max(1, GROUP_BYTES // (8 * 4 * length))
    for start in range(0, len(names), each):
        group = names[start : start + each]
        _print(ranks, BenchProgress(asked.bytes, ranks.world, group))
        strategies = [
            MeasuredServers(run, length) if name == "ps" else collective(name, asked.strategies[name], ranks, source)
            for name in group
        ]
        for one, times, correct in bench.measure(strategies):
            _print(ranks, BenchRow(question.operation, one.name, asked.bytes, ranks.world, times, correct))
        for one in strategies:
            one.close()


def collective(name: str, options: Mapping[str, object], ranks: BenchRanks, like: torch.Tensor) -> MeasuredCollective:
    """Return the engine's own all-reduce, or a schedule that is played.

    Args:
        name: `native`, or a strategy that is played.
        options: of the schedule, as plain data.
        ranks: the groups of all ranks.
        like: what it sums has this length, type and device.
    """
    where = ranks.device if like.is_cuda else like.device
    summing: AllReduceBackend
    if name == "native":
        summing = EngineAllReduce(ranks.engine if where == ranks.device else ranks.played_on_host)
    else:
        schedule = build(name, ranks.world, msgspec.convert(options, ScheduleOptions))
        where = torch.device("cpu") if played_on_host(schedule, where) else where
        group, plane = (ranks.played_on_host, ranks.plane) if where.type == "cpu" else (ranks.played, None)
        summing = ScheduleAllReduce(schedule, where, plane, group, shared=True)
    return MeasuredCollective(name, summing if where == like.device else StagedAllReduce(summing, CudaCopies()), like)


def _print(ranks: BenchRanks, answer: BenchProgress | BenchRow) -> None:
    if ranks.rank == 0:
        print(to_line(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
