"""The coordinator's process: runs the state machine of the job and carries out its instructions.

    python -m psctl.coordinator.main        orders: in memory (sealed_memory.py)

Inputs arrive through one queue. They are added to the journal; the state machine answers each with instructions, which
are carried out on the main thread, in order. Where an earlier process was lost, with its host or alone, this one
continues the job from its journal. The process never imports torch.
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

from psctl.coordinator.checkpoint_saver import CheckpointSaver, folder_of, resumed
from psctl.coordinator.checkpoint_uploader import CheckpointUploader
from psctl.coordinator.connections import CoordinatorConnections
from psctl.coordinator.event_log import EventLog
from psctl.coordinator.journal import CoordinatorState, RestoredState, clock_of, restore
from psctl.coordinator.journaled_state_machine import JournaledStateMachine
from psctl.coordinator.replication import Replication
from psctl.coordinator.sessions import MemberSessions, SessionMessage
from psctl.coordinator.standby_copy import StandbyCopy
from psctl.coordinator.state.instructions import (
    AgentsSilent,
    AppendEvent,
    CloseConnection,
    CloseCoordinator,
    CollectivesPlanned,
    CommitCheckpoint,
    DiscardCheckpoint,
    FindRestorable,
    Input,
    Instruction,
    LeaderWaited,
    MakePlan,
    MakeShards,
    MessageReceived,
    PlanAgain,
    PlanCollectives,
    PlanMade,
    PlanRemade,
    SendCheckpointCopy,
    SendMessage,
    ShardsMade,
    StartMember,
    TakenOver,
    Tick,
    UploadCheckpoint,
)
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import PsctlError
from psctl.job import events
from psctl.job.job_permits import COORDINATION
from psctl.job.leadership_messages import has_standby
from psctl.job.message import JobMessage
from psctl.job.process_messages import JobFinished, NewCertificate, StartProcess, StopWanted
from psctl.job.training_messages import CollectiveChoice
from psctl.plan.candidates import options_as_data
from psctl.plan.choose import choose
from psctl.plan.collective_choice import choices_as_data
from psctl.plan.plan_input import plan_input_of_job
from psctl.process import lifeline, sealed_memory, stderr_log
from psctl.process.certificate_renewal import Renewals
from psctl.process.journal_files import SNAPSHOT
from psctl.process.process_orders import CoordinatorOrders
from psctl.process.rejected_connections import RejectionLog
from psctl.ps.shards import cut, sizes
from psctl.transport.connect import Acceptor
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.protocol.authority import Pair, issue, sign
from psctl.types import Member

TICK = 0.1
"""Seconds between two looks at the time: a third of the shortest deadline (failures.SETTLE)."""

MOST_AT_ONCE = 256
"""Inputs that make one record of the journal, if so many wait."""

LONG_WAIT = 1.0
"""Seconds without an answer of the standby after which deadlines are extended."""

SHORTEST_PATIENCE = 30.0
"""Seconds for which a majority of the hosts is waited for, at least."""

AGENTS_RETURN = 5.0
"""Seconds in which agents connect again to a coordinator that takes over a job which is over."""

ME = Member("coordinator", 0)


class CoordinatorProcess:
    """One job's coordinator.

    Args:
        orders: the job, addresses, keys.

    Raises:
        PsctlError: the port range is full, the checkpoint to resume from is damaged, or the journal is.
    """

    def __init__(self, orders: CoordinatorOrders) -> None:
        self._orders = orders
        order = orders.order
        self._authority = Pair(orders.authority, orders.authority_key)
        self._queue: queue.SimpleQueue[Input] = queue.SimpleQueue()
        folder = Path(orders.job_dir)
        self._restored = restore(folder) if orders.port is not None or (folder / SNAPSHOT).exists() else None
        if self._restored is None:  # what an earlier process wrote, which ended before it had a journal, comes again
            (folder / events.FILE).unlink(missing_ok=True)
        self._log = EventLog(folder / events.FILE, order.log_limit)
        root = Path(orders.workdir) / "checkpoints"
        self._saver = CheckpointSaver(root, order, self._queue.put, functools.partial(sign, self._authority))
        self._uploader = CheckpointUploader(root / order.name, order, self._queue.put)
        resume = Path(order.resume) if order.resume else None
        if self._restored is not None:
            self._state_machine, self._sessions = self._restored.state.machine, self._restored.state.sessions
            resume = folder_of(root, order, self._state_machine.job.resume)
            self._clock = clock_of(folder, self._restored, orders.host)
            state = self._restored.state
            state.host, state.clock = orders.host, self._clock
        else:
            now = time.monotonic()
            resumes = resumed(order.resume_id, resume)
            self._state_machine = JobStateMachine(order, orders.grace, resumes, now, time.time() - now, os.getpid())
            self._sessions, self._clock = MemberSessions(), 0.0
            state = CoordinatorState(0, self._state_machine, self._sessions, orders.host, 0.0)
        self._copy = self._standby_copy(folder / events.FILE)
        self._waited = 0.0  # seconds for which nothing was handled, of which the state machine does not know yet
        self._connections = CoordinatorConnections(
            self._queue.put, self._saver, self._sessions, self._as_sent, resume, self._state_machine.why_refused,
            self._copy,
        )  # fmt: skip
        pair = self._issue(ME)
        self._credentials = Credentials(
            order.name, ME, orders.authority, pair.certificate_pem, pair.key_pem, orders.preauth_secret
        )
        self._renewals = Renewals(time.time() if self._restored is None else 0.0)  # earlier ones are not known
        self._open = True
        self._close_at: float | None = None  # the job was over when this process took over
        self._job = JournaledStateMachine(
            folder, state, self._carry_out, self._connections.start_session, self._copy, self._confirm
        )
        if self._restored is None:
            self._job.start(self._now())
        else:
            self._take_over(self._restored)
        ports = order.ports if orders.port is None else (orders.port, orders.port)
        self._acceptor = Acceptor(
            order.hosts[orders.host].address, ports, self._credentials, COORDINATION, self._connections, self._allow,
            order.congestion, refused=RejectionLog("the coordinator"),
        )  # fmt: skip

    def run(self) -> None:
        """Coordinate until the job is over."""
        signal.signal(
            signal.SIGTERM, lambda *_: self._queue.put(MessageReceived(ME, StopWanted(False, False, "SIGTERM")))
        )
        with os.fdopen(self._orders.report, "wb") as report:
            report.write(msgspec.json.encode(self._acceptor.address) + b"\n")
        tick_at = time.monotonic() + TICK
        while self._open:
            given = self._next_inputs(tick_at)
            if is_tick := time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK
                given += [AgentsSilent(self._connections.agents_silent_for()), Tick()]
            if given:
                self._job.handle(given, self._now())
            if self._open and is_tick:
                self._connections.acknowledge()
                self._log.flush()
                self._renew(time.time())
                self._maintain_copy()
                if self._close_at is not None:
                    reached = self._connections.have_sessions(self._sessions.agents)
                    self._open = not reached and time.monotonic() < self._close_at
        self._acceptor.close()
        self._log.close()
        self._job.close()
        self._connections.close(2.0)

    def _now(self) -> float:
        """Return the job's time."""
        return time.monotonic() + self._clock

    def _next_inputs(self, until: float) -> list[Input]:
        """Return the inputs that wait; if none does, wait for one until a time of the monotonic clock."""
        found: list[Input] = []
        if self._waited:
            found.append(LeaderWaited(self._waited))
            self._waited = 0.0
        with contextlib.suppress(queue.Empty):
            if not found:
                found.append(self._queue.get(timeout=max(0.0, until - time.monotonic())))
            while len(found) < MOST_AT_ONCE:
                found.append(self._queue.get_nowait())
        return found

    def _standby_copy(self, log: Path) -> StandbyCopy | None:
        orders = self._orders
        if not has_standby(orders.order):
            return None
        core = Replication(orders.committed, orders.newest, is_successor=orders.is_successor)
        patience = max(SHORTEST_PATIENCE, orders.order.restart_wait)

        def peer(member: Member) -> PeerConnection | None:
            return self._connections.peer(member)

        return StandbyCopy(core, log, orders.authority_key, peer, patience)

    def _confirm(self) -> None:
        """Wait until what follows from the last record may be carried out."""
        waited = self._copy.wait() if self._copy is not None else 0.0
        if waited >= LONG_WAIT:
            self._waited += waited

    def _maintain_copy(self) -> None:
        job = self._state_machine.job
        if self._copy is None:
            return
        hosts = frozenset(range(len(job.order.hosts))) - job.lost_hosts
        self._copy.maintain(hosts, self._job.make_snapshot, may_begin=hosts <= job.registered and not job.takeover)

    def _take_over(self, restored: RestoredState) -> None:
        """Continue the job of a coordinator that was lost."""
        done = self._state_machine.job.checkpoints
        self._saver.ignore(done.dropped | done.committed)
        written = self._log.last_events()

        def carry_out_again(instruction: Instruction) -> None:
            if isinstance(instruction, CloseCoordinator):
                self._close_at = time.monotonic() + AGENTS_RETURN
            elif not (isinstance(instruction, AppendEvent) and written.take(instruction.event)):
                self._carry_out(instruction)

        taken = TakenOver(os.getpid(), self._orders.host)
        self._job.take_over(restored, taken, self._now(), carry_out_again)

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

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AppendEvent(event=event):
                self._log.append(event)
            case SendMessage(member=member, message=message):
                self._connections.send(member, message)
            case CloseConnection(member=member, reason=reason):
                self._connections.close_connection(member, reason)
            case StartMember(host=host):
                self._connections.send(Member("agent", host), instruction)
            case MakePlan():  # takes seconds for many ranks; heartbeats must be handled meanwhile
                threading.Thread(
                    target=lambda: self._queue.put(self._make_plan(instruction)), name="plan", daemon=True
                ).start()
            case PlanAgain(wanted=wanted):
                threading.Thread(
                    target=lambda: self._queue.put(PlanRemade(self._make_plan(wanted))), name="plan", daemon=True
                ).start()
            case PlanCollectives():
                threading.Thread(
                    target=self._plan_collectives, args=(instruction,), name="plan-collectives", daemon=True
                ).start()
            case MakeShards(layout=layout, servers=servers, near=near):
                shards = cut(layout, servers, near=near)
                self._queue.put(ShardsMade(shards, sizes(shards)))
            case CommitCheckpoint():
                self._saver.commit(instruction)
            case DiscardCheckpoint(step=step):
                self._saver.discard(step)
            case FindRestorable():
                self._saver.find_restorable(self._connections.read_from)
            case SendCheckpointCopy(step=step, agent=agent, base=base):
                self._saver.copy(step, agent, self._connections.peer(agent), base)
            case UploadCheckpoint(step=step):
                self._uploader.upload(step)
            case CloseCoordinator(status=status):
                for agent in self._sessions.agents:
                    self._connections.send(agent, JobFinished(status))
                self._open = False

    def _as_sent(self, message: SessionMessage) -> JobMessage:
        """Return the message that is sent for one that a session keeps: a StartMember gets its certificate."""
        if not isinstance(message, StartMember):
            return message
        pair = self._issue(message.member)
        self._renewals.issued(message.member, time.time())
        return StartProcess(
            message.member, message.world, message.local_rank, message.environment, self._orders.authority,
            pair.certificate_pem, pair.key_pem, self._orders.store,
        )  # fmt: skip

    def _plan_collectives(self, wanted: PlanCollectives) -> None:
        world = sum(host.workers for host in wanted.order.hosts)
        try:
            found = [CollectiveChoice(*each) for each in choices_as_data(plan_input_of_job(wanted.order))]
        except Exception as defect:  # noqa: BLE001 - of psctl or a damaged topology; workers have a choice without a plan
            print(f"psctl: collectives are not planned: {type(defect).__name__}: {defect}", file=sys.stderr, flush=True)
            found = []
        self._queue.put(CollectivesPlanned(world, found))

    def _make_plan(self, wanted: MakePlan) -> PlanMade:
        try:
            return self._plan(wanted)
        except Exception as defect:  # noqa: BLE001 - of psctl; unreported, the job would wait for its plan for ever
            return PlanMade("", "", [], None, f"psctl has a defect: {type(defect).__name__}: {defect}")

    def _plan(self, wanted: MakePlan) -> PlanMade:
        try:
            plan = choose(
                wanted.order, None, wanted.layout, decided=True, on_gpus=wanted.on_gpus, hooked=wanted.hooked,
                in_parts=wanted.in_parts,
            )  # fmt: skip
        except PsctlError as error:
            return PlanMade("", "", [], None, error.message)
        event = plan.event(time.time())
        start = None
        if plan.start is not None:
            start = CollectiveChoice(
                "broadcast", plan.start.size, plan.start.algorithm, options_as_data(plan.start.options)
            )
        return PlanMade(
            plan.chosen, plan.update, plan.servers, event, options=plan.options, factors=plan.factors, start=start,
            racks=plan.racks,
        )  # fmt: skip


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
