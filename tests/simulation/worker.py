"""A simulated worker: the shipped ClientMind, and the order of calls that runtime's client, served and session make.

Where workers share a host, also what client/host_aggregation.py does. Thin on purpose. What is not covered: threads
inside
one worker (each call runs to its end), torch's hooks (shards are pushed last ones first, as backward would), the script
itself.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import torch

from psctl.errors import ConnectionFailed
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd
from psctl.job.examples import clocks_in_epoch
from psctl.job.membership_messages import ExamplesShared, NextClock, NextClockWanted, Reassign, ServerUnreachable
from psctl.job.training_messages import (
    Decision,
    Go,
    Heartbeat,
    Join,
    Leave,
    MemberReady,
    Prepare,
    ScriptFinished,
    Welcome,
    WorkerListens,
    WorkersAt,
)
from psctl.ps.dense.client.dense_client_state import ClientOutput, DenseClient
from psctl.ps.dense.client.host_collection import HostSumTask, ToPeer
from psctl.ps.dense.host_sums import host_sum
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import BetweenPeers, HostPush
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import pieces
from psctl.train_state.example_sharing import ExampleShare
from psctl.types import Address, Assignment, Member, ServerAt
from tests.simulation.beside import Lines, Memory
from tests.simulation.feed import Feed, Place
from tests.simulation.kernel import Broken, Process, Sleep, Task, Until
from tests.simulation.links import Links
from tests.simulation.model import Script, scale_at, taken, weight
from tests.simulation.network import End, Network
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import Scenario

_encode = msgspec.msgpack.Encoder().encode
_place = msgspec.msgpack.Decoder(Place).decode


class Worker:
    """One worker process; the handler of its connection to the coordinator."""

    def __init__(self, process: Process, network: Network, scenario: Scenario, script: Script, oracle: Oracle,
                 coordinator: Address, early: dict[int, float]) -> None:  # fmt: skip
        self.process, self._network, self._scenario, self._script = process, network, scenario, script
        self._oracle, self._rank = oracle, process.member.rank
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._go = self._closing = False
        self._coordinator: End | None = None
        self._compute = early[self._rank]
        self.machine: DenseClient | None = None
        self.links = Links(process, network, self, lambda at: True)
        self._assignment: Assignment | None = None
        self._memory = Memory(network)
        self._lines: Lines | None = None  # to others of this host
        self.step = 0
        self._division: ExampleShare | None = None
        self._feed: Feed | None = None  # where members may change
        network.dial(process, coordinator, Member("coordinator", 0), self, self._unreachable)
        process.spawn(self._main())

    # ---- the coordinator's handler -----------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        self._coordinator = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        match message:
            case Welcome():
                self._welcome = message
            case Decision():
                self._decision = message
                if message.elastic:
                    first = message.resume.step if message.resume is not None else 0
                    world, staleness = self._scenario.spec.world, message.staleness or 0
                    self._division = ExampleShare(world, first, elastic=True, staleness=staleness)
            case NextClockWanted(ticket=ticket) if self._division is not None:
                self._tell(NextClock(ticket, self._division.next_clock(ticket)))
            case ExamplesShared() if self._division is not None:
                self._division.add_change(message)
            case WorkersAt(workers=workers) if self._lines is not None:
                self._lines.told(workers)
            case Go():
                self._go = True
            case Reassign(assignment=assignment):
                self._told(assignment)
            case Leave():
                self.process.end(1)
            case _:
                pass

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if not self._closing:
            self.process.end(1)

    def _unreachable(self, why: str) -> None:
        self.process.end(1)

    def _tell(self, message: Any) -> None:
        assert self._coordinator is not None
        self._coordinator.send(message)

    # ---- the script ----------------------------------------------------------------------------------------------

    def _main(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        self._tell(Join(1))
        yield Until("Welcome", lambda: self._welcome is not None)
        self._tell(Prepare(self._script.layout, ()))
        yield Until("the decision", lambda: self._decision is not None)
        assert self._decision is not None
        yield from self._start(self._decision)
        self._tell(MemberReady())
        yield Until("go", lambda: self._go)
        self._leave_aside()
        if self._feed is not None:
            yield from self._passes(self._feed)
        for clock in range(self.step, self._scenario.spec.steps if self._feed is None else 0):
            epoch, mine, together = taken(self._scenario.spec, clock, self._rank)
            yield from self._clock(clock, epoch, mine, weight(self._scenario.spec, len(mine), together))
            self.step = clock + 1
            self._leave_aside()
            self._tell(Heartbeat(self.step, "compute"))
        yield from self._last()
        self._oracle.finished(self._rank, self.step)
        self._tell(ScriptFinished(self.step))
        self.links.close()
        if self._lines is not None:
            self._lines.close()
        assert self._coordinator is not None
        self._closing = True
        self._coordinator.close("the script ended")
        yield Sleep(4 * self._scenario.pace)
        self.process.end(0)

    def _passes(self, feed: Feed) -> Task:
        """The clocks of all passes, whoever takes part."""
        while not feed.over:
            if feed.pass_drawn:
                yield from self._all()
                late = yield from feed.end_pass()
                self._leave_aside()
                if not late:
                    continue
            else:
                yield from feed.draw()
            assert feed.batch is not None, "it was drawn"
            feed.drawn()
            batch = feed.batch
            mine = [place for part in batch.of(self._rank) for place in range(part.start, part.stop)]
            among = len(mine) * len(batch.ranks)
            share = 1.0 if among == batch.size else among / batch.size
            yield from self._clock(feed.step, feed.epoch, mine, share)
            feed.done()
            self.step = feed.step
            if not feed.pass_drawn:
                self._leave_aside()
            self._tell(Heartbeat(self.step, "compute"))

    def _all(self) -> Task:
        """Wait until all clocks of everyone are in the values, as run.wait() does."""
        exact = self._client.terms.staleness != 0
        if exact:
            self._pull(self.step, exact=True)
        yield from self._wait(self.step, exact=exact)

    def _last(self) -> Task:
        """As who reads the state_dict at the end: all clocks of everyone; and nothing is left unacknowledged."""
        yield from self._all()
        machine = self._client
        yield Until("acknowledgements", lambda: not machine.unacknowledged_servers(self.step), self.links.away)

    def _start(self, decision: Decision) -> Task:
        base = decision.resume.step if decision.resume else 0
        world = self._welcome.world if self._welcome else 0
        self.step = base
        terms = Terms(decision.layout, world, decision.update, base, decision.staleness, hosts=decision.hosts)
        if decision.hosts != self._scenario.groups:
            raise Broken("hosts", f"{decision.hosts} are said to share hosts, and {self._scenario.groups} do")
        first = decision.assignment if self._assignment is None else self._assignment
        ranks = [at.rank for at in first.servers]
        self.machine = DenseClient(terms, decision.shards, first.owners, self._rank, ranks, self._memory)
        if any(self._rank in group for group in decision.hosts):
            self._lines = Lines(self.process, self._network, self)
            self._tell(WorkerListens(None, b"secret"))
        self._assignment = first
        self._held = pieces(decision.layout, decision.shards)
        self._oracle.shards = decision.shards
        self._local = self._script.initial.clone()
        self._optimizer, self._parameters = self._script.optimizer(self._local)
        self.links.assigned(first.servers)
        if self._rank == 0 and decision.resume is None:
            self._send(self.machine.send_start_values({self._scenario.spec.dtype: self._script.initial}))
        self._pull(base)
        yield from self._wait(base)
        if decision.resume is not None and not decision.resume.checkpoint:
            place = yield from self._take_aside(base)
        else:
            state = decision.resume.state if decision.resume is not None else {}
            place = Place(base, state.get("epoch", 0), state.get("within", 0))
        if self._division is not None:
            spec = self._scenario.spec
            passes = spec.steps // clocks_in_epoch(spec.examples, spec.batch, spec.world)
            self._feed = Feed(spec, self._division, place, passes)

    def _clock(self, clock: int, epoch: int, mine: Sequence[int], share: float) -> Task:
        machine, spec = self._client, self._scenario.spec
        yield Sleep(self._compute * (0.5 + self._network.world.random.random()))
        yield from self._wait(clock)
        self._oracle.begins(self._rank, clock)
        values = self._local if self._scenario.update == "worker" else machine.front[spec.dtype]
        gradient = self._script.gradient(values, clock, self._rank, mine, epoch)
        self._spoil(gradient, clock)
        before = clock - machine.buffer_count
        yield Until(f"room for clock {clock}", lambda: not machine.unacknowledged_servers(before), self.links.away)
        machine.send_buffer(clock)[spec.dtype].copy_(gradient)
        self._oracle.computed(self.process.member, clock, gradient, share, (epoch, tuple(mine)))
        if self._scenario.early:
            self._pull(clock + 1)
        for shard in reversed(range(len(machine.shards))):
            self._send(machine.push(clock, shard, self._present(clock, shard), share))
            if self._network.world.random.random() < 0.5:
                yield Sleep(self._compute * 0.3)
        serves = self._scenario.update == "server"
        if serves and self._scenario.norms:
            yield from self._norms(clock)
        saves = bool(serves and self._scenario.saves and (clock + 1) % self._scenario.saves == 0)
        if serves:
            self._send(machine.order_step(clock, self._script.numbers(clock), scale_at(spec, clock), saves))
        if saves:
            where = {} if self._feed is None else {"epoch": self._feed.epoch, "within": self._feed.within}
            self._tell(SaveBegin(clock + 1, [], where if self._rank == 0 else None))
            self._tell(SaveEnd(clock + 1))
        if not self._scenario.early:
            self._pull(clock + 1)
        self._oracle.consumed(self._rank, clock)
        if self._scenario.update == "worker":
            yield from self._apply(clock)

    def _apply(self, clock: int) -> Task:
        """Step here, as the user's optimizer does with the joint gradient."""
        yield from self._wait(clock + 1)
        mean = self._client.front[self._scenario.spec.dtype].clone()
        scale = scale_at(self._scenario.spec, clock)
        if scale is not None:
            mean.mul_(scale)
        there = self._client.presence(clock)
        for group, numbers in zip(self._optimizer.param_groups, self._script.numbers(clock), strict=True):
            group.update(numbers)
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            self._parameters[index].grad = mean[start : start + size] if there[index] else None
        self._optimizer.step()

    def _leave_aside(self) -> None:
        """What rank 0 alone keeps (asp: each rank) goes beside, as it is at the start of the next clock."""
        if self._rank == 0 or self._client.terms.staleness is None:
            place = self._feed.place if self._feed is not None else Place(self.step, 0, 0)
            self._send(self._client.send_rank_state(self.step, memoryview(_encode(place))))

    def _take_aside(self, clock: int) -> Generator[Sleep | Until, None, Place]:
        """As who joins in mid-run: take over what rank 0 left with the servers."""
        machine = self._client
        self._send(machine.request_rank_state(clock))
        yield Until(f"the state at clock {clock}", lambda: machine.rank_state(clock) is not None, self.links.away)
        place = _place(machine.rank_state(clock) or b"")
        self._oracle.aside(self._rank, clock, place.step)
        return place

    def _norms(self, clock: int) -> Task:
        machine = self._client
        self._send(machine.request_norms(clock))
        yield Until(f"norms of clock {clock}", lambda: not machine.servers_without_norms(clock), self.links.away)
        assert machine.squared_norms(clock) is not None

    def _wait(self, clock: int, *, exact: bool = False) -> Task:
        machine = self._client
        missing = machine.missing_shards(clock, exact=exact)
        machine.set_waiting(missing, True)
        what = f"values of clock {clock}"
        yield Until(what, lambda: not machine.missing_shards(clock, missing, exact=exact), self.links.away)
        machine.set_waiting(missing, False)
        machine.copy_to_front()
        self._oracle.read(self._rank, clock, machine, range(len(machine.shards)))

    def _pull(self, clock: int, *, exact: bool = False) -> None:
        self._client.copy_to_front()
        self._send(self._client.pull(clock, exact=exact))

    def _present(self, clock: int, shard: int) -> list[bool]:
        place = {index: at for at, index in enumerate(self._trainable)}
        return [self._script.has(clock, self._rank, place[piece.parameter]) for piece in self._held[shard]]

    def _spoil(self, gradient: torch.Tensor, clock: int) -> None:
        """Where there is no gradient the buffer holds what was left there: it may never count."""
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            if not self._script.has(clock, self._rank, index):
                gradient[start : start + size] = 777.0 + clock

    # ---- servers -------------------------------------------------------------------------------------------------

    @property
    def _client(self) -> DenseClient:
        assert self.machine is not None
        return self.machine

    @property
    def _trainable(self) -> list[int]:
        return [index for index, info in enumerate(self._script.layout.parameters) if info.trainable]

    def _send(self, said: Sequence[ClientOutput]) -> None:
        for one in said:
            match one:
                case ToServer(server=server, message=message, payload=payload):
                    self.links.send(server, message, payload)
                case ToPeer(rank=rank, message=message) if self._lines is not None:
                    self._lines.send(rank, message)
                case HostSumTask():
                    chance = self._network.world.random
                    self.process.world.after(
                        chance.choice((0.0, chance.random())) * self._scenario.pace, self._sum, one
                    )

    # ---- others of this host -------------------------------------------------------------------------------------

    def _sum(self, gather: HostSumTask) -> None:
        """What the thread does that sums."""
        if not self.process.alive:
            return
        if self.process.world.now < self.process.paused_until:
            self.process.world.at(self.process.paused_until, self._sum, gather)
            return
        present = host_sum(gather.into, self._held[gather.shard], gather.parts)
        self._send(self._client.on_host_sum(gather, present))
        self.process.poke()

    def line_up(self, rank: int) -> None:
        self._send(self._client.on_peer_connected(rank))

    def line_down(self, rank: int) -> None:
        self._send(self._client.on_peer_disconnected(rank))

    def beside(self, rank: int, message: BetweenPeers) -> None:
        data = self._memory.read(message.at) if isinstance(message, HostPush) else None
        self._send(self._client.on_peer_message(rank, message, data))

    # ---- servers, again ------------------------------------------------------------------------------------------

    def _told(self, assignment: Assignment) -> None:
        """Take in a new assignment, as ParameterClient.told; before the decision it is kept."""
        if self._assignment is not None and assignment.epoch <= self._assignment.epoch:
            return
        self._assignment = assignment
        if self.machine is not None:
            self.links.assigned(assignment.servers)
            ranks = [at.rank for at in assignment.servers]
            self._send(self.machine.on_assignment(assignment.epoch, assignment.owners, ranks))

    def up(self, at: ServerAt, peer: End) -> None:
        """Nothing to say: the server speaks first."""

    def down(self, at: ServerAt) -> None:
        self._send(self._client.on_server_disconnected(at.rank))

    def unreachable(self, at: ServerAt, why: str) -> None:
        self._tell(ServerUnreachable(at.rank, at.incarnation, why))

    def place_from(self, at: ServerAt, message: Any, size: int) -> memoryview | None:
        return self._client.receive_buffer_for(at.rank, message, size)

    def received_from(self, at: ServerAt, message: Any, size: int) -> None:
        self._send(self._client.on_server_message(at.rank, message, size))
