"""A worker's client of the parameter server for dense parameters: push, pull and wait.

Clocks count from 0; version v of the values holds the clocks 0 .. v-1. One step of a job at clock c is

    gradients = client.send_buffer(c)          # flat, by dtype ("float32"); fill it while backward runs
    client.push(c, shard, present, weight)     # each shard when its gradients are ready
    client.norms(c)                            # only to clip: squares of the averaged gradient's norms
    client.step(c, groups, scale, save)        # where servers step; save: the result is checkpoint c+1
    client.pull(c + 1)                         # ask for the values of clock c+1, which hold clock c; also before pushes
    client.wait(c + 1, shards)                 # before the first read; then `landing` has them

Under staleness s clock c reads values that hold all clocks up to c-s-1 at least: `wait` blocks only when those in
`landing` are older, so the fastest worker is never more than s clocks ahead of the slowest; `exact` asks for all clocks
up to c-1. The first clock is `resume.step`, else 0; `start` fetches its values. Under `update: worker`, `start` fetches
rank 0's start values, and wait(c + 1) the averaged gradient of clock c.

`landing` changes only inside `start` and `wait`, for the shards that are waited for: values that arrive earlier are
kept in a back buffer, which the wait copies; values that arrive during the wait are received in place. Values that were
never waited for are copied by the next `pull` (ps/dense/client/dense_client_state.py). `deliver` replaces the copy.

Connections follow the assignment (server_connections.py). When one breaks it is made again, and pushes that are not
acknowledged are sent again to the server that leads the shard then; callers notice only a delay.

Threads. One lock guards the state machine; the connections' reader threads and the script's threads hold it briefly and
never while bytes are copied; messages are queued under it, so they are sent in the order in which they were made. A
wait ends when its values have arrived, when the servers refuse to go on (JobFailed), when a server has had no
connection for `patience` seconds and no other took its place (PeerLost), or when it has sent nothing for so long
in spite of queries (TimedOut). A slow worker elsewhere does not end a wait: its server answers that it waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from psctl.client.host_aggregation import HostAggregation
from psctl.client.model_layout import terms_of
from psctl.client.server_connections import Dial, ServerConnections
from psctl.client.server_waits import InFlightTimer, ServerWaits
from psctl.client.shared_buffers import SharedBuffers, private_buffers
from psctl.clock import Clock
from psctl.errors import ConnectionFailed
from psctl.job.membership_messages import ExamplesShared, Reassign, ServerUnreachable
from psctl.job.training_messages import Decision, WorkerListens, WorkersAt
from psctl.permits import WireMessage
from psctl.ps.dense.client.dense_client_state import ClientOutput, DenseClient
from psctl.ps.dense.client.pending_values import PendingValues
from psctl.ps.dense.client.receive_buffers import ValueSink
from psctl.ps.messages import FromServer, Push, WaitQuery
from psctl.ps.outputs import ToServer
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Assignment, Member, Number, PeerBytes, ServerAt

FLUSH = 1.0
"""Seconds to send what is queued when the client closes."""


class ParameterClient:
    """Pushes gradients, and pulls and waits for values; the module describes the order of calls.

    Args:
        me: this worker.
        world: number of workers.
        decision: layout, shards, assignment, and the checkpoint that the job continues from.
        dial: connects to a server; raises ConnectionFailed.
        clock: the machine's time.
        patience: seconds that a server may leave a query unanswered, or be without a connection.
        on_push_sent: called with the shard and the clock when a part of a push was sent.
        report: sends a message to the coordinator.
        sharing: memory that servers of this host read, and theirs; None: all bytes are sent.
        host: sums gradients with other workers of this host or rack; None: this worker pushes alone.
    """

    def __init__(
        self,
        me: Member,
        world: int,
        decision: Decision,
        dial: Dial,
        clock: Clock,
        patience: float,
        on_push_sent: Callable[[int, int], object] | None = None,
        report: Callable[[WorkerListens | ServerUnreachable], object] = lambda message: None,
        sharing: SharedBuffers | None = None,
        host: HostAggregation | None = None,
    ) -> None:
        self.base = decision.resume.step if decision.resume else 0  # the first clock
        terms = terms_of(decision, world)
        first, servers = decision.assignment, [at.rank for at in decision.assignment.servers]
        self._rack = decision.racks[me.rank] if decision.racks else ""
        near = self._near(first)
        self._state = DenseClient(terms, decision.shards, first.owners, me.rank, servers, sharing, near)
        self._pushes_ask = terms.pushes_ask
        self.landing = self._state.front
        """By dtype ("float32"): values, or under `update: worker` the averaged gradient."""
        self.residual = self._state.send_buffers.residual
        """What compression left out of pushes so far, flat by dtype (ps/dense/client/send_buffers.py)."""
        self._in_flight = InFlightTimer(clock)
        self._newest = self.base - 1, self.base - 1  # clocks of the last push and the last pull
        self._on_push_sent, self._report = on_push_sent, report
        self._sharing = sharing or private_buffers(me)
        self._lock = threading.RLock()
        self._epoch = first.epoch  # of the newest assignment
        self._servers = ServerConnections(dial, self, self._report_unreachable)
        self._waits = ServerWaits(
            self._lock, self._state, self._servers, clock, patience, reads=not decision.racks
        )  # fmt: skip
        self._host = host
        if host is not None:
            host.start(self._state, self._call_for_group, report)
        self._servers.assign(first.servers)

    # ---- one step ----------------------------------------------------------------------------------------------

    def start(self, values: Mapping[str, torch.Tensor] | None) -> None:
        """Fetch the first version into `landing`; blocks until it has arrived.

        Args:
            values: rank 0's start values by dtype, flat and on the CPU; None on other ranks, and on rank 0 when the
                servers have values: loaded from a checkpoint (`update: server` in a resumed job), or trained already.

        Raises:
            PsctlError: as `wait`.
        """
        if values is not None:
            self._call(lambda: self._state.send_start_values(values))
        self.pull(self.base)
        self.wait(self.base)

    def send_buffer(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, by dtype; waits until its former content is acknowledged."""
        before = clock - self._state.buffer_count
        with self._lock:
            full = self._state.unacknowledged_servers(before)
        if full:
            self._wait_for(
                f"a free send buffer for clock {clock}", clock, lambda: self._state.unacknowledged_servers(before)
            )
        return self._state.send_buffer(clock)

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float = 1.0) -> None:
        """Push a shard of `send_buffer(clock)`, which must not be changed until `send_buffer` returns it again.

        Args:
            clock: the next of the shard; there are no gaps.
            present: for each piece of the shard, whether this worker has a gradient; other bytes are ignored.
            weight: examples of this rank times world, divided by the examples of the clock.
        """
        if self._state.missing_shards(clock, [shard]):  # without the lock the answer can only be outdated
            self._wait_for(f"shard {shard} of clock {clock}", clock, lambda: self._servers_of(clock, shard))
        self._state.send_buffers.encode(clock, shard, present)
        with self._lock:
            self._newest = clock, clock + 1 if self._pushes_ask else self._newest[1]
            self._in_flight.start()
            self._send(self._state.push(clock, shard, present, weight))

    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> None:
        """Order the optimizer step of `clock`, after all its pushes; every rank orders the same. Does not block.

        Under `update: worker` there is no order: each shard's sum is sent back as soon as it is complete.

        Args:
            groups: numbers of each optimizer group, as ps.server_optimizers.numbers returns them.
            scale: factor of the summed gradient, to clip it; None: 1.
            save: the servers stream the result to the coordinator as the checkpoint of step clock+1.
        """
        self._call(lambda: self._state.order_step(clock, [dict(group) for group in groups], scale, save))

    def order_in_backward(self, clock: int, groups: Sequence[Mapping[str, Number]]) -> frozenset[int]:
        """Order some shards to step at `clock` as soon as all ranks have pushed them; before the clock's pushes.

        Returns:
            These shards, whose values `pull_in_backward` may request.
        """
        with self._lock:
            self._send(self._state.order_in_backward(clock, groups))
            return self._state.shards_in_backward

    @property
    def shards_in_backward(self) -> frozenset[int]:
        """The shards that step in backward, by the newest assignment."""
        with self._lock:
            return self._state.shards_in_backward

    def pull_in_backward(self, clock: int, shard: int) -> None:
        """Ask for a shard's values of `clock`, before `pull` asks for the others; does not block."""
        self._call(lambda: self._state.pull_in_backward(clock, shard))

    def save(self, version: int) -> None:
        """Have the servers save `version`, the newest that was pulled, without an order in its step; any rank may."""
        if self._state.terms.update == "server":
            self._call(lambda: self._state.request_save(version))

    def norms(self, clock: int) -> dict[int, float]:
        """Return the square of the averaged gradient's 2-norm by parameter index; blocks until all have pushed.

        Every rank gets the same numbers to the bit. Parameters without a gradient on any rank are left out.
        """
        self._call(lambda: self._state.request_norms(clock))
        self._wait_for(f"norms of clock {clock}", clock + 1, lambda: self._state.servers_without_norms(clock))
        with self._lock:
            found = self._state.squared_norms(clock)
        assert found is not None, "the wait was for them"
        return found

    def pull(self, clock: int) -> None:
        """Ask for the values that clock `clock` reads; does not block. Call it once a clock, in order.

        Values that have arrived and were never waited for are copied to `landing` now.
        """
        with self._lock:
            self._send(self._state.pull(clock))
            self._newest = self._newest[0], clock

    def wait(self, clock: int, shards: Sequence[int] | None = None, *, exact: bool = False) -> None:
        """Block until the values that clock `clock` reads are in `landing`, for these shards (None: for all).

        Args:
            clock: the newest that was pulled.
            exact: wait for values with all clocks before `clock`, whatever the staleness.

        Raises:
            PeerLost: a server is lost and no other took its place; names it and its address.
            TimedOut: a server is silent; names it and its address.
            JobFailed: the servers refuse to go on; the message has the reason.
        """
        wanted = list(range(len(self._state.shards))) if shards is None else list(shards)
        if exact:
            self._call(lambda: self._state.pull(clock, exact=True))
        with self._lock:
            missing = PendingValues(self._state, clock, wanted, exact=exact)
            late = missing.left
            self._state.set_waiting(late, True)
        try:
            if landed := missing.newly_arrived():
                self._state.copy_to_front(landed)
            while missing.left:
                self._wait_for(f"values of clock {clock}", clock, missing.servers_waited_for)
                self._state.copy_to_front(missing.newly_arrived())
        finally:
            with self._lock:
                self._state.set_waiting(late, False)

    def deliver(self, take: ValueSink) -> None:
        """Have `wait` and `pull` call `take` instead of copying values to `landing`; called after `start`."""
        self._state.set_value_sink(take)

    def presence(self, clock: int) -> list[bool]:
        """Return for each trainable parameter whether any worker had a gradient at `clock`; after wait(clock + 1)."""
        with self._lock:
            return self._state.presence(clock)

    def complete_clocks(self, shards: Sequence[int]) -> int:
        """Return the clock before which all workers' clocks are in `landing`, for all of these shards."""
        return self._state.complete_clocks(shards)

    # ---- the state of a worker that joins during the run -----------------------------------------------------------

    def keep_rank_state(self, clock: int, data: bytes) -> None:
        """Keep this rank's state at the start of `clock` on the servers, for a worker that joins there."""
        self._call(lambda: self._state.send_rank_state(clock, memoryview(data)))

    def rank_state(self, clock: int) -> bytes:
        """Return the state that is kept for the start of `clock`; blocks until it has arrived."""
        self._call(lambda: self._state.request_rank_state(clock))
        missing = lambda: set() if self._state.rank_state(clock) is not None else {self._state.owners[0]}  # noqa: E731
        self._wait_for(f"the state at clock {clock}", clock, missing)
        with self._lock:
            found = self._state.rank_state(clock)
        assert found is not None, "the wait was for it"
        return bytes(found)

    # ---- statistics -------------------------------------------------------------------------------------------

    @property
    def seconds_waiting(self) -> float:
        """Seconds spent in waits."""
        return self._waits.seconds

    @property
    def seconds_in_flight(self) -> float:
        """Seconds from each clock's first push until the values that were pulled after it had arrived."""
        return self._in_flight.seconds

    @property
    def answered_at(self) -> float:
        """When the values of the newest pull had arrived, in seconds of the clock."""
        return self._in_flight.ended_at

    @property
    def bytes_by_peer(self) -> dict[str, PeerBytes]:
        """Bytes sent to each server and received from it so far."""
        return self._servers.bytes_by_peer

    @property
    def activity(self) -> str:
        """The worker's activity, for heartbeats: "compute", or the servers and workers that it waits for."""
        with self._lock:
            what, servers = self._waits.at
            return f"sync: waiting for {what} from {self._waits.describe(servers)}" if servers else "compute"

    def settle(self) -> None:
        """Block until every clock is ordered at all servers and acknowledged: only then may a worker leave.

        An order is sent when the servers have received this worker's pushes; a push that is not acknowledged could be
        sent again by this worker only.

        Raises:
            PsctlError: as `wait`.
        """
        self._wait_for("the last clock", self._newest[0] + 1, self._state.unsettled_servers)

    def close(self, reason: str = "") -> None:
        """End all connections, after what is queued was sent."""
        if self._host is not None:
            self._host.close()
        self._servers.close(reason, FLUSH)

    # ---- the coordinator: its connection's reader thread ---------------------------------------------------------

    def on_membership(self, message: Reassign | ExamplesShared | WorkersAt) -> None:
        """Adopt the listening workers of this group, or a new assignment; an older assignment changes nothing."""
        if isinstance(message, WorkersAt) and self._host is not None:
            self._host.on_workers(message)
        if not isinstance(message, Reassign):
            return
        new = message.assignment
        with self._lock:
            if new.epoch <= self._epoch:
                return
            self._epoch = new.epoch
        self._servers.assign(new.servers)
        with self._lock:
            ranks = [at.rank for at in new.servers]
            self._send(self._state.on_assignment(new.epoch, new.owners, ranks, self._near(new)))
            self._waits.wake()

    def _near(self, assignment: Assignment) -> set[int]:
        """Return the servers in this worker's rack."""
        return {at.rank for at in assignment.servers if self._rack and at.rack == self._rack}

    def _report_unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        self._report(ServerUnreachable(at.rank, at.incarnation, error.message))

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _wait_for(self, what: str, clock: int, missing: Callable[[], set[int]]) -> None:
        """Block until `missing`, called under the lock, returns no server any more; `clock` is the one waited for."""
        with self._lock:
            self._waits.until(what, missing, lambda server: self._servers.send(server, WaitQuery(clock), urgent=True))

    def _servers_of(self, clock: int, shard: int) -> set[int]:
        return {self._state.owners[shard] for shard in self._state.missing_shards(clock, [shard])}

    # ---- the connections ---------------------------------------------------------------------------------------

    def _call(self, make: Callable[[], Sequence[ClientOutput]]) -> None:
        with self._lock:
            self._send(make())

    def _call_for_group(self, make: Callable[[], Sequence[ClientOutput]]) -> None:
        """Call a function for a message of another worker, which may have values that a thread waits for."""
        with self._lock:
            self._send(make())
            self._note_answers()
            self._waits.on_progress()

    def _note_answers(self) -> None:
        """End the time in flight when the values of the newest pull have arrived."""
        if not self._state.unanswered and self._newest[1] > self._newest[0]:
            self._in_flight.stop()

    def _send(self, instructions: Sequence[ClientOutput]) -> None:
        """Queue messages, under the lock, so that they are sent in the order in which they were made."""
        for one in instructions:
            if isinstance(one, ToServer):
                self._servers.send(one.server, one.message, one.payload)
            elif self._host is not None:
                self._host.follow(one)

    def on_connected(self, peer: PeerConnection) -> None:
        if self._on_push_sent is not None:
            peer.on_written = self._on_written
        self._sharing.offer(peer)

    def receive_buffer_for(self, peer: PeerConnection, message: FromServer, size: int) -> memoryview | None:
        with self._lock:
            return (
                self._state.receive_buffer_for(peer.member.rank, message, size)
                if self._servers.is_in_use(peer)
                else None
            )

    def on_message(self, peer: PeerConnection, message: FromServer, payload: memoryview | None) -> None:
        shared = self._sharing.find_shared_bytes(peer, message)
        server = peer.member.rank
        with self._lock:
            if not self._servers.is_in_use(peer):
                return
            self._send(self._state.on_server_message(server, message, 0 if payload is None else len(payload), shared))
            self._note_answers()
            self._waits.on_message(server, peer)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        with self._lock:
            if self._servers.is_in_use(peer):
                self._send(self._state.on_server_disconnected(peer.member.rank))
                self._sharing.forget(peer.member)
                self._waits.wake()

    def _on_written(self, message: WireMessage, size: int) -> None:
        if self._on_push_sent is not None and isinstance(message, Push):
            self._on_push_sent(message.shard, message.clock)
