"""Who may say what to the coordinator and hear what from it: the table of its connections.

States of a sender: `new` until its first message, then `joined`; of a worker that handed its model in, `prepared`.
"""

from __future__ import annotations

from typing import Any

from psctl.job.checkpoint_messages import (
    CheckpointCopyBegin,
    CheckpointCopyDone,
    CheckpointCopyEnd,
    CheckpointCopyPart,
    CheckpointSaved,
    CutAt,
    CutPosition,
    LoadEnd,
    LoadPart,
    LoadWanted,
    ProposeCut,
    SaveBegin,
    SaveEnd,
    SavePart,
)
from psctl.job.membership_messages import (
    CountUntil,
    ExamplesShared,
    LostWorkerClocks,
    Members,
    NextClock,
    NextClockWanted,
    ProtocolViolation,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    StepUnfit,
    WorkerGone,
)
from psctl.job.process_messages import (
    EndProcesses,
    HoldSlots,
    HostSample,
    JobFinished,
    NewCertificate,
    OutputLines,
    ProcessExited,
    ProcessStarted,
    Register,
    RenewStore,
    ScaleAnswer,
    ScaleWanted,
    Stacks,
    StacksWanted,
    StartProcess,
    StopProcesses,
    StopWanted,
)
from psctl.job.table_server_messages import (
    ReadBy,
    ReadRows,
    ReadWanted,
    ServeTables,
    TablesAssigned,
    TablesAt,
    TablesCaughtUp,
    TablesHandedOver,
    TablesReady,
    TablesSave,
    TablesWanted,
)
from psctl.job.training_messages import (
    Decision,
    Go,
    Heartbeat,
    Join,
    Leave,
    MemberReady,
    Prepare,
    ScriptFinished,
    StartBegin,
    StartEnd,
    StartPart,
    Welcome,
    WorkerListens,
    WorkerReport,
    WorkersAt,
)
from psctl.permits import LAYOUTS, LISTS, NEW, Direction, Permit, Permits
from psctl.types import Member, Role

PART = 4 << 20
"""Most bytes of payload that the wire carries with one message."""

JOINED, PREPARED = "joined", "prepared"

AGENT: Direction = ("agent", "coordinator")
SERVER: Direction = ("server", "coordinator")
WORKER: Direction = ("worker", "coordinator")
TO_AGENT: Direction = ("coordinator", "agent")
TO_SERVER: Direction = ("coordinator", "server")
TO_WORKER: Direction = ("coordinator", "worker")

FIRST: dict[Role, tuple[str, ...]] = {"agent": (NEW,), "server": (NEW,), "worker": (NEW,)}
INSIDE: dict[Role, tuple[str, ...]] = {"agent": (JOINED,), "server": (JOINED,), "worker": (JOINED, PREPARED)}
"""Of what is said once a member has introduced itself."""
WITH_MODEL: dict[Role, tuple[str, ...]] = {"server": (JOINED,), "worker": (PREPARED,)}
"""Of what a worker says once it has handed its model in."""

SECRET = 64
"""Most bytes of a secret that workers show each other."""

METRICS = 1000
"""Most names in one step's numbers."""


def _of_save(sender: Member, message: Any) -> str:
    if message.tables and sender.role != "server":
        return "only servers hold tables"
    return "" if message.step >= 0 else f"step {message.step}"


def _save_begin(sender: Member, message: SaveBegin) -> str:
    if message.state is not None and sender != Member("worker", 0, sender.incarnation):
        return "only worker/0 sends the state of a checkpoint"
    return _of_save(sender, message)


def _ready(sender: Member, message: MemberReady) -> str:
    listens = message.address is not None
    return "" if listens == (sender.role == "server") else "a server says where it listens, and a worker does not"


def _report(sender: Member, message: WorkerReport) -> str:
    most = max((len(each.metrics) for each in message.steps), default=0)
    return "" if most <= METRICS else f"{most} numbers of one step, more than {METRICS}"


def _exited(sender: Member, message: ProcessExited) -> str:
    return "" if (message.failure is None) == (message.status == 0) else "a failure is told of a status other than 0"


def _lines(sender: Member, message: OutputLines) -> str:
    return "" if message.stream in ("stdout", "stderr") else f"stream {message.stream[:80]!r}"


def _listens(sender: Member, message: WorkerListens) -> str:
    return "" if len(message.secret) <= SECRET else f"a secret of {len(message.secret)} bytes"


COORDINATION = Permits(
    [
        # ---- an agent
        Permit(Register, (AGENT,), FIRST, JOINED),
        Permit(ProcessStarted, (AGENT,), INSIDE),
        Permit(ProcessExited, (AGENT,), INSIDE, size=LAYOUTS, check=_exited),
        Permit(OutputLines, (AGENT,), INSIDE, size=LAYOUTS, check=_lines),
        Permit(HostSample, (AGENT,), INSIDE, size=LISTS),
        Permit(Stacks, (AGENT,), INSIDE, size=LISTS),
        Permit(StopWanted, (AGENT,), INSIDE),
        Permit(ScaleWanted, (AGENT,), INSIDE),
        Permit(CheckpointCopyDone, (AGENT,)),
        Permit(ReadWanted, (AGENT, TO_SERVER), INSIDE, size=LISTS),
        # ---- to an agent
        Permit(ScaleAnswer, (TO_AGENT,)),
        Permit(StartProcess, (TO_AGENT,), size=LISTS),
        Permit(StopProcesses, (TO_AGENT,)),
        Permit(EndProcesses, (TO_AGENT,), size=LISTS),
        Permit(StacksWanted, (TO_AGENT,), size=LISTS),
        Permit(RenewStore, (TO_AGENT,)),
        Permit(CheckpointCopyBegin, (TO_AGENT,), size=LISTS),
        Permit(CheckpointCopyPart, (TO_AGENT,), payload=PART),
        Permit(CheckpointCopyEnd, (TO_AGENT,)),
        Permit(JobFinished, (TO_AGENT,)),
        Permit(HoldSlots, (TO_AGENT,)),
        Permit(ReadBy, (TO_AGENT,)),
        # ---- a worker or server
        Permit(Join, (WORKER, SERVER), FIRST, JOINED),
        Permit(Prepare, (WORKER,), {"worker": (JOINED,)}, PREPARED, size=LAYOUTS),
        Permit(MemberReady, (WORKER, SERVER), WITH_MODEL, check=_ready),
        Permit(WorkerReport, (WORKER,), INSIDE, size=LAYOUTS, check=_report),
        Permit(Heartbeat, (WORKER, SERVER), INSIDE, size=LISTS),
        Permit(CutPosition, (WORKER,), INSIDE),
        Permit(SaveBegin, (WORKER, SERVER), WITH_MODEL, size=LAYOUTS, check=_save_begin),
        Permit(SavePart, (WORKER, SERVER), WITH_MODEL, payload=PART, check=_of_save),
        Permit(SaveEnd, (WORKER, SERVER), WITH_MODEL, check=_of_save),
        Permit(LoadWanted, (WORKER, SERVER), INSIDE, size=LAYOUTS),
        Permit(ScriptFinished, (WORKER,), INSIDE),
        Permit(StartBegin, (WORKER, TO_WORKER), WITH_MODEL, rank=0, size=LAYOUTS),
        Permit(StartPart, (WORKER, TO_WORKER), WITH_MODEL, rank=0, payload=PART),
        Permit(StartEnd, (WORKER, TO_WORKER), WITH_MODEL, rank=0),
        Permit(LostWorkerClocks, (SERVER,), INSIDE, size=LAYOUTS),
        Permit(NextClock, (WORKER,), INSIDE),
        Permit(ShardCaughtUp, (SERVER,), INSIDE),
        Permit(ShardHandedOver, (SERVER,), INSIDE),
        Permit(StepUnfit, (WORKER,), WITH_MODEL),
        Permit(ServerUnreachable, (WORKER, SERVER), INSIDE),
        Permit(ProtocolViolation, (SERVER,), INSIDE),
        Permit(WorkerListens, (WORKER,), INSIDE, check=_listens),  # `psctl bench` meets without a model
        Permit(TablesWanted, (WORKER,), INSIDE),
        Permit(TablesReady, (SERVER,), INSIDE),
        Permit(TablesCaughtUp, (SERVER,), INSIDE),
        Permit(TablesHandedOver, (SERVER,), INSIDE),
        Permit(ReadRows, (SERVER, TO_AGENT), INSIDE, size=LAYOUTS, payload=PART),
        # ---- to a worker or server
        Permit(Welcome, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(Decision, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(Go, (TO_WORKER, TO_SERVER)),
        Permit(ProposeCut, (TO_WORKER,)),
        Permit(CutAt, (TO_WORKER,)),
        Permit(CheckpointSaved, (TO_WORKER,)),
        Permit(LoadPart, (TO_WORKER, TO_SERVER), payload=PART),
        Permit(LoadEnd, (TO_WORKER, TO_SERVER)),
        Permit(Leave, (TO_WORKER, TO_SERVER)),
        Permit(NewCertificate, (TO_AGENT, TO_WORKER, TO_SERVER), size=LISTS),
        Permit(Reassign, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(Members, (TO_SERVER,), size=LISTS),
        Permit(NextClockWanted, (TO_WORKER,)),
        Permit(ExamplesShared, (TO_WORKER,), size=LISTS),
        Permit(WorkerGone, (TO_SERVER,)),
        Permit(CountUntil, (TO_SERVER,)),
        Permit(WorkersAt, (TO_WORKER,), size=LISTS),
        Permit(ServeTables, (TO_SERVER,)),
        Permit(TablesAssigned, (TO_SERVER,), size=LAYOUTS),
        Permit(TablesAt, (TO_WORKER,), size=LISTS),
        Permit(TablesSave, (TO_SERVER,)),
    ]
)
"""Every message of a connection to or from the coordinator, once."""
