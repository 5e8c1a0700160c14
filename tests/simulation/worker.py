"""A simulated worker: the shipped DenseClient, and the calls of psctl/client, psctl/sync and psctl/worker around it.

Also simulates psctl/client/host_aggregation.py for workers that share a host. Not covered: threads inside a worker
(each call runs to its end), torch's hooks (shards are pushed in reverse order, as in backward), the script itself.
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
from tests.simulation.host_peers import HostPeers, SharedMemory
from tests.simulation.kernel import Process, Sleep, Task, Until, Violation
from tests.simulation.model import Script, examples_taken, gradient_weight, scale_at
from tests.simulation.network import End, Network
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import Scenario
from tests.simulation.server_connections import ServerConnections
from tests.simulation.worker_batches import LoaderPosition, WorkerBatches

_encode = msgspec.msgpack.Encoder().encode
_decode_position = msgspec.msgpack.Decoder(LoaderPosition).decode


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
        self.servers = ServerConnections(process, network, self, lambda at: True)
        self._assignment: Assignment | None = None
        self._memory = SharedMemory(network)
        self._host_peers: HostPeers | None = None
        self.step = 0
        self._example_share: ExampleShare | None = None
        self._batches: WorkerBatches | None = None  # only where members may change
        network.dial(process, coordinator, Member("coordinator", 0), self, self._unreachable)
        process.spawn(self._run())

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
                if message.elastic or self._scenario.divides:
                    assert self._welcome is not None
                    first = message.resume.step if message.resume is not None else 0
                    world, staleness = self._welcome.world, message.staleness or 0
                    self._example_share = ExampleShare(world, first, elastic=message.elastic, staleness=staleness)
            case NextClockWanted(ticket=ticket) if self._example_share is not None:
                self._send_to_coordinator(NextClock(ticket, self._example_share.next_clock(ticket)))
            case ExamplesShared() if self._example_share is not None:
                self._example_share.add_change(message)
            case WorkersAt(workers=workers) if self._host_peers is not None:
                self._host_peers.set_peers(workers)
            case Go():
                self._go = True
            case Reassign(assignment=assignment):
                self._on_assignment(assignment)
            case Leave():
                self.process.end(1)
            case _:
                pass

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if not self._closing:
            self.process.end(1)

    def _unreachable(self, why: str) -> None:
        self.process.end(1)

    def _send_to_coordinator(self, message: Any) -> None:
        assert self._coordinator is not None
        self._coordinator.send(message)

    # ---- the script ----------------------------------------------------------------------------------------------

    def _run(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        self._send_to_coordinator(Join(1))
        yield Until("Welcome", lambda: self._welcome is not None)
        self._send_to_coordinator(Prepare(self._script.layout, ()))
        yield Until("the decision", lambda: self._decision is not None)
        assert self._decision is not None
        yield from self._start(self._decision)
        self._send_to_coordinator(MemberReady())
        yield Until("go", lambda: self._go)
        self._store_rank_state()
        if self._batches is not None:
            yield from self._train_epochs(self._batches)
        for clock in range(self.step, self._scenario.spec.steps if self._batches is None else 0):
            epoch, positions, total = examples_taken(self._scenario.spec, clock, self._rank)
            yield from self._train_clock(
                clock, epoch, positions, gradient_weight(self._scenario.spec, len(positions), total)
            )
            self.step = clock + 1
            self._store_rank_state()
            self._send_to_coordinator(Heartbeat(self.step, "compute", self._batches is not None))
        yield from self._wait_for_end()
        if self._batches is None or self._batches.finished:
            self._oracle.on_finished(self._rank, self.step)
        self._send_to_coordinator(ScriptFinished(self.step))
        self.servers.close()
        if self._host_peers is not None:
            self._host_peers.close()
        assert self._coordinator is not None
        self._closing = True
        self._coordinator.close("the script ended")
        yield Sleep(4 * self._scenario.latency)
        self.process.end(0)

    def _train_epochs(self, batches: WorkerBatches) -> Task:
        """Train all clocks of all epochs, with the members of each clock."""
        while not batches.finished:
            if batches.epoch_drawn:
                if self._decision is not None and self._decision.elastic:
                    yield from self._wait_for_all()
                late = yield from batches.end_epoch()
                self._store_rank_state()
                if not late:
                    continue
            else:
                yield from batches.draw()
            if batches.leaves(self._rank):
                return
            assert batches.batch is not None, "it was drawn"
            batches.commit_batch()
            batch = batches.batch
            positions = [place for part in batch.of(self._rank) for place in range(part.start, part.stop)]
            among = len(positions) * len(batch.ranks)
            share = 1.0 if among == batch.size else among / batch.size
            yield from self._train_clock(batches.step, batches.epoch, positions, share)
            batches.advance_step()
            self.step = batches.step
            if not batches.epoch_drawn:
                self._store_rank_state()
            self._send_to_coordinator(Heartbeat(self.step, "compute", self._batches is not None))

    def _wait_for_all(self) -> Task:
        """Wait until the values contain all clocks of all workers, as run.wait() does."""
        exact = self._client.terms.staleness != 0
        if exact:
            self._pull(self.step, exact=True)
        yield from self._wait(self.step, exact=exact)

    def _wait_for_end(self) -> Task:
        """Wait until all clocks of all workers are applied and every push is acknowledged, as at the script's end."""
        yield from self._wait_for_all()
        machine = self._client
        yield Until(
            "acknowledgements",
            lambda: not machine.unacknowledged_servers(self.step),
            self.servers.disconnected,
        )

    def _start(self, decision: Decision) -> Task:
        base = decision.resume.step if decision.resume else 0
        world = self._welcome.world if self._welcome else 0
        self.step = base
        by_rack = bool(decision.racks)
        terms = Terms(
            decision.layout, world, decision.update, base, decision.staleness, hosts=decision.hosts, by_rack=by_rack,
            in_backward=(1.0 if decision.servers_apart else 0.5) * decision.step_in_backward,
        )  # fmt: skip
        if decision.hosts != self._scenario.host_groups and not self._scenario.divides:
            raise Violation("hosts", f"the decision has host groups {decision.hosts}, not {self._scenario.host_groups}")
        first = decision.assignment if self._assignment is None else self._assignment
        ranks = [at.rank for at in first.servers]
        self._rack = decision.racks[self._rank] if by_rack else ""
        near = self._near(first)
        self.machine = DenseClient(terms, decision.shards, first.owners, self._rank, ranks, self._memory, near)
        if any(self._rank in group for group in decision.hosts):
            self._host_peers = HostPeers(self.process, self._network, self)
            self._send_to_coordinator(WorkerListens(Address("10.0.0.1", 1) if by_rack else None, b"secret"))
        self._assignment = first
        self._held = pieces(decision.layout, decision.shards)
        self._oracle.shards = decision.shards
        self._local = self._script.initial.clone()
        self._optimizer, self._parameters = self._script.optimizer(self._local)
        self.servers.set_servers(first.servers)
        if self._rank == 0 and decision.resume is None:
            self._send_outputs(self.machine.send_start_values({self._scenario.spec.dtype: self._script.initial}))
        self._pull(base)
        yield from self._wait(base)
        if decision.resume is not None and not decision.resume.checkpoint:
            place = yield from self._fetch_rank_state(base)
        else:
            state = decision.resume.state if decision.resume is not None else {}
            place = LoaderPosition(base, state.get("epoch", 0), state.get("clock_in_epoch", 0))
        if self._example_share is not None:
            spec = self._scenario.spec
            passes = spec.steps // clocks_in_epoch(spec.examples, spec.batch, spec.world)
            self._batches = WorkerBatches(spec, world, self._example_share, place, passes)

    def _train_clock(self, clock: int, epoch: int, positions: Sequence[int], share: float) -> Task:
        machine, spec = self._client, self._scenario.spec
        yield Sleep(self._compute * (0.5 + self._network.world.random.random()))
        yield from self._wait(clock)
        self._oracle.on_clock_started(self._rank, clock)
        values = self._local if self._scenario.update == "worker" else machine.front[spec.dtype]
        gradient = self._script.gradient(values, clock, self._rank, positions, epoch)
        self._fill_absent_gradients(gradient, clock)
        before = clock - machine.buffer_count
        yield Until(
            f"room for clock {clock}",
            lambda: not machine.unacknowledged_servers(before),
            self.servers.disconnected,
        )
        machine.send_buffer(clock)[spec.dtype].copy_(gradient)
        self._oracle.on_gradient(self.process.member, clock, gradient, share, (epoch, tuple(positions)))
        if self._scenario.pulls_early:
            self._pull(clock + 1)
        in_backward: frozenset[int] = frozenset()
        if self._scenario.in_backward:
            self._send_outputs(machine.order_in_backward(clock, self._script.group_numbers(clock)))
            in_backward = machine.shards_in_backward
        for shard in reversed(range(len(machine.shards))):
            self._send_outputs(machine.push(clock, shard, self._presence_of(clock, shard), share))
            if shard in in_backward:
                self._send_outputs(machine.pull_in_backward(clock + 1, shard))
            if self._network.world.random.random() < 0.5:
                yield Sleep(self._compute * 0.3)
        serves = self._scenario.update == "server"
        if serves and self._scenario.requests_norms:
            yield from self._fetch_norms(clock)
        saves_now = bool(serves and self._scenario.save_every and (clock + 1) % self._scenario.save_every == 0)
        if serves:
            self._send_outputs(
                machine.order_step(clock, self._script.group_numbers(clock), scale_at(spec, clock), saves_now)
            )
        if saves_now:
            where = (
                {}
                if self._batches is None
                else {"epoch": self._batches.epoch, "clock_in_epoch": self._batches.clock_in_epoch}
            )
            self._send_to_coordinator(SaveBegin(clock + 1, [], where if self._rank == 0 else None))
            self._send_to_coordinator(SaveEnd(clock + 1))
        if not self._scenario.pulls_early:
            self._pull(clock + 1)
        self._oracle.on_clock_consumed(self._rank, clock)
        if self._scenario.update == "worker":
            yield from self._step_optimizer(clock)

    def _step_optimizer(self, clock: int) -> Task:
        """Step the optimizer in the worker with the joint gradient."""
        yield from self._wait(clock + 1)
        mean = self._client.front[self._scenario.spec.dtype].clone()
        scale = scale_at(self._scenario.spec, clock)
        if scale is not None:
            mean.mul_(scale)
        there = self._client.presence(clock)
        for group, numbers in zip(self._optimizer.param_groups, self._script.group_numbers(clock), strict=True):
            group.update(numbers)
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            self._parameters[index].grad = mean[start : start + size] if there[index] else None
        self._optimizer.step()

    def _store_rank_state(self) -> None:
        """Store the rank state of rank 0 (asp: of each rank) with the servers for the start of the next clock."""
        if self._rank == 0 or self._client.terms.staleness is None:
            place = self._batches.position if self._batches is not None else LoaderPosition(self.step, 0, 0)
            self._send_outputs(self._client.send_rank_state(self.step, memoryview(_encode(place))))

    def _fetch_rank_state(self, clock: int) -> Generator[Sleep | Until, None, LoaderPosition]:
        """Fetch the rank state that rank 0 has stored, as a worker that joins during the run does."""
        machine = self._client
        self._send_outputs(machine.request_rank_state(clock))
        yield Until(
            f"the state at clock {clock}",
            lambda: machine.rank_state(clock) is not None,
            self.servers.disconnected,
        )
        place = _decode_position(machine.rank_state(clock) or b"")
        self._oracle.on_rank_state(self._rank, clock, place.step)
        return place

    def _fetch_norms(self, clock: int) -> Task:
        machine = self._client
        self._send_outputs(machine.request_norms(clock))
        yield Until(
            f"norms of clock {clock}",
            lambda: not machine.servers_without_norms(clock),
            self.servers.disconnected,
        )
        assert machine.squared_norms(clock) is not None

    def _wait(self, clock: int, *, exact: bool = False) -> Task:
        machine = self._client
        missing = machine.missing_shards(clock, exact=exact)
        machine.set_waiting(missing, True)
        what = f"values of clock {clock}"
        yield Until(what, lambda: not machine.missing_shards(clock, missing, exact=exact), self.servers.disconnected)
        machine.set_waiting(missing, False)
        machine.copy_to_front()
        self._oracle.on_read(self._rank, clock, machine, range(len(machine.shards)))

    def _pull(self, clock: int, *, exact: bool = False) -> None:
        self._client.copy_to_front()
        self._send_outputs(self._client.pull(clock, exact=exact))

    def _presence_of(self, clock: int, shard: int) -> list[bool]:
        place = {index: at for at, index in enumerate(self._trainable)}
        return [self._script.has_gradient(clock, self._rank, place[piece.parameter]) for piece in self._held[shard]]

    def _fill_absent_gradients(self, gradient: torch.Tensor, clock: int) -> None:
        """Write garbage where there is no gradient: it must never be part of a sum."""
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            if not self._script.has_gradient(clock, self._rank, index):
                gradient[start : start + size] = 777.0 + clock

    # ---- outputs -------------------------------------------------------------------------------------------------

    @property
    def _client(self) -> DenseClient:
        assert self.machine is not None
        return self.machine

    @property
    def _trainable(self) -> list[int]:
        return [index for index, info in enumerate(self._script.layout.parameters) if info.trainable]

    def _send_outputs(self, outputs: Sequence[ClientOutput]) -> None:
        for one in outputs:
            match one:
                case ToServer(server=server, message=message, payload=payload):
                    self.servers.send(server, message, payload)
                case ToPeer(rank=rank, message=message, payload=payload) if self._host_peers is not None:
                    self._host_peers.send(rank, message, payload)
                case HostSumTask():
                    rng = self._network.world.random
                    self.process.world.after(rng.choice((0.0, rng.random())) * self._scenario.latency, self._sum, one)

    # ---- workers of this host ------------------------------------------------------------------------------------

    def _sum(self, task: HostSumTask) -> None:
        """Sum the gradients of a host, as the aggregation thread does."""
        if not self.process.alive:
            return
        if self.process.world.now < self.process.paused_until:
            self.process.world.at(self.process.paused_until, self._sum, task)
            return
        present = host_sum(task.into, self._held[task.shard], task.parts)
        self._send_outputs(self._client.on_host_sum(task, present))
        self.process.wake_tasks()

    def on_peer_connected(self, rank: int) -> None:
        self._send_outputs(self._client.on_peer_connected(rank))

    def on_peer_disconnected(self, rank: int) -> None:
        self._send_outputs(self._client.on_peer_disconnected(rank))

    def on_peer_message(self, rank: int, message: BetweenPeers, payload: memoryview | None) -> None:
        data = self._memory.read(message.at) if isinstance(message, HostPush) and message.at is not None else payload
        self._send_outputs(self._client.on_peer_message(rank, message, data))

    # ---- servers -------------------------------------------------------------------------------------------------

    def _on_assignment(self, assignment: Assignment) -> None:
        """Take a new assignment. One that comes before the decision is stored."""
        if self._assignment is not None and assignment.epoch <= self._assignment.epoch:
            return
        self._assignment = assignment
        if self.machine is not None:
            self.servers.set_servers(assignment.servers)
            ranks = [at.rank for at in assignment.servers]
            near = self._near(assignment)
            self._send_outputs(self.machine.on_assignment(assignment.epoch, assignment.owners, ranks, near))

    def _near(self, assignment: Assignment) -> set[int]:
        return {at.rank for at in assignment.servers if self._rack and at.rack == self._rack}

    def on_server_connected(self, at: ServerAt, peer: End) -> None:
        """Do nothing: the server sends the first message."""

    def on_server_disconnected(self, at: ServerAt) -> None:
        self._send_outputs(self._client.on_server_disconnected(at.rank))

    def on_server_unreachable(self, at: ServerAt, why: str) -> None:
        self._send_to_coordinator(ServerUnreachable(at.rank, at.incarnation, why))

    def server_buffer_for(self, at: ServerAt, message: Any, size: int) -> memoryview | None:
        return self._client.receive_buffer_for(at.rank, message, size)

    def on_server_message_from(self, at: ServerAt, message: Any, size: int) -> None:
        self._send_outputs(self._client.on_server_message(at.rank, message, size))
