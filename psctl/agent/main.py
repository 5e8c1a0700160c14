"""The agent: one process per job and host, which starts, monitors and ends the job's processes on its host.

    python -m psctl.agent.main ORDERS [MARK]

ORDERS is a file that it removes at once; by MARK, which it ignores, others find the process.

The started process is the supervisor (supervisor.py); the agent is its child. Threads read the sources of events (the
coordinator's connection, the control socket, process output, the store, the supervisor's pipe) and put events into one
queue; the main thread handles them in order. Connections to MASTER_PORT (torch_store.py) have threads of their own.
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

import msgspec
import psutil

from psctl.agent import spawn, supervisor
from psctl.agent.control_socket import (
    AgentStatus,
    ControlRefused,
    ControlRequest,
    ControlSocket,
    CoordinatorQueries,
    OrdersWanted,
    StacksRequested,
    StopRequested,
    answer,
)
from psctl.agent.coordinator_link import (
    CheckpointCopies,
    CoordinatorLink,
    FromCoordinator,
    LinkGone,
    LinkSilent,
)
from psctl.agent.elections import Elected, Elections, LeaderFound, first_configuration
from psctl.agent.gpu_usage import NO_GPUS, GpuSampler, usage_of
from psctl.agent.head_services import CoordinatorAt, HeadServices, StoreWanted
from psctl.agent.log_pump import LogPump
from psctl.agent.processes import AgentChild, Processes
from psctl.agent.resource_usage import CpuUsage, NetworkUsage, memory_bytes, session_of
from psctl.agent.shm_broker import SegmentBroker
from psctl.agent.spawn import COORDINATOR, Files
from psctl.agent.stack_requests import StackDumps
from psctl.agent.step_rings import StepRings
from psctl.agent.torch_store import MasterPort
from psctl.errors import HostUnreachable, MessageRefused, PsctlError
from psctl.job.control_answers import ControlAnswer
from psctl.job.leadership_messages import Configuration, has_standby
from psctl.job.message import JobMessage
from psctl.job.process_messages import (
    AgentNotice,
    ClockIs,
    EndProcesses,
    HoldSlots,
    HostAnswer,
    HostSample,
    JobFinished,
    ProcessExited,
    ProcessFailure,
    ProcessStarted,
    ProcessUsage,
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
from psctl.process.leader_file import LeaderFile, write_leader
from psctl.process.secret_masking import Secrets
from psctl.types import Address, Member

SAMPLE_EVERY = 3.0
"""Seconds between two samples of the host's load."""

EXIT_DELAY = 5.0
"""Seconds after the grace period for which an agent waits for the end of the job before it exits by itself."""

LEAVE = 120.0
"""Seconds for which an agent that got SIGTERM lets the job write a checkpoint and stop."""

LONGEST_NOTICE = 1000
"""Characters."""


class ChildEnded(msgspec.Struct, frozen=True):
    """A child, or an orphan that the agent inherited, has ended."""


class SigtermReceived(msgspec.Struct, frozen=True):
    """The agent received SIGTERM."""


class SupervisorEnded(msgspec.Struct, frozen=True):
    """The agent's supervisor has ended."""


AgentEvent = (
    ChildEnded | SigtermReceived | SupervisorEnded | LinkSilent | LinkGone | FromCoordinator | CoordinatorAt
    | StoreWanted | StopRequested | StacksRequested | Elected | LeaderFound
)  # fmt: skip


class Agent:
    """Runs one job on one host: handles events until the job ends, then removes what the job needs only while it runs.

    Args:
        orders: the job and this host's part in it.
        lifeline_end: reading end of the pipe to which children are tied (process/lifeline.py).
        umask: umask of the login session; workers run with it, all other processes create files for this user only.
    """

    def __init__(self, orders: AgentOrders, lifeline_end: int, umask: int) -> None:
        self.orders = orders
        self._umask = umask
        self.host = orders.job.hosts[orders.host]
        self.files = Files(orders)
        self._queue: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self._secrets = Secrets(orders.secrets.values())
        self._processes = Processes(lifeline_end)
        self._members: dict[AgentChild, Member] = {}
        self._segments = SegmentBroker()
        self._cpu_usage = CpuUsage()
        self._network_usage = NetworkUsage(self.host.interface)
        self._gpus = GpuSampler(SAMPLE_EVERY)
        self._stacks = StackDumps(orders.code_dir, self._secrets)
        self._rings = StepRings()
        self._kill_times: dict[AgentChild, float] = {}  # when a child that was ordered to end is killed
        self._coordinator: Address | None = orders.coordinator
        self._stopping = ""
        self._kill_at: float | None = None
        self._leave_at: float | None = None  # when the job must have ended after a SIGTERM
        self._exit_at: float | None = None
        self._failure: ProcessFailure | None = None  # the job's failure, if the coordinator cannot write it
        self._abandoned = False  # the coordinator is lost
        self._finished = False
        credentials = spawn.credentials_of(orders)
        self._credentials = credentials
        self._elections: Elections | None = None  # a job of few hosts has no standby
        self._leadership = first_configuration(orders)  # the newest one
        self._master_port = MasterPort(orders.job, credentials, self._notice)
        self._head = HeadServices(
            orders, self.files, self._processes, self._queue.put, credentials, self._master_port,
            lambda: self._elections.configurations if self._elections else (self._leadership, self._leadership),
            self._notice,
        )  # fmt: skip
        self._copies = CheckpointCopies(Path(orders.workdir) / "checkpoints", orders.job)
        self._link = CoordinatorLink(
            credentials, self._registration, orders.job.restart_wait, orders.job.congestion, self._queue.put,
            self._copies, lambda: self._elections,
        )  # fmt: skip
        self._queries = CoordinatorQueries(self._link.ask)
        self._pump = LogPump(self.files.logs, orders.job.log_limit, self._secrets, self._link.send, self._log)

    # ---- the main thread -------------------------------------------------------------------------------------------

    def run(self, supervisor_pid: int, supervisor_pipe: int) -> int:
        """Handle events until the job is over; return the exit status.

        Args:
            supervisor_pid: the supervisor's process id.
            supervisor_pipe: reading end of a pipe that ends with the supervisor.
        """
        self._start_event_sources(supervisor_pid, supervisor_pipe)
        try:
            if has_standby(self.orders.job):
                self._elections = Elections(self.orders, self._credentials, self._link.silent_for, self._queue.put)
            if self._coordinator is None:
                if problem := self._head.start():
                    self._log(
                        f"no torch store is started on this host, because other users could connect to it: {problem}"
                    )
            else:
                self._link.start(self._coordinator)
        except (PsctlError, OSError) as error:
            self._fail(error)
        self._gpus.start()
        sample_at = time.monotonic()
        while not self._finished:
            with contextlib.suppress(queue.Empty):
                self._handle(self._queue.get(timeout=self._seconds_to_next_deadline(sample_at)))
            now = time.monotonic()
            if now >= sample_at:
                sample_at = now + SAMPLE_EVERY
                self._sample()
            self._apply_deadlines(now)
        self._shut_down()
        return 0

    def _start_event_sources(self, supervisor_pid: int, supervisor_pipe: int) -> None:
        def on_sigterm(*_: object) -> None:  # the kernel sends it too when the supervisor has ended: that is no stop
            self._queue.put(SigtermReceived() if os.getppid() == supervisor_pid else SupervisorEnded())

        signal.signal(signal.SIGCHLD, lambda *_: self._queue.put(ChildEnded()))
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        lifeline.reap_descendants()
        ControlSocket(self.files.job_dir, self.files.private, self._answer)
        watch = threading.Thread(
            target=self._watch_supervisor, args=(supervisor_pipe,), name="psctl supervisor", daemon=True
        )
        watch.start()

    def _watch_supervisor(self, pipe: int) -> None:
        os.read(pipe, 1)  # nothing is ever written; it returns when the supervisor ends
        self._queue.put(SupervisorEnded())

    def _seconds_to_next_deadline(self, sample_at: float) -> float:
        deadlines = [sample_at, *self._kill_times.values(), *filter(None, [self._kill_at, self._exit_at])]
        return max(0.0, min(deadlines) - time.monotonic())

    def _handle(self, event: AgentEvent) -> None:
        match event:
            case ChildEnded():
                for child in self._processes.ended():
                    self._on_child_ended(child)
            case CoordinatorAt(address=address):
                self._on_coordinator_at(address)
            case Elected(configuration=configuration):
                self._lead(configuration)
            case LeaderFound(configuration=configuration, coordinator=coordinator):
                self._follow(configuration, coordinator)
            case FromCoordinator(message=ScaleAnswer() | HostAnswer() | ReadBy() | ReadRows() | ClockIs()):
                self._queries.add_answer(event)
            case FromCoordinator(message=message):
                self._on_coordinator_message(message)
            case LinkSilent(reason=reason):
                self._log(f"the coordinator is out of reach: {reason}; ending the job's processes on this host")
                self._end_members(list(self._members.values()), self.orders.grace)
            case LinkGone(reason=reason):
                self._on_coordinator_lost(reason)
            case StoreWanted() if not self._stopping:
                self._head.start_store()
            case StopRequested(stop=stop):
                self._request_stop(stop)
            case StacksRequested(answers=answers):
                self._stacks.ask(list(self._members.items()), answers.put)
            case SigtermReceived():
                self._request_stop(StopWanted(False, False, f"SIGTERM to the agent on {self.host.name}"))
                self._leave_at = self._leave_at or time.monotonic() + LEAVE
            case SupervisorEnded():
                self._log("the agent's supervisor has ended: ending all processes of the job on this host")
                self._record_failure("psctl's supervisor on the head was lost")
                self._finished = True

    def _apply_deadlines(self, now: float) -> None:
        for child in [child for child, at in self._kill_times.items() if now >= at]:
            del self._kill_times[child]
            child.signal(signal.SIGKILL)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._processes.end_all(but=self._head.children)
            self._queue.put(ChildEnded())
        if self._leave_at is not None and now >= self._leave_at and not self._stopping:
            self._leave_at = None
            self._stop_processes(self.orders.grace, "SIGTERM")
            self._exit_at = time.monotonic() + self.orders.grace + EXIT_DELAY
        if self._exit_at is not None and now >= self._exit_at:
            self._record_failure(f"the job did not end in time after {self._stopping or 'a request to end'}")
            self._finished = True

    # ---- processes -------------------------------------------------------------------------------------------------

    def _start_process(self, start: StartProcess) -> None:
        member = start.member
        try:
            if why := spawn.refusal_of(self.orders, start, len(self._members)):
                raise MessageRefused(why, where=str(member))
            assert self._coordinator is not None, "orders to start processes are sent by the coordinator"
            with (
                self._segments.opened(member) as segments,
                self._stacks.opened(member) as dump,
                self._rings.opened(member) as ring,
            ):
                data = spawn.process_orders(self.orders, start, self._coordinator, self.files, (segments, dump, ring))
                with sealed_memory.holding(data) as orders:
                    child = self._spawn(start, [segments, dump, ring, orders])
        except (PsctlError, OSError) as error:
            self._release(member)
            self._link.send(ProcessExited(member, 127, spawn.not_started(self.orders, member, error)))
            return
        self._members[child] = member
        self._link.send(ProcessStarted(member, child.pid))

    def _release(self, member: Member) -> None:
        """Release the memory of a child that has ended or could not be started."""
        self._segments.ended(member)
        self._stacks.ended(member)
        self._rings.ended(member)

    def _spawn(self, start: StartProcess, descriptors: list[int]) -> AgentChild:
        given = {**start.environment, **self._master_port.environment(start)}
        environment = spawn.environment_of(self.orders, given, self.files, start.member, descriptors[-1])
        cwd = self.orders.code_dir if start.member.role in spawn.SCRIPTS else self.orders.job_dir
        (stdout, to_stdout), (stderr, to_stderr) = os.pipe(), os.pipe()
        try:
            return self._processes.start(
                spawn.argv_of(self.orders, start.member.role, start.member.rank), environment, cwd, to_stdout,
                to_stderr, descriptors, self._umask if start.member.role in spawn.SCRIPTS else -1,
            )  # fmt: skip
        finally:
            os.close(to_stdout)
            os.close(to_stderr)
            self._pump.add(start.member, "stdout", stdout)
            self._pump.add(start.member, "stderr", stderr)

    def _on_child_ended(self, child: AgentChild) -> None:
        status = child.status if child.status is not None else 0
        if child is self._head.coordinator:
            self._on_coordinator_ended(child)
            return
        if self._head.deposed(child):
            return
        if self._head.exporter_ended(child):
            return
        if self._head.store_ended(child):
            self._log(f"a process that served torch's store ended with status {status}")
            return
        member = self._members.pop(child)
        self._kill_times.pop(child, None)
        spans = tuple((each.kind, each.step, each.begin, each.end) for each in self._rings.newest(member))
        self._release(member)
        tail = self._pump.drain(member)
        failure = None
        if status:
            failure = spawn.account(self.files, member, self.host.name, child, tail, self._secrets)
        self._link.send(ProcessExited(member, status, failure, spans, time.monotonic_ns()))
        self._processes.end_family(child)  # before a start of the same rank: events are handled in order
        self._pump.close(member)
        self._finish_if_idle()

    def _end_members(self, members: list[Member], grace: float) -> None:
        """Send SIGTERM to some processes, and SIGKILL after the grace period; others may be started in their place."""
        for child, member in self._members.items():
            if member in members:
                if grace > 0:
                    child.ask_to_end()
                else:
                    child.signal(signal.SIGKILL)
                self._kill_times[child] = time.monotonic() + grace

    def _stop_processes(self, grace: float, reason: str) -> None:
        """Send SIGTERM to all processes but the coordinator, and SIGKILL after the grace period."""
        self._stopping = self._stopping or reason
        if grace <= 0:
            self._kill_at = time.monotonic()
            return
        at = time.monotonic() + grace
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        self._processes.ask_all_to_end(but=self._head.children)

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _on_coordinator_message(self, message: JobMessage) -> None:
        match message:
            case StartProcess() if not self._stopping:
                self._start_process(message)
            case StartProcess():
                failure = ProcessFailure(str(message.member), self.host.name, -15, time.time(), 0, "not started")
                self._link.send(ProcessExited(message.member, -int(signal.SIGTERM), failure))
            case EndProcesses(members=members, grace=grace):
                self._end_members(members, grace)
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
                self._log(f"the job is over: {status}")
                self._link.finish()
                self._processes.end_all(but=self._head.children)
                if self._head.coordinator is None:
                    self._finished = True
                else:
                    self._exit_at = time.monotonic() + EXIT_DELAY
            case _:
                self._log(f"the coordinator sent a {type(message).__name__}, which an agent does not handle")

    def _on_coordinator_at(self, address: Address) -> None:
        self._head.start_exporter()
        if address == self._coordinator:  # it was started again there
            return
        self._coordinator = address
        if self._elections is not None:
            self._elections.coordinator_at(address)
            self._write_leader()
        self._link.move(address)

    def _lead(self, configuration: Configuration) -> None:
        """Start the coordinator here: this host was elected."""
        assert self._elections is not None, "it held the election"
        self._leadership = configuration
        if self._stopping or self._finished:
            return
        self._log(f"the leader is out of reach: this host leads from now on, as leader {configuration.term + 1}")
        try:
            self._head.lead(self._elections.replica.release())
        except (PsctlError, OSError) as error:
            self._fail(error)

    def _follow(self, configuration: Configuration, coordinator: Address | None) -> None:
        """Take a newer configuration; stop leading if another host leads."""
        if configuration.age < self._leadership.age:
            return
        self._leadership = configuration
        if configuration.leader != self.orders.host and self._head.coordinator is not None:
            self._log(f"{self._name_of(configuration.leader)} leads from now on: the coordinator here ends")
            self._head.stop_leading()
        if coordinator is not None and coordinator != self._coordinator:
            self._coordinator = coordinator
            self._link.move(coordinator)
        self._write_leader()

    def _name_of(self, host: int) -> str:
        hosts = self.orders.job.hosts
        return hosts[host].name if host < len(hosts) else f"host {host}, which was added later,"

    def _write_leader(self) -> None:
        known = self._leadership
        try:
            write_leader(self.files.job_dir, LeaderFile(known.term, known.leader, known.standby, self._coordinator))
        except OSError as error:
            self._log(f"the file that names the leader was not written: {error.strerror}")

    def _on_coordinator_ended(self, child: AgentChild) -> None:
        failure = spawn.account(self.files, COORDINATOR, self.host.name, child, self._head.tail(), self._secrets)
        may_restart = failure.code != HostUnreachable.code and self._head.may_restart()
        if child.status and may_restart and not self._stopping:
            self._log(f"the coordinator ended with status {child.status}; it is started again")
            try:
                self._head.restart()
                return
            except OSError as error:
                self._log(f"the coordinator cannot be started again: {error}")
        if child.status:
            self._failure = msgspec.structs.replace(failure, exception=f"psctl's coordinator: {failure.exception}")
            self._log(self._failure.exception)
        self._processes.end_all(but=self._head.children)
        self._finished = True

    def _on_coordinator_lost(self, reason: str) -> None:
        """End the job on this host after the connection to the coordinator is lost; the head writes the job's end."""
        self._log(f"the coordinator is lost: {reason}")
        self._record_failure(f"psctl's coordinator was lost: {reason}")
        self._stop_processes(self.orders.grace, "the coordinator is lost")
        self._exit_at = time.monotonic() + self.orders.grace + 1
        self._abandoned = True
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        """Finish without the coordinator's order, once it is lost and the last process has ended."""
        if self._abandoned and all(child in self._head.children for child in self._processes.running):
            self._finished = True

    def _request_stop(self, stop: StopWanted) -> None:
        self._link.send(stop)
        if stop.force:
            self._stopping = self._stopping or f"a forced stop by {stop.by}"
            self._exit_at = time.monotonic() + self.orders.grace + EXIT_DELAY

    def _record_failure(self, text: str, code: str = "", exit_code: int = 1, hint: str = "") -> None:
        if self._failure is None:
            self._failure = ProcessFailure(
                str(COORDINATOR), self.host.name, 1, time.time(), 0, text, code=code, exit=exit_code, hint=hint
            )

    def _fail(self, error: PsctlError | OSError) -> None:
        self._log(str(error))
        known = (error.code, error.exit, error.hint) if isinstance(error, PsctlError) else ()
        self._record_failure(str(error), *known)
        self._finished = True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        self._gpus.end()
        self._processes.end_all(but=self._head.exporters)
        self._link.close(1.0)
        self._copies.discard()
        if self._elections is not None:
            self._elections.close()
            self._elections.replica.discard()
        if self._leadership.leader == self.orders.host:
            self._record_failure("psctl's agent on the head ended before the job did")
            assert self._failure is not None
            supervisor.write_finished(self.files.job_dir, self.orders.job.name, self._failure)
        self._head.finish_export()
        self._processes.end_all()
        supervisor.clean(self.files.job_dir)

    # ---- other threads ---------------------------------------------------------------------------------------------

    def _answer(self, request: ControlRequest) -> ControlAnswer:
        """Answer a psctl command; called on the control socket's thread."""
        processes = [(member, child.pid) for child, member in list(self._members.items())]
        status = AgentStatus(self.orders.job.name, self.host.name, self._coordinator, processes, self._stopping)
        return answer(
            request, status, self._queue.put, self._queries, self._orders_for, self._rings,
            lambda rank: str(self.files.profile(rank)),
        )  # fmt: skip

    def _orders_for(self, wanted: OrdersWanted) -> AgentOrders:
        """Return the orders of the agent of another host, which has booted or is new."""
        if self._head.coordinator is None or self._coordinator is None:
            raise ControlRefused(f"{self.host.name} does not lead {self.orders.job.name}, or not yet")
        if wanted.host == self.orders.host:
            raise ControlRefused(f"host {wanted.host} is {self.host.name} itself")
        found = self._queries.hosts(wanted.host, wanted.added)
        return self._head.orders_for(wanted, found.hosts, found.added, self._coordinator, self._leadership)

    def _registration(self) -> Register:
        return Register(
            tuple(self._members.values()),
            listens=self._elections.address if self._elections is not None else None,
            restarted=self._elections is not None and self._elections.abstains,
        )

    def _notice(self, text: str) -> None:
        """Have a sentence written to the event log; called on any thread."""
        self._log(text)
        self._link.send(AgentNotice(self._secrets.mask_text(text)[:LONGEST_NOTICE]))

    def _sample(self) -> None:
        self._processes.update_memory_kills()
        busy = self._cpu_usage.busy_sessions(child.pid for child in self._members)
        members = [member for child, member in self._members.items() if child.pid in busy]
        memory = memory_bytes({child.pid for child in self._members})
        gpus, on_gpus = self._gpus.newest()
        of_gpus = usage_of(gpus, on_gpus, session_of)
        usage = [
            ProcessUsage(
                member, self._cpu_usage.percent.get(child.pid, 0), memory.get(child.pid, 0), self._rings.parts(member),
                *of_gpus.get(child.pid, NO_GPUS),
            )
            for child, member in self._members.items()
        ]  # fmt: skip
        self._link.send(
            HostSample(
                psutil.virtual_memory().percent / 100, members, usage, *self._network_usage.rates(),
                tuple((gpu.name, gpu.busy, gpu.used, gpu.memory) for gpu in gpus),
            )
        )  # fmt: skip

    def _log(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.host.name}: {self._secrets.mask_text(text)}"
        print(line, file=sys.stderr, flush=True)


def main(path: str) -> int:
    """Run the supervisor, and in its child the agent, with the orders in the file `path`."""
    umask = os.umask(0o077)
    data = Path(path).read_bytes()
    os.unlink(path)  # from here on keys and secrets are only in memory
    orders = msgspec.json.decode(data, type=AgentOrders)
    stderr_log.install()
    files = Files(orders)
    files.make()
    files.hold_slots(orders.job.hosts[orders.host].workers)
    supervisor.write_pid(Path(orders.job_dir))  # the lock that it takes ends with this process
    lifeline.hide_memory()  # a sweep no longer needs the environment to find this process

    def run_agent(supervisor_pid: int, pipe: int, lifeline_end: int) -> int:
        return Agent(orders, lifeline_end, umask).run(supervisor_pid, pipe)

    return supervisor.supervise(run_agent, lambda status: supervisor.end_job(orders, status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
