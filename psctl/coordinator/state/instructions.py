"""What the coordinator's mind hears and what it asks for: the two small languages between it and its shell."""

from __future__ import annotations

from typing import Any

import msgspec

from psctl.job.events import AnyEvent, Planned
from psctl.job.message import JobMessage
from psctl.job.training_messages import Resume
from psctl.orders import JobOrder
from psctl.types import Layout, Member, Shard

# ---- what it hears -------------------------------------------------------------------------------------------------


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
    """A member sent what it may not send; its connection is closed."""

    member: Member
    reason: str


class PlanMade(msgspec.Struct, frozen=True):
    """Answer to MakePlan. `servers` has the host index of each server; `options` are the chosen schedule's; `problem`
    says why there is no plan."""

    chosen: str
    update: str
    servers: list[int]
    event: Planned | None
    problem: str = ""
    options: dict[str, Any] = {}


class ShardsMade(msgspec.Struct, frozen=True):
    """Answer to MakeShards; `sizes` are their bytes."""

    shards: list[Shard]
    sizes: list[int]


class CheckpointCommitted(msgspec.Struct, frozen=True):
    """A checkpoint is whole and verified on disk (problem ""), or was given up and removed."""

    step: int
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


class CheckpointCopySent(msgspec.Struct, frozen=True):
    """All of a checkpoint was sent to another host (its agent still has to prove it), or could not be."""

    step: int
    problem: str = ""


class RestorableFound(msgspec.Struct, frozen=True):
    """Answer to FindRestorable: where the job goes on, None: from its start. `problem` says why it cannot."""

    resume: Resume | None
    skipped: list[str] = []
    problem: str = ""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Input = (
    MessageReceived | Connected | ConnectionLost | ProtocolBroken | PlanMade | ShardsMade | CheckpointCommitted
    | CheckpointCopySent | RestorableFound | Tick
)  # fmt: skip

# ---- what it asks for ----------------------------------------------------------------------------------------------


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
    """Close the connection of a member that sent what it may not send."""

    member: Member
    reason: str


class AppendEvent(msgspec.Struct, frozen=True):
    """Append an event to the log."""

    event: AnyEvent


class MakePlan(msgspec.Struct, frozen=True):
    """Choose the strategy for this layout and the job as it is now; answer PlanMade. `on_gpus`: parameters are."""

    layout: Layout
    order: JobOrder
    on_gpus: bool = False


class MakeShards(msgspec.Struct, frozen=True):
    """Cut the layout for so many servers; answer ShardsMade. `near`: they and all workers are on one host."""

    layout: Layout
    servers: int
    near: bool


class CommitCheckpoint(msgspec.Struct, frozen=True):
    """All parts of this step's checkpoint were sent: make it whole, verify it, prune; answer Written."""

    step: int
    epoch: int
    world: int
    servers: int
    strategy: str
    update: str
    metrics: dict[str, float]
    parameters: list[str] = []  # names of those that it must hold


class DiscardCheckpoint(msgspec.Struct, frozen=True):
    """A part of this step's checkpoint will never come: remove what is there; no answer."""

    step: int


class SendCheckpointCopy(msgspec.Struct, frozen=True):
    """Send the checkpoint of this step to an agent as a second copy; answer CopySent."""

    step: int
    agent: Member


class FindRestorable(msgspec.Struct, frozen=True):
    """Everything ended: find the newest checkpoint whose every byte is right, and read from it from now on; forget
    which ones were given up, for their steps come again. Answer Restorable."""


class CloseCoordinator(msgspec.Struct, frozen=True):
    """The job is over and its last event was appended: tell the agents, leave."""

    status: str


Instruction = (
    StartMember | SendMessage | CloseConnection | AppendEvent | MakePlan | MakeShards | CommitCheckpoint
    | DiscardCheckpoint | SendCheckpointCopy | FindRestorable | CloseCoordinator
)  # fmt: skip
