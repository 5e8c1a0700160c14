"""A worker's end of the parameter server: push, pull and wait over one connection to each server.

Clocks count from 0; version v of the values holds the clocks 0 .. v-1. One step of a job at clock c is

    gradients = client.sending(c)              # flat, by dtype ("float32"); fill it while backward runs
    client.push(c, shard, present, weight)     # each shard when its gradients are ready
    client.norms(c)                            # only to clip: squares of the joint gradient's norms
    client.step(c, groups, scale, save)        # where servers step; save: the result is checkpoint c+1
    client.pull(c + 1)                         # what clock c+1 reads: values that hold clock c; or before its pushes
    client.wait(c + 1, shards)                 # before the first read; then `landing` has them

Under staleness s clock c reads values that hold all clocks up to c-s-1 at least: `wait` blocks only when those in
`landing` are older, so the fastest worker is never more than s clocks ahead of the slowest; `exact` asks for no less
than all clocks up to c-1. The first clock is `resume.step`, else 0; `start` brings its values. Under `update: worker`,
`start` brings rank 0's start values in the same way, and wait(c + 1) the joint mean gradient of clock c.

`landing` changes only inside `start` and `wait`, for the shards that are waited for: values that arrive earlier lie in
a back buffer, and the wait copies them; values that arrive during the wait land in place. Values that were never waited
for are copied by the next `pull` (ps/dense/client/dense_client_state.py). Who wants them elsewhere has them
delivered: one copy less.

Servers come and go: `told` hands in a new assignment, and connections follow it (server_links.py). A connection that
breaks is
made again; what was not acknowledged is said again to whoever leads the shard then. Nobody above notices but by time.

Threads: one lock around the mind; the connections' reader threads and the user's threads take it briefly and never
while bytes are copied; what the mind says leaves under it, in order (sending only queues). Waits end when what they
wait for is there, when the servers refuse to go on (JobFailed), when a server has had no connection for `patience`
seconds and no other took its place (PeerLost), or when it has not said a word for so long although it was asked
(TimedOut): a slow worker elsewhere is no reason, for the server answers that it waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psctl.client.host_aggregation import HostAggregation
from psctl.client.model_layout import terms_of
from psctl.client.overlap_timer import UnderWay
from psctl.client.server_connections import Dial, ServerConnections
from psctl.client.server_waits import ServerWaits
from psctl.client.shared_buffers import SharedBuffers, private_buffers
from psctl.clock import Clock
from psctl.errors import ConnectionFailed
from psctl.job.membership_messages import ExamplesShared, Reassign, ServerUnreachable
from psctl.job.training_messages import Decision, WorkersAt
from psctl.ps.dense.client.dense_client_state import ClientMind
from psctl.ps.dense.client.pending_values import Missing
from psctl.ps.dense.client.push_path import Out, Say
from psctl.ps.dense.client.receive_buffers import Take
from psctl.ps.messages import FromServer, Message, Push, PushPart, Why
from psctl.types import Member, Number, ServerAt

LAST = 1.0
"""Seconds that what was sent has to leave when all ends."""


class ParameterClient:
    """Push, pull, wait; see the module's docstring for the order of calls and who changes what when.

    Args:
        me: this worker.
        world: number of workers.
        decision: layout, shards, assignment and whether the job goes on from a checkpoint.
        dial: connects to a server; raises ConnectionFailed.
        clock: the machine's time.
        patience: seconds that a server may be silent although it was asked, or be without a connection.
        trace: called with (time, "push-bytes-left", shard, clock) when a part of a push has left this process.
        tell: sends a message to the coordinator.
        sharing: memory that servers of this host read, and theirs; None: all bytes are sent.
        host: the way to others of this host that push together with this worker; None: there are none.
    """

    def __init__(
        self,
        me: Member,
        world: int,
        decision: Decision,
        dial: Dial,
        clock: Clock,
        patience: float,
        trace: Callable[[tuple[float, str, int, int]], object] | None = None,
        tell: Callable[[Any], object] = lambda message: None,
        sharing: SharedBuffers | None = None,
        host: HostAggregation | None = None,
    ) -> None:
        self.base = decision.resume.step if decision.resume else 0  # the first clock
        terms = terms_of(decision, world)
        first, servers = decision.assignment, [at.rank for at in decision.assignment.servers]
        self._mind = ClientMind(terms, decision.shards, first.owners, me.rank, servers, sharing)
        self._pushes_ask = terms.pushes_ask
        self.landing = self._mind.landing
        """By dtype ("float32"): values, or under `update: worker` the joint mean gradient."""
        self.residual = (
            self._mind.pushes.residual
        )  # what pushes left out so far, flat by dtype (ps/dense/client/send_buffers.py)
        self._under_way = UnderWay(clock)
        self._newest = self.base - 1, self.base - 1  # clocks of the last push and the last pull
        self._clock, self._trace, self._tell = clock, trace, tell
        self._sharing = sharing or private_buffers(me)
        self._lock = threading.RLock()
        self._epoch = first.epoch  # of the newest assignment
        self._servers = ServerConnections(dial, self, self._report_unreachable)
        self._waits = ServerWaits(self._lock, self._mind, self._servers, clock, patience)
        self._host = host
        if host is not None:
            host.begin(self._mind, self._say, tell)
        self._servers.assign(first.servers)

    # ---- one step ----------------------------------------------------------------------------------------------

    def start(self, values: Mapping[str, torch.Tensor] | None) -> None:
        """Bring the first version to `landing`; blocks until it is there.

        Args:
            values: rank 0's start values by dtype, flat and on the CPU; None on other ranks, and on rank 0 when the
                servers have them: loaded from a checkpoint (`update: server` and a resumed job), or trained already.

        Raises:
            PsctlError: as `wait`.
        """
        if values is not None:
            self._say(lambda: self._mind.begin(values))
        self.pull(self.base)
        self.wait(self.base)

    def sending(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, by dtype; waits until what it held before is acknowledged."""
        before = clock - self._mind.buffers
        with self._lock:
            full = self._mind.unacknowledged(before)
        if full:
            self._wait(f"a free send buffer for clock {clock}", clock, lambda: self._mind.unacknowledged(before))
        return self._mind.sending(clock)

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float = 1.0) -> None:
        """Push a shard of `sending(clock)`, which must stay untouched until it is given out again.

        Args:
            clock: clocks of a shard follow one another without a gap.
            present: for each piece of the shard, whether this worker has a gradient; the bytes of others do not count.
            weight: examples of this rank times world, divided by the examples of the clock.
        """
        if self._mind.missing(clock, [shard]):  # a look without the lock can only be late
            self._wait(f"shard {shard} of clock {clock}", clock, lambda: self._servers_of(clock, shard))
        self._mind.pushes.encode(clock, shard, present)
        with self._lock:
            self._newest = clock, clock + 1 if self._pushes_ask else self._newest[1]
            self._under_way.begin()
            self._send(self._mind.push(clock, shard, present, weight))

    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> None:
        """Order the step of `clock`, after all its pushes; every rank orders the same. Does not block.

        Nothing is ordered under `update: worker`: each shard's sum comes back as soon as it is whole.

        Args:
            groups: numbers of each optimizer group, as store.fit.numbers returns them.
            scale: what the joint gradient is multiplied by first; None: nothing.
            save: the servers stream the result to the coordinator as the checkpoint of step clock+1.
        """
        self._say(lambda: self._mind.step(clock, [dict(group) for group in groups], scale, save))

    def save(self, version: int) -> None:
        """Have the servers save `version`, the newest that was pulled, though its step did not say so; any rank may."""
        if self._mind.terms.update == "server":
            self._say(lambda: self._mind.save(version))

    def norms(self, clock: int) -> dict[int, float]:
        """Return the square of the joint mean gradient's 2-norm by parameter index; blocks until all have pushed.

        Every rank gets the same numbers to the bit. Parameters that nobody had a gradient for are left out.
        """
        self._say(lambda: self._mind.ask_norms(clock))
        self._wait(f"norms of clock {clock}", clock + 1, lambda: self._mind.without_norms(clock))
        with self._lock:
            found = self._mind.norms(clock)
        assert found is not None, "the wait was for them"
        return found

    def pull(self, clock: int) -> None:
        """Ask for the values that clock `clock` reads; does not block. Once a clock, in order.

        Shards whose values have landed and were never waited for come to `landing` now.
        """
        with self._lock:
            self._send(self._mind.pull(clock))
            self._newest = self._newest[0], clock

    def wait(self, clock: int, shards: Sequence[int] | None = None, *, exact: bool = False) -> None:
        """Block until the values that clock `clock` reads are in `landing`, for these shards (None: for all).

        Args:
            clock: the newest that was pulled.
            exact: no older ones will do, whatever the staleness: all clocks before `clock` are in them.

        Raises:
            PeerLost: a server is lost and nobody took its place; names it and its address.
            TimedOut: a server is silent; names it and its address.
            JobFailed: the servers refuse to go on; the message says why and whose fault it is.
        """
        wanted = list(range(len(self._mind.shards))) if shards is None else list(shards)
        if exact:
            self._say(lambda: self._mind.pull(clock, exact=True))
        with self._lock:
            missing = Missing(self._mind, clock, wanted, exact=exact)
            late = missing.left
            self._mind.opened(late, True)
        try:
            if landed := missing.landed():
                self._mind.show(landed)
            while missing.left:
                self._wait(f"values of clock {clock}", clock, missing.servers)
                self._mind.show(missing.landed())
        finally:
            with self._lock:
                self._mind.opened(late, False)

    def deliver(self, take: Take) -> None:
        """From now on `wait` and `pull` call this in the place of copying values to `landing`; after `start`."""
        self._mind.deliver(take)

    def presence(self, clock: int) -> list[bool]:
        """Return for each trainable parameter whether any worker had a gradient at `clock`, after wait(clock + 1)."""
        with self._lock:
            return self._mind.presence(clock)

    def held(self, shards: Sequence[int]) -> int:
        """Return the clock before which everyone's clocks are in `landing`, for all of these shards."""
        return self._mind.clocks(shards)

    # ---- what a worker that joins in mid-run needs ---------------------------------------------------------------

    def put_aside(self, clock: int, data: bytes) -> None:
        """Leave rank 0's own state at the start of `clock` with the servers, for a worker that joins there."""
        self._say(lambda: self._mind.aside(clock, memoryview(data)))

    def aside(self, clock: int) -> bytes:
        """Return what rank 0 left at the start of `clock`; blocks until it is there."""
        self._say(lambda: self._mind.ask_aside(clock))
        missing = lambda: set() if self._mind.aside_of(clock) is not None else {self._mind.owners[0]}  # noqa: E731
        self._wait(f"the state at clock {clock}", clock, missing)
        with self._lock:
            found = self._mind.aside_of(clock)
        assert found is not None, "the wait was for it"
        return bytes(found)

    # ---- about itself ------------------------------------------------------------------------------------------

    @property
    def seconds_waiting(self) -> float:
        """Seconds spent in waits."""
        return self._waits.seconds

    @property
    def seconds_under_way(self) -> float:
        """Seconds from a clock's first push until the values pulled after it had come."""
        return self._under_way.seconds

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""
        return self._servers.bytes_moved

    @property
    def doing(self) -> str:
        """What the client is at, for heartbeats: "compute", or whom it waits for."""
        with self._lock:
            what, servers = self._waits.at
            return f"sync: waiting for {what} from {self._waits.describe(servers)}" if servers else "compute"

    def settle(self) -> None:
        """Block until every clock that was ordered is with all servers and acknowledged: only then may a worker leave.

        An order leaves when other servers have said that they have this worker's pushes, and until a push is
        acknowledged nobody else could push it again.

        Raises:
            PsctlError: as `wait`.
        """
        self._wait("the last clock", self._newest[0] + 1, self._mind.unsettled)

    def close(self, reason: str = "") -> None:
        """End all connections; what was sent has left first."""
        if self._host is not None:
            self._host.close()
        self._servers.close(reason, LAST)

    # ---- the coordinator's word: its connection's reader thread --------------------------------------------------

    def told(self, message: Reassign | ExamplesShared | WorkersAt) -> None:
        """Take in who of this host listens, or a new assignment; an older one than the newest says nothing."""
        if isinstance(message, WorkersAt) and self._host is not None:
            self._host.told(message)
        if not isinstance(message, Reassign):
            return
        new = message.assignment
        with self._lock:
            if new.epoch <= self._epoch:
                return
            self._epoch = new.epoch
        self._servers.assign(new.servers)
        with self._lock:
            self._send(self._mind.assigned(new.epoch, new.owners, [at.rank for at in new.servers]))
            self._waits.wake()

    def _report_unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        self._tell(ServerUnreachable(at.rank, at.incarnation, error.message))

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _wait(self, what: str, clock: int, missing: Callable[[], set[int]]) -> None:
        """Block until `missing`, called under the lock, returns no server any more; `clock` is the one waited for."""
        with self._lock:
            self._waits.until(what, missing, lambda server: self._servers.send(server, Why(clock), urgent=True))

    def _servers_of(self, clock: int, shard: int) -> set[int]:
        return {self._mind.owners[shard] for shard in self._mind.missing(clock, [shard])}

    # ---- the connections ---------------------------------------------------------------------------------------

    def _say(self, what: Callable[[], Sequence[Say]]) -> None:
        with self._lock:
            self._send(what())

    def _send(self, said: Sequence[Say]) -> None:
        """Queue what the mind said; under the lock, so that it leaves in the order in which it was said."""
        for one in said:
            if isinstance(one, Out):
                self._servers.send(one.server, one.message, one.payload)
            elif self._host is not None:
                self._host.do(one)

    def on_connected(self, peer: Any) -> None:
        if self._trace is not None:
            peer.on_written = self._written
        self._sharing.offer(peer)

    def receive_buffer_for(self, peer: Any, message: FromServer, size: int) -> memoryview | None:
        with self._lock:
            return self._mind.place(peer.member.rank, message, size) if self._servers.is_in_use(peer) else None

    def on_message(self, peer: Any, message: FromServer, payload: memoryview | None) -> None:
        lent = self._sharing.lent_bytes(peer, message)
        server = peer.member.rank
        with self._lock:
            if not self._servers.is_in_use(peer):
                return
            self._send(self._mind.received(server, message, 0 if payload is None else len(payload), lent))
            if not self._mind.unanswered and self._newest[1] > self._newest[0]:
                self._under_way.end()
            self._waits.on_message(server, peer)

    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None:
        with self._lock:
            if self._servers.is_in_use(peer):
                self._send(self._mind.lost(peer.member.rank))
                self._sharing.forget(peer.member)
                self._waits.wake()

    def _written(self, message: Message, size: int) -> None:
        if self._trace is not None and isinstance(message, Push | PushPart):
            self._trace((self._clock.now(), "push-bytes-left", message.shard, message.clock))
