"""The inputs and the instructions of the job's state machine."""

from __future__ import annotations

import msgspec

from psctl.job.events import AnyEvent, Planned
from psctl.job.message import JobMessage
from psctl.job.training_messages import CollectiveChoice, Resume
from psctl.orders import JobOrder
from psctl.types import Layout, Member, Shard, State

# ---- inputs --------------------------------------------------------------------------------------------------------


class MessageReceived(msgspec.Struct, frozen=True):
    """A member sent a message."""

    member: Member
    message: JobMessage


class Connected(msgspec.Struct, frozen=True):
    """A member's connection is made."""

    member: Member


class ConnectionLost(msgspec.Struct, frozen=True):
    """A member's connection ended."""

    member: Member
    reason: str


class ProtocolBroken(msgspec.Struct, frozen=True):
    """A member sent a message that it may not send; its connection is closed."""

    member: Member
    reason: str


class AgentsSilent(msgspec.Struct, frozen=True):
    """Seconds since the last packet of each connected agent's host (its index); comes with every Tick."""

    seconds: dict[int, float]


class PlanMade(msgspec.Struct, frozen=True):
    """Answer to MakePlan. `servers` has the host index of each server; `options` are the chosen schedule's; `problem`
    is the reason when there is no plan; `factors`: weights whose gradients are sent as factors; `start`: the broadcast
    of start values; `racks`: of each host, where gradients are summed by rack."""

    chosen: str
    update: str
    servers: list[int]
    event: Planned | None
    problem: str = ""
    options: dict[str, object] = {}
    factors: tuple[str, ...] = ()
    start: CollectiveChoice | None = None
    racks: tuple[str, ...] = ()


class PlanRemade(msgspec.Struct, frozen=True):
    """Answer to PlanAgain: the plan, whose candidates have the seconds of a step."""

    plan: PlanMade


class CollectivesPlanned(msgspec.Struct, frozen=True):
    """Answer to PlanCollectives, for `world` workers."""

    world: int
    choices: list[CollectiveChoice]


class ShardsMade(msgspec.Struct, frozen=True):
    """Answer to MakeShards; `sizes` are their bytes."""

    shards: list[Shard]
    sizes: list[int]


class CheckpointCommitted(msgspec.Struct, frozen=True):
    """A checkpoint is whole and verified on disk (problem ""), or was given up and removed.

    `written`: bytes of files that no earlier checkpoint has. `can_continue`: whether later parts may be based on it,
    or, with a problem, on that on which it was based.
    """

    step: int
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    written: int = 0
    can_continue: bool = True


class CheckpointCopyFailed(msgspec.Struct, frozen=True):
    """A checkpoint could not be sent to another host."""

    step: int
    agent: Member
    problem: str


class CheckpointUploadEnded(msgspec.Struct, frozen=True):
    """A checkpoint is at `checkpoint.to`, at `place`, or could not be uploaded (place ""); `problem`: what failed."""

    step: int
    place: str = ""
    problem: str = ""


class RestorableFound(msgspec.Struct, frozen=True):
    """Answer to FindRestorable: where the job resumes, None: at its start; `problem`: why it cannot."""

    resume: Resume | None
    skipped: list[str] = []
    problem: str = ""


class TakenOver(msgspec.Struct, frozen=True):
    """A new process continues the job from the journal, because the coordinator before was lost.

    `pid`: its id; `host`: where it runs, another one than before if the leader's host was lost.
    """

    pid: int
    host: int = 0


class LeaderWaited(msgspec.Struct, frozen=True):
    """No input was handled for some seconds, because neither the standby nor a majority of the hosts answered."""

    seconds: float


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Input = (
    MessageReceived | Connected | ConnectionLost | ProtocolBroken | AgentsSilent | PlanMade | PlanRemade
    | CollectivesPlanned | ShardsMade | CheckpointCommitted | CheckpointCopyFailed | CheckpointUploadEnded
    | RestorableFound | TakenOver | LeaderWaited | Tick
)  # fmt: skip

# ---- instructions --------------------------------------------------------------------------------------------------


class StartMember(msgspec.Struct, frozen=True):
    """Issue a certificate for the member and have the agent of this host (its index) start it."""

    member: Member
    world: int
    host: int
    local_rank: int
    environment: dict[str, str]


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to a member, if it is connected."""

    member: Member
    message: JobMessage


class CloseConnection(msgspec.Struct, frozen=True):
    """Close the connection of a member that broke the protocol."""

    member: Member
    reason: str


class AppendEvent(msgspec.Struct, frozen=True):
    """Append an event to the log."""

    event: AnyEvent


class MakePlan(msgspec.Struct, frozen=True):
    """Choose the strategy for this layout and the job as it is now; answer PlanMade. `on_gpus`: parameters are.
    `hooked`: gradients come from DistributedDataParallel. `in_parts`: each worker may step a part of the parameters
    where `update: auto` allows it; else the job is one whose optimizer steps as a whole, and is timed as such."""

    layout: Layout
    order: JobOrder
    on_gpus: bool = False
    hooked: bool = False
    in_parts: bool = True


class PlanAgain(msgspec.Struct, frozen=True):
    """Make the plan of a job that trains, whose order has the measured compute; answer PlanRemade."""

    wanted: MakePlan


class PlanCollectives(msgspec.Struct, frozen=True):
    """Choose the algorithms of collectives on the machines of this job; answer CollectivesPlanned."""

    order: JobOrder


class MakeShards(msgspec.Struct, frozen=True):
    """Cut the layout for so many servers; answer ShardsMade. `near`: they and all workers are on one host."""

    layout: Layout
    servers: int
    near: bool


class CommitCheckpoint(msgspec.Struct, frozen=True):
    """All parts of this step's checkpoint are here: commit it, verify it, prune; answer CheckpointCommitted."""

    step: int
    epoch: int
    world: int
    servers: int
    strategy: str
    update: str
    metrics: dict[str, float]
    parameters: list[str] = []  # names of those that it must hold
    again: bool = False  # an earlier coordinator had begun it: it may be on disk
    streams: list[State] = []  # as JSON values, for the state


class DiscardCheckpoint(msgspec.Struct, frozen=True):
    """Remove the files of this step's checkpoint, of which a part will not arrive; no answer."""

    step: int


class SendCheckpointCopy(msgspec.Struct, frozen=True):
    """Send the checkpoint of this step to an agent as a copy; the agent answers, or CheckpointCopyFailed.

    `base`: the step of an earlier one of which the agent has a copy; -1: there is none.
    """

    step: int
    agent: Member
    base: int = -1


class UploadCheckpoint(msgspec.Struct, frozen=True):
    """Upload the checkpoint of this step to `checkpoint.to` while training goes on; answer CheckpointUploadEnded."""

    step: int


class FindRestorable(msgspec.Struct, frozen=True):
    """Find the newest checkpoint whose every byte is verified and read from it from now on; forget which steps were
    given up, since they come again. Answer RestorableFound."""


class CloseCoordinator(msgspec.Struct, frozen=True):
    """The job is over and its last event was appended: inform the agents and exit."""

    status: str


Instruction = (
    StartMember | SendMessage | CloseConnection | AppendEvent | MakePlan | PlanAgain | PlanCollectives | MakeShards
    | CommitCheckpoint | DiscardCheckpoint | SendCheckpointCopy | UploadCheckpoint | FindRestorable | CloseCoordinator
)  # fmt: skip
