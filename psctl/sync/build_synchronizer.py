"""From the coordinator's decision to a way to synchronise, with every value in place: rank 0's, or the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from psctl.clock import Clock
from psctl.collectives.allreduce_backends import (
    AllReduceBackend,
    EngineAllReduce,
    ScheduleAllReduce,
    played_on_host,
    spread,
)
from psctl.collectives.data_plane import DataPlane
from psctl.errors import UsageError
from psctl.job.training_messages import Decision, Resume, Welcome
from psctl.ps.pieces import torch_dtype
from psctl.schedule.algorithms import catalog
from psctl.schedule.schedule import Schedule
from psctl.sync.allreduce_sync import AllReduceSync, Reducer
from psctl.sync.bucket_allreduce import BucketReducer, EngineGroup
from psctl.sync.compression_residuals import Residuals
from psctl.sync.device_copies import CudaCopies
from psctl.sync.device_sum import StagedAllReduce
from psctl.sync.flat_parameters import Client, FlatParameters, ServerReducer
from psctl.sync.gpu_staging import staged
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.local_sgd import PLACE, LocalSgdSync, OptimizerFactory, SingleRankReducer
from psctl.sync.ps_sync import ParameterServerSync
from psctl.sync.synchronizer import ExampleWeight, SingleWorker, Synchronizer
from psctl.train_state.common_step import StepActions
from psctl.train_state.example_sharing import ExampleDivision
from psctl.train_state.training_parts import TrainingParts, local, wanted
from psctl.types import Layout, Member, TensorSlice, consistency


class Seat(Protocol):
    """A run's place in its job; session.Session has one, lone.Lone stands in where there is no job."""

    me: Member
    keeps: bool
    division: ExampleDivision | None

    def join(self) -> Welcome: ...
    def prepare(
        self, layout: Layout, buffers: tuple[str, ...], outer: bool = False, on_gpus: bool = False
    ) -> Decision: ...
    def plane(self, schedule: Schedule) -> DataPlane | None: ...
    def begin(self, step: int) -> None: ...
    def listen(self, listener: Callable[[Any], None]) -> None: ...
    def ending(self, step: int) -> StepActions: ...
    def ended(self, step: int) -> None: ...
    def load(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]: ...
    def give_start(self, tensors: Mapping[str, torch.Tensor]) -> None: ...
    def take_start(self) -> dict[str, torch.Tensor]: ...
    def send_checkpoint(self, step: int, state: dict[str, Any] | None, tensors: Mapping[str, torch.Tensor]) -> None: ...
    def saved(self, step: int, timeout: float) -> str | None: ...
    def send(self, message: Any, payload: Any = None, *, urgent: bool = False) -> None: ...
    def unfit(self, step: int, reason: str) -> NoReturn: ...
    def finished(self, step: int) -> None: ...
    def close(self, reason: str) -> None: ...


class Tools:
    """What a way is built with.

    Args:
        seat: the run's.
        world: number of workers.
        connect: makes the parameter client that a decision asks for.
        share: tells this rank's weight.
        outer: makes the optimizer that steps at the ends of periods.
    """

    def __init__(
        self,
        seat: Seat,
        world: int,
        connect: Callable[[Decision], Client],
        share: ExampleWeight,
        clock: Clock,
        trace: GradientTrace | None,
        outer: OptimizerFactory | None = None,
    ) -> None:
        self.seat, self.world, self.connect = seat, world, connect
        self.share, self.clock, self.trace, self.outer = share, clock, trace, outer


def start(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    """Bring the start values and return the way that was decided.

    Raises:
        PsctlError: the decision cannot be carried out with this script; the message has the cures.
    """
    if decision.resume is not None and decision.resume.checkpoint:
        on_servers = decision.strategy == "ps" and decision.update == "server"
        restore(parts, decision.resume, tools.seat, on_servers=on_servers, apart=_apart(decision, tools))
    if decision.strategy == "ps":
        return _ps(parts, decision, tools)
    if decision.strategy == "alone" or tools.world == 1:
        if tools.outer is not None:
            return _stepping(parts, SingleRankReducer(), decision, tools)
        return SingleWorker(list(parts.trainable().values()), decision.strategy)
    return _collective(parts, decision, tools)


def restore(parts: TrainingParts, resume: Resume, seat: Seat, *, on_servers: bool, apart: bool = False) -> None:
    """Load from the checkpoint what this worker holds itself.

    Args:
        on_servers: servers load the trainable parameters and the optimizer's state themselves.
        apart: each rank has a state of the optimizer of its own; one that was not saved takes rank 0's.
    """
    values = list(parts.values(on_servers))
    place = f"{local(seat.me.rank)}/" if apart else "optim/"
    held = [each.name for each in resume.tensors if each.name.startswith(place)]
    if not held:
        place = "optim/"
        held = [each.name for each in resume.tensors if each.name.startswith(place)]
    names = values if on_servers else values + held
    slices = wanted(resume.tensors, names, resume.checkpoint)
    tensors = dict(zip(names, seat.load(slices), strict=True))
    parts.load_values(tensors, values)
    if not on_servers:
        found = {f"optim/{name.removeprefix(place)}": tensors[name] for name in held}
        parts.load_optimizer(resume.state.get("optimizer") or {}, found)
    parts.load_groups(resume.state.get("groups") or [])
    parts.load_scheduler(resume.state.get("scheduler"))


def _collective(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    trainable = parts.trainable()
    parameters, values = list(trainable.values()), [*parts.parameters().values(), *parts.buffers().values()]
    device, group = parameters[0].device, None
    summing: AllReduceBackend | None = _on_plane(decision, device, tools)
    if summing is not None:
        spread(summing, tools.seat.me.rank == 0, values)
    else:
        group = EngineGroup(device)
        if not tools.seat.keeps:  # under psctl the coordinator has compared the ranks
            group.same_everywhere(decision.layout)
        group.spread(values)
        summing = _summing(decision, group, device, tools)
    halves = torch_dtype(decision.compression.halves) if decision.compression.halves else None
    reducer = BucketReducer(group, summing, parameters, halves)
    return _stepping(parts, reducer, decision, tools)


def _apart(decision: Decision, tools: Tools) -> bool:
    """Whether ranks step apart."""
    return decision.period > 1 or tools.outer is not None


def _stepping(parts: TrainingParts, reducer: Reducer, decision: Decision, tools: Tools) -> AllReduceSync | LocalSgdSync:
    """Return the way of workers that step: jointly, or apart and joined at the ends of periods."""
    trainable = parts.trainable()
    if not _apart(decision, tools):
        parameters = list(trainable.values())
        return AllReduceSync(
            decision.strategy, list(trainable), parameters, reducer, tools.share, tools.clock, tools.trace
        )
    if parts.optimizer is None:
        raise UsageError(
            f"period: {decision.period} was asked for, and run.prepare was given no optimizer, whose steps are counted",
            "give the optimizer to run.prepare, or set `period: 1` under sync: in the job file",
        )
    resume = decision.resume
    way = LocalSgdSync(
        decision.strategy, trainable, reducer, tools.share, tools.clock, period=decision.period,
        step=resume.step if resume else 0, world=tools.world, outer=tools.outer, trace=tools.trace,
    )  # fmt: skip
    if resume is not None:
        names = [each.name for each in resume.tensors if each.name.startswith(f"{PLACE}/")]
        tensors = tools.seat.load(wanted(resume.tensors, names, resume.checkpoint))
        way.load(resume.state.get("outer") or {}, dict(zip(names, tensors, strict=True)))
    return way


def _on_plane(decision: Decision, device: torch.device, tools: Tools) -> ScheduleAllReduce | None:
    """Return what plays the schedule over psctl's own connections, without the engine.

    None: the engine takes part, under `native` and for vectors on GPUs.
    """
    if decision.strategy == "native" or device.type != "cpu":
        return None
    schedule = catalog.build(decision.strategy, tools.world, msgspec.convert(decision.options, catalog.ScheduleOptions))
    plane = tools.seat.plane(schedule)
    return ScheduleAllReduce(schedule, device, plane) if plane is not None else None


def _summing(decision: Decision, group: EngineGroup, device: torch.device, tools: Tools) -> AllReduceBackend:
    """Return what sums vectors that lie on `device`."""
    where = group.device
    summing: AllReduceBackend
    if decision.strategy == "native":
        summing = EngineAllReduce(group.group)
    else:
        schedule = catalog.build(
            decision.strategy, group.world, msgspec.convert(decision.options, catalog.ScheduleOptions)
        )
        where = torch.device("cpu") if played_on_host(schedule, where) else where
        summing = ScheduleAllReduce(schedule, where, tools.seat.plane(schedule) if where.type == "cpu" else None)
    return summing if where == device else StagedAllReduce(summing, CudaCopies())


def _ps(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    trainable = parts.trainable()
    names, parameters = list(trainable), list(trainable.values())
    served = decision.update == "server"
    if served and tools.outer is not None:
        raise UsageError(
            "update: server was asked for, and run.prepare was given outer=, between whose steps workers step alone",
            "set `update: auto` or `update: worker` under sync: in the job file",
        )
    if served and (parts.optimizer is None or not decision.layout.optimizer):
        what = type(parts.optimizer).__name__ if parts.optimizer is not None else "no optimizer"
        if decision.staleness != 0:
            asked = consistency(decision.staleness)
            raise UsageError(
                f"consistency: {asked} was asked for, but {what} was given, which servers cannot step piece by piece, "
                "and only they can step while workers are apart",
                "give an optimizer that fits (SGD, Adam, AdamW ...), or set `consistency: bsp` under sync:",
            )
        raise UsageError(
            f"update: server was asked for, but {what} was given, which servers cannot step piece by piece",
            "set `update: auto` or `update: worker` under sync: in the job file",
        )
    client, flat = tools.connect(decision), FlatParameters(decision.layout, decision.shards, parameters)
    if any(one.is_cuda for one in parameters):
        apart = decision.staleness != 0
        client, flat = staged(client, CudaCopies(), apart, decision.layout, decision.shards, parameters)
    tools.seat.listen(client.told)
    _start_values(parts, decision, tools, client, flat)
    if not served:
        way: ParameterServerSync | AllReduceSync | LocalSgdSync = _stepping(
            parts, ServerReducer(client, flat), decision, tools
        )
    else:
        assert parts.optimizer is not None, "checked above"
        asp = decision.staleness is None
        way = ParameterServerSync(
            parts.model, names, parts.optimizer, client, flat, tools.share, tools.clock, tools.trace, asp=asp,
            unfit=tools.seat.unfit if decision.auto and decision.staleness == 0 else None,
        )  # fmt: skip
    way.residuals = _residuals(decision, tools, client)
    return way


def _residuals(decision: Decision, tools: Tools, client: Client) -> Residuals | None:
    """Return what this rank's pushes left out, with what a checkpoint has of it; None: they leave nothing out."""
    if not client.residual:
        return None
    found = Residuals(client.residual, decision.layout, tools.seat.me.rank)
    if decision.resume is not None:
        slices = found.saved(decision.resume.tensors)
        found.load(slices, tools.seat.load(slices))
    return found


def _start_values(parts: TrainingParts, decision: Decision, tools: Tools, client: Client, flat: FlatParameters) -> None:
    """Give every rank rank 0's values: trainable ones through the servers, the rest through the coordinator."""
    first = tools.seat.me.rank == 0
    from_checkpoint = decision.resume is not None
    own = first and not (from_checkpoint and decision.update == "server")
    client.start(flat.values() if own else None)
    if not own:
        flat.write(client.landing, range(len(flat.parameters)))
    if from_checkpoint or tools.world == 1:
        return
    if first:
        rest = parts.values(on_servers=True) | {f"buffer/{name}": one for name, one in parts.buffers().items()}
        tools.seat.give_start(rest)
    else:
        values = tools.seat.take_start()
        parts.load_values(values, list(values))
