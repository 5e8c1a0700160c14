"""The exporter of metrics as a child of the head's agent: training never waits for it, and goes on without it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from psctl.agent import spawn
from psctl.agent.processes import AgentChild, Processes
from psctl.agent.spawn import Files
from psctl.job.run_parameters import parameters_of
from psctl.orders import AgentOrders, ExportOrder
from psctl.process import sealed_memory
from psctl.process.process_orders import ExporterOrders
from psctl.process.sealed_memory import ENVIRONMENT

LOG = "exporter.log"

FLUSH = 5.0
"""Seconds that the exporter has after the job's end to write what it has read."""

LOOK = 0.02
"""Seconds between two looks whether it has ended."""


class ExporterProcess:
    """Starts the exporter, passes its sentences on, and reports its end; used from the agent's main thread.

    Args:
        orders, files, processes: the agent's.
        notice: has a sentence written to the event log; called on any thread.
    """

    def __init__(self, orders: AgentOrders, files: Files, processes: Processes, notice: Callable[[str], None]) -> None:
        self._orders, self._files, self._processes, self._notice = orders, files, processes, notice
        self._stopped: list[AgentChild] = []
        self._failed = False
        self.child: AgentChild | None = None

    def start(self) -> None:
        """Start the exporter if the job asks for one; not again after it has ended by itself."""
        if self._orders.job.exports == ExportOrder() or self.child is not None or self._failed:
            return
        reader, writer = os.pipe()
        try:
            with sealed_memory.holding(self._made(writer)) as descriptor:
                self.child = self._spawn(writer, descriptor)
        except OSError as error:
            os.close(reader)
            self._failed = True
            self._notice(f"metrics: the exporter was not started: {error.strerror or error}; training goes on")
            return
        finally:
            os.close(writer)
        threading.Thread(target=self._read, args=(reader,), name="psctl exporter", daemon=True).start()

    def _made(self, notices: int) -> bytes:
        orders = self._orders
        return msgspec.json.encode(
            ExporterOrders(
                job=orders.job.name, host=orders.job.hosts[orders.host].name, folder=orders.job_dir,
                exports=orders.job.exports, parameters=parameters_of(orders.job), notices=notices,
                error_file=str(self._files.job_dir / spawn.ERRORS / "exporter.json"),
                secrets=tuple(orders.secrets.values()),
            )
        )  # fmt: skip

    def _spawn(self, notices: int, descriptor: int) -> AgentChild:
        orders = self._orders
        environment = spawn.environment_of(orders, orders.job.environment, self._files, spawn.COORDINATOR, descriptor)
        environment |= {**orders.secrets, ENVIRONMENT: f"{self._files.private}/exporter-0:{descriptor}"}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self._files.job_dir / LOG, flags, 0o600)
        try:
            argv = spawn.argv_of(orders, "exporter")
            return self._processes.start(argv, environment, orders.job_dir, log, log, [notices, descriptor])
        finally:
            os.close(log)

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as file:
            for line in file:
                self._notice(line.decode(errors="replace").strip())

    def ended(self, child: AgentChild) -> bool:
        """Return whether a child that has ended was the exporter; say so in the event log if it ended early."""
        if child in self._stopped:
            self._stopped.remove(child)
            return True
        if child is not self.child:
            return False
        self.child, self._failed = None, True
        self._processes.end_family(child)
        if child.status:
            how = f"killed by signal {-child.status}" if child.status < 0 else f"status {child.status}"
            log = self._files.job_dir / LOG
            self._notice(f"metrics: the exporter has ended ({how}); training goes on without it; on the head: {log}")
        return True

    def stop(self) -> None:
        """Kill it, because another host leads and has its own."""
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
            self._stopped.append(self.child)
        self.child, self._failed = None, False

    def finish(self) -> None:
        """Wait until it has read the end of the event log and has ended, FLUSH seconds at most."""
        until = time.monotonic() + FLUSH
        while self.child is not None and self.child.status is None and time.monotonic() < until:
            self._processes.reap()
            time.sleep(LOOK)
        if self.child is not None and self.child.status is None:
            print(f"the exporter of metrics did not end within {FLUSH:g} s of the job's end", file=sys.stderr)
