"""Messages between the coordinator and workers or servers: the start of training, reports, the end.

A worker that executes a schedule over psctl's data plane, or shares a host's sums, sends `WorkerListens`. When all
workers concerned have, the coordinator sends each of them `WorkersAt`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from psctl import types
from psctl.job.message import JobMessage
from psctl.types import NO_SERVERS, PLAIN, Address, Assignment, Compression, Layout, Shard, State, TensorSlice

MOST_PEERS = 64
"""Peers whose bytes a report has one by one, the most bytes first; those of further peers are one sum.

With an entry a server, reports of 10,000 workers to 1,000 servers would be 200 MB each second at the coordinator.
"""


class Join(JobMessage, frozen=True):
    """First message of a worker (sent by psctl.init) or server; its certificate names the member."""

    pid: int


class Prepare(JobMessage, frozen=True):
    """A worker reached `prepare`. Rank 0's layout counts; another that differs is an error.

    `outer`: an optimizer steps at the ends of periods, so workers step alone in between. `on_gpus`: parameters are.
    `hooked`: gradients come from DistributedDataParallel's hook, so only collectives fit, and nothing is saved.
    `follows`: the loop is a library's, which begins after so many steps, and which saves and resumes its own state at
    common steps; None: it is the script's. Unless hooked, it sums gradients itself, and the layout is empty.
    """

    layout: Layout
    buffers: types.Names
    outer: bool = False
    on_gpus: bool = False
    hooked: bool = False
    follows: types.Step | None = None


class MemberReady(JobMessage, frozen=True):
    """A server listens at `address`; or a worker has its start values (address None)."""

    address: Address | None = None


class StepReport(msgspec.Struct, frozen=True):
    """The numbers that one rank reported of one step."""

    step: types.Step
    epoch: types.Step
    weight: float  # examples
    metrics: Annotated[dict[types.Name, float], msgspec.Meta(max_length=1000)]


class WorkerReport(JobMessage, frozen=True):
    """Progress of a worker since its last report; seconds and bytes are sums over that time.

    `moved`: a peer's name ("server/0"; "": not known, or all beyond MOST_PEERS), bytes sent to it and received from it.
    """

    step: types.Step  # last finished
    epoch: types.Step
    steps: list[StepReport]
    examples: float
    compute_seconds: float
    sync_seconds: float
    moved: Annotated[
        tuple[tuple[types.Name, types.Size, types.Size], ...], msgspec.Meta(max_length=MOST_PEERS + 1)
    ] = ()
    staleness: int = 0  # clocks that were missing from the values of the last step
    hidden_seconds: float = 0.0  # of compute_seconds: gradients or values were being sent, and the worker did not wait
    rested: int = 0  # the last step whose numbers are final: the loop is past its wait point
    total: types.Step = 0  # steps of the whole training; 0: unknown


class Heartbeat(JobMessage, frozen=True):
    """A worker or server runs; `doing` is its activity ("compute", "sync: waiting for server/1").

    `shares`: the worker's last batch came from run.loader, so its examples can be divided among other workers.
    """

    step: types.Step
    doing: str
    shares: bool = False


class ScriptFinished(JobMessage, frozen=True):
    """The worker's script reached its end after `step` steps; its last checkpoint is on its way or done."""

    step: types.Step


class Resume(msgspec.Struct, frozen=True):
    """Where a job continues: rank 0's saved state, and the tensors of the checkpoint."""

    checkpoint: str  # "digits-3@500"
    step: int
    state: State
    tensors: list[TensorSlice]  # each whole tensor once: start 0, stop size


class Welcome(JobMessage, frozen=True):
    """Answer to a worker's or server's Join."""

    world: int  # number of workers when training began
    seed: int
    every_steps: int  # save at steps that this divides; 0: never by steps
    report_seconds: float
    resume: Resume | None = None
    hosts: list[int] = msgspec.field(default_factory=list)  # the number of each worker's host


class CollectiveChoice(msgspec.Struct, frozen=True):
    """The algorithm of a collective up to a size, of the bytes of its vector; the largest size has no end.

    `options` are those of its schedule (`catalog.ScheduleOptions` as plain data).
    """

    collective: str
    size: int
    algorithm: str
    options: dict[str, object] = {}


class Decision(JobMessage, frozen=True):
    """The decision how gradients are synchronized. Shards and assignment are empty unless the strategy is ps.

    `options` are those of the strategy's schedule (`catalog.ScheduleOptions` as plain data), empty for ps and
    native. `staleness`: clocks that the fastest worker may be ahead of the slowest; 0: bsp; None: asp. `period`:
    steps that workers take alone between two synchronizations; 1: none. `elastic`: the members may change while they
    train. `hosts`: ranks that share a host, whose gradients are summed before others' (ps/dense/host_sums.py).
    `racks`: by rank, the rack, where `hosts` has the ranks of each rack instead, and values are forwarded within it.
    `factors`: weights of linear layers whose gradients are sent as factors, with at most `factor_rows` rows a worker.
    `bucket`: bytes of gradients that a collective sums together; 0: measured in the first steps; None: the default.
    `start`: the broadcast of start values over the connections of the sums; None: a sum with zeros.
    `step_in_backward`: some buckets of a sharded optimizer, or some shards, are stepped while backward runs.
    `servers_apart`: no server shares a host with a worker. `joint_batch_norm`: BatchNorm's statistics are of all
    workers' batches.
    """

    strategy: str
    update: str  # "server" | "worker" | "sharded"
    layout: Layout
    shards: list[Shard]
    assignment: Assignment = NO_SERVERS
    resume: Resume | None = None
    options: dict[str, object] = msgspec.field(default_factory=dict)
    staleness: int | None = 0
    period: int = 1
    elastic: bool = False
    auto: bool = False  # the job file leaves `update` to psctl
    sums: dict[str, object] = msgspec.field(default_factory=dict)  # the order of sums, for checkpoints
    compression: Compression = PLAIN
    hosts: tuple[tuple[int, ...], ...] = ()
    factors: tuple[str, ...] = ()
    factor_rows: int = 0
    bucket: types.Size | None = None
    start: CollectiveChoice | None = None
    racks: tuple[str, ...] = ()
    step_in_backward: bool = False
    servers_apart: bool = False
    joint_batch_norm: bool = False


class Go(JobMessage, frozen=True):
    """All ranks have their start values: train."""


class Leave(JobMessage, frozen=True):
    """The receiver must exit now; `reason` is for the log."""

    reason: str


class StartBegin(JobMessage, frozen=True):
    """Rank 0's start values of what no server holds: these slices follow, relayed to every other worker."""

    slices: types.Slices


class StartPart(JobMessage, frozen=True):
    """Payload: bytes of slice number `index` of StartBegin, from byte `offset` of that slice."""

    index: types.Size
    offset: types.Size


class StartEnd(JobMessage, frozen=True):
    """All start values were sent."""


class WorkerListens(JobMessage, frozen=True):
    """A worker to the coordinator: its address for other workers (None: no worker of another host needs it), and the
    secret that workers of its own host must send. Answered by WorkersAt.

    `epoch`: of the ConnectAgain that it answers; 0: the first connections.
    """

    address: Address | None
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    epoch: types.Count = 0


class WorkerAt(msgspec.Struct, frozen=True):
    """A worker, its incarnation and how it is reached; the secret is sent to workers of its own host only."""

    rank: int
    incarnation: int
    address: Address | None
    secret: bytes


class WorkersAt(JobMessage, frozen=True):
    """The coordinator to a worker: all workers, in rank order. `epoch`: of the WorkerListens that it answers."""

    workers: list[WorkerAt]
    epoch: int = 0


class RanksWanted(JobMessage, frozen=True):
    """A worker to the coordinator: its script calls a collective; connect all workers. Answered by RanksAt."""


class ListenForRanks(JobMessage, frozen=True):
    """The coordinator to a worker: listen for all others, for collectives of scripts, whatever its own script does now.

    `hosts`: the number of each worker's host. Answered by RankListens.
    """

    hosts: list[int]


class RankListens(JobMessage, frozen=True):
    """A worker to the coordinator: its address for workers of other hosts, and the secret for those of its own."""

    address: Address | None
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]


class RanksAt(JobMessage, frozen=True):
    """The coordinator to a worker: all workers, in rank order, when all listen; and the plan of collectives.

    `problem`: why the workers cannot be connected; there are no addresses then.
    """

    workers: list[WorkerAt]
    choices: list[CollectiveChoice] = msgspec.field(default_factory=list)
    problem: str = ""


class ConnectAgain(JobMessage, frozen=True):
    """The coordinator to a worker of a collective: the data plane has ended; answer WorkerListens with this epoch.

    A later epoch replaces an earlier one. `hosts`: the number of each worker's host.
    """

    epoch: int
    hosts: list[int]


class BucketSizeChosen(JobMessage, frozen=True):
    """A worker to the coordinator: `sync.bucket: auto` has ended with this size.

    `measured`: the bytes of each bucket size that was tried, and the median of the seconds between two sums.
    """

    size: types.Size
    measured: Annotated[tuple[tuple[types.Size, types.Seconds], ...], msgspec.Meta(max_length=64)] = ()


class BackwardStepsChosen(JobMessage, frozen=True):
    """A worker to the coordinator: so many buckets, of `all`, are stepped in backward from now on.

    `measured`: each number that was tried, and the median of the seconds of a step with as many.
    """

    buckets: types.Size
    all: types.Size
    measured: Annotated[tuple[tuple[types.Size, types.Seconds], ...], msgspec.Meta(max_length=64)] = ()


class PlaneBroken(JobMessage, frozen=True):
    """A worker to the coordinator: its data plane of this epoch has ended. Answered by ConnectAgain.

    `workers`: the ranks that it could not connect to.
    """

    epoch: types.Count
    reason: types.Name
    workers: Annotated[tuple[types.Count, ...], msgspec.Meta(max_length=4096)] = ()


class NotReplaceable(JobMessage, frozen=True):
    """A worker to the coordinator: no worker holds the state that a lost one's replacement needs, for `reason`."""

    reason: types.Name
