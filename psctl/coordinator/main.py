"""The coordinator's process: runs the state machine of the job and carries out its instructions.

    python -m psctl.coordinator.main        orders: in memory (sealed_memory.py)

Inputs arrive through one queue. The state machine answers each with instructions, which are carried out on the main
thread, in order. The process never imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from psctl.coordinator.checkpoint_saver import CheckpointSaver, resumed
from psctl.coordinator.connections import CoordinatorConnections
from psctl.coordinator.event_log import EventLog
from psctl.coordinator.state.instructions import (
    AgentsSilent,
    AppendEvent,
    CloseConnection,
    CloseCoordinator,
    CommitCheckpoint,
    DiscardCheckpoint,
    FindRestorable,
    Input,
    Instruction,
    MakePlan,
    MakeShards,
    MessageReceived,
    PlanMade,
    SendCheckpointCopy,
    SendMessage,
    ShardsMade,
    StartMember,
    Tick,
)
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import PsctlError
from psctl.job import events
from psctl.job.job_permits import COORDINATION
from psctl.job.process_messages import JobFinished, NewCertificate, StartProcess, StopWanted
from psctl.plan.choose import choose
from psctl.process import lifeline, sealed_memory, stderr_log
from psctl.process.certificate_renewal import Renewals
from psctl.process.process_orders import CoordinatorOrders
from psctl.process.rejected_connections import RejectionLog
from psctl.ps.shards import cut, sizes
from psctl.transport.connect import Acceptor
from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import Pair, issue, sign
from psctl.types import Member

TICK = 0.1
"""Seconds between two looks at the time: a third of the shortest deadline (failures.SETTLE)."""

ME = Member("coordinator", 0)


class CoordinatorProcess:
    """One job's coordinator.

    Args:
        orders: the job, addresses, keys.

    Raises:
        PsctlError: the port range is full, or the checkpoint to resume from is damaged.
    """

    def __init__(self, orders: CoordinatorOrders) -> None:
        self._orders = orders
        order = orders.order
        self._authority = Pair(orders.authority, orders.authority_key)
        self._queue: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self._log = EventLog(Path(orders.job_dir) / events.FILE, order.log_limit)
        root = Path(orders.workdir) / "checkpoints"
        self._saver = CheckpointSaver(root, order, self._queue.put, functools.partial(sign, self._authority))
        resume = Path(order.resume) if order.resume else None
        now = time.monotonic()
        self._state_machine = JobStateMachine(
            order, orders.grace, resumed(order.resume_id, resume), now, time.time() - now, os.getpid()
        )
        self._connections = CoordinatorConnections(
            self._queue.put, self._saver, resume, self._state_machine.why_refused
        )
        pair = self._issue(ME)
        self._credentials = Credentials(
            order.name, ME, orders.authority, pair.certificate_pem, pair.key_pem, orders.preauth_secret
        )
        self._renewals = Renewals(time.time())
        head = order.hosts[0]
        self._acceptor = Acceptor(
            head.address, order.ports, self._credentials, COORDINATION, self._connections, self._allow,
            order.congestion, refused=RejectionLog("the coordinator"),
        )  # fmt: skip
        self._open = True

    def run(self) -> None:
        """Coordinate until the job is over."""
        signal.signal(
            signal.SIGTERM, lambda *_: self._queue.put(MessageReceived(ME, StopWanted(False, False, "SIGTERM")))
        )
        self._carry_out(self._state_machine.start(time.monotonic()))
        with os.fdopen(self._orders.report, "wb") as report:
            report.write(msgspec.json.encode(self._acceptor.address) + b"\n")
        tick_at = time.monotonic() + TICK
        while self._open:
            given: Input = Tick()
            with contextlib.suppress(queue.Empty):
                given = self._queue.get(timeout=max(0.0, tick_at - time.monotonic()))
            self._carry_out(self._state_machine.handle(given, time.monotonic()))
            if self._open and time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK
                silent = AgentsSilent(self._connections.agents_silent_for())
                self._carry_out(self._state_machine.handle(silent, time.monotonic()))
                self._carry_out(self._state_machine.handle(Tick(), time.monotonic()))
                self._log.flush()
                self._renew(time.time())
        self._acceptor.close()
        self._log.close()
        self._connections.close(2.0)

    def _allow(self, member: Member) -> str | None:
        return self._state_machine.why_not_expected(member) or None

    def _issue(self, member: Member) -> Pair:
        return issue(self._authority, self._orders.order.name, member, time.time())

    def _renew(self, now: float) -> None:
        """Issue new certificates to members whose present ones have less than half of their life left."""
        for member in self._renewals.due((ME, *self._connections.connected()), now):
            pair = self._issue(member)
            self._renewals.issued(member, now)
            if member == ME:
                self._credentials.renew(pair.certificate_pem, pair.key_pem)
            else:
                self._connections.send(member, NewCertificate(pair.certificate_pem, pair.key_pem))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case AppendEvent(event=event):
                self._log.append(event)
            case SendMessage(member=member, message=message):
                self._connections.send(member, message)
            case CloseConnection(member=member, reason=reason):
                self._connections.close_connection(member, reason)
            case StartMember():
                self._start(instruction)
            case MakePlan():  # takes seconds for many ranks; heartbeats must be handled meanwhile
                threading.Thread(target=self._make_plan, args=(instruction,), name="plan", daemon=True).start()
            case MakeShards(layout=layout, servers=servers, near=near):
                shards = cut(layout, servers, near=near)
                self._queue.put(ShardsMade(shards, sizes(shards)))
            case CommitCheckpoint():
                self._saver.commit(instruction)
            case DiscardCheckpoint(step=step):
                self._saver.discard(step)
            case FindRestorable():
                self._saver.find_restorable(self._connections.read_from)
            case SendCheckpointCopy(step=step, agent=agent):
                self._saver.copy(step, self._connections.peer(agent))
            case CloseCoordinator(status=status):
                for host in range(len(self._orders.order.hosts)):
                    self._connections.send(Member("agent", host), JobFinished(status))
                self._open = False

    def _start(self, start: StartMember) -> None:
        pair = self._issue(start.member)
        self._renewals.issued(start.member, time.time())
        order = StartProcess(
            start.member,
            start.world,
            start.local_rank,
            start.environment,
            self._orders.authority,
            pair.certificate_pem,
            pair.key_pem,
            self._orders.store,
        )
        self._connections.send(Member("agent", start.host), order)

    def _make_plan(self, wanted: MakePlan) -> None:
        try:
            made = self._plan(wanted)
        except Exception as defect:  # noqa: BLE001 - of psctl; unreported, the job would wait for its plan for ever
            made = PlanMade("", "", [], None, f"psctl has a defect: {type(defect).__name__}: {defect}")
        self._queue.put(made)

    def _plan(self, wanted: MakePlan) -> PlanMade:
        try:
            plan = choose(wanted.order, None, wanted.layout, decided=True, on_gpus=wanted.on_gpus)
        except PsctlError as error:
            return PlanMade("", "", [], None, error.message)
        event = plan.event(time.time())
        return PlanMade(plan.chosen, plan.update, plan.servers, event, options=plan.options)


def main() -> int:
    """Coordinate the job that this process's orders name."""
    stderr_log.install()
    lifeline.hide_memory()
    orders = sealed_memory.read()
    assert orders is not None, "an agent starts the coordinator"
    CoordinatorProcess(msgspec.json.decode(orders, type=CoordinatorOrders)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
