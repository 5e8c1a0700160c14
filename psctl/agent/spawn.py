"""The command line, environment, orders and files of each process that an agent starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

import psctl
from psctl.agent.processes import AgentChild
from psctl.agent.supervisor import PRIVATE, SLOTS
from psctl.errors import PsctlError
from psctl.job.environment import NAMES, SPINS
from psctl.job.leadership_messages import Configuration, has_standby
from psctl.job.process_messages import ProcessFailure, StartProcess
from psctl.orders import AgentOrders
from psctl.process import bootstrap, lifeline
from psctl.process.process_orders import CoordinatorOrders, ProcessOrders
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.process.secret_masking import Secrets
from psctl.transport.credentials import Credentials
from psctl.types import UNDECODABLE, Address, Member

SERVERS = 64
"""Servers that may run on one host at once."""

SCRIPTS = ("worker", "reader")
"""Roles whose processes run a script of the user, with the job's secrets and in its folder."""

LOGS, ERRORS, PROFILES = "logs", "errors", "profiles"

MEMORY_CURE = "smaller batches, fewer loader processes, or fewer workers there (`slots:` in the cluster file)"

COORDINATOR = Member("coordinator", 0)


class Files:
    """Paths of the files of one job on one host."""

    def __init__(self, orders: AgentOrders) -> None:
        self.job_dir = Path(orders.job_dir)
        self.private = self.job_dir / PRIVATE
        self.logs = self.job_dir / LOGS

    def make(self) -> None:
        """Make the folders, accessible to this user only."""
        for folder in (self.job_dir, self.private, self.logs, self.job_dir / ERRORS):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)

    def hold_slots(self, workers: int) -> None:
        """Write the number of the job's workers on this host, which psctl reads to find free slots."""
        begun = self.job_dir / (SLOTS + ".new")
        try:
            begun.write_text(str(workers))
            begun.replace(self.job_dir / SLOTS)
        except OSError as error:  # the job continues; the old number stays in the file
            print(f"the number of workers here was not written: {error.strerror}", file=sys.stderr)

    def error(self, member: Member) -> Path:
        """Return the file to which a process writes its failure."""
        return self.job_dir / ERRORS / f"{member.role}-{member.rank}.json"

    def profile(self, rank: int) -> Path:
        """Return the file to which a worker writes the profile of some steps."""
        return self.job_dir / PROFILES / f"worker-{rank}.json"

    def named(self, member: Member, descriptor: int) -> str:
        """Return the value of a process's PSCTL_ORDERS (sealed_memory.py)."""
        return f"{self.private}/{member.role}-{member.rank}:{descriptor}"


def credentials_of(orders: AgentOrders) -> Credentials:
    """Return an agent's credentials."""
    me = Member("agent", orders.host)
    return Credentials(orders.job.name, me, orders.authority, orders.certificate, orders.key, orders.preauth_secret)


def refusal_of(orders: AgentOrders, start: StartProcess, running: int) -> str:
    """Return why an order of the coordinator is refused, or "".

    The command that a process runs is in the agent's own orders. The coordinator, on another host, chooses only the
    process's part in the job and the variables of its environment that psctl itself sets.

    Args:
        running: number of running processes that the coordinator has ordered on this host.
    """
    job, member = orders.job, start.member
    most = 2 * slots_of(orders) + SERVERS + len(job.readers)
    if member.role not in ("worker", "server", "reader"):
        return f"a {member.role} is not started by order"
    if member.role == "reader" and member.rank >= len(job.readers):
        return f"the job has {len(job.readers)} readers"
    if running >= most:
        return f"{running} processes run here already"
    if start.authority != orders.authority:
        return "its certificate is of another authority than the job's"
    foreign = {
        name
        for name, value in start.environment.items()
        if name not in NAMES and (name not in job.environment or job.environment[name] != value)
    }
    return f"it sets {', '.join(sorted(foreign))[:200]}, which the job file does not" if foreign else ""


def slots_of(orders: AgentOrders) -> int:
    """Return how many workers of the job may run on this host."""
    host = orders.job.hosts[orders.host]
    return max(host.slots, host.workers, 1)


def argv_of(orders: AgentOrders, role: str, rank: int = 0) -> list[str]:
    """Return a process's command line; all processes start through bootstrap, which ties them to the agent.

    The command lines of servers, the coordinator and the exporter end in a mark by which `there.processes` finds them:
    the environment of a process that hides its memory cannot be read.
    """
    modules = {"server": "psctl.server.main", "coordinator": "psctl.coordinator.main", "exporter": "psctl.export.main"}
    if role in modules:
        own = ["-m", modules[role], f"PSCTL_ORDERS={orders.job_dir}/"]
    else:
        own = orders.job.readers[rank].argv if role == "reader" else orders.job.argv
    return [orders.python, os.path.abspath(bootstrap.__file__), *own]


def environment_of(
    orders: AgentOrders, given: dict[str, str], files: Files, member: Member, descriptor: int
) -> dict[str, str]:
    """Return a process's whole environment: the agent's own, the coordinator's variables, secrets, psctl's variables.

    `descriptor` is the one of its orders.
    """
    own = {name: value for name, value in os.environ.items() if name not in (ENVIRONMENT, lifeline.ENVIRONMENT)}
    given = dict(given)
    for name, cause in (("OMP_NUM_THREADS", "OMP_NUM_THREADS"), (SPINS, SPINS), (SPINS, "OMP_WAIT_POLICY")):
        if cause in own and name not in orders.job.environment:
            given.pop(name, None)  # the user has set it on this host
    paths = [*orders.paths, *filter(None, [orders.job.environment.get("PYTHONPATH")])]
    return {
        **own,
        **given,
        **(orders.secrets if member.role in SCRIPTS else {}),
        "PYTHONPATH": os.pathsep.join(paths or [str(Path(psctl.__file__).parents[1])]),
        ENVIRONMENT: files.named(member, descriptor),
    }


def process_orders(
    orders: AgentOrders, start: StartProcess, coordinator: Address, files: Files, inherited: tuple[int, int, int]
) -> bytes:
    """Return the orders of a worker or server, and remove the failure file of an earlier start.

    Args:
        inherited: descriptors: of the socket for shared memory, of the memory for stacks and for the times of steps.

    Raises:
        OSError: the file cannot be removed.
    """
    segments, stacks, spans = inherited
    files.error(start.member).unlink(missing_ok=True)
    host = orders.job.hosts[orders.host]
    made = ProcessOrders(
        job=orders.job.name, member=start.member, world=start.world, host=host.name,
        local_rank=start.local_rank, coordinator=coordinator, bind=host.address, ports=orders.job.ports,
        authority=start.authority, certificate=start.certificate, key=start.key, preauth_secret=orders.preauth_secret,
        congestion=orders.job.congestion, sealed=orders.job.sealed,
        error_file=str(files.error(start.member)), segments=segments, stacks=stacks,
        spans=spans, profile=str(files.profile(start.member.rank)),
        folder=orders.code_dir, secrets=tuple(orders.secrets.values()) if start.member.role in SCRIPTS else (),
        leader_dir=orders.job_dir if has_standby(orders.job) else None,
        reader=orders.job.readers[start.member.rank] if start.member.role == "reader" else None,
    )  # fmt: skip
    return msgspec.json.encode(made)


def coordinator_orders(
    orders: AgentOrders, store: Address | None, report: int, files: Files, port: int | None,
    configurations: tuple[Configuration, Configuration], *, is_successor: bool,
) -> bytes:  # fmt: skip
    """Return the orders of the coordinator, which include the authority's key.

    Args:
        orders, files: the agent's.
        store: address of torch's store for other hosts' agents.
        report: descriptor to which it writes its address.
        port: of the coordinator on this host that it succeeds.
        configurations: the committed one with which it leads, and the newest one.
        is_successor: it succeeds another one on this host.
    """
    committed, newest = configurations
    made = CoordinatorOrders(
        order=orders.job, authority=orders.authority, authority_key=orders.authority_key,
        preauth_secret=orders.preauth_secret, store=store,
        job_dir=orders.job_dir, workdir=orders.workdir, grace=orders.grace, report=report,
        error_file=str(files.error(COORDINATOR)), port=port, host=orders.host, committed=committed, newest=newest,
        is_successor=is_successor,
    )  # fmt: skip
    return msgspec.json.encode(made)


def not_started(orders: AgentOrders, member: Member, error: PsctlError | OSError) -> ProcessFailure:
    """Return why a process could not be started."""
    host = orders.job.hosts[orders.host].name
    code, status, hint = "", 1, ""
    if isinstance(error, PsctlError):
        why, code, status, hint = error.message, error.code, error.exit, error.hint
    else:
        why = f"{error.strerror or error} ({error.filename or orders.python})"
    text = f"{member} could not be started: {why}"
    return ProcessFailure(str(member), host, 127, time.time(), 0, text, code=code, exit=status, hint=hint)


class ErrorReport(msgspec.Struct, frozen=True):
    """The exception that ended a process, as it wrote it to its error file (process/bootstrap.py)."""

    time: float = 0.0
    step: int | None = None
    exception: str = ""
    frames: list[str] = []
    code: str = ""
    exit: int = 1
    hint: str = ""


def account(
    files: Files, member: Member, host: str, child: AgentChild, tail: list[str], secrets: Secrets
) -> ProcessFailure:
    """Return the failure of an ended process: from its error file, else from its status and last lines of output."""
    status = child.status or 0
    written = ErrorReport()
    with contextlib.suppress(OSError, *UNDECODABLE):  # it was killed, or ended by itself without an exception
        written = msgspec.convert(json.loads(files.error(member).read_bytes()), ErrorReport)
    exception = written.exception or (
        f"killed by signal {-status} ({_signal_name(-status)})" if status < 0 else f"ended with status {status}"
    )
    hint = written.hint
    if child.memory and status == -signal.SIGKILL:
        exception, hint = f"OutOfMemory: the kernel killed it for lack of memory: {child.memory}", MEMORY_CURE
    elif child.memory and not hint:
        hint = f"the kernel has just killed a process on {host} for lack of memory ({child.memory}): {MEMORY_CURE}"
    return ProcessFailure(
        member=str(member), host=host, status=status, time=written.time or time.time(),
        step=written.step or 0, exception=secrets.mask_text(exception),
        frames=[secrets.mask_text(frame) for frame in written.frames], tail=tail,
        code=written.code, exit=written.exit, hint=secrets.mask_text(hint),
    )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
