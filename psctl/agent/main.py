"""The agent: one a job a host. It starts, watches and ends the job's processes there, and dies with the job.

    python -m psctl.agent.main ORDERS      (a file that it removes at once)

The process that is started is the keeper (supervisor.py); the agent is its child. Threads only listen (link, ear, logs,
store, keeper's pipe) and put what they hear into one queue; all that is done is done on the main thread, in order.
Connections to MASTER_PORT (torch_store.py) have threads of their own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from psctl.agent import spawn, supervisor
from psctl.agent.control_socket import (
    AgentStatus,
    ControlRequest,
    ControlSocket,
    CoordinatorQueries,
    StopRequested,
    answer,
)
from psctl.agent.coordinator_link import CheckpointCopies, CoordinatorLink, FromCoordinator, LinkGone, LinkUp
from psctl.agent.head_services import CoordinatorAt, HeadServices, StoreWanted
from psctl.agent.log_pump import LogPump
from psctl.agent.processes import AgentChild, Processes
from psctl.agent.resource_usage import CpuUsage
from psctl.agent.shm_broker import SegmentBroker
from psctl.agent.spawn import COORDINATOR, Files
from psctl.agent.stack_requests import StackDumps
from psctl.agent.torch_store import MasterPort
from psctl.errors import PsctlError
from psctl.job.process_messages import (
    EndProcesses,
    HoldSlots,
    JobFinished,
    OutputLines,
    ProcessExited,
    ProcessFailure,
    ProcessStarted,
    Register,
    RenewStore,
    ScaleAnswer,
    StacksWanted,
    StartProcess,
    StopProcesses,
    StopWanted,
)
from psctl.job.table_server_messages import ReadBy, ReadRows
from psctl.orders import AgentOrders
from psctl.process import lifeline, sealed_memory, stderr_log
from psctl.process.secret_masking import Secrets
from psctl.types import Address, Member

SAMPLE_EVERY = 3.0
"""Seconds between two looks at how busy the host is."""

LEAVE = 5.0
"""Seconds beyond the grace that an agent waits for others before it leaves by itself."""


class ChildEnded(msgspec.Struct, frozen=True):
    """A child, or an orphan that fell to us, has ended."""


class SigtermReceived(msgspec.Struct, frozen=True):
    """We got SIGTERM."""


class KeeperGone(msgspec.Struct, frozen=True):
    """Our keeper has died."""


class Agent:
    """An agent's life.

    Args:
        orders: all that it was told.
        lifeline_end: what its children hold on to.
        umask: the login's, for workers: what the user's script writes is the user's. All else is for this user alone.
    """

    def __init__(self, orders: AgentOrders, lifeline_end: int, umask: int) -> None:
        self.orders, self._umask = orders, umask
        self.host = orders.job.hosts[orders.host]
        self.files = Files(orders)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._secrets = Secrets(orders.secrets.values())
        self._processes = Processes(lifeline_end)
        self._members: dict[AgentChild, Member] = {}
        self._segments, self._busy = SegmentBroker(), CpuUsage()
        self._stacks = StackDumps(orders.code_dir, self._secrets)
        self._kill_each: dict[AgentChild, float] = {}  # when those end that were told to
        self._untold: list[ProcessExited] = []  # ends that there was no connection for
        self._pump = LogPump(self.files.logs, orders.job.log_limit, self._secrets, self._pass_on, self._say)
        self._coordinator: Address | None = orders.coordinator
        self._wanted: StopWanted | None = None  # a stop that nobody could be told yet
        self._stopping = ""
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._failure: tuple[ProcessFailure, int] | None = None  # what to write if the coordinator could not
        self._abandoned = False  # the coordinator is gone
        self._left = False
        credentials = spawn.credentials_of(orders)
        self._master_port = MasterPort(orders.job, credentials)
        self._head = HeadServices(orders, self.files, self._processes, self._queue.put, credentials, self._master_port)
        register = Register(self.host.name, os.getpid(), self.host.cores, psutil.virtual_memory().total, self.host.gpus)
        self._copies = CheckpointCopies(Path(orders.workdir) / "checkpoints", orders.job)
        self._link = CoordinatorLink(credentials, register, orders.job.congestion, self._queue.put, self._copies)
        self._questions = CoordinatorQueries(self._link.send)

    # ---- the main thread -------------------------------------------------------------------------------------------

    def run(self, keeper_pipe: int) -> int:
        """Live until the job is over; return the exit status."""
        self._listen(keeper_pipe)
        try:
            if self._coordinator is None:
                if problem := self._head.start():
                    self._say(f"there is no torch store on this host, for other users could reach it: {problem}")
            else:
                self._link.start(self._coordinator)
        except (PsctlError, OSError) as error:
            self._end_by_error(error)
        sample_at = time.monotonic()
        while not self._left:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=self._patience(sample_at)))
            now = time.monotonic()
            if now >= sample_at:
                sample_at = now + SAMPLE_EVERY
                self._sample()
            self._deadlines(now)
        self._leave()
        return 0

    def _listen(self, keeper_pipe: int) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: self._queue.put(ChildEnded()))
        signal.signal(signal.SIGTERM, lambda *_: self._queue.put(SigtermReceived()))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        lifeline.reap_descendants()
        ControlSocket(self.files.job_dir, self.files.private, self._answer)
        watch = threading.Thread(target=self._watch_keeper, args=(keeper_pipe,), name="psctl keeper", daemon=True)
        watch.start()

    def _watch_keeper(self, pipe: int) -> None:
        os.read(pipe, 1)  # nothing is ever written; it returns at the end
        self._queue.put(KeeperGone())

    def _patience(self, sample_at: float) -> float:
        deadlines = [sample_at, *self._kill_each.values(), *filter(None, [self._kill_at, self._leave_at])]
        return max(0.0, min(deadlines) - time.monotonic())

    def _take(self, event: Any) -> None:
        match event:
            case ChildEnded():
                for child in self._processes.ended():
                    self._child_ended(child)
            case CoordinatorAt(address=address):
                self._coordinator = address
                self._link.start(address)
            case LinkUp():
                untold, self._untold = self._untold, []
                for message in untold:
                    self._tell(message)
                if self._wanted is not None:
                    self._link.send(self._wanted)
            case FromCoordinator(message=ScaleAnswer() | ReadBy() | ReadRows()):
                self._questions.add_answer(event)
            case FromCoordinator(message=message):
                self._heard(message)
            case LinkGone(reason=reason):
                self._coordinator_lost(reason)
            case StoreWanted() if not self._stopping:
                self._head.start_store()
            case StopRequested(stop=stop):
                self._stop_wanted(stop)
            case SigtermReceived():
                self._stop_wanted(StopWanted(False, False, f"the agent on {self.host.name}, which got SIGTERM"))
                self._stop_processes(self.orders.grace, "SIGTERM")
                self._leave_at = time.monotonic() + self.orders.grace + LEAVE
            case KeeperGone():
                self._say("the keeper of this agent is gone; everything here ends")
                self._blame("psctl's keeper on the head died", 1)
                self._left = True

    def _deadlines(self, now: float) -> None:
        for child in [child for child, at in self._kill_each.items() if now >= at]:
            del self._kill_each[child]
            child.signal(signal.SIGKILL)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._processes.end_all(but=self._head.coordinator)
            self._queue.put(ChildEnded())
        if self._leave_at is not None and now >= self._leave_at:
            self._blame(f"the job did not end in time after {self._stopping or 'its end was wanted'}", 1)
            self._left = True

    # ---- processes -------------------------------------------------------------------------------------------------

    def _start(self, start: StartProcess) -> None:
        member = start.member
        try:
            spawn.check_order(self.orders, start, len(self._members))
            assert self._coordinator is not None, "who orders processes is known"
            with self._segments.opened(member) as segments, self._stacks.opened(member) as dump:
                shared = segments, dump
                told = spawn.process_orders(self.orders, start, self._coordinator, self.files, *shared)
                with sealed_memory.holding(told) as orders:
                    child = self._spawn(start, [*shared, orders])
        except (PsctlError, OSError) as error:
            self._segments.ended(member)
            self._stacks.ended(member)
            self._tell(ProcessExited(member, 127, spawn.not_started(self.orders, member, error)))
            return
        self._members[child] = member
        self._link.send(ProcessStarted(member, child.pid))

    def _spawn(self, start: StartProcess, descriptors: list[int]) -> AgentChild:
        given = {**start.environment, **self._master_port.environment(start)}
        environment = spawn.environment_of(self.orders, given, self.files, start.member, descriptors[-1])
        cwd = self.orders.code_dir if start.member.role == "worker" else self.orders.job_dir
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        try:
            return self._processes.start(
                str(start.member), spawn.argv_of(self.orders, start.member.role), environment, cwd,
                writers[0], writers[1], descriptors, self._umask if start.member.role == "worker" else -1,
            )  # fmt: skip
        finally:
            for writer in writers:
                os.close(writer)
            for reader, stream in zip(readers, ("stdout", "stderr"), strict=True):
                self._pump.add(start.member, stream, reader)

    def _child_ended(self, child: AgentChild) -> None:
        status = child.status if child.status is not None else 0
        if child is self._head.coordinator:
            self._coordinator_ended(child)
            return
        if self._head.store_ended(child):
            self._say(f"a process that held torch's store ended with status {status}")
            return
        member = self._members.pop(child)
        self._kill_each.pop(child, None)
        self._segments.ended(member)
        self._stacks.ended(member)
        tail = self._pump.drain(member)
        failure = None
        if status:
            failure = spawn.account(self.files, member, self.host.name, child, tail, self._secrets)
        self._tell(ProcessExited(member, status, failure))
        self._processes.end_family(child)  # before another one can be started here, for we do one thing at a time
        self._pump.close(member)
        self._leave_if_alone()

    def _tell(self, message: ProcessExited) -> None:
        if not self._link.send(message):
            self._untold.append(message)

    def _end_some(self, members: list[Member], grace: float) -> None:
        """TERM to some processes, and KILL when the grace is over; others may be started in their place."""
        for child, member in self._members.items():
            if member in members:
                child.signal(signal.SIGTERM if grace > 0 else signal.SIGKILL)
                self._kill_each[child] = time.monotonic() + grace

    def _stop_processes(self, grace: float, reason: str) -> None:
        """TERM, and KILL when the grace is over; the coordinator is not among them."""
        self._stopping = self._stopping or reason
        if grace <= 0:
            self._kill_at = time.monotonic()
            return
        at = time.monotonic() + grace
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        self._processes.signal_all(signal.SIGTERM, but=self._head.coordinator)

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _heard(self, message: Any) -> None:
        match message:
            case StartProcess() if not self._stopping:
                self._start(message)
            case StartProcess():
                failure = ProcessFailure(
                    str(message.member), self.host.name, -15, time.time(), 0, "not started", [], []
                )
                self._tell(ProcessExited(message.member, -int(signal.SIGTERM), failure))
            case EndProcesses(members=members, grace=grace):
                self._end_some(members, grace)
            case HoldSlots(workers=workers):
                self.files.hold_slots(min(workers, spawn.slots_of(self.orders)))
            case StacksWanted(members=wanted):
                asked = [(child, member) for child, member in self._members.items() if member in wanted]
                self._stacks.ask(asked, self._link.send)
            case RenewStore():
                self._head.renew_store()
            case StopProcesses(grace=grace, reason=reason):
                self._stop_processes(grace, reason)
            case JobFinished(status=status):
                self._say(f"the job is over: {status}")
                self._link.finish()
                self._processes.end_all(but=self._head.coordinator)
                if self._head.coordinator is None:
                    self._left = True
                else:
                    self._leave_at = time.monotonic() + LEAVE
            case _:
                self._say(f"the coordinator sent a {type(message).__name__}, which is not for an agent")

    def _coordinator_ended(self, child: AgentChild) -> None:
        if child.status:
            tail = self._head.tail()
            failure = spawn.account(self.files, COORDINATOR, self.host.name, child, tail, self._secrets)
            failure = msgspec.structs.replace(failure, exception=f"psctl's coordinator: {failure.exception}")
            self._failure = failure, failure.exit if failure.code else 1
            self._say(failure.exception)
        self._processes.end_all()
        self._left = True

    def _coordinator_lost(self, reason: str) -> None:
        """The coordinator cannot be reached any more: the job is over here; its end is the head's to write."""
        self._say(f"the coordinator is lost: {reason}")
        self._blame(f"psctl's coordinator was lost: {reason}", 1)
        self._stop_processes(self.orders.grace, "the coordinator is lost")
        self._leave_at = time.monotonic() + self.orders.grace + 1
        self._abandoned = True
        self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        """Nobody will tell us to leave any more: do so when the last process has ended."""
        if self._abandoned and all(child is self._head.coordinator for child in self._processes.running):
            self._left = True

    def _stop_wanted(self, stop: StopWanted) -> None:
        if not self._link.send(stop):
            self._wanted = stop
        if stop.force:
            self._stopping = self._stopping or f"a forced stop by {stop.by}"
            self._leave_at = time.monotonic() + self.orders.grace + LEAVE

    def _blame(self, text: str, exit_code: int) -> None:
        if self._failure is None:
            failure = ProcessFailure(str(COORDINATOR), self.host.name, 1, time.time(), 0, text, [], [])
            self._failure = failure, exit_code

    def _end_by_error(self, error: PsctlError | OSError) -> None:
        self._say(str(error))
        self._blame(str(error), getattr(error, "exit", 1))
        if isinstance(error, PsctlError) and self._failure is not None:
            failure = msgspec.structs.replace(self._failure[0], code=error.code, exit=error.exit, hint=error.hint)
            self._failure = failure, error.exit
        self._left = True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._processes.end_all()
        self._link.close(1.0)
        self._copies.discard()
        if self.orders.host == 0:
            self._blame("psctl's agent on the head ended before the job did", 1)
            assert self._failure is not None
            supervisor.write_finished(self.files.job_dir, self.orders.job.name, *self._failure)
        supervisor.clean(self.files.job_dir)

    # ---- other threads ---------------------------------------------------------------------------------------------

    def _answer(self, request: ControlRequest) -> dict[str, Any]:
        """Answer psctl, on the ear's thread."""
        processes = [(member, child.pid) for child, member in list(self._members.items())]
        standing = AgentStatus(self.orders.job.name, self.host.name, self._coordinator, processes, self._stopping)
        return answer(request, standing, self._queue.put, self._questions)

    def _pass_on(self, lines: OutputLines) -> None:
        self._link.send(lines)

    def _sample(self) -> None:
        sample = self._processes.sample(self.host.name)
        busy = self._busy.busy_sessions(child.pid for child in self._members)
        members = [member for child, member in self._members.items() if child.pid in busy]
        self._link.send(msgspec.structs.replace(sample, busy=members))

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.host.name}: {self._secrets.strike_text(text)}"
        print(line, file=sys.stderr, flush=True)


def main(path: str) -> int:
    """Be the keeper, and in its child the agent, of the orders in `path`."""
    umask = os.umask(0o077)
    told = Path(path).read_bytes()
    os.unlink(path)  # keys and secrets are in memory alone from here on
    orders = msgspec.json.decode(told, type=AgentOrders)
    stderr_log.install()
    files = Files(orders)
    files.make()
    files.hold_slots(orders.job.hosts[orders.host].workers)
    supervisor.write_pid(Path(orders.job_dir))  # the lock that it takes ends with this process
    lifeline.hide_memory()  # a sweep no longer needs the environment to find this process

    def live(_keeper: int, pipe: int, lifeline_end: int) -> int:
        return Agent(orders, lifeline_end, umask).run(pipe)

    return supervisor.keep(live, lambda status: supervisor.end_job(orders, status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
