"""Services of the leading host's agent: the coordinator and the exporter as children, the socket of torch's store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from psctl.agent import spawn
from psctl.agent.control_socket import OrdersWanted
from psctl.agent.exporter_process import ExporterProcess
from psctl.agent.processes import AgentChild, Processes
from psctl.agent.spawn import COORDINATOR, Files
from psctl.agent.torch_store import MasterPort, StoreSocket
from psctl.job.leadership_messages import Configuration
from psctl.message_costs import UNKNOWN_COSTS
from psctl.orders import AgentOrders, HostOrder
from psctl.process import sealed_memory
from psctl.process.journal_files import JournalFiles
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.transport import loopback_tcp
from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import Pair, issue
from psctl.types import Address, Member

LOG = "coordinator.log"

QUICK = 5.0
"""Seconds: a coordinator that ends so soon after it began to listen counts as one that cannot continue."""

MOST_QUICK = 3
"""Times that this may happen before the job fails."""


class StoreWanted(msgspec.Struct, frozen=True):
    """A process connects to torch's store, which has no process to serve it yet."""


class CoordinatorAt(msgspec.Struct, frozen=True):
    """The coordinator has started and listens at `address`."""

    address: Address


class HeadServices:
    """The coordinator and the store of a job; used from the agent's main thread.

    Args:
        orders, files, processes: the agent's.
        put: puts StoreWanted and CoordinatorAt into the agent's queue; called on any thread.
        credentials, master_port: the agent's.
        configurations: returns the committed and the newest configuration of the job's leadership.
        notice: has a sentence written to the event log; called on any thread.
    """

    def __init__(
        self, orders: AgentOrders, files: Files, processes: Processes,
        put: Callable[[StoreWanted | CoordinatorAt], None], credentials: Credentials, master_port: MasterPort,
        configurations: Callable[[], tuple[Configuration, Configuration]], notice: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._configurations = configurations
        self._exporter = ExporterProcess(orders, files, processes, notice)
        self._orders = orders
        self._files = files
        self._processes = processes
        self._put = put
        self._credentials = credentials
        self._master_port = master_port
        self._store: StoreSocket | None = None
        self.coordinator: AgentChild | None = None
        self.store_host: AgentChild | None = None
        self._tunnels: Address | None = None  # of the store, for other hosts' agents
        self._address: Address | None = None  # of the coordinator
        self._listens_since: float | None = None  # the coordinator that was started last
        self._quick_ends = 0
        self._old_stores: list[AgentChild] = []  # killed, not ended yet
        self._old_coordinators: list[AgentChild] = []

    @property
    def exporters(self) -> list[AgentChild]:
        """The exporter of metrics, if it runs."""
        return [self._exporter.child] if self._exporter.child is not None else []

    @property
    def children(self) -> list[AgentChild]:
        """The coordinator and the exporter, which outlast the other processes."""
        return [*filter(None, [self.coordinator]), *self.exporters]

    def start_exporter(self) -> None:
        """Start the exporter of metrics if this host leads and the job has one; call it when the event log exists."""
        if self.coordinator is not None:
            self._exporter.start()

    def exporter_ended(self, child: AgentChild) -> bool:
        """Return whether a child that has ended was the exporter."""
        return self._exporter.ended(child)

    def finish_export(self) -> None:
        """Wait until the exporter has read the job's end."""
        self._exporter.finish()

    def start(self) -> str:
        """Bind the store's socket and start the coordinator; `put` gets CoordinatorAt when it listens.

        Returns:
            Why this host can have no store; "" when it can.

        Raises:
            PsctlError, OSError: no port is free, or the process cannot be started.
        """
        store = StoreSocket(self._orders.job, self._credentials, self._master_port)
        if not store.problem:
            self._store = store
            self._watch_store(store)
        self._tunnels = store.tunnels
        self._start_coordinator(None)
        return store.problem

    def lead(self, authority_key: str) -> str:
        """Start to lead, as an elected host whose folder has the state; otherwise as `start`.

        Args:
            authority_key: PEM, of the copy.
        """
        self._orders = msgspec.structs.replace(self._orders, authority_key=authority_key)
        self._address, self._quick_ends = None, 0
        return self.start()

    def orders_for(
        self, wanted: OrdersWanted, hosts: list[HostOrder], added: int, coordinator: Address, leadership: Configuration
    ) -> AgentOrders:
        """Return the orders of another host's agent, which is started while the job runs.

        Args:
            wanted: of which host.
            hosts: of the job, of which the last `added` were added while it ran.
            coordinator: where it listens.
            leadership: the newest configuration that is known here.
        """
        orders = self._orders
        job = msgspec.structs.replace(orders.job, hosts=hosts, added=added, topology=None, costs=UNKNOWN_COSTS)
        authority = Pair(orders.authority, orders.authority_key)
        pair = issue(authority, orders.job.name, Member("agent", wanted.host), time.time())
        return msgspec.structs.replace(
            orders, job=job, host=wanted.host,
            python=wanted.python, paths=[wanted.code], workdir=wanted.workdir, job_dir=wanted.job_dir,
            code_dir=wanted.code_dir, certificate=pair.certificate_pem, key=pair.key_pem, coordinator=coordinator,
            authority_key="", restarted=msgspec.to_builtins(leadership),
        )  # fmt: skip

    def stop_leading(self) -> None:
        """Kill the coordinator and the exporter, because another host leads, and remove the journal."""
        self._exporter.stop()
        if self.coordinator is not None:
            self.coordinator.signal(signal.SIGKILL)
            self._old_coordinators.append(self.coordinator)
            self.coordinator = None
        if self.store_host is not None:
            self.store_host.signal(signal.SIGKILL)
            self._old_stores.append(self.store_host)
        if self._store is not None:
            self._store.close()
        self._store = self.store_host = None
        JournalFiles(self._files.job_dir).remove()

    def deposed(self, child: AgentChild) -> bool:
        """Return whether a child that has ended was a coordinator that does not lead any more."""
        if child not in self._old_coordinators:
            return False
        self._old_coordinators.remove(child)
        return True

    def may_restart(self) -> bool:
        """Return whether the coordinator, which has ended, may be started again: not if it ends at once each time."""
        quick = self._listens_since is None or time.monotonic() - self._listens_since < QUICK
        self._quick_ends = self._quick_ends + 1 if quick else 0
        return self._quick_ends < MOST_QUICK

    def restart(self) -> None:
        """Start the coordinator again; it continues the job from its journal, at the same address if there was one.

        Raises:
            OSError: it cannot be started.
        """
        self._start_coordinator(None if self._address is None else self._address.port, is_successor=True)

    def _start_coordinator(self, port: int | None, *, is_successor: bool = False) -> None:
        reader, writer = os.pipe()
        self._listens_since = None
        try:
            orders = spawn.coordinator_orders(
                self._orders, self._tunnels, writer, self._files, port, self._configurations(),
                is_successor=is_successor,
            )  # fmt: skip
            with sealed_memory.holding(orders) as descriptor:
                self.coordinator = self._spawn(writer, descriptor)
        finally:
            os.close(writer)
        threading.Thread(target=self._read_report, args=(reader,), name="psctl report", daemon=True).start()

    def _spawn(self, report: int, orders: int) -> AgentChild:
        environment = spawn.environment_of(self._orders, {}, self._files, COORDINATOR, orders)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self._files.job_dir / LOG, flags, 0o600)
        try:
            argv = spawn.argv_of(self._orders, "coordinator")
            return self._processes.start(argv, environment, self._orders.job_dir, log, log, [report, orders])
        finally:
            os.close(log)

    def _read_report(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as file:
            line = file.readline()
        if line:  # empty: the coordinator has ended, which the agent sees by SIGCHLD
            self._address, self._listens_since = msgspec.json.decode(line, type=Address), time.monotonic()
            self._put(CoordinatorAt(self._address))

    def start_store(self) -> None:
        """Start the process that serves the store's socket.

        Raises:
            OSError: it cannot be started.
        """
        if self._store is None or self.store_host is not None:
            return
        environment = spawn.environment_of(self._orders, {}, self._files, COORDINATOR, -1)
        environment.pop(ENVIRONMENT)
        descriptors = self._store.descriptors
        arguments = [str(descriptors[0]), loopback_tcp.HOST, str(self._store.port)]
        self.store_host = self._processes.start(
            [self._orders.python, "-m", "psctl.agent.torch_store_host", *arguments], environment,
            self._orders.job_dir, 2, 2, descriptors,
        )  # fmt: skip

    def renew_store(self) -> None:
        """End the process that serves the store; the next connection starts a new one, with an empty store."""
        if self._store is None or self.store_host is None:
            return
        self.store_host.signal(signal.SIGKILL)
        self._old_stores.append(self.store_host)
        self._watch_store(self._store)

    def _watch_store(self, store: StoreSocket) -> None:
        self.store_host = None
        store.watch(lambda: self._put(StoreWanted()))

    def store_ended(self, child: AgentChild) -> bool:
        """Return whether a child that has ended served the store, and decide what becomes of the socket.

        After a kill the next connection starts another process, with an empty store: training rarely uses the store,
        and a restart needs it. A process that ended by itself would do so again: connections are refused from then on.
        """
        if child in self._old_stores:
            self._old_stores.remove(child)
            return True
        if child is not self.store_host:
            return False
        if self._store is not None and child.status is not None and child.status < 0:
            self._watch_store(self._store)
        elif self._store is not None:
            self._store.close()
            self._store = None
            self._master_port.refuse_all(f"its process ended with status {child.status}; agent.log has its output")
        return True

    def tail(self) -> list[str]:
        """Return the last lines of the coordinator's log."""
        return (self._files.job_dir / LOG).read_text(errors="replace").splitlines()[-20:]
