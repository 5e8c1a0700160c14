"""A stand-in for the coordinator: it hands out assignments and cuts deaths as the store's contract says, and at random.

It is not the product. The job's own machine (coordinator.py) decides by balance and by what happened; this one moves
shards, fills replicas and replaces servers whenever the scenario says so, so the store meets sequences of assignments
that a balanced job would meet once in a year.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psctl.errors import ConnectionFailed
from psctl.job.assignment import Chains, assign, missing_copies, without
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import (
    CountUntil,
    LostWorkerClocks,
    Reassign,
    ShardCaughtUp,
    ShardHandedOver,
    WorkerGone,
)
from psctl.job.process_messages import ProcessExited, Register, StartProcess
from psctl.job.training_messages import (
    Decision,
    Go,
    Join,
    MemberReady,
    Prepare,
    Resume,
    Welcome,
    WorkerAt,
    WorkerListens,
    WorkersAt,
)
from psctl.ps.shards import cut, sizes
from psctl.types import Address, Assignment, Member, ServerAt, Shard
from tests.simulation.kernel import Broken, Process
from tests.simulation.network import End, Network
from tests.simulation.scenario import Scenario


class Director:
    """The coordinator's process, as far as the store is concerned."""

    def __init__(self, process: Process, network: Network, scenario: Scenario, layout: Any) -> None:
        self.process, self._network, self._scenario, self._layout = process, network, scenario, layout
        self._peers: dict[Member, End] = {}
        self.status = ""
        self.events: list[str] = []
        self.on_go: Callable[[], None] = lambda: None
        self.newest: dict[tuple[str, int], int] = {}
        self.hosts: dict[int, int] = {}  # server -> host
        self._registered: set[int] = set()
        self._prepared: set[int] = set()
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self.alive: dict[int, ServerAt] = {}
        self.deaths = 0
        self.epoch = -1
        self.shards: list[Shard] = []
        self.chains: Chains = []
        self.goal: Chains = []
        self._filled: set[tuple[int, int]] = set()
        self._since: dict[int, int] = {}  # shard -> epoch since which what is said of its copies counts
        self.awaited: dict[int, int] = {}  # shard -> former primary that hands it over
        self._dead: list[Member] = []  # workers whose death is to be cut
        self._held: dict[int, LostWorkerClocks] = {}
        self._cuts: dict[int, int] = {}  # rank -> the last clock that counts of its start before
        self._joining: set[int] = set()  # of them, those whose next start has no values yet
        self.members = tuple(range(len(scenario.workers)))
        self.on_cut: Callable[[int, int], None] = lambda rank, clock: None
        self._resume: dict[int, int] = {}
        self._listen: dict[int, Member] = {}
        self.address = network.listen(process, self, COORDINATION.union, self._allow)

    @property
    def over(self) -> bool:
        return self.status != ""

    def _allow(self, member: Member) -> str | None:
        newest = self.newest.get((member.role, member.rank), 0)
        return None if member.incarnation == newest else f"incarnation {newest} was started"

    # ---- the handler -----------------------------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        self._peers[peer.member] = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._peers.get(peer.member) is not peer:
            return
        del self._peers[peer.member]
        if peer.member.role == "agent":
            for (role, rank), incarnation in list(self.newest.items()):
                host = self.hosts.get(rank) if role == "server" else self._scenario.workers[rank]
                if host == peer.member.rank:
                    self._gone(Member(role, rank, incarnation), -9)  # type: ignore[arg-type]

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        member = peer.member
        match message:
            case Register():
                self._registered.add(member.rank)
                if len(self._registered) == self._scenario.hosts:
                    self._begin()
            case ProcessExited(member=gone, status=status):
                self._gone(gone, status)
            case Join():
                self._tell(member, Welcome(len(self._scenario.workers), 0, 0, 1.0, self._resumed(member)))
            case Prepare():
                self._prepare(member)
            case MemberReady(address=address):
                self._is_ready(member, address)
            case WorkerListens():
                self._listens(member)
            case ShardCaughtUp():
                self._caught_up(message)
            case ShardHandedOver():
                if self.awaited.get(message.shard) == member.rank:
                    del self.awaited[message.shard]
                    self._go_on()
            case LostWorkerClocks():
                self._held[member.rank] = message
                self._cut()
            case _:
                pass

    # ---- the start -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for rank, host in enumerate(self._scenario.workers):
            self._start(Member("worker", rank), host)
        for rank, host in enumerate(self._scenario.servers):
            self._start(Member("server", rank), host)

    def _start(self, member: Member, host: int) -> None:
        self.newest[member.role, member.rank] = member.incarnation
        if member.role == "server":
            self.hosts[member.rank] = host
        self._tell(Member("agent", host), self._order(member))

    def _order(self, member: Member) -> StartProcess:
        return StartProcess(member, len(self._scenario.workers), 0, {}, "", "", "")

    def _prepare(self, member: Member) -> None:
        self._prepared.add(member.rank)
        if self.epoch >= 0:
            self._tell(member, self._decision(member))
        self._decide()

    def _is_ready(self, member: Member, address: Address | None) -> None:
        if member.role == "server":
            assert address is not None
            self.alive[member.rank] = ServerAt(member.rank, member.incarnation, address)
            if self.epoch < 0:
                self._decide()
            else:
                self._tell(member, self._decision(member))
                for rank, clock in sorted(self._cuts.items()):  # it may come to lead a shard that waits for them
                    self._tell(member, CountUntil(rank, -1, clock))
                self._plan()
            return
        first = len(self._ready) < len(self._scenario.workers)
        self._ready.add(member.rank)
        if first and len(self._ready) == len(self._scenario.workers):
            self.on_go()
            for each in [one for one in self._peers if one.role != "agent"]:
                self._tell(each, Go())
        elif not first:
            self._joining.discard(member.rank)
            self._tell(member, Go())

    def _listens(self, member: Member) -> None:
        """A worker listens for others of its host: tell those who do of each other."""
        self._listen[member.rank] = member
        hosts, newest = self._scenario.workers, self.newest
        there = [one for one in self._listen.values() if newest["worker", one.rank] == one.incarnation]
        there = [one for one in there if hosts[one.rank] == hosts[member.rank]]
        told = WorkersAt([WorkerAt(one.rank, one.incarnation, None, b"secret") for one in there])
        for one in there:
            self._tell(one, told)

    def _decide(self) -> None:
        scenario = self._scenario
        whole = len(self._prepared) == len(scenario.workers) and len(self.alive) == len(scenario.servers)
        if self.epoch >= 0 or not whole:
            return
        self.shards = cut(self._layout, len(scenario.servers), scenario.cut_bytes)
        self.epoch = 0
        hosts = {rank: self.hosts[rank] for rank in self.alive}
        self.chains = self.goal = assign(sizes(self.shards), hosts, scenario.replicas)
        for member in [one for one in self._peers if one.role != "agent"]:
            self._tell(member, self._decision(member))

    def _resumed(self, member: Member) -> Resume | None:
        step = self._resume.get(member.rank) if member.role == "worker" else None
        return None if step is None else Resume("", step, {}, [])

    def _decision(self, member: Member) -> Decision:
        return Decision(
            "ps", self._scenario.update, self._layout, self.shards, self._assignment(), self._resumed(member),
            staleness=self._scenario.staleness, hosts=self._scenario.groups,
        )  # fmt: skip

    # ---- assignments -----------------------------------------------------------------------------------------------

    def _assignment(self) -> Assignment:
        filling = missing_copies(self.chains, self.goal)
        return Assignment(self.epoch, [list(chain) for chain in self.chains], filling, list(self.alive.values()))

    def _tell_all(self) -> None:
        self.epoch += 1
        self._network.world.say(lambda: f"assignment {self.epoch}: chains {self.chains} goal {self.goal}")
        for member in [one for one in self._peers if one.role in ("server", "worker")]:
            self._tell(member, Reassign(self._assignment()))

    def _plan(self) -> None:
        """Make a new goal: all shards where they are best, or (moved) somewhere else."""
        hosts = {rank: self.hosts[rank] for rank in self.alive}
        goal = assign(sizes(self.shards), hosts, self._scenario.replicas, self.chains)
        self._aim(goal)

    def settled(self) -> Chains:
        """Return the chains, empty where a hand-over is under way."""
        return [[] if shard in self.awaited else chain for shard, chain in enumerate(self.chains)]

    def move(self, shard: int, server: int) -> None:
        """Make `server` the primary of a shard, when that can be."""
        if self.epoch < 0 or self.over or server not in self.alive or self.awaited:
            return
        shard %= len(self.shards)
        goal = [list(chain) for chain in self.goal]
        chain = goal[shard]
        goal[shard] = [server, *[one for one in chain if one != server]][: len(chain)]
        self._aim(goal)

    def leave(self, server: int) -> None:
        """Move everything away from a server."""
        rest = {rank: self.hosts[rank] for rank in self.alive if rank != server}
        if self.epoch >= 0 and rest and not self.over and not self.awaited:
            self._aim(assign(sizes(self.shards), rest, min(self._scenario.replicas, len(rest) - 1), self.chains))

    def _aim(self, goal: Chains) -> None:
        for shard, (old, new) in enumerate(zip(self.goal, goal, strict=True)):
            if shard in self.awaited:
                goal[shard] = old
            elif old != new:
                self._since[shard] = self.epoch + 1
                self._filled = {one for one in self._filled if one[0] != shard}
        self.goal = goal
        self._switch()
        self._tell_all()

    def _caught_up(self, said: ShardCaughtUp) -> None:
        if said.epoch < self._since.get(said.shard, 0) or said.server not in self.goal[said.shard]:
            return
        self._filled.add((said.shard, said.server))
        if self._switch():
            self._tell_all()

    def _switch(self) -> bool:
        """Let chains be as the goal wants them where all new members are filled."""
        changed = False
        for shard, (now, goal) in enumerate(zip(self.chains, self.goal, strict=True)):
            there = {*now, *(server for at, server in self._filled if at == shard)}
            if now == goal or shard in self.awaited or self._dead or not set(goal) <= there:
                continue
            if now[0] != goal[0]:
                self.awaited[shard] = now[0]
            self.chains[shard] = list(goal)
            self._since[shard] = self.epoch + 1
            self._filled = {one for one in self._filled if one[0] != shard}
            changed = True
        return changed

    def _go_on(self) -> None:
        """A hand-over is done: what waited for it may come."""
        if self._dead and not self.awaited:
            self._ask()
        elif self._switch():
            self._tell_all()

    # ---- deaths ----------------------------------------------------------------------------------------------------

    def _gone(self, member: Member, status: int) -> None:
        if self.newest.get((member.role, member.rank)) != member.incarnation or self.over:
            return
        self.newest[member.role, member.rank] = member.incarnation + 1
        if member.role == "server":
            self._server_gone(member)
        elif status == 0:
            self._done.add(member.rank)
            if self._done >= set(self.members):
                self.status = "done"
        elif len(self._ready) < len(self._scenario.workers):
            self.status = "ended before it began"
        elif self._scenario.update == "worker" or self._scenario.workers[member.rank] in self._network.dark:
            self.status = "a worker cannot be replaced"
        else:
            self._dead.append(member)
            if not self.awaited and len(self._dead) == 1:
                self._ask()

    def _server_gone(self, member: Member) -> None:
        rank = member.rank
        self.deaths += 1
        self.alive.pop(rank, None)
        if self.epoch < 0:
            self.status = "ended before it began"
            return
        if self._joining:  # the dead server may have had the only copy of a clock that counts
            self.status = "inconsistent"
            return
        for shard, former in list(self.awaited.items()):
            if former == rank:
                del self.awaited[shard]
            elif self.chains[shard][0] == rank:
                del self.awaited[shard]  # the new primary is dead: the next of the chain leads at once
        self.chains = without(self.chains, [rank])
        for shard, former in list(self.awaited.items()):
            if self.chains[shard][:1] == [former]:
                del self.awaited[shard]  # it leads again
        for shard in range(len(self.shards)):
            self._since[shard] = self.epoch + 1
        self._filled.clear()
        if not all(self.chains):
            self.status = "no replica is left"
            return
        hosts = {each: self.hosts[each] for each in self.alive}
        self.goal = assign(sizes(self.shards), hosts, self._scenario.replicas, self.chains)
        for shard in self.awaited:
            self.goal[shard] = self.chains[shard]
        self._tell_all()
        if self._scenario.replaces:
            host = self.hosts[rank]
            if host not in self._network.dark:
                self._network.world.after(0.02, self._start, Member("server", rank, member.incarnation + 1), host)
        if self._dead and not self.awaited:
            self._ask()

    def _ask(self) -> None:
        gone = self._dead[0]
        self._held.clear()
        for server in self.alive.values():
            self._tell(_named(server), WorkerGone(gone.rank, gone.incarnation))

    def _cut(self) -> None:
        if not self._dead:
            return
        gone = self._dead[0]
        held = [one for one in self._held.values() if (one.rank, one.incarnation) == (gone.rank, gone.incarnation)]
        clocks = {shard: clock for one in held for shard, clock in one.clocks.items()}
        if len(held) < len(self.alive) and len(clocks) < len(self.shards):
            return
        if len(clocks) < len(self.shards):
            self._network.world.after(0.05, self._ask_again, gone)
            return
        last = min(clocks.values())
        newest = max(version for one in held for version in one.versions.values())
        separate = min([*clocks.values(), *(clock for one in held for clock in one.separate_clocks.values())])
        last = separate if newest <= separate + 1 else last
        if gone.rank == 0 or self._scenario.staleness is None:  # who joins needs what was left beside
            last = min(last, max(one.rank_state_clock for one in held) - 1)
        inconsistent = last < -1
        if self._scenario.staleness is not None:
            dying = {dead.rank for dead in self._dead}
            others = [rank for rank in self.members if rank not in dying | self._done]
            versions = {version for one in held for version in one.versions.values()}
            inconsistent |= newest > last + 1  # some shard will have applied what another can't
            if not any(self._cuts.get(rank, last - 1) < last for rank in others):
                inconsistent |= len(versions) > 1  # nobody is left who would order what is applied on some shards only
                last = newest - 1  # it is done again
        if inconsistent:
            self.status = "inconsistent"
            return
        self._dead.pop(0)
        self.on_cut(gone.rank, last)
        for server in self.alive.values():
            self._tell(_named(server), CountUntil(gone.rank, gone.incarnation, last))
        host = self._scenario.workers[gone.rank]
        self._cuts[gone.rank] = last
        self._joining.add(gone.rank)
        self._resume[gone.rank] = last + 1
        self._network.world.after(0.02, self._start, Member("worker", gone.rank, gone.incarnation + 1), host)
        self._go_on()

    def _ask_again(self, gone: Member) -> None:
        if self._dead and self._dead[0] == gone and not self.over:
            self._ask()

    def _tell(self, member: Member, message: Any) -> None:
        peer = self._peers.get(member)
        if peer is not None and self.process.alive:
            peer.send(message, urgent=True)


def _named(at: ServerAt) -> Member:
    return Member("server", at.rank, at.incarnation)


__all__ = ["Broken", "Director"]
