"""One chain of replicas alone: the shipped Chain over the simulated network, with a log of pushes as its machine.

What the whole run (play.py) can do in a hundredth of a second this does in a thousandth, so rare sequences of deaths,
moves and broken connections come soon; and the window of unacknowledged entries is larger than one here, as for tables.
Clients put numbered entries, one after another; the log says which are in, in which order, on whom.
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
from tests.simulation.kernel import Broken, Process, World
from tests.simulation.network import End, Network
from tests.simulation.play import Outcome, judged

HORIZON = 300.0
"""Simulated seconds in which every run must be over."""


class Put(Message, frozen=True):
    """A client's entry; sent again until Got."""

    number: int


class Got(Message, frozen=True):
    """All of a client's entries up to this one are on all of the chain."""

    number: int


class Leads(Message, frozen=True):
    """I lead."""


class Holder:
    """A server with one shard."""

    def __init__(self, run: Chained, rank: int, incarnation: int, epoch: int) -> None:
        self.run, self.rank = run, rank
        self.process = Process(run.world, Member("server", rank, incarnation), rank)
        self.machine = Log()
        self.chain = ReplicaChain(
            0, rank, self.machine, lambda server: server in self.servers, epoch, run.window, staged=self.machine
        )
        self.servers: dict[int, End] = {}
        self.clients: dict[int, End] = {}
        self.owed: set[int] = set()
        self.address: Address = run.network.listen(self.process, self, BetweenServers | Put | Got | Leads, self._allow)
        self._alive: dict[int, int] = {}  # rank -> incarnation
        self._dialling: set[int] = set()

    def _allow(self, member: Member) -> str | None:
        if member.role == "server" and self._alive.get(member.rank) != member.incarnation:
            return "not of the newest assignment"
        return None

    def assigned(self, epoch: int, chain: list[int], copies: list[int], alive: dict[int, int]) -> None:
        """The director's word."""
        self._alive = alive
        for rank, end in list(self.servers.items()):
            if alive.get(rank) != end.member.incarnation:
                end.drop("it is dead")
        led = self.chain.leads
        self._follow(self.chain.on_assignment(epoch, chain, copies, lambda rank: rank in alive))
        self._after(led)
        for rank in alive:
            self._dial(rank)

    def begin(self) -> None:
        """This is where the log begins, as the start values do: until all have them they are sent to whoever leads."""
        leads = self.chain.leads or self.chain.role == "demoting"
        if leads and self.machine.version is None and self.process.alive:
            self.machine.version = 0
            self._follow(self.chain.on_first_version())
            self._advance()

    def _dial(self, rank: int) -> None:
        other = self.run.holders.get(rank)
        wanted = rank < self.rank and rank in self._alive and rank not in self.servers and rank not in self._dialling
        if not (wanted and self.process.alive) or other is None:
            return
        self._dialling.add(rank)
        member = Member("server", rank, self._alive[rank])
        self.run.network.dial(self.process, other.address, member, self, lambda why: self._failed(rank))

    def _failed(self, rank: int) -> None:
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
            peer.drop("you are dead")
            return
        peers[rank] = peer
        led = self.chain.leads
        if peers is self.servers:
            self._follow(self.chain.on_server_connected(rank))
            self._after(led)
        elif led:
            peer.send(Leads())

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        rank = peer.member.rank
        return self.chain.receive_buffer_for(rank, message, size) if self.servers.get(rank) is peer else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        rank = peer.member.rank
        if isinstance(message, Put):
            self._put(rank, message.number)
        elif self.servers.get(rank) is peer:
            led = self.chain.leads
            self._follow(self.chain.on_message(rank, message, 0 if payload is None else len(payload)))
            self._after(led)

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        rank = peer.member.rank
        peers = self.servers if peer.member.role == "server" else self.clients
        if peers.get(rank) is peer:
            del peers[rank]
            if peers is self.servers:
                self.chain.on_server_disconnected(rank)
                self._after(self.chain.leads)
                self.run.world.after(0.05, self._dial, rank)

    # ---- the primary -------------------------------------------------------------------------------------------------

    def _put(self, client: int, number: int) -> None:
        if not self.chain.leads:
            return
        if number > self.machine.last(client):
            self.machine.pending[client] = number
        self.owed.add(client)
        self._after(True)

    def _after(self, led: bool) -> None:
        if self.chain.leads and self.machine.version is None:
            self.run.world.after(0.01, self.begin)
        if self.chain.leads and not led:
            self.owed = set(self.clients)
            for end in list(self.clients.values()):
                end.send(Leads())
        if self.chain.role in ("none", "copying", "member"):
            self.machine.pending.clear()
        self._advance()

    def _advance(self) -> None:
        chain, machine = self.chain, self.machine
        if not chain.leads or machine.version is None:
            return
        while True:
            self._settle()
            if not (machine.pending and chain.may_append):
                return
            client = min(machine.pending)
            payload = memoryview(msgspec.msgpack.encode((client, machine.pending.pop(client))))
            number = machine.version
            machine.apply(b"", payload, kept=chain.keeps_payloads)
            self.owed.add(client)
            if chain.keeps_payloads:
                machine.rooms += 1
                self._follow(chain.append(number, b"", payload))

    def _settle(self) -> None:
        """Tell clients what is on all of the chain."""
        there = self.machine.entries[: max(0, self.chain.acknowledged)]
        for client in sorted(self.owed):
            done = max((number for who, number in there if who == client), default=-1)
            if client in self.clients and done >= 0:
                self.clients[client].send(Got(done))
            if done == self.machine.last(client) and client not in self.machine.pending:
                self.owed.discard(client)

    def _follow(self, outputs: Any) -> None:
        for output in outputs:
            match output:
                case ToServer(server=server, message=message, payload=payload):
                    if server in self.servers:
                        self.servers[server].send(message, payload)
                case ReplicaCaughtUp() | LeadMoved():
                    self.run.tell(self.rank, output)


class Client:
    """Puts its numbers one after another, to whoever leads."""

    def __init__(self, run: Chained, rank: int) -> None:
        self.run, self.rank, self.next = run, rank, 0
        self.process = Process(run.world, Member("worker", rank), 100 + rank)
        self.ends: dict[int, End] = {}
        self._leading: set[int] = set()

    def assigned(self, alive: dict[int, int]) -> None:
        for rank, end in list(self.ends.items()):
            if alive.get(rank) != end.member.incarnation:
                end.drop("it is dead")
        for rank in alive:
            self.dial(rank)

    def dial(self, rank: int) -> None:
        holder = self.run.holders.get(rank)
        if rank in self.ends or holder is None or rank not in self.run.alive or self.next >= self.run.entries:
            return
        self.run.network.dial(self.process, holder.address, holder.process.member, self, lambda why: self._later(rank))

    def _later(self, rank: int) -> None:
        self.run.world.after(0.05, self.dial, rank)

    def on_connected(self, peer: End) -> None:
        if peer.member.rank in self.ends:
            peer.drop("one is enough")
            return
        self.ends[peer.member.rank] = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self.ends.get(peer.member.rank) is not peer:
            return
        match message:
            case Leads():
                self._leading.add(peer.member.rank)
                if self.next < self.run.entries:
                    peer.send(Put(self.next))
            case Got(number=number) if number >= self.next:
                self.run.acknowledged[self.rank] = number
                self.next = number + 1
                if self.next < self.run.entries:
                    for rank in sorted(self._leading & self.ends.keys()):
                        self.ends[rank].send(Put(self.next))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self.ends.get(peer.member.rank) is peer:
            del self.ends[peer.member.rank]
            self._leading.discard(peer.member.rank)
            self._later(peer.member.rank)


class Chained:
    """One run of one chain; the director of its assignments is here too."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        chance = self.chance = random.Random(seed * 40503 + 7)
        self.world = World(seed, traced=traced)
        self.network = Network(self.world, chance.choice((0.001, 0.01, 0.05)), chance.choice((0.0, 0.3)))
        self.window, self.entries = chance.choice((1, 1, 3)), chance.choice((5, 10, 20))
        count = chance.choice((1, 2, 3, 4))
        self.replicas = min(count - 1, chance.choice((0, 1, 1, 2, 3)))
        self.alive = dict.fromkeys(range(count), 0)
        self.acknowledged: dict[int, int] = {}
        self.deaths, self.epoch, self.ended = 0, 0, ""
        self.chain = list(range(count))[: self.replicas + 1]
        self.goal, self.filled, self.since = list(self.chain), set[int](), 0
        self.awaited: int | None = None
        self.holders: dict[int, Holder] = {}
        self._mail: dict[object, deque[Callable[[], None]]] = {}
        for rank in self.alive:
            self._begins(rank, 0)
        self.clients = [Client(self, rank) for rank in range(chance.choice((1, 2, 3)))]
        self._tell_all()
        for _ in range(chance.choice((0, 1, 2, 3, 5, 8))):
            self.world.at(chance.random() * 0.5, self._strike)

    def run(self) -> None:
        """Play it to its end."""
        if not self.world.run(self._over, HORIZON):
            roles = {
                rank: (one.chain.role, one.machine.version, one.chain.followers) for rank, one in self.live.items()
            }
            raise Broken("hangs", f"chain {self.chain} goal {self.goal} awaited {self.awaited} {roles}")
        if self.ended:
            if self.deaths <= self.replicas:
                raise Broken("survives", f"{self.ended} after {self.deaths} deaths with {self.replicas} replicas")
            return
        self._judge()

    @property
    def live(self) -> dict[int, Holder]:
        return {rank: one for rank, one in self.holders.items() if rank in self.alive and one.process.alive}

    def _over(self) -> bool:
        done = all(client.next >= self.entries for client in self.clients) and self.awaited is None
        there = [self.live[rank].chain for rank in self.chain if rank in self.live]
        quiet = done and all(chain.settled and chain.epoch == self.epoch for chain in there)
        return bool(self.ended) or (quiet and all(rank in self.live for rank in self.chain))

    def _judge(self) -> None:
        logs = {rank: self.live[rank].machine.entries for rank in self.chain}
        for rank, log in logs.items():
            for client in range(len(self.clients)):
                numbers = [number for who, number in log if who == client]
                if numbers != list(range(self.entries)):
                    raise Broken("once", f"server/{rank} has of client {client}: {numbers}")
            if log != logs[self.chain[0]]:
                raise Broken("replicas", f"server/{rank} has another log than server/{self.chain[0]}")
        leaders = [rank for rank, one in self.live.items() if one.chain.leads and one.chain.epoch == self.epoch]
        if leaders != self.chain[:1]:
            raise Broken("one primary", f"{leaders} lead where {self.chain} is the chain")
        for rank, one in self.live.items():
            if one.machine.rooms > self.window + 2 * len(self.alive) + 8:
                raise Broken("finite", f"server/{rank} keeps {one.machine.rooms} payloads")

    # ---- the director ------------------------------------------------------------------------------------------------

    def _begins(self, rank: int, incarnation: int) -> None:
        holder = Holder(self, rank, incarnation, -1)
        if self.chance.random() < 0.5:
            holder.process.dies_at = 5 + int(self.chance.random() ** 2 * 120)
        holder.process.on_end = lambda process, status: self._deliver("director", lambda: self._dead(rank, incarnation))
        self.holders[rank] = holder

    def _deliver(self, to: object, act: Callable[[], None]) -> None:
        """Hand something over later, in order."""
        box = self._mail.setdefault(to, deque())
        box.append(act)
        self.world.after(self.network.latency(), lambda: box.popleft()())

    def tell(self, rank: int, said: ReplicaCaughtUp | LeadMoved) -> None:
        """A server says something to the director."""
        self._deliver(("from", rank), lambda: self._heard(rank, said))

    def _tell_all(self) -> None:
        self.epoch += 1
        epoch, chain, alive = self.epoch, list(self.chain), dict(self.alive)
        copies = [rank for rank in self.goal if rank not in chain]
        self.world.say(lambda: f"assignment {epoch}: {chain} fill {copies} alive {alive}")
        for rank in alive:
            holder = self.holders[rank]

            def tell(holder: Holder = holder) -> None:
                if holder.process.alive:
                    holder.assigned(epoch, chain, copies, alive)

            self._deliver(("to", rank, alive[rank]), tell)
        for client in self.clients:
            self._deliver(("client", client.rank), lambda client=client: client.assigned(alive))  # type: ignore[misc]

    def _strike(self) -> None:
        kind, ranks = self.chance.choice(("goal", "goal", "snap", "snap", "join")), sorted(self.alive)
        if self.ended or not ranks:
            return
        if kind == "snap":
            a = Member("server", self.chance.choice(ranks))
            b = self.chance.choice(
                [Member("server", rank) for rank in ranks] + [one.process.member for one in self.clients]
            )
            for connection in self.network.connections:
                ends = {(end.owner.member.role, end.owner.member.rank) for end in connection.ends}
                if ends == {(a.role, a.rank), (b.role, b.rank)}:
                    connection.snap(self.network.notice())
        elif kind == "goal" and self.awaited is None:
            self._aim(self.chance.sample(ranks, min(len(ranks), self.replicas + 1)))
        elif kind == "join":
            rank = max(self.holders) + 1
            self._begins(rank, 0)
            self.alive[rank] = 0
            self._aim(self.goal)

    def _aim(self, goal: list[int]) -> None:
        if goal != self.goal:
            self.since = self.epoch + 1
            self.filled.clear()
        self.goal = goal
        self._switch()
        self._tell_all()

    def _switch(self) -> bool:
        if self.awaited is not None or self.goal == self.chain or not set(self.goal) <= {*self.chain, *self.filled}:
            return False
        if self.goal[0] != self.chain[0]:
            self.awaited = self.chain[0]
        self.chain, self.since = list(self.goal), self.epoch + 1
        self.filled.clear()
        return True

    def _heard(self, rank: int, said: ReplicaCaughtUp | LeadMoved) -> None:
        if self.ended:
            return
        if isinstance(said, LeadMoved):
            if self.awaited == rank:
                self.awaited = None
                if self._switch():
                    self._tell_all()
        elif said.epoch >= self.since and said.server in self.goal and said.server in self.alive:
            self.filled.add(said.server)
            if self._switch():
                self._tell_all()

    def _dead(self, rank: int, incarnation: int) -> None:
        if self.alive.get(rank) != incarnation or self.ended:
            return
        self.deaths += 1
        del self.alive[rank]
        if self.awaited == rank:
            self.awaited = None
        elif self.chain[:1] == [rank]:
            self.awaited = None  # the new primary is dead: the next of the chain leads at once
        self.chain = [one for one in self.chain if one != rank]
        if self.chain[:1] == [self.awaited]:
            self.awaited = None  # it leads again
        if not self.chain:
            self.ended = "no replica is left"
            return
        self.since = self.epoch + 1
        self.filled.clear()
        rest = [one for one in sorted(self.alive) if one not in self.chain]
        self.goal = (self.chain + rest)[: self.replicas + 1] if self.awaited is None else list(self.chain)
        self._tell_all()
        if self.chance.random() < 0.7:
            self.world.after(0.02 + self.chance.random() * 0.1, self._again, rank, incarnation + 1)

    def _again(self, rank: int, incarnation: int) -> None:
        if not self.ended:
            self._begins(rank, incarnation)
            self.alive[rank] = incarnation
            rest = [one for one in sorted(self.alive) if one not in self.chain]
            self._aim((self.chain + rest)[: self.replicas + 1] if self.awaited is None else self.goal)


def play_chain(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed of the chain alone; as `play`."""
    one = Chained(seed, traced=traced)
    outcome = judged(seed, one.run)
    outcome.seconds, outcome.happened = one.world.now, one.world.happened
    outcome.read, outcome.trace = sum(client.next for client in one.clients), one.world.trace or []
    return outcome
