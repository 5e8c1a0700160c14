"""What only the head's agent has: the coordinator as its child, and the socket behind MASTER_PORT."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from psctl.orders import AgentOrders
from psctl.runtime import agent_start
from psctl.runtime.agent_start import COORDINATOR, Files
from psctl.runtime.agent_store import StoreSocket
from psctl.runtime.orders import ENVIRONMENT
from psctl.runtime.processes import Child, Processes
from psctl.words import Address

LOG = "coordinator.log"


class StoreWanted(msgspec.Struct, frozen=True):
    """Somebody connects to torch's store."""


class CoordinatorAt(msgspec.Struct, frozen=True):
    """Our coordinator listens there."""

    address: Address


class Head:
    """The coordinator and the store of a job; used from the agent's main thread.

    Args:
        orders, files, processes: the agent's.
        put: takes StoreWanted and CoordinatorAt, from any thread.
    """

    def __init__(self, orders: AgentOrders, files: Files, processes: Processes, put: Callable[[Any], None]) -> None:
        self._orders, self._files, self._processes, self._put = orders, files, processes, put
        self._store: StoreSocket | None = None
        self._master: Address | None = None
        self.coordinator: Child | None = None
        self.store_host: Child | None = None
        self._old_stores: list[Child] = []  # that were told to end

    @property
    def master(self) -> Address | None:
        """Where MASTER_ADDR and MASTER_PORT point to."""
        return self._master

    def start(self) -> None:
        """Bind the store's socket and start the coordinator; CoordinatorAt follows when it listens.

        Raises:
            PortTaken, OSError: a port or the process cannot be had.
        """
        host = self._orders.job.hosts[0]
        self._store = StoreSocket(host.address, self._orders.job.ports)
        self._master = self._store.address
        self._watch_store(self._store)
        reader, writer = os.pipe()
        try:
            agent_start.write_coordinator_orders(self._orders, self._store.address, writer, self._files)
            self.coordinator = self._spawn(writer)
        finally:
            os.close(writer)
        threading.Thread(target=self._read_report, args=(reader,), name="psctl report", daemon=True).start()

    def _spawn(self, report: int) -> Child:
        environment = agent_start.environment_of(self._orders, {}, self._files, COORDINATOR)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self._files.job_dir / LOG, flags, 0o600)
        try:
            argv = agent_start.argv_of(self._orders, "coordinator")
            return self._processes.start("coordinator", argv, environment, self._orders.job_dir, log, log, [report])
        finally:
            os.close(log)

    def _read_report(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as file:
            line = file.readline()
        if line:  # without one it has ended, which is noticed elsewhere
            self._put(CoordinatorAt(msgspec.json.decode(line, type=Address)))

    def start_store(self) -> None:
        """Start the process that serves the store's socket; OSError when it cannot be started."""
        if self._store is None or self.store_host is not None:
            return
        address, descriptor = self._store.address, self._store.descriptor
        environment = agent_start.environment_of(self._orders, {}, self._files, COORDINATOR)
        environment.pop(ENVIRONMENT)
        arguments = [str(descriptor), address.host, str(address.port)]
        self.store_host = self._processes.start(
            "store", [self._orders.python, "-m", "psctl.runtime.store_host", *arguments], environment,
            self._orders.job_dir, 2, 2, [descriptor],
        )  # fmt: skip

    def renew_store(self) -> None:
        """End the process that serves the store; a new one, with an empty store, is started when it is wanted."""
        if self._store is None or self.store_host is None:
            return
        self.store_host.signal(signal.SIGKILL)
        self._old_stores.append(self.store_host)
        self._watch_store(self._store)

    def _watch_store(self, store: StoreSocket) -> None:
        self.store_host = None
        store.watch(lambda: self._put(StoreWanted()))

    def store_ended(self, child: Child) -> bool:
        """Was this child a process that served the store?

        If it was killed, by whomever, another one, with an empty store, is started when it is wanted: who is in
        training seldom asks it, and a restart needs it. If it ended by itself it would do so again: who connects is
        refused from then on.
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
        return True

    def tail(self) -> list[str]:
        """Return the last lines of the coordinator's log."""
        return (self._files.job_dir / LOG).read_text(errors="replace").splitlines()[-20:]
