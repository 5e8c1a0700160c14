"""A simulation of one chain of replicas: the shipped ReplicaChain on the simulated network.

A run takes a tenth of the time of a run of the store (store_run.py), so rare sequences of losses, moves and broken
connections are found sooner; and several entries may be unacknowledged, as with tables. Clients put numbered entries
one after another, and each server's log has the entries in the order of application.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from psctl.errors import ConnectionFailed
from psctl.ps.messages import BetweenServers, Message
from psctl.ps.outputs import LeadMoved, ReplicaCaughtUp, ToServer
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.types import Address, Member
from tests.ps.log import Log
from tests.simulation.kernel import Process, Violation, World
from tests.simulation.network import End, Network
from tests.simulation.outcome import Outcome, outcome_of

TIME_LIMIT = 300.0
"""Simulated seconds within which every run must end."""


class Put(Message, frozen=True):
    """A client's entry; sent again until it is acknowledged."""

    number: int


class Acknowledged(Message, frozen=True):
    """All entries of a client up to this one are on all replicas."""

    number: int


class Leading(Message, frozen=True):
    """The sender leads the chain."""


class ChainServer:
    """A server with one shard; the handler of its connections."""

    def __init__(self, run: ChainRun, rank: int, incarnation: int, epoch: int) -> None:
        self.run, self.rank = run, rank
        self.process = Process(run.world, Member("server", rank, incarnation), rank)
        self.machine = Log()
        self.chain = ReplicaChain(
            0, rank, self.machine, lambda server: server in self.servers, epoch, run.window, staged=self.machine
        )
        self.servers: dict[int, End] = {}
        self.clients: dict[int, End] = {}
        self.unacknowledged: set[int] = set()
        self.address: Address = run.network.listen(
            self.process, self, BetweenServers | Put | Acknowledged | Leading, self._allow
        )
        self._alive: dict[int, int] = {}  # rank -> incarnation
        self._dialling: set[int] = set()

    def _allow(self, member: Member) -> str | None:
        if member.role == "server" and self._alive.get(member.rank) != member.incarnation:
            return "not of the newest assignment"
        return None

    def on_assignment(self, epoch: int, chain: list[int], copies: list[int], alive: dict[int, int]) -> None:
        """Take an assignment."""
        self._alive = alive
        for rank, end in list(self.servers.items()):
            if alive.get(rank) != end.member.incarnation:
                end.drop("it was declared lost")
        was_leading = self.chain.leads
        self._carry_out(self.chain.on_assignment(epoch, chain, copies, lambda rank: rank in alive))
        self._on_chain_changed(was_leading)
        for rank in alive:
            self._dial(rank)

    def start_log(self) -> None:
        """Begin the log at version 0; as with start values, this is repeated until the primary has a version."""
        leads = self.chain.leads or self.chain.role == "demoting"
        if leads and self.machine.version is None and self.process.alive:
            self.machine.version = 0
            self._carry_out(self.chain.on_first_version())
            self._advance()

    def _dial(self, rank: int) -> None:
        other = self.run.servers_by_rank.get(rank)
        wanted = rank < self.rank and rank in self._alive and rank not in self.servers and rank not in self._dialling
        if not (wanted and self.process.alive) or other is None:
            return
        self._dialling.add(rank)
        member = Member("server", rank, self._alive[rank])
        self.run.network.dial(self.process, other.address, member, self, lambda why: self._on_dial_failed(rank))

    def _on_dial_failed(self, rank: int) -> None:
        self._dialling.discard(rank)
        self.run.world.after(0.05, self._dial, rank)

    # ---- the handler -------------------------------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        rank = peer.member.rank
        peers = self.servers if peer.member.role == "server" else self.clients
        self._dialling.discard(rank)
        if rank in peers:
            peers[rank].drop("you connected again")
        if self._allow(peer.member) is not None:
            peer.drop("you were declared lost")
            return
        peers[rank] = peer
        was_leading = self.chain.leads
        if peers is self.servers:
            self._carry_out(self.chain.on_server_connected(rank))
            self._on_chain_changed(was_leading)
        elif was_leading:
            peer.send(Leading())

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        rank = peer.member.rank
        return self.chain.receive_buffer_for(rank, message, size) if self.servers.get(rank) is peer else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        rank = peer.member.rank
        if isinstance(message, Put):
            self._put(rank, message.number)
        elif self.servers.get(rank) is peer:
            was_leading = self.chain.leads
            self._carry_out(self.chain.on_message(rank, message, 0 if payload is None else len(payload)))
            self._on_chain_changed(was_leading)

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        rank = peer.member.rank
        peers = self.servers if peer.member.role == "server" else self.clients
        if peers.get(rank) is peer:
            del peers[rank]
            if peers is self.servers:
                self.chain.on_server_disconnected(rank)
                self._on_chain_changed(self.chain.leads)
                self.run.world.after(0.05, self._dial, rank)

    # ---- the primary -------------------------------------------------------------------------------------------------

    def _put(self, client: int, number: int) -> None:
        if not self.chain.leads:
            return
        if number > self.machine.last(client):
            self.machine.pending[client] = number
        self.unacknowledged.add(client)
        self._on_chain_changed(True)

    def _on_chain_changed(self, was_leading: bool) -> None:
        if self.chain.leads and self.machine.version is None:
            self.run.world.after(0.01, self.start_log)
        if self.chain.leads and not was_leading:
            self.unacknowledged = set(self.clients)
            for end in list(self.clients.values()):
                end.send(Leading())
        if self.chain.role in ("none", "copying", "member"):
            self.machine.pending.clear()
        self._advance()

    def _advance(self) -> None:
        chain, machine = self.chain, self.machine
        if not chain.leads or machine.version is None:
            return
        while True:
            self._acknowledge()
            if not (machine.pending and chain.may_append):
                return
            client = min(machine.pending)
            payload = memoryview(msgspec.msgpack.encode((client, machine.pending.pop(client))))
            number = machine.version
            machine.apply(b"", payload, kept=chain.keeps_payloads)
            self.unacknowledged.add(client)
            if chain.keeps_payloads:
                machine.rooms += 1
                self._carry_out(chain.append(number, b"", payload))

    def _acknowledge(self) -> None:
        """Acknowledge to clients the entries that all replicas have."""
        there = self.machine.entries[: max(0, self.chain.acknowledged)]
        for client in sorted(self.unacknowledged):
            done = max((number for sender, number in there if sender == client), default=-1)
            if client in self.clients and done >= 0:
                self.clients[client].send(Acknowledged(done))
            if done == self.machine.last(client) and client not in self.machine.pending:
                self.unacknowledged.discard(client)

    def _carry_out(self, outputs: Any) -> None:
        for output in outputs:
            match output:
                case ToServer(server=server, message=message, payload=payload):
                    if server in self.servers:
                        self.servers[server].send(message, payload)
                case ReplicaCaughtUp() | LeadMoved():
                    self.run.report(self.rank, output)


class Client:
    """Puts numbered entries, one after another, to the primary."""

    def __init__(self, run: ChainRun, rank: int) -> None:
        self.run, self.rank, self.next = run, rank, 0
        self.process = Process(run.world, Member("worker", rank), 100 + rank)
        self.ends: dict[int, End] = {}
        self._leading: set[int] = set()

    def on_assignment(self, alive: dict[int, int]) -> None:
        for rank, end in list(self.ends.items()):
            if alive.get(rank) != end.member.incarnation:
                end.drop("it was declared lost")
        for rank in alive:
            self.dial(rank)

    def dial(self, rank: int) -> None:
        server = self.run.servers_by_rank.get(rank)
        if rank in self.ends or server is None or rank not in self.run.alive or self.next >= self.run.entries:
            return
        self.run.network.dial(self.process, server.address, server.process.member, self, lambda why: self._retry(rank))

    def _retry(self, rank: int) -> None:
        self.run.world.after(0.05, self.dial, rank)

    def on_connected(self, peer: End) -> None:
        if peer.member.rank in self.ends:
            peer.drop("there is a connection already")
            return
        self.ends[peer.member.rank] = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self.ends.get(peer.member.rank) is not peer:
            return
        match message:
            case Leading():
                self._leading.add(peer.member.rank)
                if self.next < self.run.entries:
                    peer.send(Put(self.next))
            case Acknowledged(number=number) if number >= self.next:
                self.run.acknowledged[self.rank] = number
                self.next = number + 1
                if self.next < self.run.entries:
                    for rank in sorted(self._leading & self.ends.keys()):
                        self.ends[rank].send(Put(self.next))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self.ends.get(peer.member.rank) is peer:
            del self.ends[peer.member.rank]
            self._leading.discard(peer.member.rank)
            self._retry(peer.member.rank)


class ChainRun:
    """One run of one chain, with its coordinator."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        rng = self.rng = random.Random(seed * 40503 + 7)
        self.world = World(seed, traced=traced)
        self.network = Network(self.world, rng.choice((0.001, 0.01, 0.05)), rng.choice((0.0, 0.3)))
        self.window, self.entries = rng.choice((1, 1, 3)), rng.choice((5, 10, 20))
        count = rng.choice((1, 2, 3, 4))
        self.replicas = min(count - 1, rng.choice((0, 1, 1, 2, 3)))
        self.alive = dict.fromkeys(range(count), 0)
        self.acknowledged: dict[int, int] = {}
        self.deaths, self.epoch, self.failure = 0, 0, ""
        self.chain = list(range(count))[: self.replicas + 1]
        self.goal, self.caught_up, self.goal_epoch = list(self.chain), set[int](), 0
        self.handing_over: int | None = None
        self.servers_by_rank: dict[int, ChainServer] = {}
        self._queues: dict[object, deque[Callable[[], None]]] = {}
        for rank in self.alive:
            self._start_server(rank, 0)
        self.clients = [Client(self, rank) for rank in range(rng.choice((1, 2, 3)))]
        self._send_assignment()
        for _ in range(rng.choice((0, 1, 2, 3, 5, 8))):
            self.world.at(rng.random() * 0.5, self._inject_fault)

    def run(self) -> None:
        """Run the chain to its end.

        Raises:
            Violation: an invariant does not hold.
        """
        if not self.world.run(self._over, TIME_LIMIT):
            roles = {
                rank: (one.chain.role, one.machine.version, one.chain.followers) for rank, one in self.live.items()
            }
            raise Violation("hangs", f"chain {self.chain} goal {self.goal} hands over from {self.handing_over} {roles}")
        if self.failure:
            if self.deaths <= self.replicas:
                raise Violation("survives", f"{self.failure} after {self.deaths} deaths with {self.replicas} replicas")
            return
        self._check_end()

    @property
    def live(self) -> dict[int, ChainServer]:
        return {rank: one for rank, one in self.servers_by_rank.items() if rank in self.alive and one.process.alive}

    def _over(self) -> bool:
        done = all(client.next >= self.entries for client in self.clients) and self.handing_over is None
        there = [self.live[rank].chain for rank in self.chain if rank in self.live]
        quiet = done and all(chain.settled and chain.epoch == self.epoch for chain in there)
        return bool(self.failure) or (quiet and all(rank in self.live for rank in self.chain))

    def _check_end(self) -> None:
        logs = {rank: self.live[rank].machine.entries for rank in self.chain}
        for rank, log in logs.items():
            for client in range(len(self.clients)):
                numbers = [number for sender, number in log if sender == client]
                if numbers != list(range(self.entries)):
                    raise Violation("once", f"server/{rank} has of client {client}: {numbers}")
            if log != logs[self.chain[0]]:
                raise Violation("replicas", f"server/{rank} has another log than server/{self.chain[0]}")
        leaders = [rank for rank, one in self.live.items() if one.chain.leads and one.chain.epoch == self.epoch]
        if leaders != self.chain[:1]:
            raise Violation("one primary", f"servers {leaders} lead; the chain is {self.chain}")
        for rank, one in self.live.items():
            if one.machine.rooms > self.window + 2 * len(self.alive) + 8:
                raise Violation("finite", f"server/{rank} keeps {one.machine.rooms} payloads")

    # ---- the coordinator ---------------------------------------------------------------------------------------------

    def _start_server(self, rank: int, incarnation: int) -> None:
        server = ChainServer(self, rank, incarnation, -1)
        if self.rng.random() < 0.5:
            server.process.dies_at = 5 + int(self.rng.random() ** 2 * 120)
        server.process.on_end = lambda process, status: self._deliver(
            "coordinator", lambda: self._on_server_lost(rank, incarnation)
        )
        self.servers_by_rank[rank] = server

    def _deliver(self, to: object, act: Callable[[], None]) -> None:
        """Call `act` after the latency of a message, in order of the calls for one receiver."""
        queue = self._queues.setdefault(to, deque())
        queue.append(act)
        self.world.after(self.network.latency(), lambda: queue.popleft()())

    def report(self, rank: int, message: ReplicaCaughtUp | LeadMoved) -> None:
        """Deliver a server's report to the coordinator."""
        self._deliver(("from", rank), lambda: self._on_report(rank, message))

    def _send_assignment(self) -> None:
        self.epoch += 1
        epoch, chain, alive = self.epoch, list(self.chain), dict(self.alive)
        copies = [rank for rank in self.goal if rank not in chain]
        self.world.log(lambda: f"assignment {epoch}: chain {chain}, copies {copies}, alive {alive}")
        for rank in alive:
            server = self.servers_by_rank[rank]

            def deliver(server: ChainServer = server) -> None:
                if server.process.alive:
                    server.on_assignment(epoch, chain, copies, alive)

            self._deliver(("to", rank, alive[rank]), deliver)
        for client in self.clients:
            self._deliver(("client", client.rank), lambda client=client: client.on_assignment(alive))  # type: ignore[misc]

    def _inject_fault(self) -> None:
        kind, ranks = self.rng.choice(("goal", "goal", "disconnect", "disconnect", "join")), sorted(self.alive)
        if self.failure or not ranks:
            return
        if kind == "disconnect":
            a = Member("server", self.rng.choice(ranks))
            b = self.rng.choice(
                [Member("server", rank) for rank in ranks] + [one.process.member for one in self.clients]
            )
            for connection in self.network.connections:
                ends = {(end.owner.member.role, end.owner.member.rank) for end in connection.ends}
                if ends == {(a.role, a.rank), (b.role, b.rank)}:
                    connection.disconnect(self.network.detection_delay())
        elif kind == "goal" and self.handing_over is None:
            self._set_goal(self.rng.sample(ranks, min(len(ranks), self.replicas + 1)))
        elif kind == "join":
            rank = max(self.servers_by_rank) + 1
            self._start_server(rank, 0)
            self.alive[rank] = 0
            self._set_goal(self.goal)

    def _set_goal(self, goal: list[int]) -> None:
        if goal != self.goal:
            self.goal_epoch = self.epoch + 1
            self.caught_up.clear()
        self.goal = goal
        self._switch()
        self._send_assignment()

    def _switch(self) -> bool:
        if (
            self.handing_over is not None
            or self.goal == self.chain
            or not set(self.goal) <= {*self.chain, *self.caught_up}
        ):
            return False
        if self.goal[0] != self.chain[0]:
            self.handing_over = self.chain[0]
        self.chain, self.goal_epoch = list(self.goal), self.epoch + 1
        self.caught_up.clear()
        return True

    def _on_report(self, rank: int, report: ReplicaCaughtUp | LeadMoved) -> None:
        if self.failure:
            return
        if isinstance(report, LeadMoved):
            if self.handing_over == rank:
                self.handing_over = None
                if self._switch():
                    self._send_assignment()
        elif report.epoch >= self.goal_epoch and report.server in self.goal and report.server in self.alive:
            self.caught_up.add(report.server)
            if self._switch():
                self._send_assignment()

    def _on_server_lost(self, rank: int, incarnation: int) -> None:
        if self.alive.get(rank) != incarnation or self.failure:
            return
        self.deaths += 1
        del self.alive[rank]
        if self.handing_over == rank:
            self.handing_over = None
        elif self.chain[:1] == [rank]:
            self.handing_over = None  # the new primary is lost: the next server of the chain leads at once
        self.chain = [one for one in self.chain if one != rank]
        if self.chain[:1] == [self.handing_over]:
            self.handing_over = None  # the old primary leads again
        if not self.chain:
            self.failure = "no replica is left"
            return
        self.goal_epoch = self.epoch + 1
        self.caught_up.clear()
        rest = [one for one in sorted(self.alive) if one not in self.chain]
        self.goal = (self.chain + rest)[: self.replicas + 1] if self.handing_over is None else list(self.chain)
        self._send_assignment()
        if self.rng.random() < 0.7:
            self.world.after(0.02 + self.rng.random() * 0.1, self._restart_server, rank, incarnation + 1)

    def _restart_server(self, rank: int, incarnation: int) -> None:
        if not self.failure:
            self._start_server(rank, incarnation)
            self.alive[rank] = incarnation
            rest = [one for one in sorted(self.alive) if one not in self.chain]
            self._set_goal((self.chain + rest)[: self.replicas + 1] if self.handing_over is None else self.goal)


def run_chain(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed."""
    one = ChainRun(seed, traced=traced)
    outcome = outcome_of(seed, one.run)
    outcome.seconds, outcome.event_count = one.world.now, one.world.event_count
    outcome.values_checked, outcome.trace = sum(client.next for client in one.clients), one.world.trace or []
    return outcome
