"""Who may say what to the coordinator and hear what from it: the table of its connections.

States of a sender: `new` until its first message, then `joined`; of a worker that handed its model in, `prepared`.
"""

from __future__ import annotations

from typing import Any

from psctl.job import meetings, membership, messages, stores
from psctl.permits import LAYOUTS, LISTS, NEW, Permit, Permits, Way
from psctl.words import Member, Role

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


def _save_begin(sender: Member, message: messages.SaveBegin) -> str:
    if message.state is not None and sender != Member("worker", 0, sender.incarnation):
        return "only worker/0 sends the state of a checkpoint"
    return _of_save(sender, message)


def _ready(sender: Member, message: messages.Ready) -> str:
    listens = message.address is not None
    return "" if listens == (sender.role == "server") else "a server says where it listens, and a worker does not"


def _report(sender: Member, message: messages.Report) -> str:
    most = max((len(each.metrics) for each in message.steps), default=0)
    return "" if most <= METRICS else f"{most} numbers of one step, more than {METRICS}"


def _exited(sender: Member, message: messages.Exited) -> str:
    return "" if (message.failure is None) == (message.status == 0) else "a failure is told of a status other than 0"


def _lines(sender: Member, message: messages.Lines) -> str:
    return "" if message.stream in ("stdout", "stderr") else f"stream {message.stream[:80]!r}"


def _listens(sender: Member, message: meetings.Listens) -> str:
    return "" if len(message.secret) <= SECRET else f"a secret of {len(message.secret)} bytes"


COORDINATION = Permits(
    [
        # ---- an agent
        Permit(messages.Register, (AGENT,), FIRST, JOINED),
        Permit(messages.Started, (AGENT,), INSIDE),
        Permit(messages.Exited, (AGENT,), INSIDE, size=LAYOUTS, check=_exited),
        Permit(messages.Lines, (AGENT,), INSIDE, size=LAYOUTS, check=_lines),
        Permit(messages.Sample, (AGENT,), INSIDE, size=LISTS),
        Permit(messages.Stacks, (AGENT,), INSIDE, size=LISTS),
        Permit(messages.StopWanted, (AGENT,), INSIDE),
        Permit(messages.ScaleWanted, (AGENT,), INSIDE),
        Permit(messages.CopyDone, (AGENT,)),
        Permit(stores.ReadWanted, (AGENT, TO_SERVER), INSIDE, size=LISTS),
        # ---- to an agent
        Permit(messages.ScaleAnswer, (TO_AGENT,)),
        Permit(messages.StartProcess, (TO_AGENT,), size=LISTS),
        Permit(messages.StopProcesses, (TO_AGENT,)),
        Permit(messages.EndProcesses, (TO_AGENT,), size=LISTS),
        Permit(messages.StacksWanted, (TO_AGENT,), size=LISTS),
        Permit(messages.RenewStore, (TO_AGENT,)),
        Permit(messages.CopyBegin, (TO_AGENT,), size=LISTS),
        Permit(messages.CopyPart, (TO_AGENT,), payload=PART),
        Permit(messages.CopyEnd, (TO_AGENT,)),
        Permit(messages.Finish, (TO_AGENT,)),
        Permit(membership.HoldSlots, (TO_AGENT,)),
        Permit(stores.ReadBy, (TO_AGENT,)),
        # ---- a worker or server
        Permit(messages.Join, (WORKER, SERVER), FIRST, JOINED),
        Permit(messages.Prepare, (WORKER,), {"worker": (JOINED,)}, PREPARED, size=LAYOUTS),
        Permit(messages.Ready, (WORKER, SERVER), WITH_MODEL, check=_ready),
        Permit(messages.Report, (WORKER,), INSIDE, size=LAYOUTS, check=_report),
        Permit(messages.Beat, (WORKER, SERVER), INSIDE, size=LISTS),
        Permit(messages.Position, (WORKER,), INSIDE),
        Permit(messages.SaveBegin, (WORKER, SERVER), WITH_MODEL, size=LAYOUTS, check=_save_begin),
        Permit(messages.SavePart, (WORKER, SERVER), WITH_MODEL, payload=PART, check=_of_save),
        Permit(messages.SaveEnd, (WORKER, SERVER), WITH_MODEL, check=_of_save),
        Permit(messages.LoadWanted, (WORKER, SERVER), INSIDE, size=LAYOUTS),
        Permit(messages.Finished, (WORKER,), INSIDE),
        Permit(messages.StartBegin, (WORKER, TO_WORKER), WITH_MODEL, rank=0, size=LAYOUTS),
        Permit(messages.StartPart, (WORKER, TO_WORKER), WITH_MODEL, rank=0, payload=PART),
        Permit(messages.StartEnd, (WORKER, TO_WORKER), WITH_MODEL, rank=0),
        Permit(membership.HeldOf, (SERVER,), INSIDE, size=LAYOUTS),
        Permit(membership.Drawn, (WORKER,), INSIDE),
        Permit(membership.CaughtUp, (SERVER,), INSIDE),
        Permit(membership.HandedOver, (SERVER,), INSIDE),
        Permit(membership.StepUnfit, (WORKER,), WITH_MODEL),
        Permit(membership.ServerUnreachable, (WORKER, SERVER), INSIDE),
        Permit(membership.Misbehaved, (SERVER,), INSIDE),
        Permit(meetings.Listens, (WORKER,), INSIDE, check=_listens),  # `psctl bench` meets without a model
        Permit(stores.TablesWanted, (WORKER,), INSIDE),
        Permit(stores.TablesReady, (SERVER,), INSIDE),
        Permit(stores.TablesCaughtUp, (SERVER,), INSIDE),
        Permit(stores.TablesHandedOver, (SERVER,), INSIDE),
        Permit(stores.ReadRows, (SERVER, TO_AGENT), INSIDE, size=LAYOUTS, payload=PART),
        # ---- to a worker or server
        Permit(messages.Welcome, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(messages.Decision, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(messages.Go, (TO_WORKER, TO_SERVER)),
        Permit(messages.Propose, (TO_WORKER,)),
        Permit(messages.CutAt, (TO_WORKER,)),
        Permit(messages.Saved, (TO_WORKER,)),
        Permit(messages.LoadPart, (TO_WORKER, TO_SERVER), payload=PART),
        Permit(messages.LoadEnd, (TO_WORKER, TO_SERVER)),
        Permit(messages.Leave, (TO_WORKER, TO_SERVER)),
        Permit(messages.NewCertificate, (TO_AGENT, TO_WORKER, TO_SERVER), size=LISTS),
        Permit(membership.Reassign, (TO_WORKER, TO_SERVER), size=LAYOUTS),
        Permit(membership.Members, (TO_SERVER,), size=LISTS),
        Permit(membership.MembersAsked, (TO_WORKER,)),
        Permit(membership.Shared, (TO_WORKER,), size=LISTS),
        Permit(membership.WorkerGone, (TO_SERVER,)),
        Permit(membership.CountUntil, (TO_SERVER,)),
        Permit(meetings.WorkersAt, (TO_WORKER,), size=LISTS),
        Permit(stores.ServeTables, (TO_SERVER,)),
        Permit(stores.TablesAssigned, (TO_SERVER,), size=LAYOUTS),
        Permit(stores.TablesAt, (TO_WORKER,), size=LISTS),
        Permit(stores.TablesSave, (TO_SERVER,)),
    ]
)
"""Every message of a connection to or from the coordinator, once."""
