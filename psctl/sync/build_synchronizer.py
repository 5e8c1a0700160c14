"""Builds the synchronizer of the coordinator's decision, and loads start values or a checkpoint into the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import msgspec
import torch
from torch import nn

from psctl.client.dense_client import ParameterClient
from psctl.client.model_layout import linear_layers
from psctl.clock import Clock
from psctl.collectives.allreduce_backends import (
    AllReduceBackend,
    EngineAllReduce,
    ScheduleAllReduce,
    played_on_host,
)
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.partitioned_sums import EnginePartition, PartitionBackend, SchedulePartition
from psctl.errors import UsageError
from psctl.job.membership_messages import ExamplesShared, Reassign
from psctl.job.training_messages import Decision, Resume, WorkersAt
from psctl.process.step_ring import StepRecorder
from psctl.ps.pieces import torch_dtype
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.server_optimizers import fit_name, untouched
from psctl.ps.shards import offsets
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.split import split
from psctl.schedule.schedule import Schedule
from psctl.sync.allreduce_sync import AllReduceSync, Reducer
from psctl.sync.backward_steps import BackwardSteps, waiting_counts
from psctl.sync.bucket_allreduce import BucketReducer, EngineGroup
from psctl.sync.bucket_layout import SIZES, different_sizes
from psctl.sync.choice_tuner import ChoiceTuner
from psctl.sync.ddp_hook import DdpHookSync
from psctl.sync.device_copies import CudaCopies
from psctl.sync.device_sum import StagedAllReduce
from psctl.sync.flat_parameters import FlatParameters, ServerReducer
from psctl.sync.gpu_staging import GpuParameters, Staging
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.linear_factors import LinearFactors
from psctl.sync.local_sgd import PREFIX, LocalSgdSync, OptimizerFactory, SingleRankReducer
from psctl.sync.ps_sync import ParameterServerSync
from psctl.sync.recoverable_reducer import RecoverableReducer
from psctl.sync.replacement_state import ReplacementState
from psctl.sync.sharded_sync import ShardedBuckets, ShardedSync
from psctl.sync.start_broadcast import give_start_values
from psctl.sync.synchronizer import ExampleWeight, Synchronizer
from psctl.train_state.training_parts import TrainingParts, load_saved, local_prefix
from psctl.types import Layout, Member, State, TensorSlice, bucket_bytes, consistency


class JobSession(Protocol):
    """The methods of a worker's session with the coordinator that synchronizers use."""

    me: Member
    is_in_job: bool

    @property
    def has_plane(self) -> bool: ...
    def connect_plane(self, schedule: Schedule) -> DataPlane: ...
    def connect_plane_again(self, schedule: Schedule, former: DataPlane | None, why: str) -> DataPlane: ...
    def report_not_replaceable(self, reason: str) -> NoReturn: ...
    def end_sums(self) -> None: ...
    def report_bucket_size(self, size: int, measured: Sequence[tuple[int, float]]) -> None: ...
    def report_backward_steps(self, buckets: int, every: int, measured: Sequence[tuple[int, float]]) -> None: ...
    def listen(self, listener: Callable[[Reassign | ExamplesShared | WorkersAt], None]) -> None: ...
    def load(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]: ...
    def load_slices(self, slices: Sequence[TensorSlice]) -> ReceivedSlices: ...
    def send_start_values(self, tensors: Mapping[str, torch.Tensor]) -> None: ...
    def receive_start_values(self) -> dict[str, torch.Tensor]: ...
    def report_unfit(self, step: int, reason: str) -> NoReturn: ...


class Tools(NamedTuple):
    """The parts of a worker from which a synchronizer is built."""

    session: JobSession
    world: int
    """Number of workers."""
    connect: Callable[[Decision], ParameterClient]
    """Makes the parameter client of a decision."""
    weight: ExampleWeight
    """Of this rank's gradient."""
    clock: Clock
    trace: GradientTrace | None
    outer: OptimizerFactory | None = None
    """Makes the optimizer that steps at the ends of periods."""
    spans: StepRecorder | None = None
    """Records the times of steps."""


def build_synchronizer(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    """Give the model its start values and return the synchronizer of the decision.

    Raises:
        PsctlError: the decision does not fit this script; the message has the remedy.
    """
    sharded = decision.update == "sharded" and tools.world > 1
    if sharded:
        _check_piecewise(parts, decision, tools)
    if decision.resume is not None and decision.resume.checkpoint:
        on_servers = decision.strategy == "ps" and decision.update == "server"
        restore(
            parts, decision.resume, tools.session, on_servers=on_servers, local=_steps_locally(decision, tools),
            stepped=not (on_servers or sharded),
        )  # fmt: skip
    if decision.strategy == "ps":
        return _parameter_server(parts, decision, tools)
    if sharded:
        return _sharded(parts, decision, tools)
    if decision.strategy == "alone" or tools.world == 1:
        if tools.outer is not None:
            return _stepping_on_workers(parts, SingleRankReducer(), decision, tools)
        return Synchronizer(decision.strategy, list(parts.trainable().values()))
    return _collective(parts, decision, tools)


def restore(
    parts: TrainingParts, resume: Resume, session: JobSession, *, on_servers: bool, local: bool = False,
    stepped: bool = True,
) -> None:  # fmt: skip
    """Load this worker's part of the checkpoint.

    Args:
        on_servers: servers load the trainable parameters themselves.
        local: each rank has an optimizer state of its own; one that was not saved gets rank 0's.
        stepped: the script's optimizer steps, and gets its state.
    """
    values = list(parts.values(on_servers))
    prefix = f"{local_prefix(session.me.rank)}/" if local else "optim/"
    held = [each.name for each in resume.tensors if each.name.startswith(prefix)]
    if not held:
        prefix = "optim/"
        held = [each.name for each in resume.tensors if each.name.startswith(prefix)]
    tensors = load_saved(resume, values + held if stepped else values, session.load)
    parts.load_values(tensors, values)
    if stepped:
        found = {f"optim/{name.removeprefix(prefix)}": tensors[name] for name in held}
        parts.load_optimizer(resume.state.get("optimizer") or {}, found)
    parts.load_groups(resume.state.get("groups") or [])
    parts.load_scheduler(resume.state.get("scheduler"))


def residual_tensors(flat: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Return the residuals of a rank's compressed pushes, by their names in a checkpoint; views of `flat`.

    So a job that resumes with as many workers pushes the same as an undisturbed one. The residuals of ranks that were
    not saved, and of a worker that replaces a lost one, start at zero: to keep them, each step would send them
    uncompressed.

    Args:
        flat: by dtype, the parameters one after another (ps/dense/client/send_buffers.py).
    """
    return {
        f"residual/{rank}/{info.name}": flat[info.dtype].narrow(0, start, info.size).view(info.shape)
        for info, start in zip(layout.parameters, offsets(layout), strict=True)
        if start is not None and info.dtype in flat
    }


# ---- collectives ----


def _collective(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    parameters = list(parts.trainable().values())
    values = [*parts.parameters().values(), *parts.buffers().values()]
    device, group = parameters[0].device, None
    halves = torch_dtype(decision.compression.halves) if decision.compression.halves else None
    backend: AllReduceBackend
    factors = _factors(parts, decision, tools)
    tuner = None if _steps_locally(decision, tools) else _tuner(parameters, decision, tools, factors)
    if decision.strategy != "native" and device.type == "cpu" and tools.session.has_plane:
        schedule = _schedule(decision, tools.world)
        if not _steps_locally(decision, tools):
            return _recoverable(parts, schedule, halves, decision, tools, factors, tuner)
        backend = played = ScheduleAllReduce(schedule, device, tools.session.connect_plane(schedule))
        give_start_values(played, tools.session.me.rank, decision.start, values)
    else:
        group = EngineGroup(device)
        if not tools.session.is_in_job:  # under psctl the coordinator has compared the ranks
            group.same_everywhere(decision.layout)
        group.broadcast(values)
        backend = _on_engine(decision, group, device, tools)
    reducer = BucketReducer(
        group, backend, parameters, halves, factors, size=bucket_bytes(decision.bucket), tuner=tuner,
        on_chosen=tools.session.report_bucket_size,
    )  # fmt: skip
    return _stepping_on_workers(
        parts, reducer, decision, tools, reducer.forget_factors, tuning=lambda: reducer.tuning
    )  # fmt: skip


def _sharded(parts: TrainingParts, decision: Decision, tools: Tools) -> ShardedSync:
    """Return a synchronizer whose ranks each step a part of the parameters."""
    trainable, session, resume = parts.trainable(), tools.session, decision.resume
    device, group = next(iter(trainable.values())).device, None
    halves = torch_dtype(decision.compression.halves) if decision.compression.halves else None
    values = [*parts.parameters().values(), *parts.buffers().values()]
    backend: PartitionBackend
    if decision.strategy != "native" and device.type == "cpu" and session.has_plane:
        schedule = _schedule(decision, tools.world)
        played = ScheduleAllReduce(schedule, device, session.connect_plane(schedule))
        give_start_values(played, session.me.rank, decision.start, values)
        backend = SchedulePartition(played, split(schedule))
    else:
        group = EngineGroup(device)
        group.broadcast(values)
        device = group.device
        if decision.strategy == "native":
            backend = EnginePartition(group.group)
        else:
            schedule = _schedule(decision, group.world)
            plane = session.connect_plane(schedule) if device.type == "cpu" and session.has_plane else None
            backend = SchedulePartition(ScheduleAllReduce(schedule, device, plane), split(schedule))
    shards = ShardedBuckets(
        backend, decision.layout, list(trainable.values()), halves, device, bucket_bytes(decision.bucket, sharded=True)
    )  # fmt: skip
    if resume is not None and resume.checkpoint:
        shards.load(resume, session.load_slices)
    assert parts.optimizer is not None, "checked above"
    in_backward = None
    if decision.step_in_backward and isinstance(backend, SchedulePartition):
        counts = waiting_counts(len(shards.all))
        tuner = ChoiceTuner(counts, tools.clock, tools.world, decision.strategy, None)
        in_backward = BackwardSteps(backend, len(shards.all), tuner, device, session.report_backward_steps)
    return ShardedSync(
        decision.strategy, parts.model, trainable, parts.optimizer, shards, backend, group, tools.weight, tools.clock,
        in_backward, resume.step if resume is not None else 0, session.report_unfit if decision.auto else None,
        tools.trace, tools.spans,
    )  # fmt: skip


def _tuner(
    parameters: Sequence[nn.Parameter], decision: Decision, tools: Tools, factors: Mapping[int, LinearFactors]
) -> ChoiceTuner | None:  # fmt: skip
    """Return what chooses the size of buckets; None where the job file gives it."""
    if decision.bucket != 0:
        return None
    saved = decision.resume.state.get("outer") if decision.resume is not None else None
    sizes = different_sizes(parameters, SIZES, apart=factors)
    return ChoiceTuner(sizes, tools.clock, tools.world, decision.strategy, (saved or {}).get("bucket"))


def _factors(parts: TrainingParts, decision: Decision, tools: Tools) -> dict[int, LinearFactors]:
    """Return, by the index of a trainable parameter, the factors that are sent in place of its gradient."""
    names, layers = list(parts.trainable()), linear_layers(parts.model)
    return {
        names.index(name): LinearFactors(
            name, layers[name], decision.factor_rows, tools.session.me.rank, tools.world
        )
        for name in decision.factors
    }  # fmt: skip


def _recoverable(
    parts: TrainingParts, schedule: Schedule, halves: torch.dtype | None, decision: Decision, tools: Tools,
    factors: Mapping[int, LinearFactors], tuner: ChoiceTuner | None,
) -> AllReduceSync:  # fmt: skip
    """Return a synchronizer whose lost workers are replaced while the others keep their values.

    It plays the schedule over psctl's own connections, without the engine.
    """
    session, resume, trainable = tools.session, decision.resume, parts.trainable()
    replaces = resume is not None and not resume.checkpoint  # this process does, while others train
    plane = session.connect_plane_again(schedule, None, "") if replaces else session.connect_plane(schedule)
    backend = ScheduleAllReduce(schedule, torch.device("cpu"), plane)
    step = resume.step if resume is not None else 0
    state = ReplacementState(session.me.rank, schedule, parts, step, session.report_not_replaceable)
    if not replaces:
        values = [*parts.parameters().values(), *parts.buffers().values()]
        give_start_values(backend, session.me.rank, decision.start, values)
        state.keep_start()
    parameters = list(trainable.values())
    reducer = RecoverableReducer(
        backend, parameters, halves, schedule, session.connect_plane_again, state, factors,
        size=bucket_bytes(decision.bucket), tuner=tuner, on_chosen=session.report_bucket_size,
    )  # fmt: skip
    if replaces:
        reducer.take_state()
    return AllReduceSync(
        decision.strategy,
        trainable,
        reducer,
        tools.weight,
        tools.clock,
        tools.trace,
        state,
        on_end=session.end_sums,
        spans=tools.spans,
        after_step=reducer.forget_factors,
        tuning=lambda: reducer.tuning,
    )


def _on_engine(decision: Decision, group: EngineGroup, device: torch.device, tools: Tools) -> AllReduceBackend:
    """Return a backend that sums vectors that lie on `device`."""
    where = group.device
    backend: AllReduceBackend
    if decision.strategy == "native":
        backend = EngineAllReduce(group.group)
    else:
        schedule = _schedule(decision, group.world)
        where = torch.device("cpu") if played_on_host(schedule, where) else where
        on_plane = where.type == "cpu" and tools.session.has_plane
        backend = ScheduleAllReduce(schedule, where, tools.session.connect_plane(schedule) if on_plane else None)
    return backend if where == device else StagedAllReduce(backend, CudaCopies())


def _schedule(decision: Decision, world: int) -> Schedule:
    return catalog.build(decision.strategy, world, msgspec.convert(decision.options, catalog.ScheduleOptions))


def build_ddp_hook(
    trainable: Mapping[str, nn.Parameter], decision: Decision, tools: Tools, on_step: Callable[[], object]
) -> DdpHookSync:
    """Return the synchronizer that sums the buckets of a DistributedDataParallel by the decision.

    Args:
        trainable: its module's trainable parameters by name, in the model's order.
        on_step: called at each synchronized backward.
    """
    parameters = list(trainable.values())
    device, group = parameters[0].device, None
    halves = torch_dtype(decision.compression.halves) if decision.compression.halves else None
    backend: AllReduceBackend
    if decision.strategy != "native" and device.type == "cpu" and tools.session.has_plane:
        schedule = _schedule(decision, tools.world)
        backend = ScheduleAllReduce(schedule, device, tools.session.connect_plane(schedule))
    else:
        group = EngineGroup(device)
        backend = _on_engine(decision, group, device, tools)
    return DdpHookSync(decision.strategy, parameters, backend, group, halves, tools.clock, on_step)


# ---- optimizers on workers ----


def _steps_locally(decision: Decision, tools: Tools) -> bool:
    """Whether ranks step alone between the ends of periods."""
    return decision.period > 1 or tools.outer is not None


def _stepping_on_workers(
    parts: TrainingParts, reducer: Reducer, decision: Decision, tools: Tools,
    after_step: Callable[[], object] = lambda: None, tuning: Callable[[], State] = dict,
) -> Synchronizer:  # fmt: skip
    """Return the synchronizer of workers that step: with the averaged gradient, or alone between ends of periods."""
    if not _steps_locally(decision, tools):
        return AllReduceSync(
            decision.strategy, parts.trainable(), reducer, tools.weight, tools.clock, tools.trace, spans=tools.spans,
            after_step=after_step, tuning=tuning,
        )  # fmt: skip
    if parts.optimizer is None:
        raise UsageError(
            f"period: {decision.period} is requested, and run.prepare was given no optimizer, whose steps are counted",
            "give the optimizer to run.prepare, or set `period: 1` under sync: in the job file",
        )
    resume = decision.resume
    synchronizer = LocalSgdSync(
        decision.strategy, parts.trainable(), reducer, tools.weight, tools.clock, period=decision.period,
        step=resume.step if resume else 0, world=tools.world, outer=tools.outer, trace=tools.trace,
        spans=tools.spans,
    )  # fmt: skip
    if resume is not None:
        names = [each.name for each in resume.tensors if each.name.startswith(f"{PREFIX}/")]
        synchronizer.load(resume.state.get("outer") or {}, load_saved(resume, names, tools.session.load))
    return synchronizer


# ---- parameter servers ----


def _parameter_server(parts: TrainingParts, decision: Decision, tools: Tools) -> Synchronizer:
    trainable = parts.trainable()
    parameters = list(trainable.values())
    on_servers = decision.update == "server"
    if on_servers:
        _check_piecewise(parts, decision, tools)
    client, flat = tools.connect(decision), FlatParameters(decision.layout, decision.shards, parameters)
    if any(one.is_cuda for one in parameters):
        apart = decision.staleness != 0
        flat = GpuParameters(Staging(CudaCopies()), apart, decision.layout, decision.shards, parameters)
    tools.session.listen(client.on_membership)
    _start_values(parts, decision, tools, client, flat)
    if not on_servers:
        synchronizer = _stepping_on_workers(parts, ServerReducer(client, flat, tools.spans), decision, tools)
    else:
        assert parts.optimizer is not None, "checked above"
        synchronizer = ParameterServerSync(
            parts.model, list(trainable), parts.optimizer, client, flat, tools.weight, tools.trace, tools.spans,
            in_backward=decision.step_in_backward, asynchronous=decision.staleness is None,
            on_unfit=tools.session.report_unfit if decision.auto and decision.staleness == 0 else None,
        )  # fmt: skip
        if decision.step_in_backward:
            tools.session.report_backward_steps(len(client.shards_in_backward), len(decision.shards), [])
    synchronizer.residuals = _residuals(decision, tools, client)
    return synchronizer


def _check_piecewise(parts: TrainingParts, decision: Decision, tools: Tools) -> None:
    """Raise UsageError when the optimizer cannot be stepped piece by piece, by servers or by ranks."""
    if tools.outer is not None:
        raise UsageError(
            f"update: {decision.update} is requested, and run.prepare was given outer=, which lets workers step alone",
            "set `update: auto` or `update: worker` under sync: in the job file",
        )
    if parts.optimizer is not None and decision.layout.optimizer:
        return
    why, cure = _why_unfit(parts.optimizer)
    if decision.staleness != 0:
        raise UsageError(
            f"consistency: {consistency(decision.staleness)} is requested, for which servers step the optimizer, "
            f"but {why}",
            f"{cure}, or set `consistency: bsp` under sync: in the job file",
        )
    raise UsageError(
        f"update: {decision.update} is requested, for which the optimizer is stepped piece by piece, but {why}",
        f"{cure}, or set `update: worker` under sync: in the job file",
    )


def _why_unfit(optimizer: torch.optim.Optimizer | None) -> tuple[str, str]:
    """Return why an optimizer cannot be stepped piece by piece, and a remedy."""
    if optimizer is None:
        return "run.prepare was given none", "give the optimizer to run.prepare"
    name = type(optimizer).__name__
    if fit_name(optimizer) and not untouched(optimizer):
        return (
            f"{name} has state already, from steps or load_state_dict, and the pieces begin without state",
            "give it to run.prepare before its first step (psctl train --resume continues with the saved state)",
        )
    return (
        f"{name} is none of those that fit, or has hooks or tensors in its groups",
        "give an optimizer that fits (SGD, Adam, AdamW ...)",
    )


def _residuals(decision: Decision, tools: Tools, client: ParameterClient) -> dict[str, torch.Tensor]:
    """Return this rank's residuals, with the checkpoint's values."""
    found = residual_tensors(client.residual, decision.layout, tools.session.me.rank)
    if found and decision.resume is not None:
        slices = [each for each in decision.resume.tensors if each.name in found]
        for each, tensor in zip(slices, tools.session.load(slices), strict=True):
            found[each.name].copy_(tensor)
    return found


def _start_values(
    parts: TrainingParts, decision: Decision, tools: Tools, client: ParameterClient, flat: FlatParameters
) -> None:  # fmt: skip
    """Load rank 0's values on every rank: trainable ones from the servers, the others from the coordinator."""
    first = tools.session.me.rank == 0
    from_checkpoint = decision.resume is not None
    own = first and not (from_checkpoint and decision.update == "server")
    client.start(flat.values() if own else None)
    if not own:
        flat.write(client.landing, range(len(flat.parameters)))
    if from_checkpoint or tools.world == 1:
        return
    if first:
        rest = parts.values(on_servers=True) | {f"buffer/{name}": one for name, one in parts.buffers().items()}
        tools.session.send_start_values(rest)
    else:
        values = tools.session.receive_start_values()
        parts.load_values(values, list(values))
