"""A simulated coordinator and its agents: the shipped Mind of the job, with its instructions carried out.

Thin on purpose. What is not covered: the event log's file, checkpoint files (parts are kept in memory), the plan's
choice (always ps, with the scenario's servers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psctl.errors import ConnectionFailed
from psctl.job import events, instructions, messages
from psctl.job.assignment import assign
from psctl.job.coordinator import Mind
from psctl.job.instructions import Connected, ConnectionLost, Happening, Heard, Tick
from psctl.job.messages import AnyMessage, Failure, Finish, Resume, StartProcess, StopProcesses
from psctl.store.shards import cut, sizes
from psctl.words import Address, Member

from .kernel import Broken, Process, World
from .network import End, Network
from .scenario import Scenario, order

TICK = 0.1

ME = Member("coordinator", 0)

GRACE = 5.0


class Coordinator:
    """The coordinator's process; the handler of everyone's connections to it."""

    def __init__(self, process: Process, network: Network, scenario: Scenario, resume: Resume | None) -> None:
        self.process, self._network, self._scenario = process, network, scenario
        self._peers: dict[Member, End] = {}
        self.events: list[Any] = []
        self.status = ""
        self.on_go: Callable[[], None] = lambda: None
        self.mind = Mind(order(scenario), Address("10.0.0.1", 29500), GRACE, resume, 0.0, 1000.0)
        self.address = network.listen(process, self, AnyMessage, lambda member: self.mind.expects(member) or None)
        self._carry_out(self.mind.start(0.0))
        self._world.after(TICK, self._tick)

    @property
    def _world(self) -> World:
        return self.process.world

    @property
    def over(self) -> bool:
        return self.status != ""

    # ---- the handler -----------------------------------------------------------------------------------------------

    def joined(self, peer: End) -> None:
        self._peers[peer.member] = peer
        self._happens(Connected(peer.member))

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        self._happens(Heard(peer.member, message))

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._peers.get(peer.member) is peer:
            del self._peers[peer.member]
            self._happens(ConnectionLost(peer.member, error.message))

    def _tick(self) -> None:
        if self.process.alive and not self.over:
            self._world.after(TICK, self._tick)
            self._happens(Tick())

    def _happens(self, happening: Happening) -> None:
        self._carry_out(self.mind.handle(happening, self._world.now))

    # ---- instructions ------------------------------------------------------------------------------------------------

    def _carry_out(self, found: list[instructions.Instruction]) -> None:
        for instruction in found:
            self._do(instruction)

    def _do(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.Append(event=event):
                self.events.append(event)
                self._world.say(lambda: f"event: {event}")
            case instructions.Tell(member=member, message=message):
                self._tell(member, message)
            case instructions.Start(member=member, host=host, local_rank=local, environment=environment):
                self._tell(Member("agent", host), StartProcess(member, local, environment, "", "", ""))
            case instructions.MakePlan():
                event = events.Planned(
                    time=0, size=8, world=1, chosen="ps", reason="asked", decided=True, candidates=[]
                )
                scenario = self._scenario
                made = instructions.PlanMade("ps", scenario.update, list(scenario.servers), event)
                self._world.after(0.0, self._happens, made)
            case instructions.MakeShards(layout=layout, servers=servers):
                shards = cut(layout, servers, self._scenario.cut_bytes)
                chains = assign(sizes(shards), dict.fromkeys(range(servers), 0), replicas=0)
                made_shards = instructions.ShardsMade(shards, [chain[0] for chain in chains])
                self._world.after(0.0, self._happens, made_shards)
            case instructions.Close(status=status):
                self.status = status
                for host in range(self._scenario.hosts):
                    self._tell(Member("agent", host), Finish(status))
            case _:
                raise Broken("shell", f"the simulator does not carry out {type(instruction).__name__} yet")

    def _tell(self, member: Member, message: Any) -> None:
        if isinstance(message, messages.Go):
            self.on_go()
        peer = self._peers.get(member)
        if peer is not None:
            peer.send(message, urgent=True)


class Agent:
    """One host's agent: starts processes, tells of their ends, stops them."""

    def __init__(
        self, process: Process, network: Network, coordinator: Address, make: Callable[[Member, int], Process | None]
    ) -> None:
        self.process, self._make = process, make
        self._end: End | None = None
        self._children: dict[Member, Process] = {}
        network.dial(process, coordinator, ME, self, lambda why: process.end(1))

    def joined(self, peer: End) -> None:
        self._end = peer
        peer.send(messages.Register(f"h{self.process.host}", 1, 4, 1 << 30, 0))

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        world = self.process.world
        match message:
            case StartProcess(member=member):
                world.after(world.random.random() * 0.02, self._start, member)
            case StopProcesses():
                for child in list(self._children.values()):
                    world.after(world.random.random() * 0.02, child.end, -15)
            case _:
                pass

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        for child in list(self._children.values()):
            child.end(-9)

    def _start(self, member: Member) -> None:
        if not self.process.alive:
            return
        child = self._make(member, self.process.host)
        if child is not None:
            child.on_end = self._ended
            self._children[member] = child
            self._say(messages.Started(member, 1))

    def _ended(self, child: Process, status: int) -> None:
        if self.process.alive:
            self.process.world.after(self.process.world.random.random() * 0.05, self._told, child, status)

    def _told(self, child: Process, status: int) -> None:
        failure = None
        if status != 0:
            how = f"killed by signal {-status}" if status < 0 else "ConnectionFailed"
            failure = Failure(str(child.member), f"h{child.host}", status, self.process.world.now, 0, how, [], [])
        if self.process.alive:
            self._say(messages.Exited(child.member, status, failure))

    def _say(self, message: Any) -> None:
        if self._end is not None:
            self._end.send(message)
