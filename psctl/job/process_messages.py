"""Messages between the coordinator and agents: processes, their output and ends, users' requests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from psctl import types
from psctl.job.activity import PARTS
from psctl.job.message import JobMessage
from psctl.orders import HostOrder
from psctl.types import Address, Count, Member

Stream = Literal["stdout", "stderr"]

Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
MOST_SPANS = msgspec.Meta(max_length=400)
"""Of the parts of steps that an agent sends when a worker has ended."""


class Register(JobMessage, frozen=True):
    """First message of an agent on each connection. `running`: the job's processes on its host.

    `received`: numbered messages that it has received in its session; None: it has none. SessionResumed answers.
    `listens`: where it listens for other agents; None: the job has too few hosts for a standby. `restarted`: it was
    started while the job runs, in place of one that ended with its host, and has no vote yet.
    """

    running: tuple[Member, ...] = ()
    received: types.Size | None = None
    listens: Address | None = None
    restarted: bool = False


class ProcessStarted(JobMessage, frozen=True):
    """A process was started."""

    member: Member
    pid: int


class ProcessFailure(msgspec.Struct, frozen=True):
    """The failure of a process, for people."""

    member: str  # "worker/1"
    host: str
    status: int  # exit status, or minus the signal's number
    time: float  # seconds since the epoch, on that host
    step: int
    exception: str  # "ValueError: NaN loss"; "killed by signal 9" when there was none
    frames: list[str] = []  # the user's own frames, outermost first: "train.py:88 in step: loss = f(x)"
    tail: list[str] = []  # last lines of its standard error
    code: str = ""  # of a psctl error ("port-taken"); "" when the user's code failed
    exit: int = 1  # the exit code that this failure gives the job
    hint: str = ""  # a remedy, if psctl has one


class ProcessExited(JobMessage, frozen=True):
    """A process ended. `failure` is None exactly when `status` is 0.

    `spans`: of a worker, the parts of its newest steps: kind, step, begin and end in nanoseconds of the host's clock,
    which was at `at` then.
    """

    member: Member
    status: int
    failure: ProcessFailure | None = None
    spans: Annotated[tuple[tuple[types.Name, types.Step, Nanoseconds, Nanoseconds], ...], MOST_SPANS] = ()
    at: Nanoseconds = 0


class OutputLines(JobMessage, frozen=True):
    """Lines that a process printed; `dropped` further ones are in the host's log file only, and `unwritten` in none."""

    member: Member
    stream: Stream
    lines: list[str]
    dropped: types.Size = 0
    unwritten: types.Size = 0


class Stacks(JobMessage, frozen=True):
    """Answer to StacksWanted, for one process: frames outermost first, "train.py:88 in step: loss = f(x)".

    `main` is of the main thread and empty when the stack is not known; `problem` is the reason then.
    """

    member: Member
    main: types.Names
    others: Annotated[tuple[types.Names, ...], msgspec.Meta(max_length=64)]  # one for each other thread
    problem: types.Name = ""


class ProcessUsage(msgspec.Struct, frozen=True):
    """What a process and its children used: percent of one core since the last sample, and bytes of memory now; of a
    worker the percent of its time in each of `activity.PARTS`; of GPUs the percent of the time that those it uses are
    busy, and the bytes of them that it holds."""

    member: Member
    cpu: types.Size
    memory: types.Size
    parts: Annotated[tuple[types.Percent, ...], msgspec.Meta(max_length=len(PARTS))] = ()
    gpu: types.Percent = 0
    gpu_memory: types.Size = 0


class ClockWanted(JobMessage, frozen=True):
    """An agent asks for the coordinator's time; answered at once by ClockIs."""

    ticket: types.Count


class ClockIs(JobMessage, frozen=True):
    """Answer to ClockWanted: nanoseconds of the monotonic clock of the coordinator's host."""

    ticket: types.Count
    time: types.Size


class HostSample(JobMessage, frozen=True):
    """The load of a host: the share of its memory that is used, 0..1, the processes that used the processor since the
    last sample, the bytes/s of its network interface since then, and its GPUs: name, percent of the time that they are
    busy (None: not known), bytes used and in all."""

    memory: float
    busy: list[Member]
    usage: list[ProcessUsage] = msgspec.field(default_factory=list)
    sent: float = 0.0
    received: float = 0.0
    gpus: Annotated[
        tuple[tuple[types.Name, types.Percent | None, types.Size, types.Size], ...], msgspec.Meta(max_length=256)
    ] = ()


class AgentNotice(JobMessage, frozen=True):
    """A sentence of an agent for the event log; the same one is written once."""

    text: types.Name


class StopWanted(JobMessage, frozen=True):
    """A request to stop the job (psctl stop, an interrupt, SIGTERM)."""

    save: bool
    force: bool
    by: str  # for the event log: "psctl stop", "Ctrl-C", "SIGTERM"


class ScaleWanted(JobMessage, frozen=True):
    """psctl scale: the wanted numbers of workers and servers; None: unchanged. Answered by ScaleAnswer."""

    ticket: int
    workers: types.Count | None
    servers: types.Count | None


class ScaleAnswer(JobMessage, frozen=True):
    """Answer to ScaleWanted: the numbers are being changed (problem ""), or cannot be. `workers` and `servers` are the
    numbers before."""

    ticket: int
    workers: int
    servers: int
    problem: str = ""
    hint: str = ""


class HostWanted(JobMessage, frozen=True):
    """psctl up: the agent of a host of the job is to be started while the job runs. Answered by HostAnswer.

    `place` is the host's index. `host`: it is new to the job, and is added if the job has `place` hosts; None: the job
    has it already.
    """

    ticket: int
    place: types.Count
    host: HostOrder | None


class HostAnswer(JobMessage, frozen=True):
    """Answer to HostWanted: all hosts of the job, of which the last `added` were added while it ran; or why not."""

    ticket: int
    hosts: list[HostOrder]
    added: int = 0
    problem: str = ""


class NewCertificate(JobMessage, frozen=True):
    """Use this certificate and key, PEM text, for connections from now on: the former certificate expires soon."""

    certificate: Annotated[str, msgspec.Meta(max_length=16_384)]
    key: Annotated[str, msgspec.Meta(max_length=16_384)]


class StartProcess(JobMessage, frozen=True):
    """Start one process. Certificate and key are PEM text for 0600 files. `store`: the address that
    agents of other hosts than the head dial for torch's store."""

    member: Member
    world: types.Count  # number of workers
    local_rank: types.Count
    environment: dict[str, str]
    authority: str
    certificate: str
    key: str
    store: Address | None = None


class StopProcesses(JobMessage, frozen=True):
    """End all processes of the host: TERM, then KILL after `grace` seconds (0: KILL at once)."""

    grace: types.Seconds
    reason: str


class EndProcesses(JobMessage, frozen=True):
    """End these processes of the host, TERM then KILL after `grace` seconds; the agent stays, and may start others."""

    members: list[Member]
    grace: types.Seconds
    reason: str


class StacksWanted(JobMessage, frozen=True):
    """Send the stacks of these processes of the host; answered by one Stacks for each."""

    members: list[Member]


class RenewStore(JobMessage, frozen=True):
    """To the head's agent: all workers have ended and will be started again; torch's store must be empty then."""


class JobFinished(JobMessage, frozen=True):
    """The job is over: keep the logs and exit."""

    status: str  # done | failed | stopped


class HoldSlots(JobMessage, frozen=True):
    """To an agent: this host has `workers` workers of the job from now on; other jobs may use the other slots."""

    workers: Count
