"""The job's event log: one typed value a kind, one JSON line an event, written by the coordinator.

The kinds from `started` to `finished` are promised to users (`train -o jsonl`). `state` and `notice` are psctl's own,
for the live screen and `status`; PROMISED lists the promised kinds. JSON has no NaN: metrics hold finite numbers only,
and a notice reports the others.
"""

from __future__ import annotations

import msgspec

FILE = "events.jsonl"
"""The log's name in the job's folder on the head."""


class Event(msgspec.Struct, frozen=True, tag_field="event", kw_only=True):
    """Base: `time` is seconds since the epoch on the head host."""

    time: float


class RoleOf(msgspec.Struct, frozen=True):
    """One process of the job and its host."""

    role: str
    rank: int
    host: str


class Started(Event, frozen=True, tag="started"):
    """The job runs: first event of the log. `checkpoint`: the one that it continues from; "": none."""

    job: str
    hosts: list[str]
    roles: list[RoleOf]
    checkpoint: str = ""


class PlanCandidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One strategy in a plan; `seconds` None when it is not feasible.

    `step_seconds`, of a whole training step, and `hidden_seconds`, of the synchronization that compute hides: None
    where the compute of a step is not known.
    """

    strategy: str
    params: dict[str, object]
    seconds: float | None
    steps: int | None
    bytes_per_rank: float | None
    bottleneck: str | None
    feasible: bool
    why_not: str | None
    step_seconds: float | None = None
    hidden_seconds: float | None = None


class Planned(Event, frozen=True, tag="plan"):
    """How gradients are synchronized, decided when the script called `prepare`."""

    size: int
    world: int
    chosen: str
    reason: str
    decided: bool
    candidates: list[PlanCandidate]
    sums: str = ""
    """The order in which gradients are summed: floating-point sums depend on it."""
    factors: list[str] = []
    """Weights of linear layers whose gradients are sent as factors."""


class PlanChecked(Event, frozen=True, tag="plan-check"):
    """The first steps take longer or shorter than the plan predicts, or another strategy is faster.

    `predicted`, `measured`: seconds of a step with the chosen strategy; the prediction knows the measured compute.
    """

    step: int
    steps: int
    """How many were measured."""
    chosen: str
    predicted: float
    measured: float
    compute: float
    """Measured seconds of a step without synchronization, of the slowest worker."""
    fastest: str
    """The strategy whose step is shorter by a quarter (measured, where it has run, else predicted), or `chosen`."""
    fastest_seconds: float
    changes: bool
    """The job saves a checkpoint and continues with `fastest` (`sync.replan`)."""


class Progress(Event, frozen=True, tag="progress"):
    """The progress of training. Rates are over the last interval, seconds are per step."""

    step: int
    epoch: int
    metrics: dict[str, float]
    examples_per_second: float
    bytes_per_second: float
    sync_seconds: float
    compute_seconds: float
    staleness: int
    hidden_seconds: float = 0.0
    """Of compute_seconds, those in which gradients or values were sent: synchronization that no rank waited for."""
    total: int = 0
    """Steps of the whole training, as far as the script's epochs or `run.report(total=)` tell; 0: unknown."""


class CheckpointWritten(Event, frozen=True, tag="checkpoint"):
    """A checkpoint is whole on disk and verified; `written`: bytes of it that no earlier checkpoint has."""

    step: int
    path: str
    bytes: int
    seconds: float
    written: int = 0


class CheckpointCopied(Event, frozen=True, tag="checkpoint-copied"):
    """A further host holds a verified copy of a checkpoint, or it is at `checkpoint.to`; `place`: the host or URL."""

    step: int
    place: str


class BucketSize(msgspec.Struct, frozen=True):
    """A size of buckets that was tried: bytes, and the median of the seconds from one sum of gradients to the next."""

    size: int
    seconds: float


class BucketChosen(Event, frozen=True, tag="bucket"):
    """`sync.bucket: auto` has chosen the bytes of a bucket; `measured` has those that were tried."""

    size: int
    measured: list[BucketSize]


class BackwardCount(msgspec.Struct, frozen=True):
    """A number of buckets that was tried, and the median of the seconds of a step with as many."""

    buckets: int
    seconds: float


class StepsInBackward(Event, frozen=True, tag="steps-in-backward"):
    """`sync.step_in_backward`: how many buckets (of servers: shards), of `all`, are stepped in backward; `measured` was
    tried, under collectives."""

    buckets: int
    all: int
    measured: list[BackwardCount]


class WorkerLost(Event, frozen=True, tag="worker-lost"):
    """A worker was lost. `lost`: state that is lost with it and not computed again; "": none."""

    rank: int
    host: str
    reason: str
    lost: str = ""


class WorkerJoined(Event, frozen=True, tag="worker-joined"):
    """A worker has joined."""

    rank: int
    host: str


class ServerLost(Event, frozen=True, tag="server-lost"):
    """A server was lost."""

    rank: int
    host: str
    reason: str


class Restored(Event, frozen=True, tag="restored"):
    """Training resumes from a checkpoint; "" from the start values. `lost` steps were done and will be done again.
    `reason`: the loss after which all processes had to start again; "" of a job that was resumed or scaled."""

    checkpoint: str
    step: int
    lost: int = 0
    reason: str = ""


class GroupReported(Event, frozen=True, tag="group"):
    """A process of a group that reads the servers (`groups:`) reported numbers for the values of a step."""

    group: str
    rank: int
    """Within the group."""
    step: int
    metrics: dict[str, float]


class Log(Event, frozen=True, tag="log"):
    """A line that a process printed. `rank` is "worker/3" or "server/0"."""

    rank: str
    stream: str
    text: str


class Finished(Event, frozen=True, tag="finished"):
    """Last event, always. `exit` is the exit code of the psctl that follows the job."""

    status: str  # done | failed | stopped
    exit: int
    steps: int
    seconds: float
    metrics: dict[str, float]
    failure: dict[str, object] | None = None


class StateChanged(Event, frozen=True, tag="state"):
    """A process (role and rank) or the job itself (role "job", rank 0) changed its state. psctl's own."""

    role: str
    rank: int
    host: str
    state: str
    pid: int = 0
    step: int = 0
    last_error: str = ""
    staleness: int = 0  # clocks that were missing from the values of a worker's last step
    cpu: int = 0  # percent of one core
    memory: int = 0  # bytes that the process and its children hold
    sync: int = 0  # percent of a worker's time that it waits for synchronization
    sends: float = 0.0  # bytes a second that a worker sends to other processes
    receives: float = 0.0  # bytes a second that a worker receives from other processes
    parts: dict[str, int] = {}  # percent of a worker's time by `activity.PARTS`; the rest is outside of steps
    gpu: int = 0  # percent of the time that its GPUs are busy, with other processes' work too
    gpu_memory: int = 0  # bytes of GPUs that it holds; 0: it uses none, or it is not known


class HostTraffic(Event, frozen=True, tag="traffic"):
    """What a host's network interface sends and receives, of all programs, in bytes/s. psctl's own."""

    host: str
    sent: float
    received: float
    capacity: float = 0.0  # bytes/s in one direction, measured or nominal; 0: unknown


class HostFlow(msgspec.Struct, frozen=True):
    """Bytes a second from one host of the job to another."""

    source: str
    target: str
    rate: float


class HostFlows(Event, frozen=True, tag="flows"):
    """What workers sent to and received from processes of other hosts, by pair of hosts. psctl's own.

    What servers send each other, and what torch.distributed moves, does not count.
    """

    flows: list[HostFlow]


class LastSteps(Event, frozen=True, tag="steps"):
    """The parts of the newest steps of a worker that has ended: kind, step, begin and end. psctl's own.

    Times are nanoseconds of the coordinator's clock; `exact`: its host is the coordinator's, so both clocks are one.
    """

    rank: int
    host: str
    spans: list[tuple[str, int, int, int]]
    exact: bool


class GpuState(msgspec.Struct, frozen=True):
    """A GPU: the percent of the time that it is busy (None: not known), and bytes of its memory."""

    name: str
    busy: int | None
    used: int
    memory: int


class HostGpus(Event, frozen=True, tag="gpus"):
    """The GPUs of a host, of all programs. psctl's own."""

    host: str
    gpus: list[GpuState]


class ReplicasChanged(Event, frozen=True, tag="replicas"):
    """The further copies of the shard that has the fewest: servers that may be lost at once. psctl's own."""

    replicas: int


class Recovering(Event, frozen=True, tag="recovering"):
    """The job waits for hosts that are lost or out of reach; times in seconds since the epoch. psctl's own."""

    hosts: list[str]
    since: float
    until: float  # then it goes on, or ends, without them


class Recovered(Event, frozen=True, tag="recovered"):
    """The job waits for hosts no longer: it goes on, or ends. psctl's own."""


class Notice(Event, frozen=True, tag="notice"):
    """A plain sentence for people ("worker/1 is slow: step 31 since 32 s, in sync"). psctl's own."""

    text: str


AnyEvent = (
    Started | Planned | PlanChecked | Progress
    | CheckpointWritten | CheckpointCopied | BucketChosen | StepsInBackward | WorkerLost | WorkerJoined
    | ServerLost | Restored | Log | Finished | StateChanged | HostTraffic | HostFlows | HostGpus | LastSteps
    | ReplicasChanged | Recovering | Recovered | Notice | GroupReported
)  # fmt: skip

PROMISED = (
    Started, Planned, PlanChecked, Progress,
    CheckpointWritten, BucketChosen, StepsInBackward, WorkerLost, WorkerJoined, ServerLost, Restored, Log,
    Finished, GroupReported,
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def to_line(event: AnyEvent) -> bytes:
    """Return the event as one JSON line, newline included."""
    return _encoder.encode(event) + b"\n"


def from_line(line: bytes | str) -> AnyEvent:
    """Read one line of an event log; raises one of UNDECODABLE for anything else."""
    return _decoder.decode(line)


def finished_by_failure(now: float, text: str) -> Finished:
    """Return the last event of a job that ended without its coordinator (it was lost, or its host)."""
    failure: dict[str, object] = {"exception": text}
    return Finished(time=now, status="failed", exit=1, steps=0, seconds=0.0, metrics={}, failure=failure)
