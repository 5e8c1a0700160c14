"""What the coordinator, agents, servers and workers say to each other about the job; one small class a message.

A message that carries a payload says so; the payload's bytes travel behind it, never inside it.
"""

# long: one class a message, in the order of who speaks to whom

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from psctl import types
from psctl.job import membership_messages, rendezvous_messages, table_server_messages
from psctl.job.membership_messages import Message
from psctl.types import NO_SERVERS, PLAIN, Address, Assignment, Compression, Layout, Member, Shard, TensorSlice

# ---- an agent to the coordinator ---------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """First message of an agent."""

    host: str
    pid: int
    cores: int
    memory: int  # bytes
    gpus: int


class Started(Message, frozen=True):
    """A process was started."""

    member: Member
    pid: int


class Failure(msgspec.Struct, frozen=True):
    """How a process failed, as a person wants to read it."""

    member: str  # "worker/1"
    host: str
    status: int  # exit status, or minus the signal's number
    time: float  # seconds since the epoch, on that host
    step: int
    exception: str  # "ValueError: NaN loss"; "killed by signal 9" when there was none
    frames: list[str]  # the user's own frames, outermost first: "train.py:88 in step: loss = f(x)"
    tail: list[str]  # last lines of its standard error
    code: str = ""  # of a psctl error ("port-taken"); "" when the user's code failed
    exit: int = 1  # the exit code that this failure gives the job
    hint: str = ""  # what to do about it, where psctl knows


class Exited(Message, frozen=True):
    """A process ended. `failure` is None exactly when `status` is 0."""

    member: Member
    status: int
    failure: Failure | None = None


class Lines(Message, frozen=True):
    """Lines that a process printed; `dropped` more are in the host's log file alone, which lacks `unwritten` of all."""

    member: Member
    stream: str  # "stdout" | "stderr"
    lines: list[str]
    dropped: types.Size = 0
    unwritten: types.Size = 0


class Stacks(Message, frozen=True):
    """Answer to StacksWanted, for one process: frames outermost first, "train.py:88 in step: loss = f(x)".

    `main` is of the main thread and empty when the stack is not known; `problem` says why then.
    """

    member: Member
    main: types.Names
    others: Annotated[tuple[types.Names, ...], msgspec.Meta(max_length=64)]  # one for each other thread
    problem: types.Name = ""


class Sample(Message, frozen=True):
    """How busy a host is now."""

    host: str
    cpu: float  # share of all cores, 0..1
    memory: float  # share used, 0..1
    gpus: list[float] = msgspec.field(default_factory=list)
    busy: list[Member] = msgspec.field(default_factory=list)  # processes that used the processor since the last one


class StopWanted(Message, frozen=True):
    """Someone asked for the job's end (psctl stop, an interrupt, SIGTERM)."""

    save: bool
    force: bool
    by: str  # for the event log: "psctl stop", "Ctrl-C", "SIGTERM"


class ScaleWanted(Message, frozen=True):
    """psctl scale: so many workers and servers, None: as it is. Answered by ScaleAnswer."""

    ticket: int
    workers: types.Count | None
    servers: types.Count | None


class ScaleAnswer(Message, frozen=True):
    """The coordinator to the agent that asked: it is being done (problem ""), or cannot be. `workers` and `servers` are
    how many there were."""

    ticket: int
    workers: int
    servers: int
    problem: str = ""
    hint: str = ""


class CopyDone(Message, frozen=True):
    """The copy of a checkpoint on this host is verified (problem "") or is not."""

    step: types.Step
    problem: str = ""


# ---- the coordinator to every member -----------------------------------------------------------------------------


class NewCertificate(Message, frozen=True):
    """Use this certificate and key, PEM text, for connections from now on: the former certificate ends soon."""

    certificate: Annotated[str, msgspec.Meta(max_length=16_384)]
    key: Annotated[str, msgspec.Meta(max_length=16_384)]


# ---- the coordinator to an agent ---------------------------------------------------------------------------------


class StartProcess(Message, frozen=True):
    """Start one process. Certificate and key are PEM text for 0600 files. `store`: where agents of other hosts than the
    head dial to reach torch's store."""

    member: Member
    world: types.Count  # number of workers
    local_rank: types.Count
    environment: dict[str, str]
    authority: str
    certificate: str
    key: str
    store: Address | None = None


class StopProcesses(Message, frozen=True):
    """End all processes of the host: TERM, then KILL after `grace` seconds (0: KILL at once)."""

    grace: types.Seconds
    reason: str


class EndProcesses(Message, frozen=True):
    """End these processes of the host, TERM then KILL after `grace` seconds; the agent stays, and may start others."""

    members: list[Member]
    grace: types.Seconds
    reason: str


class StacksWanted(Message, frozen=True):
    """What are these processes of the host at? Answered by one Stacks for each."""

    members: list[Member]


class RenewStore(Message, frozen=True):
    """To the head's agent: all workers have ended and will be started again; torch's store must be empty then."""


class CopyBegin(Message, frozen=True):
    """A checkpoint comes to this host as a second copy; `files` maps names to sizes in bytes."""

    step: types.Step
    files: dict[types.Name, types.Size]


class CopyPart(Message, frozen=True):
    """Payload: bytes of one of its files."""

    step: types.Step
    file: str
    offset: types.Size


class CopyEnd(Message, frozen=True):
    """All bytes were sent: verify, publish, answer CopyDone."""

    step: types.Step


class Finish(Message, frozen=True):
    """The job is over: keep the logs, leave."""

    status: str  # done | failed | stopped


# ---- a worker or server to the coordinator -----------------------------------------------------------------------


class Join(Message, frozen=True):
    """First message of a worker (sent by psctl.init) or server; who it is stands in its certificate."""

    pid: int


class Prepare(Message, frozen=True):
    """A worker reached `prepare`. Rank 0's layout counts; another that differs is an error.

    `outer`: an optimizer steps at the ends of periods, so workers step alone in between. `on_gpus`: parameters are.
    """

    layout: Layout
    buffers: types.Names
    outer: bool = False
    on_gpus: bool = False


class Ready(Message, frozen=True):
    """A server listens at `address`; or a worker has its start values (address None)."""

    address: Address | None = None


class StepReport(msgspec.Struct, frozen=True):
    """What one rank reported of one step."""

    step: types.Step
    epoch: types.Step
    weight: float  # examples
    metrics: dict[types.Name, float]


class Report(Message, frozen=True):
    """Progress of a worker since its last report; seconds and bytes are sums over that time."""

    step: types.Step  # last finished
    epoch: types.Step
    steps: list[StepReport]
    examples: float
    compute_seconds: float
    sync_seconds: float
    bytes_moved: types.Size
    staleness: int = 0  # clocks that the values lacked which the last step was computed from
    hidden_seconds: float = 0.0  # of these compute_seconds gradients or values were under way, and nobody waited
    rested: int = 0  # the last step of which the loop can report no more: its point of rest is behind


class Beat(Message, frozen=True):
    """A worker or server is alive; `doing` says at what ("compute", "sync: waiting for server/1")."""

    step: types.Step
    doing: str


class Position(Message, frozen=True):
    """Answer to Propose: the step in progress. The sender does not start step+2 before it hears CutAt."""

    ticket: int
    step: types.Step


class StartBegin(Message, frozen=True):
    """Rank 0's start values of what no server holds: these slices follow, handed on to every other worker unread."""

    slices: types.Slices


class StartPart(Message, frozen=True):
    """Payload: bytes of slice number `index` of StartBegin, from byte `offset` of that slice."""

    index: types.Size
    offset: types.Size


class StartEnd(Message, frozen=True):
    """All start values were sent."""


class SaveBegin(Message, frozen=True):
    """Parts of the checkpoint of `step` come from this sender: these slices, and (rank 0) its state as JSON text."""

    step: types.Step
    slices: types.Slices
    state: dict[str, Any] | None = None
    tables: bool = False  # a server's tables, which it sends apart from its parameters


class SavePart(Message, frozen=True):
    """Payload: bytes of slice number `index` from byte `offset` of that slice."""

    step: types.Step
    index: types.Size
    offset: types.Size
    tables: bool = False


class SaveEnd(Message, frozen=True):
    """All slices of this sender were sent."""

    step: types.Step
    tables: bool = False


class LoadWanted(Message, frozen=True):
    """Send me these slices of the checkpoint that the job resumes from; answered by LoadPart, then LoadEnd."""

    ticket: int
    slices: types.Slices


class Finished(Message, frozen=True):
    """The worker's script reached its end after `step` steps; its last checkpoint is on its way or done."""

    step: types.Step


# ---- the coordinator to a worker or server -----------------------------------------------------------------------


class Resume(msgspec.Struct, frozen=True):
    """Where a job goes on: rank 0's saved state, and what tensors the checkpoint holds."""

    checkpoint: str  # "digits-3@500"
    step: int
    state: dict[str, Any]
    tensors: list[TensorSlice]  # each whole tensor once: start 0, stop size


class Welcome(Message, frozen=True):
    """Answer to a worker's or server's Join."""

    world: int  # number of workers
    seed: int
    every_steps: int  # save at steps that this divides; 0: never by steps
    report_seconds: float
    resume: Resume | None = None
    hosts: list[int] = msgspec.field(default_factory=list)  # the number of each worker's host
    training: bool = False  # the others train already


class Decision(Message, frozen=True):
    """How gradients are synchronised, decided. Shards and assignment are empty unless the strategy is ps.

    `options` are what the strategy's schedule is built with (`schedule.catalog.Options` as plain data), empty for ps
    and native. `staleness`: clocks that the fastest worker may be ahead of the slowest; 0: bsp; None: asp. `period`:
    steps that workers take alone between two synchronisations; 1: none. `elastic`: who takes part may change while they
    train. `hosts`: ranks that share a host, whose gradients are summed before others' (ps/dense/host_sums.py).
    """

    strategy: str
    update: str  # "server" | "worker"
    layout: Layout
    shards: list[Shard]
    assignment: Assignment = NO_SERVERS
    resume: Resume | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    staleness: int | None = 0
    period: int = 1
    elastic: bool = False
    auto: bool = False  # nobody asked for this `update`
    sums: dict[str, Any] = msgspec.field(default_factory=dict)  # the order of sums, for checkpoints
    compression: Compression = PLAIN
    hosts: tuple[tuple[int, ...], ...] = ()


class Go(Message, frozen=True):
    """All ranks have their start values: train."""


class Propose(Message, frozen=True):
    """The coordinator wants one common step to cut at: answer Position at once."""

    ticket: int


class CutAt(Message, frozen=True):
    """After finishing `step`: save if `save`, then leave if `stop`. Answers all Propose of this ticket."""

    ticket: int
    step: types.Step
    save: bool
    stop: bool


class Saved(Message, frozen=True):
    """The checkpoint of `step` is whole on disk (problem "") or was given up."""

    step: types.Step
    problem: str = ""


class LoadPart(Message, frozen=True):
    """Payload: bytes of the wanted slice number `index`, from byte `offset` of it."""

    ticket: int
    index: types.Size
    offset: types.Size


class LoadEnd(Message, frozen=True):
    """All wanted slices were sent (problem "") or could not be."""

    ticket: int
    problem: str = ""


class Leave(Message, frozen=True):
    """End yourself now; `reason` is for the log."""

    reason: str


AnyMessage = (
    Register | Started | Exited | Lines | Sample | Stacks | StopWanted | CopyDone | ScaleWanted | ScaleAnswer
    | StacksWanted
    | StartProcess | StopProcesses | EndProcesses | RenewStore | CopyBegin | CopyPart | CopyEnd | Finish
    | Join | Prepare | Ready | Report | Beat | Position | SaveBegin | SavePart | SaveEnd | LoadWanted | Finished
    | StartBegin | StartPart | StartEnd | membership_messages.Kinds | table_server_messages.Kinds |
    rendezvous_messages.Kinds
    | Welcome | Decision | Go | Propose | CutAt | Saved | LoadPart | LoadEnd | Leave | NewCertificate
)  # fmt: skip
"""Every kind: what a connection to or from the coordinator is made with."""
