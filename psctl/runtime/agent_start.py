"""What an agent gives each process that it starts: command line, environment, private orders, log files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

import psctl
from psctl.job.environment import SPINS
from psctl.job.messages import Failure, StartProcess
from psctl.orders import AgentOrders
from psctl.runtime import bootstrap, lifeline
from psctl.runtime.keeper import PRIVATE, SLOTS
from psctl.runtime.logs import Secrets
from psctl.runtime.orders import ENVIRONMENT, CoordinatorOrders, ProcessOrders, write_private
from psctl.words import Address, Member

LOGS, ERRORS = "logs", "errors"

COORDINATOR = Member("coordinator", 0)


class Files:
    """Where the files of one job on one host lie."""

    def __init__(self, orders: AgentOrders) -> None:
        self.job_dir = Path(orders.job_dir)
        self.private = self.job_dir / PRIVATE

    def make(self) -> None:
        """Make the folders; the job's own and `private` are for this user only."""
        for folder, mode in ((self.job_dir, 0o700), (self.private, 0o700)):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        (self.job_dir / LOGS).mkdir(exist_ok=True)
        (self.job_dir / ERRORS).mkdir(exist_ok=True)

    def hold_slots(self, workers: int) -> None:
        """Write down how many workers of the job have their places here now, for those who look for free slots."""
        begun = self.job_dir / (SLOTS + ".new")
        begun.write_text(str(workers))
        begun.replace(self.job_dir / SLOTS)

    def log(self, member: Member, stream: str) -> Path:
        """Return a rank's log file of one stream."""
        return self.job_dir / LOGS / f"{member.role}-{member.rank}.{stream}.log"

    def error(self, member: Member) -> Path:
        """Return where a process writes how it failed."""
        return self.job_dir / ERRORS / f"{member.role}-{member.rank}.json"

    def orders(self, member: Member) -> Path:
        """Return a process's private orders."""
        return self.private / f"{member.role}-{member.rank}.json"


def argv_of(orders: AgentOrders, role: str) -> list[str]:
    """Return a process's command line; everything starts through bootstrap, which ties it to its agent."""
    modules = {"server": ["-m", "psctl.runtime.server"], "coordinator": ["-m", "psctl.runtime.coordinator"]}
    return [orders.python, _bootstrap(), *modules.get(role, orders.job.argv)]


def _bootstrap() -> str:
    return os.path.abspath(bootstrap.__file__)


def environment_of(orders: AgentOrders, given: dict[str, str], files: Files, member: Member) -> dict[str, str]:
    """Return a process's whole environment: the agent's own, what the coordinator sets, secrets, psctl's."""
    own = {name: value for name, value in os.environ.items() if name not in (ENVIRONMENT, lifeline.ENVIRONMENT)}
    given = dict(given)
    for name, told in (("OMP_NUM_THREADS", "OMP_NUM_THREADS"), (SPINS, SPINS), (SPINS, "OMP_WAIT_POLICY")):
        if told in own and name not in orders.job.environment:
            given.pop(name, None)  # who runs psctl has set it on this host
    paths = [*orders.paths, *filter(None, [orders.job.environment.get("PYTHONPATH")])]
    return {
        **own,
        **given,
        **(orders.secrets if member.role == "worker" else {}),
        "PYTHONPATH": os.pathsep.join(paths or [_package_root()]),
        ENVIRONMENT: str(files.orders(member)),
    }


def _package_root() -> str:
    return str(Path(psctl.__file__).parents[1])


def write_orders(orders: AgentOrders, start: StartProcess, coordinator: Address, files: Files, segments: int) -> None:
    """Write the private orders of a worker or server, and forget how an earlier start of it failed. OSError: the disk
    refuses."""
    files.error(start.member).unlink(missing_ok=True)
    host = orders.job.hosts[orders.host]
    told = ProcessOrders(
        job=orders.job.name, member=start.member, world=start.world, host=host.name,
        local_rank=start.local_rank, coordinator=coordinator, bind=host.address, ports=orders.job.ports,
        authority=start.authority, certificate=start.certificate, key=start.key, knock=orders.knock,
        congestion=orders.job.congestion, error_file=str(files.error(start.member)), segments=segments,
        folder=orders.code_dir,
    )  # fmt: skip
    write_private(files.orders(start.member), msgspec.json.encode(told))


def write_coordinator_orders(orders: AgentOrders, master: Address, report: int, files: Files) -> None:
    """Write the private orders of the coordinator, the authority's key among them."""
    told = CoordinatorOrders(
        order=orders.job, authority=orders.authority, authority_key=orders.authority_key,
        knock=orders.knock, master=master,
        job_dir=orders.job_dir, workdir=orders.workdir, grace=orders.grace, report=report,
        error_file=str(files.error(COORDINATOR)),
    )  # fmt: skip
    write_private(files.orders(COORDINATOR), msgspec.json.encode(told))


def account(files: Files, member: Member, host: str, status: int, tail: list[str], secrets: Secrets) -> Failure:
    """Return how a process failed: from the account it wrote itself, else from its status and last lines."""
    said: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # it was killed, or ended by itself without an exception
        said = json.loads(files.error(member).read_bytes())
    exception = said.get("exception") or (
        f"killed by signal {-status} ({_signal_name(-status)})" if status < 0 else f"ended with status {status}"
    )
    return Failure(
        member=str(member), host=host, status=status, time=said.get("time") or time.time(),
        step=said.get("step") or 0, exception=secrets.strike_text(exception),
        frames=[secrets.strike_text(frame) for frame in said.get("frames", [])], tail=tail,
        code=said.get("code", ""), exit=said.get("exit", 1), hint=secrets.strike_text(said.get("hint", "")),
    )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
