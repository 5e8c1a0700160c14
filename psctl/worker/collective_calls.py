"""The collectives that a training script calls: `run.all_reduce` and the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from psctl.collectives.collective_links import CollectiveLinks, EndStore, EngineLinks, NcclChannels, PlaneLinks
from psctl.collectives.group_collectives import GroupCollectives
from psctl.errors import UsageError
from psctl.job.training_messages import CollectiveChoice
from psctl.plan.collective_choice import usual_choice
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.contracts import Collective
from psctl.schedule.groups import Group
from psctl.sync.bucket_allreduce import init_default_group, local_device
from psctl.worker.training_progress import Session

Value = TypeVar("Value")

GroupOfRanks = Group | Sequence[int] | None


class CollectiveCalls:
    """The part of a run that has collectives over tensors and plain values.

    Every rank of the group calls the same collective, in the same order, as with torch.distributed. A tensor is dense,
    on the CPU or a GPU, of any shape and stride. A plain value is None, a number, text, bytes, or lists, tuples and
    dicts of them (a tuple arrives as a list); it travels as msgpack, and nothing that arrives is executed. Each call
    blocks until its result is there. Results are equal to the bit on every rank, and in every run.

    Ranks compare their calls before data moves: where one gave another shape, type, root or operation, every rank gets
    the same UsageError, which names it, and may go on. Different groups end all collectives, with such an error on
    every rank. A wait for a rank is its activity in `psctl status`, and `timeouts.stall` bounds it. When a worker is
    lost, a job whose script has called a collective starts again from its last checkpoint, under every strategy.

    `group`: the ranks that take part, such as [0, 2] or `run.group([0, 2]) | run.group([3])`; None: all. Only these
    call.
    """

    _collectives: GroupCollectives

    def group(self, ranks: Iterable[int]) -> Group:
        """Return a group of ranks. `a | b` has the ranks of either, `a & b` those of both; no rank waits for another.

        Raises:
            UsageError: a rank is given twice, or is none of the job.
        """
        try:
            found = Group(tuple(ranks))
        except (TypeError, ValueError) as error:
            raise UsageError(f"run.group({ranks!r:.60}): {error}", "such as run.group([0, 2])") from None
        world = self._collectives.world
        if any(rank >= world for rank in found):
            raise UsageError(f"run.group({list(found)}): the job has ranks 0 to {world - 1}")
        return found

    def barrier(self, group: GroupOfRanks = None) -> None:
        """Return when every rank of the group has called it."""
        self._collectives.barrier(group)

    def all_reduce(self, value: Value, op: str = "sum", group: GroupOfRanks = None) -> Value:
        """Combine the ranks' tensors, or numbers, element by element; every rank gets the result.

        Args:
            value: a tensor, of one shape and type on all ranks, which is overwritten with the result; or an int or a
                float.
            op: sum, mean (floats), prod, min, max.

        Returns:
            the same tensor, or the number.
        """
        return cast("Value", self._collectives.all_reduce(value, op, group))

    def reduce(self, value: Value, op: str = "sum", root: int = 0, group: GroupOfRanks = None) -> Value | None:
        """Combine the ranks' tensors, or numbers; only the root gets the result, and other tensors stay as they are.

        Args:
            value, op: as of `all_reduce`.
            root: the rank (of the job) that gets it.

        Returns:
            the same tensor, or the number, on the root; None elsewhere.
        """
        return cast("Value | None", self._collectives.reduce(value, op, root, group))

    def broadcast(self, value: Value, root: int = 0, group: GroupOfRanks = None) -> Value:
        """Give the root's value to every rank.

        Args:
            value: a tensor, of one shape and type on all ranks, which is overwritten with the root's; or a plain value,
                of which only the root's counts.
            root: the rank (of the job) that gives it.

        Returns:
            the same tensor, or the root's value.
        """
        return cast("Value", self._collectives.broadcast(value, root, group))

    def all_gather(self, value: Value, group: GroupOfRanks = None) -> list[Value]:
        """Give every rank's value to every rank; return them in the order of the group.

        Args:
            value: a tensor, of one type on all ranks, whose shape may differ; or a plain value.
        """
        return cast("list[Value]", self._collectives.all_gather(value, group))

    def gather(self, value: Value, root: int = 0, group: GroupOfRanks = None) -> list[Value] | None:
        """Give every rank's value to the root, in the order of the group; other ranks get None.

        Args:
            value: as of `all_gather`.
            root: the rank (of the job) that gets them.
        """
        return cast("list[Value] | None", self._collectives.gather(value, root, group))

    def scatter(self, values: Sequence[Value] | None, root: int = 0, group: GroupOfRanks = None) -> Value:
        """Give each rank its value of the root's list; return it.

        Args:
            values: on the root, a value for each rank of the group, in its order: tensors of one type, whose shapes may
                differ, or plain values; or one tensor, which is cut evenly along its first dimension. Elsewhere None.
            root: the rank (of the job) that gives them.
        """
        return cast("Value", self._collectives.scatter(values, root, group))

    def reduce_scatter(
        self, values: torch.Tensor | Sequence[torch.Tensor], op: str = "sum", group: GroupOfRanks = None
    ) -> torch.Tensor:
        """Combine the ranks' lists place by place, and give each rank its place of the result, a new tensor.

        Args:
            values: a tensor for each rank of the group, in its order; the same shapes and type on all ranks; or one
                tensor, which is cut evenly along its first dimension.
            op: as of `all_reduce`.
        """
        return self._collectives.reduce_scatter(values, op, group)

    def all_to_all(self, values: Sequence[Value], group: GroupOfRanks = None) -> list[Value]:
        """Send each rank a value of its own; return the values for this rank, in the order of the group.

        Args:
            values: a value for each rank of the group: tensors of one type, whose shapes may differ, or plain values;
                or one tensor, which is cut evenly along its first dimension.
        """
        return cast("list[Value]", self._collectives.all_to_all(values, group))


# ---- connections -----------------------------------------------------------------------------------------------------


class ScriptLinks:
    """Makes the links of a run's collectives at the first call, and chooses their algorithms by the job's plan.

    Args:
        session: of this worker.
        world: number of workers.
    """

    def __init__(self, session: Session, world: int) -> None:
        self._session, self._world = session, world
        self._choices: list[CollectiveChoice] = []

    def connect(self) -> CollectiveLinks:
        """Connect to all ranks."""
        device = local_device()
        on_gpu = device.type == "cuda"
        shared = on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
        gpus = _gpu_channels(device) if on_gpu and not shared else None
        if self._session.is_in_job:
            plane, self._choices = self._session.connect_ranks()
            return PlaneLinks(plane, gpus, shares_gpu=shared)
        init_default_group(device)
        store: EndStore = dist.distributed_c10d._get_default_store()
        return EngineLinks(dist.new_group(backend="gloo"), store, gpus, shares_gpu=shared)

    def choose(self, collective: Collective, size: int, count: int) -> tuple[str, ScheduleOptions]:
        """Return the algorithm of a collective.

        Args:
            collective: its name.
            size: bytes of the vector.
            count: number of ranks; the plan is for all, closed forms at assumed rates choose for fewer.
        """
        known = [each for each in self._choices if each.collective == collective] if count == self._world else []
        if not known:
            return _usual(collective, size, count)
        found = next((each for each in known if size <= each.size), known[-1])
        return found.algorithm, msgspec.convert(found.options, ScheduleOptions)


_usual = lru_cache(maxsize=1024)(usual_choice)


def _gpu_channels(device: torch.device) -> NcclChannels:
    return NcclChannels(lambda: init_default_group(device))
