"""The agent's end of its job's leadership: it listens for other agents, votes, and stands when the leader is lost.

The rules are in leadership.py. A thread looks now and then how long the leader has been out of reach; from PATIENCE on
it asks the other agents which leader they know, and, on the standby, for their votes.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from psctl.agent.leadership import Election, Voter
from psctl.agent.replica import StateReplica
from psctl.errors import ConnectionFailed
from psctl.job.leadership_messages import (
    Configuration,
    LeaderAt,
    Leadership,
    LeadershipAccepted,
    LeaderWanted,
    MajorityMissed,
    ReplicaBegin,
    ReplicaLog,
    ReplicaRecord,
    ReplicaSnapshot,
    VoteGiven,
    VoteWanted,
)
from psctl.job.message import JobMessage
from psctl.orders import AgentOrders
from psctl.permits import LISTS, Direction, Permit, Permits, WireMessage
from psctl.process.rejected_connections import RejectionLog
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.types import Address, Member

PATIENCE = 6.0
"""Seconds without a packet of the leader's host after which another one may lead; longer than a short outage."""

LOOK = 0.25
"""Seconds between two looks."""

ANSWER = 2.0
"""Seconds for another agent to be connected and to answer."""

FEW = 3
"""Other agents that one asks which is not a candidate: all asking all would be a load where hosts are many."""

ROUND = 0.5
"""Seconds of waiting for answers before agents are asked again."""

BETWEEN: Direction = ("agent", "agent")

ELECTION = Permits(
    [
        Permit(VoteWanted, (BETWEEN,), size=LISTS),
        Permit(VoteGiven, (BETWEEN,), size=LISTS),
        Permit(LeaderWanted, (BETWEEN,)),
        Permit(LeaderAt, (BETWEEN,), size=LISTS),
    ]
)
"""Every message between agents about leadership, once."""

LeadershipMessage = (
    Leadership | MajorityMissed | ReplicaBegin | ReplicaLog | ReplicaSnapshot | ReplicaRecord
)  # fmt: skip
"""What a leader sends about leadership."""


class Elected(msgspec.Struct, frozen=True):
    """This agent's host leads from now on; it has the state to continue."""

    configuration: Configuration


class LeaderFound(msgspec.Struct, frozen=True):
    """The newest configuration, and where its coordinator listens; None: it is not known."""

    configuration: Configuration
    coordinator: Address | None


def first_configuration(orders: AgentOrders) -> Configuration:
    """Return the configuration that an agent begins with: that of the job's start, or of the running job."""
    if orders.restarted is not None:
        return msgspec.convert(orders.restarted, Configuration)
    return Configuration(voters=tuple(range(len(orders.job.hosts))))


class Elections:
    """The leadership of a job, as one agent sees it.

    Args:
        orders: the agent's.
        credentials: the agent's.
        silent_for: returns the seconds for which the leader has been out of reach.
        put: takes Elected and LeaderFound; called on other threads.

    Raises:
        PortTaken: no port of the job's range is free.
        ConnectionFailed: the host's address is not of this machine.
    """

    def __init__(
        self, orders: AgentOrders, credentials: Credentials, silent_for: Callable[[], float],
        put: Callable[[Elected | LeaderFound], None],
    ) -> None:  # fmt: skip
        self._credentials, self._silent_for, self._put = credentials, silent_for, put
        self._congestion = orders.job.congestion
        self._lock = threading.Lock()
        first = first_configuration(orders)
        self._voter = Voter(orders.host, first, restarted=orders.restarted is not None)
        self._committed = first
        self._addresses: dict[int, Address] = {}
        self._coordinator: tuple[int, Address] | None = None  # of which term, and where it listens
        self._election: Election | None = None
        self._look = threading.Event()
        self._over = False
        self.replica = StateReplica(Path(orders.job_dir))
        self._acceptor = Acceptor(
            orders.job.hosts[orders.host].address, orders.job.ports, credentials, ELECTION, _Answers(self._answer),
            lambda member: None if member.role == "agent" else f"{member} is not an agent",
            self._congestion, refused=RejectionLog("the agent"),
        )  # fmt: skip
        threading.Thread(target=self._run, name="psctl elections", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where this agent listens for others."""
        return self._acceptor.address

    @property
    def configurations(self) -> tuple[Configuration, Configuration]:
        """The newest configuration that a majority is known to have accepted, and the newest one."""
        with self._lock:
            return self._committed, self._voter.configuration

    @property
    def abstains(self) -> bool:
        """Whether this agent was started again, and neither votes nor confirms yet."""
        return self._voter.abstains

    @property
    def leads(self) -> bool:
        """Whether this agent's host leads, as far as it knows."""
        with self._lock:
            return self._voter.configuration.leader == self._voter.me

    def coordinator_at(self, address: Address) -> None:
        """The coordinator of the newest configuration listens at this address."""
        with self._lock:
            self._coordinator = (self._voter.configuration.term, address)

    def close(self) -> None:
        """Stop listening, and vote no more."""
        self._over = True
        self._look.set()
        self._acceptor.close()

    # ---- what the leader sends, on the link's reader thread ----------------------------------------------------------

    def on_message(self, message: LeadershipMessage, payload: memoryview | None) -> JobMessage | None:
        """Take a message of the leader; return the answer."""
        match message:
            case MajorityMissed():
                self._look.set()
                return None
            case Leadership():
                return self._on_leadership(message)
            case _:
                with self._lock:
                    return self.replica.receive(message, payload)

    def _on_leadership(self, message: Leadership) -> JobMessage | None:
        with self._lock:
            before = self._voter.configuration
            confirms = not self._voter.abstains
            if self._voter.adopt(message.configuration):
                self._committed = message.committed
                confirms = self._voter.confirms(message.committed)
                self._addresses = {each.host: each.address for each in message.agents}
            known = self._voter.promise or self._voter.configuration
            if self._voter.configuration != before:
                self._put(LeaderFound(self._voter.configuration, self._address()))
            return LeadershipAccepted(*known.age) if confirms else None

    def _address(self) -> Address | None:
        """Where the coordinator of the newest configuration listens; under the lock."""
        found = self._coordinator
        return found[1] if found is not None and found[0] == self._voter.configuration.term else None

    # ---- questions of other agents, on the threads of their connections ----------------------------------------------

    def _answer(self, source: Member, message: WireMessage) -> WireMessage | None:
        match message:
            case VoteWanted():
                with self._lock:
                    return self._voter.vote(source.rank, message, is_leader_silent=self._is_leader_silent())
            case LeaderWanted():
                with self._lock:
                    return LeaderAt(self._voter.configuration, self._address(), self._voter.stands)
        return None

    def _is_leader_silent(self) -> bool:
        return self._silent_for() >= PATIENCE

    # ---- the thread that looks -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            asked = self._look.wait(LOOK)
            self._look.clear()
            if self._over or not (asked or self._is_leader_silent() or self._election is not None):
                continue
            with self._lock:
                wanted = self._wanted()
                asked_hosts, before = self._asked_hosts(), self._voter.promise
            for host, answer in self._ask_all(asked_hosts, [LeaderWanted(), *wanted]):
                with self._lock:
                    self._take(host, answer, wanted, before)
                    election = self._election
                    decided = election is not None and (election.is_won or election.wanted not in wanted)
                if decided:
                    self._look.set()  # the next round at once: hosts that do not answer are not waited for
                    break
            self._win()

    def _wanted(self) -> list[VoteWanted]:
        """Return what voters are to be asked; under the lock."""
        if self._election is not None and self._election.is_void:
            self._election = None
        if self._election is None and self._voter.may_stand and self._is_leader_silent():
            self._election = Election(self._voter)
        return [self._election.wanted] if self._election is not None else []

    def _asked_hosts(self) -> dict[int, Address]:
        """Return where the agents to ask listen: a candidate asks all, others the standby and a few; under the lock."""
        others = {host: at for host, at in self._addresses.items() if host != self._voter.me}
        if self._election is not None:
            return others
        promise = self._voter.promise
        likely = {self._voter.configuration.standby, None if promise is None else promise.leader}
        likely.update(random.sample(sorted(others), min(FEW, len(others))))
        return {host: at for host, at in others.items() if host in likely}

    def _take(self, host: int, answer: WireMessage, wanted: list[VoteWanted], before: Configuration | None) -> None:
        """Take an answer; under the lock."""
        if isinstance(answer, VoteGiven) and wanted and self._election is not None:
            self._election.on_vote(host, wanted[0], answer)
        if not isinstance(answer, LeaderAt):
            return
        if self._voter.promise != before and self._voter.promise is not None:
            return  # the vote was given after the question
        term = self._voter.configuration.term
        self._voter.on_configuration(host, answer.configuration, stands=answer.stands)
        if self._voter.configuration == answer.configuration:
            if answer.coordinator is not None and self._coordinator != (answer.configuration.term, answer.coordinator):
                self._coordinator = (answer.configuration.term, answer.coordinator)
                self._put(LeaderFound(answer.configuration, answer.coordinator))
            if answer.configuration.term > term:
                self._committed = answer.configuration
                self.replica.discard()

    def _win(self) -> None:
        with self._lock:
            if self._election is None or self._election.is_void or not self._election.is_won:
                return
            elected = self._election.win()
            self._election, self._committed = None, elected
        self._put(Elected(elected))

    def _ask_all(self, others: dict[int, Address], questions: list[WireMessage]) -> Iterator[tuple[int, WireMessage]]:
        """Ask agents at the same time; yield their answers of the next ROUND seconds as they come."""
        answers: queue.SimpleQueue[tuple[int, WireMessage]] = queue.SimpleQueue()
        for host, at in others.items():
            threading.Thread(target=self._ask, args=(host, at, questions, answers), daemon=True).start()
        until, left = time.monotonic() + ROUND, len(others) * len(questions)
        with contextlib.suppress(queue.Empty):
            while left:
                yield answers.get(timeout=max(0.0, until - time.monotonic()))
                left -= 1

    def _ask(
        self, host: int, at: Address, questions: list[WireMessage],
        answers: queue.SimpleQueue[tuple[int, WireMessage]],
    ) -> None:  # fmt: skip
        handler = _Question(len(questions), lambda answer: answers.put((host, answer)))
        try:
            peer = dial(at, self._credentials, Member("agent", host), ELECTION, handler, ANSWER, self._congestion)
        except ConnectionFailed:  # it is out of reach too, or has ended
            return
        for question in questions:
            peer.send(question)
        handler.answered.wait(ANSWER)
        peer.close("answered")


class _Answers(ConnectionHandler[WireMessage]):
    """Answers the questions of other agents."""

    def __init__(self, answer: Callable[[Member, WireMessage], WireMessage | None]) -> None:
        self._answer = answer

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        answer = self._answer(peer.member, message)
        if answer is not None:
            peer.send(answer)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        return  # it asks again


class _Question(ConnectionHandler[WireMessage]):
    """Waits for the answers of one agent."""

    def __init__(self, count: int, take: Callable[[WireMessage], None]) -> None:
        self._left, self._take = count, take
        self.answered = threading.Event()

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        self._take(message)
        self._left -= 1
        if not self._left:
            self.answered.set()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self.answered.set()
