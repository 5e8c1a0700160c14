"""The messages that each member may send to the coordinator and receive from it: the table of its connections.

States of a sender: `new` until its first message, then `joined`; a worker that has sent its model is `prepared`. On a
further connection a worker or server is `resumed`: it may send what it might before.
"""

from __future__ import annotations

from psctl.job import checkpoint_messages as checkpoint
from psctl.job import leadership_messages as leadership
from psctl.job import membership_messages as membership
from psctl.job import process_messages as process
from psctl.job import reader_messages as readers
from psctl.job import session_messages as session
from psctl.job import stream_messages as streams
from psctl.job import table_server_messages as tables
from psctl.job import training_messages as training
from psctl.permits import LAYOUTS, LISTS, NEW, Direction, Permit, Permits
from psctl.types import Member, Role

PART = 4 << 20
"""Most bytes of payload of one message."""

JOINED, PREPARED, RESUMED = "joined", "prepared", "resumed"

AGENT: Direction = ("agent", "coordinator")
SERVER: Direction = ("server", "coordinator")
WORKER: Direction = ("worker", "coordinator")
READER: Direction = ("reader", "coordinator")
TO_AGENT: Direction = ("coordinator", "agent")
TO_SERVER: Direction = ("coordinator", "server")
TO_WORKER: Direction = ("coordinator", "worker")
TO_READER: Direction = ("coordinator", "reader")

FIRST: dict[Role, tuple[str, ...]] = {"agent": (NEW,), "server": (NEW,), "worker": (NEW,), "reader": (NEW,)}
INSIDE: dict[Role, tuple[str, ...]] = {
    "agent": (JOINED,), "server": (JOINED, RESUMED), "worker": (JOINED, PREPARED, RESUMED),
    "reader": (JOINED, RESUMED),
}  # fmt: skip
"""Of messages that a member may send after its first one."""
WITH_MODEL: dict[Role, tuple[str, ...]] = {"server": (JOINED, RESUMED), "worker": (PREPARED, RESUMED)}
"""Of messages that a worker may send after `Prepare`."""


def _of_save(sender: Member, message: checkpoint.SaveBegin | checkpoint.SavePart | checkpoint.SaveEnd) -> str:
    if message.tables and sender.role != "server":
        return "only servers hold tables"
    return "" if message.step >= 0 else f"step {message.step}"


def _save_begin(sender: Member, message: checkpoint.SaveBegin) -> str:
    if message.state is not None and sender != Member("worker", 0, sender.incarnation):
        return "only worker/0 sends the state of a checkpoint"
    return _of_save(sender, message)


def _ready(sender: Member, message: training.MemberReady) -> str:
    listens = message.address is not None
    return (
        ""
        if listens == (sender.role == "server")
        else "a server sends the address on which it listens, a worker does not"
    )


def _exited(sender: Member, message: process.ProcessExited) -> str:
    return "" if (message.failure is None) == (message.status == 0) else "a failure has a status other than 0"


COORDINATION = Permits(
    [
        # ---- an agent
        Permit(process.Register, (AGENT,), FIRST, JOINED),
        Permit(process.ProcessStarted, (AGENT,), INSIDE),
        Permit(process.ProcessExited, (AGENT,), INSIDE, size=LAYOUTS, check=_exited),
        Permit(process.OutputLines, (AGENT,), INSIDE, size=LAYOUTS),
        Permit(process.HostSample, (AGENT,), INSIDE, size=LISTS),
        Permit(process.Stacks, (AGENT,), INSIDE, size=LISTS),
        Permit(process.AgentNotice, (AGENT,), INSIDE),
        Permit(process.ClockWanted, (AGENT,), INSIDE),
        Permit(process.StopWanted, (AGENT,), INSIDE),
        Permit(process.ScaleWanted, (AGENT,), INSIDE),
        Permit(process.HostWanted, (AGENT,), INSIDE),
        Permit(checkpoint.CheckpointCopyDone, (AGENT,)),
        Permit(tables.ReadWanted, (AGENT, TO_SERVER), INSIDE, size=LISTS),
        # ---- a session (process/coordinator_connection.py); the state machine checks what a resumed worker may send
        Permit(session.ResumeSession, (WORKER, SERVER, READER), FIRST, RESUMED),
        Permit(session.SessionResumed, (TO_AGENT, TO_WORKER, TO_SERVER, TO_READER)),
        Permit(session.MessagesReceived, (AGENT, WORKER, SERVER, READER, TO_AGENT, TO_WORKER, TO_SERVER, TO_READER)),
        # ---- leadership (coordinator/standby_copy.py, agent/elections.py)
        Permit(leadership.LeadershipAccepted, (AGENT,), INSIDE),
        Permit(leadership.ReplicaStored, (AGENT,), INSIDE),
        Permit(leadership.Leadership, (TO_AGENT,), size=LISTS),
        Permit(leadership.MajorityMissed, (TO_AGENT,)),
        Permit(leadership.ReplicaBegin, (TO_AGENT,)),
        Permit(leadership.ReplicaLog, (TO_AGENT,), payload=PART),
        Permit(leadership.ReplicaSnapshot, (TO_AGENT,), payload=PART),
        Permit(leadership.ReplicaRecord, (TO_AGENT,), payload=PART),
        # ---- to an agent
        Permit(process.ScaleAnswer, (TO_AGENT,)),
        Permit(process.HostAnswer, (TO_AGENT,), size=LAYOUTS),
        Permit(process.StartProcess, (TO_AGENT,), size=LISTS),
        Permit(process.StopProcesses, (TO_AGENT,)),
        Permit(process.EndProcesses, (TO_AGENT,), size=LISTS),
        Permit(process.StacksWanted, (TO_AGENT,), size=LISTS),
        Permit(process.RenewStore, (TO_AGENT,)),
        Permit(process.ClockIs, (TO_AGENT,)),
        Permit(checkpoint.CheckpointCopyBegin, (TO_AGENT,), size=LISTS),
        Permit(checkpoint.CheckpointCopyPart, (TO_AGENT,), payload=PART),
        Permit(checkpoint.CheckpointCopyEnd, (TO_AGENT,)),
        Permit(process.JobFinished, (TO_AGENT,)),
        Permit(process.HoldSlots, (TO_AGENT,)),
        Permit(tables.ReadBy, (TO_AGENT,)),
        # ---- a worker or server
        Permit(training.Join, (WORKER, SERVER, READER), FIRST, JOINED),
        Permit(training.Prepare, (WORKER,), {"worker": (JOINED, RESUMED)}, PREPARED, size=LAYOUTS),
        Permit(training.MemberReady, (WORKER, SERVER), WITH_MODEL, check=_ready),
        Permit(training.WorkerReport, (WORKER,), INSIDE, size=LAYOUTS),
        Permit(training.Heartbeat, (WORKER, SERVER, READER), INSIDE, size=LISTS),
        Permit(checkpoint.CutPosition, (WORKER,), INSIDE),
        Permit(checkpoint.SaveBegin, (WORKER, SERVER), WITH_MODEL, size=LAYOUTS, check=_save_begin),
        Permit(checkpoint.SavePart, (WORKER, SERVER), WITH_MODEL, payload=PART, check=_of_save),
        Permit(checkpoint.SaveEnd, (WORKER, SERVER), WITH_MODEL, check=_of_save),
        Permit(checkpoint.LoadWanted, (WORKER, SERVER), INSIDE, size=LAYOUTS),
        Permit(training.ScriptFinished, (WORKER,), INSIDE),
        Permit(training.StartBegin, (WORKER, TO_WORKER), WITH_MODEL, rank=0, size=LAYOUTS),
        Permit(training.StartPart, (WORKER, TO_WORKER), WITH_MODEL, rank=0, payload=PART),
        Permit(training.StartEnd, (WORKER, TO_WORKER), WITH_MODEL, rank=0),
        Permit(membership.LostWorkerClocks, (SERVER,), INSIDE, size=LAYOUTS),
        Permit(membership.NextClock, (WORKER,), INSIDE),
        Permit(membership.MembersSet, (SERVER,), INSIDE),
        Permit(membership.ShardCaughtUp, (SERVER,), INSIDE),
        Permit(membership.ShardHandedOver, (SERVER,), INSIDE),
        Permit(membership.StepUnfit, (WORKER,), WITH_MODEL),
        Permit(membership.ServerUnreachable, (WORKER, SERVER), INSIDE),
        Permit(membership.ProtocolViolation, (SERVER,), INSIDE),
        Permit(training.WorkerListens, (WORKER,), INSIDE),  # `psctl bench` has no model
        Permit(training.RanksWanted, (WORKER,), INSIDE),
        Permit(training.RankListens, (WORKER,), INSIDE),
        Permit(training.PlaneBroken, (WORKER,), WITH_MODEL, size=LISTS),
        Permit(training.NotReplaceable, (WORKER,), WITH_MODEL),
        Permit(training.BucketSizeChosen, (WORKER,), WITH_MODEL),
        Permit(training.BackwardStepsChosen, (WORKER,), WITH_MODEL),
        Permit(streams.StreamOpened, (WORKER,), WITH_MODEL),
        Permit(streams.ShardWanted, (WORKER,), WITH_MODEL),
        Permit(streams.BatchTaken, (WORKER,), WITH_MODEL, size=LISTS),
        Permit(tables.TablesWanted, (WORKER, READER), INSIDE),
        Permit(tables.ScriptOpensStore, (WORKER,), INSIDE),
        Permit(tables.TablesReady, (SERVER,), INSIDE),
        Permit(tables.ReadRows, (SERVER, TO_AGENT), INSIDE, size=LAYOUTS, payload=PART),
        # ---- to a worker or server
        Permit(training.Welcome, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(training.Decision, (TO_WORKER, TO_SERVER, TO_READER), size=LAYOUTS),
        Permit(training.Go, (TO_WORKER, TO_SERVER)),
        Permit(checkpoint.ProposeCut, (TO_WORKER,)),
        Permit(checkpoint.CutAt, (TO_WORKER,)),
        Permit(checkpoint.CheckpointSaved, (TO_WORKER,)),
        Permit(checkpoint.LoadPart, (TO_WORKER, TO_SERVER), payload=PART),
        Permit(checkpoint.LoadEnd, (TO_WORKER, TO_SERVER)),
        Permit(training.Leave, (TO_WORKER, TO_SERVER, TO_READER)),
        Permit(process.NewCertificate, (TO_AGENT, TO_WORKER, TO_SERVER, TO_READER), size=LISTS),
        Permit(membership.Reassign, (TO_WORKER, TO_SERVER, TO_READER), size=LAYOUTS),
        Permit(membership.Members, (TO_SERVER,), size=LISTS),
        Permit(membership.NextClockWanted, (TO_WORKER,)),
        Permit(membership.ExamplesShared, (TO_WORKER,), size=LISTS),
        Permit(membership.WorkerGone, (TO_SERVER,)),
        Permit(membership.CountUntil, (TO_SERVER,)),
        Permit(training.WorkersAt, (TO_WORKER,), size=LISTS),
        Permit(training.ConnectAgain, (TO_WORKER,), size=LISTS),
        Permit(training.ListenForRanks, (TO_WORKER,), size=LISTS),
        Permit(training.RanksAt, (TO_WORKER,), size=LAYOUTS),
        Permit(tables.ServeTables, (TO_SERVER,)),
        Permit(tables.TablesAssigned, (TO_SERVER,), size=LAYOUTS),
        Permit(streams.StreamPosition, (TO_WORKER,), size=LISTS),
        Permit(streams.ShardGiven, (TO_WORKER,)),
        Permit(streams.NoShardLeft, (TO_WORKER,)),
        Permit(streams.StreamEnded, (TO_WORKER,)),
        Permit(streams.BatchSize, (TO_WORKER,)),
        Permit(tables.TablesAt, (TO_WORKER, TO_READER), size=LISTS),
        Permit(tables.TablesSave, (TO_SERVER,)),
        Permit(tables.TablesSaved, (TO_SERVER,)),
        # ---- a reader
        Permit(readers.GroupReport, (READER,), INSIDE, size=LISTS),
        Permit(readers.TrainingEnded, (TO_READER,)),
    ]
)
"""Every message of a connection to or from the coordinator, once."""
