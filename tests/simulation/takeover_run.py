"""One run of a coordinator that is killed again and again: shipped journal, sessions and connections, and an oracle.

Members send messages of a training job, connections break, and the coordinator is killed at any step: before and after
an input is written to the journal, between two instructions, while it takes over, while its journal is renewed. At the
end the oracle feeds the inputs of the journal to a state machine that nobody killed, and compares:

- every numbered message of a member is an input exactly once, in order;
- every member has handled exactly the numbered messages that the other state machine sends it, in order;
- the event log has exactly its events;
- a member's message is acknowledged only when it is in the journal.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psctl.coordinator import journal
from psctl.coordinator.connections import CoordinatorConnections
from psctl.coordinator.event_log import WrittenEvents
from psctl.coordinator.journal import CoordinatorState, Journal, NoCopy, restore
from psctl.coordinator.journaled_state_machine import JournaledStateMachine
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import (
    AppendEvent,
    CloseConnection,
    Input,
    Instruction,
    MessageReceived,
    SendMessage,
    StartMember,
    TakenOver,
    Tick,
)
from psctl.errors import PeerLost
from psctl.job import events
from psctl.job.membership_messages import ShardCaughtUp, ShardHandedOver
from psctl.job.message import JobMessage
from psctl.job.message_session import MessageSession, is_numbered
from psctl.job.process_messages import OutputLines, ProcessExited, ProcessStarted, Register, ScaleWanted
from psctl.job.session_messages import MessagesReceived, ResumeSession, SessionResumed
from psctl.job.training_messages import Heartbeat, Join, WorkerReport
from psctl.types import Member
from tests.helpers.any_inputs import ROOMY
from tests.helpers.driven_job import A0, A1, AGENTS, W0, W1, S, training
from tests.simulation.kernel import Violation
from tests.simulation.outcome import Outcome, outcome_of

ACTIONS = 150
"""Random actions of a run, before everything in flight arrives."""


class CoordinatorKilled(BaseException):
    """Ends the step in which the coordinator is killed."""


class SimulatedPeer:
    """The coordinator's end of a connection, with both directions' messages in flight."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.to_member: deque[Any] = deque()
        self.to_coordinator: deque[Any] = deque()
        self.open = True

    def send(self, message: Any, payload: Any = None, *, urgent: bool = False) -> bool:
        if self.open:
            self.to_member.append(message)
        return self.open

    def close(self, reason: str = "") -> None:
        self.open = False

    def tolerate(self, silence: float) -> None: ...


class SimulatedMember:
    """A member: the protocol of coordinator_connection.py and coordinator_link.py, without threads."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.session: MessageSession[Any] = MessageSession()
        self.sent: list[Any] = []
        """Numbered messages of the session."""
        self.handled: list[Any] = []
        """Those of the coordinator."""
        self.peer: SimulatedPeer | None = None
        self.begun = self.ready = False

    @property
    def first(self) -> Any:
        """The first message of a connection."""
        received = self.session.received
        if self.member.role == "agent":
            return Register(received=received if self.begun else None)
        return ResumeSession(received, ()) if self.begun else Join(1)

    def connect(self, peer: SimulatedPeer) -> None:
        self.peer = peer
        peer.to_coordinator.append(self.first)
        self.ready = not self.begun and self.member.role != "agent"
        self.begun = self.begun or self.ready

    def send(self, message: JobMessage) -> None:
        if is_numbered(message):
            self.sent.append(message)
            self.session.keep(message)
        if self.ready and self.peer is not None and self.peer.open:
            self.peer.to_coordinator.append(message)

    def receive(self, message: Any) -> None:
        assert self.peer is not None
        match message:
            case SessionResumed(received=received):
                self.session.acknowledge(received or 0)
                self.peer.to_coordinator.extend(self.session.unacknowledged())
                self.begun = self.ready = True
            case MessagesReceived(count=count):
                self.session.acknowledge(count)
            case _ if is_numbered(message):
                self.handled.append(message)
                self.session.received += 1
                self.peer.to_coordinator.append(MessagesReceived(self.session.received))


class TakeoverRun:
    """The run of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance, self.folder = random.Random(seed), folder
        self.kills_at = 0  # steps until the coordinator is killed; 0: it is not
        self.kills = 0
        self.inputs: list[tuple[float, Input]] = []
        """The inputs of all journals."""
        self.events: list[Any] = []
        self.trace: list[str] = []
        self.members = {member: SimulatedMember(member) for member in (A0, A1, W0, W1, *S)}
        self.stale: list[SimulatedPeer] = []
        """Connections that broke at the member's end only, with messages in flight."""
        self.step = 0
        job = training(ROOMY)
        self.now = job.now
        self.untouched = pickle.dumps(job.machine)
        self._queue: deque[Input] = deque()
        self._written = WrittenEvents(())
        self._begin(CoordinatorState(0, job.machine, MemberSessions()))
        self.core.begin_with_journal()

    # ---- the coordinator ---------------------------------------------------------------------------------------------

    def _begin(self, state: CoordinatorState) -> None:
        """Make a coordinator's process of this state, with no connections."""
        self._queue.clear()
        self.end_process()
        self.machine, sessions = state.machine, state.sessions
        saver: Any = None
        self.connections = CoordinatorConnections(self._queue.append, saver, sessions, lambda message: message, None)  # type: ignore[arg-type, return-value]
        self.core = _Core(self.folder, state, self._carry_out, self.connections.start_session)
        for member in self.members.values():
            member.peer, member.ready = None, False
        self.stale.clear()

    def end_process(self) -> None:
        """Close the files in the job's folder, as the kernel does for a process that has ended."""
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the scan itself
                if os.readlink(entry.path).startswith(f"{self.folder}/"):
                    os.close(int(entry.name))

    def may_kill(self) -> None:
        """A step of the coordinator, at which it may be killed."""
        if self.kills_at:
            self.kills_at -= 1
            if not self.kills_at:
                raise CoordinatorKilled

    def append(self, method: Callable[..., None], log: Journal, given: Sequence[Input], now: float) -> None:
        """Write inputs to the journal, in the place of Journal.append."""
        self.may_kill()
        method(log, given, now)
        self.inputs += [(now, each) for each in given]
        self.may_kill()

    def _carry_out(self, instruction: Instruction) -> None:
        self.may_kill()
        match instruction:
            case AppendEvent(event=event):
                self.events.append(event)
            case SendMessage(member=member, message=message):
                self.connections.send(member, message)
            case StartMember(host=host):
                self.connections.send(Member("agent", host), instruction)
            case CloseConnection(member=member, reason=reason):
                self.connections.close_connection(member, reason)
        self.may_kill()

    def _carry_out_again(self, instruction: Instruction) -> None:
        if not (isinstance(instruction, AppendEvent) and self._written.take(instruction.event)):
            self._carry_out(instruction)

    def _take_over(self) -> None:
        """Start coordinators until one is not killed while it takes over."""
        while True:
            self.kills += 1
            self.now += 0.01
            self._log(f"the coordinator is killed, {len(self.inputs)} inputs in the journal")
            found = restore(self.folder)
            self._written = WrittenEvents(events.to_line(event) for event in self.events)
            self._begin(found.state)
            self.kills_at = self.chance.choice([0, 0, 1, 2, 3, 8])
            try:
                self.core.take_over(found, TakenOver(100 + self.kills), self.now, self._carry_out_again)
                return
            except CoordinatorKilled:
                continue

    def _do(self, action: Callable[[], None]) -> None:
        """Do something that the coordinator may be killed in."""
        try:
            action()
        except CoordinatorKilled:
            self._take_over()

    def _handle_next(self) -> None:
        if self._queue:
            count = min(len(self._queue), self.chance.choice([1, 1, 2, 5]))
            self.now += 1e-5  # no two records are of one moment
            self.core.handle([self._queue.popleft() for _ in range(count)], self.now)

    def _tick(self) -> None:
        self.now += 0.1
        self.core.handle([Tick()], self.now)
        self.connections.acknowledge()
        self._check_acknowledgements()

    # ---- members -----------------------------------------------------------------------------------------------------

    def _connect(self, member: SimulatedMember) -> None:
        if self.machine.why_not_expected(member.member):
            return
        self._log(f"{member.member} connects: {member.first}")
        peer: Any = SimulatedPeer(member.member)
        self.connections.on_connected(peer)
        member.connect(peer)

    def _arrive_at_coordinator(self, member: SimulatedMember) -> None:
        peer: Any = member.peer
        if peer is not None and peer.open and peer.to_coordinator:
            message = peer.to_coordinator.popleft()
            self._log(f"coordinator <- {member.member}: {message}")
            self.connections.on_message(peer, message, None)

    def _arrive_at_member(self, member: SimulatedMember) -> None:
        if member.peer is not None and member.peer.to_member:
            message = member.peer.to_member.popleft()
            self._log(f"{member.member} <- {message}")
            member.receive(message)
            if isinstance(message, StartMember):
                self.members.setdefault(message.member, SimulatedMember(message.member))
                member.send(ProcessStarted(message.member, 7))

    def _break(self, member: SimulatedMember) -> None:
        """The connection of a worker or server breaks; an agent's would be its host's loss."""
        peer: Any = member.peer
        if peer is not None and member.member.role != "agent":
            self._log(f"{member.member} loses its connection")
            peer.open, member.peer, member.ready = False, None, False
            if self.chance.random() < 0.5:
                self.stale.append(peer)
            else:
                self.connections.on_connection_lost(peer, PeerLost("reset"))

    def _arrive_late(self) -> None:
        """The coordinator receives the rest of a broken connection, or detects that it is broken."""
        for peer in self.stale[:1]:
            given: Any = peer
            if peer.to_coordinator:
                self.connections.on_message(given, peer.to_coordinator.popleft(), None)
            else:
                self.stale.remove(peer)
                self.connections.on_connection_lost(given, PeerLost("reset"))

    def _say(self, member: SimulatedMember) -> None:
        """Send a message of the member's own."""
        self.step += 1
        match member.member.role:
            case "worker":
                numbers = WorkerReport(self.step, 0, [], 1.0, 0.1, 0.1, (("", 8, 0),))
                member.send(self.chance.choice([numbers, numbers, Heartbeat(self.step, "")]))
            case "server":
                ranks = range(3)
                caught = ShardCaughtUp(self.chance.randrange(4), self.chance.randrange(6), self.chance.choice(ranks))
                given = ShardHandedOver(self.chance.randrange(4), self.chance.randrange(6))
                member.send(self.chance.choice([caught, given, Heartbeat(self.step, "serving")]))
            case _:
                mine = [each for each, agent in AGENTS.items() if agent == member.member]
                lines = OutputLines(
                    self.chance.choice(mine), "stdout", [f"line {self.step}"] * self.chance.choice([1, 2])
                )
                ends = ProcessExited(self.chance.choice(mine), -9)
                scale = ScaleWanted(self.step, None, self.chance.choice([2, 3, 4]))
                member.send(self.chance.choices([lines, ends, scale], [8, 1, 2])[0])

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Act at random, then let everything arrive, and compare.

        Raises:
            Violation: an invariant does not hold.
        """
        for _ in range(ACTIONS):
            if not self.kills_at and self.chance.random() < 0.05:
                self.kills_at = self.chance.randrange(1, 30)
            self._act()
        self.kills_at = 0
        while self.stale:
            self._arrive_late()
        for _ in range(200):
            self._settle()
        self._compare()

    def _act(self) -> None:
        member = self.chance.choice(list(self.members.values()))
        if member.peer is None:
            self._connect(member)
            return
        actions: list[Callable[[], None]] = [
            lambda: self._say(member), lambda: self._arrive_at_coordinator(member), self._handle_next,
            lambda: self._arrive_at_member(member), self._tick, lambda: self._break(member), self._arrive_late,
        ]  # fmt: skip
        for action in self.chance.choices(actions, [4, 6, 6, 6, 1, 0.3, 1], k=4):
            self._do(action)

    def _settle(self) -> None:
        for member in list(self.members.values()):
            if member.peer is None:
                self._connect(member)
            for _ in range(4):
                self._arrive_at_coordinator(member)
                self._arrive_at_member(member)
        while self._queue and not self.machine.over:
            self._handle_next()
        self.connections.acknowledge()

    # ---- the oracle --------------------------------------------------------------------------------------------------

    def _check_acknowledgements(self) -> None:
        for member, simulated in self.members.items():
            written = self._numbered_inputs(member)
            missing = simulated.sent[len(written) :]
            kept = simulated.session.unacknowledged()
            if kept[len(kept) - len(missing) :] != missing if missing else False:
                raise Violation("acknowledged", f"{member}: a message is acknowledged that is in no journal")

    def _numbered_inputs(self, member: Member) -> list[Any]:
        given = [each.message for _, each in self.inputs if isinstance(each, MessageReceived) and each.member == member]
        return [message for message in given if is_numbered(message)]

    def _compare(self) -> None:
        expected: dict[Member, list[Any]] = {}
        events, machine, sessions = list[Any](), pickle.loads(self.untouched), MemberSessions()
        for now, given in self.inputs:
            if sessions.on_input(given) and isinstance(given, MessageReceived):
                expected[given.member] = []
            for instruction in machine.handle(given, now):
                known = set(sessions.by_member)
                sessions.on_instruction(instruction)
                match instruction:
                    case AppendEvent(event=event):
                        events.append(event)
                    case SendMessage(member=member, message=message) if member in known and is_numbered(message):
                        expected[member].append(message)
                    case StartMember(host=host) if Member("agent", host) in known:
                        expected[Member("agent", host)].append(instruction)
        if self.events != events:
            raise Violation("events", _difference(self.events, events))
        if machine.over:
            return  # nobody is waited for any more
        for member in sessions.by_member:
            simulated = self.members[member]
            if self.machine.why_not_expected(member):
                continue  # it is lost
            if not simulated.ready:
                raise Violation("stuck", f"{member} has a session, and cannot resume it")
            if self._numbered_inputs(member) != simulated.sent:
                raise Violation("inputs", f"{member}: {_difference(self._numbered_inputs(member), simulated.sent)}")
            if simulated.handled != expected[member]:
                raise Violation("messages", f"{member}: {_difference(simulated.handled, expected[member])}")

    def _log(self, text: str) -> None:
        self.trace.append(f"{self.now:.1f} {text}")


class _Core(JournaledStateMachine):
    """Begins with a job that trains already."""

    def begin_with_journal(self) -> None:
        self._journal = Journal(self._folder, self._state, NoCopy())


def _difference(found: list[Any], expected: list[Any]) -> str:
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(found), len(expected)))
    return f"{len(found)} instead of {len(expected)}; at {at}: {found[at : at + 2]} instead of {expected[at : at + 2]}"


def run_takeovers(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed; an error of the product is part of the outcome."""
    append, most = Journal.append, journal.MOST_INPUTS
    with tempfile.TemporaryDirectory() as folder:
        takeovers = TakeoverRun(seed, Path(folder))
        Journal.append = lambda log, given, now: takeovers.append(append, log, given, now)  # type: ignore[method-assign]
        journal.MOST_INPUTS = 20
        try:
            outcome = outcome_of(seed, takeovers.run)
        finally:
            takeovers.end_process()
            Journal.append, journal.MOST_INPUTS = append, most  # type: ignore[method-assign]
    outcome.seconds, outcome.event_count = takeovers.now, len(takeovers.inputs)
    outcome.values_checked, outcome.trace = len(takeovers.events), takeovers.trace if traced else []
    return outcome
