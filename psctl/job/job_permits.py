"""Who may say what to the coordinator and hear what from it: the table of its connections.

States of a sender: `new` until its first message, then `joined`; of a worker that handed its model in, `prepared`.
"""

from __future__ import annotations

from typing import Any

from psctl.job import job_messages, membership_messages, rendezvous_messages, table_server_messages
from psctl.permits import LAYOUTS, LISTS, NEW, Permit, Permits, Way
from psctl.types import Member, Role

PART = 4 << 20
"""Most bytes of payload that the wire carries with one message."""

JOINED, PREPARED = "joined", "prepared"

AGENT: Way = ("agent", "coordinator")
SERVER: Way = ("server", "coordinator")
WORKER: Way = ("worker", "coordinator")
TO_AGENT: Way = ("coordinator", "agent")
TO_SERVER: Way = ("coordinator", "server")
TO_WORKER: Way = ("coordinator", "worker")

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


def _save_begin(sender: Member, message: job_messages.SaveBegin) -> str:
    if message.state is not None and sender != Member("worker", 0, sender.incarnation):
        return "only worker/0 sends the state of a checkpoint"
    return _of_save(sender, message)


def _ready(sender: Member, message: job_messages.Ready) -> str:
    listens = message.address is not None
    return "" if listens == (sender.role == "server") else "a server says where it listens, and a worker does not"


def _report(sender: Member, message: job_messages.Report) -> str:
    most = max((len(each.metrics) for each in message.steps), default=0)
    return "" if most <= METRICS else f"{most} numbers of one step, more than {METRICS}"


def _exited(sender: Member, message: job_messages.Exited) -> str:
    return "" if (message.failure is None) == (message.status == 0) else "a failure is told of a status other than 0"


def _lines(sender: Member, message: job_messages.Lines) -> str:
    return "" if message.stream in ("stdout", "stderr") else f"stream {message.stream[:80]!r}"


def _listens(sender: Member, message: rendezvous_messages.Listens) -> str:
    return "" if len(message.secret) <= SECRET else f"a secret of {len(message.secret)} bytes"


COORDINATION = Permits(
    [
        # ---- an agent
        Permit(job_messages.Register, (AGENT,), FIRST, JOINED),
        Permit(job_messages.Started, (AGENT,), INSIDE),
        Permit(job_messages.Exited, (AGENT,), INSIDE, size=LAYOUTS, check=_exited),
        Permit(job_messages.Lines, (AGENT,), INSIDE, size=LAYOUTS, check=_lines),
        Permit(job_messages.Sample, (AGENT,), INSIDE, size=LISTS),
        Permit(job_messages.Stacks, (AGENT,), INSIDE, size=LISTS),
        Permit(job_messages.StopWanted, (AGENT,), INSIDE),
        Permit(job_messages.ScaleWanted, (AGENT,), INSIDE),
        Permit(job_messages.CopyDone, (AGENT,)),
        Permit(table_server_messages.ReadWanted, (AGENT, TO_SERVER), INSIDE, size=LISTS),
        # ---- to an agent
        Permit(job_messages.ScaleAnswer, (TO_AGENT,)),
        Permit(job_messages.StartProcess, (TO_AGENT,), size=LISTS),
        Permit(job_messages.StopProcesses, (TO_AGENT,)),
        Permit(job_messages.EndProcesses, (TO_AGENT,), size=LISTS),
        Permit(job_messages.StacksWanted, (TO_AGENT,), size=LISTS),
        Permit(job_messages.RenewStore, (TO_AGENT,)),
        Permit(job_messages.CopyBegin, (TO_AGENT,), size=LISTS),
        Permit(job_messages.CopyPart, (TO_AGENT,), payload=PART),
        Permit(job_messages.CopyEnd, (TO_AGENT,)),
        Permit(job_messages.Finish, (TO_AGENT,)),
        Permit(membership_messages.HoldSlots, (TO_AGENT,)),
        Permit(table_server_messages.ReadBy, (TO_AGENT,)),
        # ---- a worker or server
        Permit(job_messages.Join, (WORKER, SERVER), FIRST, JOINED),
        Permit(job_messages.Prepare, (WORKER,), {"worker": (JOINED,)}, PREPARED, size=LAYOUTS),
        Permit(job_messages.Ready, (WORKER, SERVER), WITH_MODEL, check=_ready),
        Permit(job_messages.Report, (WORKER,), INSIDE, size=LAYOUTS, check=_report),
        Permit(job_messages.Beat, (WORKER, SERVER), INSIDE, size=LISTS),
        Permit(job_messages.Position, (WORKER,), INSIDE),
        Permit(job_messages.SaveBegin, (WORKER, SERVER), WITH_MODEL, size=LAYOUTS, check=_save_begin),
        Permit(job_messages.SavePart, (WORKER, SERVER), WITH_MODEL, payload=PART, check=_of_save),
        Permit(job_messages.SaveEnd, (WORKER, SERVER), WITH_MODEL, check=_of_save),
        Permit(job_messages.LoadWanted, (WORKER, SERVER), INSIDE, size=LAYOUTS),
        Permit(job_messages.Finished, (WORKER,), INSIDE),
        Permit(job_messages.StartBegin, (WORKER, TO_WORKER), WITH_MODEL, rank=0, size=LAYOUTS),
        Permit(job_messages.StartPart, (WORKER, TO_WORKER), WITH_MODEL, rank=0, payload=PART),
        Permit(job_messages.StartEnd, (WORKER, TO_WORKER), WITH_MODEL, rank=0),
        Permit(membership_messages.HeldOf, (SERVER,), INSIDE, size=LAYOUTS),
        Permit(membership_messages.Drawn, (WORKER,), INSIDE),
        Permit(membership_messages.CaughtUp, (SERVER,), INSIDE),
        Permit(membership_messages.HandedOver, (SERVER,), INSIDE),
        Permit(membership_messages.StepUnfit, (WORKER,), WITH_MODEL),
        Permit(membership_messages.ServerUnreachable, (WORKER, SERVER), INSIDE),
        Permit(membership_messages.Misbehaved, (SERVER,), INSIDE),
        Permit(rendezvous_messages.Listens, (WORKER,), INSIDE, check=_listens),  # `psctl bench` meets without a model
        Permit(table_server_messages.TablesWanted, (WORKER,), INSIDE),
        Permit(table_server_messages.TablesReady, (SERVER,), INSIDE),
        Permit(table_server_messages.TablesCaughtUp, (SERVER,), INSIDE),
        Permit(table_server_messages.TablesHandedOver, (SERVER,), INSIDE),
        Permit(table_server_messages.ReadRows, (SERVER, TO_AGENT), INSIDE, size=LAYOUTS, payload=PART),
        # ---- to a worker or server
        Permit(job_messages.Welcome, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(job_messages.Decision, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(job_messages.Go, (TO_WORKER, TO_SERVER)),
        Permit(job_messages.Propose, (TO_WORKER,)),
        Permit(job_messages.CutAt, (TO_WORKER,)),
        Permit(job_messages.Saved, (TO_WORKER,)),
        Permit(job_messages.LoadPart, (TO_WORKER, TO_SERVER), payload=PART),
        Permit(job_messages.LoadEnd, (TO_WORKER, TO_SERVER)),
        Permit(job_messages.Leave, (TO_WORKER, TO_SERVER)),
        Permit(job_messages.NewCertificate, (TO_AGENT, TO_WORKER, TO_SERVER), size=LISTS),
        Permit(membership_messages.Reassign, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(membership_messages.Members, (TO_SERVER,), size=LISTS),
        Permit(membership_messages.MembersAsked, (TO_WORKER,)),
        Permit(membership_messages.Shared, (TO_WORKER,), size=LISTS),
        Permit(membership_messages.WorkerGone, (TO_SERVER,)),
        Permit(membership_messages.CountUntil, (TO_SERVER,)),
        Permit(rendezvous_messages.WorkersAt, (TO_WORKER,), size=LISTS),
        Permit(table_server_messages.ServeTables, (TO_SERVER,)),
        Permit(table_server_messages.TablesAssigned, (TO_SERVER,), size=LAYOUTS),
        Permit(table_server_messages.TablesAt, (TO_WORKER,), size=LISTS),
        Permit(table_server_messages.TablesSave, (TO_SERVER,)),
    ]
)
"""Every message of a connection to or from the coordinator, once."""
