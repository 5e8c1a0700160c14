"""A simulated server: the shipped ServerMind, and what runtime's server and its desk do around it.

Thin on purpose. What is not covered: two reader threads inside one mind at once (calls run one after another, in every
order of arrival), and the pace at which checkpoint parts are streamed.
"""

from __future__ import annotations

from typing import Any

from psctl.errors import ConnectionFailed
from psctl.job import messages as say
from psctl.store.messages import Kinds
from psctl.store.server import Save, ServerMind
from psctl.store.shard import Send, Terms
from psctl.words import Address, Member

from .kernel import Process, Task, Until
from .network import End, Network


class Server:
    """One server process; the handler of its connection to the coordinator."""

    def __init__(self, process: Process, network: Network, coordinator: Address) -> None:
        self.process, self._network = process, network
        self.desk = Desk(self)
        self.mind: ServerMind | None = None
        self._coordinator: End | None = None
        self._welcome: say.Welcome | None = None
        self._decision: say.Decision | None = None
        self._address = network.listen(process, self.desk, Kinds, _workers_only)
        network.dial(process, coordinator, Member("coordinator", 0), self, lambda why: process.end(1))
        process.spawn(self._main())

    def _main(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        assert self._coordinator is not None
        self._coordinator.send(say.Join(1))
        self._coordinator.send(say.Ready(self._address))
        yield Until("the decision", lambda: self._decision is not None and self._welcome is not None)
        decision, welcome = self._decision, self._welcome
        assert decision is not None and welcome is not None
        base = decision.resume.step if decision.resume else 0
        terms = Terms(decision.layout, welcome.world, decision.update, base, decision.staleness)
        self.mind = ServerMind(terms, decision.shards, decision.assignment.owners, self.process.member.rank)
        self.desk.open()

    def save(self, save: Save) -> None:
        """Nobody asks for checkpoints yet."""

    # ---- the coordinator's handler -----------------------------------------------------------------------------

    def joined(self, peer: End) -> None:
        self._coordinator = peer

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        match message:
            case say.Welcome():
                self._welcome = message
            case say.Decision():
                self._decision = message
            case say.Leave():
                self.process.end(0)
            case _:
                pass

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        self.process.end(1)


class Desk:
    """The handler of all workers' connections, as runtime/server_desk.py."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peers: dict[int, End] = {}
        self._early: list[End] = []

    def open(self) -> None:
        """There is a mind: let those in that came early."""
        for peer in self._early:
            peer.hold(False)
            self._let_in(peer)
        self._early.clear()

    def joined(self, peer: End) -> None:
        if self._server.mind is None:
            peer.hold(True)
            self._early.append(peer)
        else:
            self._let_in(peer)

    def _let_in(self, peer: End) -> None:
        if peer.member.rank in self._peers:  # its old connection is not yet known to be over
            self._mind.lost(peer.member.rank)
        self._peers[peer.member.rank] = peer
        self._follow(self._mind.joined(peer.member.rank))

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self._mind.place(peer.member.rank, message, size)

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        size = 0 if payload is None else len(payload)
        self._follow(self._mind.received(peer.member.rank, message, size))

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        rank = peer.member.rank
        if self._peers.get(rank) is peer:
            del self._peers[rank]
            if self._server.mind is not None:
                self._mind.lost(rank)

    def _follow(self, instructions: Any) -> None:
        for instruction in instructions:
            if isinstance(instruction, Save):
                self._server.save(instruction)
                continue
            assert isinstance(instruction, Send)
            peer = self._peers.get(instruction.rank)
            if peer is not None:
                peer.send(instruction.message, instruction.payload)

    @property
    def _mind(self) -> ServerMind:
        assert self._server.mind is not None
        return self._server.mind


def _workers_only(member: Member) -> str | None:
    return None if member.role == "worker" else f"a server speaks to workers, not to {member}"
