"""A worker's end of the parameter server: push, pull and wait over one connection to each server.

Clocks count from 0; version v of the values holds the clocks 0 .. v-1. One step of a job at clock c is

    gradients = client.sending(c)              # flat, by dtype ("float32"); fill it while backward runs
    client.push(c, shard, present, weight)     # each shard when its gradients are ready
    client.norms(c)                            # only to clip: squares of the joint gradient's norms
    client.step(c, groups, scale, save)        # update: server only; save: the result is checkpoint c+1
    client.pull(c + 1)                         # what clock c+1 reads: values that hold clock c
    client.wait(c + 1, shards)                 # before the first read; then `landing` has them

Under staleness s clock c reads values that hold all clocks up to c-s-1 at least: `wait` blocks only when those in
`landing` are older, so the fastest worker is never more than s clocks ahead of the slowest.

The first clock is `resume.step`, else 0; `start` brings its values. Under `update: worker`, `start` brings rank 0's
start values in the same way, and wait(c + 1) the joint mean gradient of clock c.

`landing` changes only inside `start` and `wait`, for the shards that are waited for: values that arrive earlier lie in
a back buffer, and the wait copies them; values that arrive during the wait land in place. Values that were never waited
for are copied by the next `pull` (store/client.py).

Threads: one lock around the mind; the connections' reader threads and the user's threads take it briefly and never
while bytes are copied. Waits end when what they wait for is there, when a server is lost (PeerLost), when the servers
refuse to go on (JobFailed), or when a server has not said a word for `patience` seconds although it was asked
(TimedOut): a slow worker elsewhere is no reason, for the server answers that it waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from psctl.clock import Clock
from psctl.errors import ConnectionFailed, JobFailed, PeerLost, PsctlError, TimedOut
from psctl.job.messages import Decision
from psctl.store.client import ClientMind, Out
from psctl.store.messages import FromServer, Message, Norms, Push, PushPart, SaveNow, Step, Why
from psctl.store.shard import Terms
from psctl.words import Address, Member, Number

TICK = 1.0
"""Seconds between two looks at a wait: who is lost, who must be asked."""

ASK_EVERY = 5.0
"""Seconds between two questions to a server that keeps us waiting."""


class Connection(Protocol):
    """What the client needs of a net.peer.Peer."""

    member: Member
    bytes_sent: int
    bytes_received: int
    on_written: Callable[[Any, int], None] | None

    def send(self, message: Any, payload: memoryview | None = None, *, urgent: bool = False) -> Any: ...
    def flush(self, timeout: float) -> None: ...
    def close(self, reason: str = "") -> None: ...
    def join(self, timeout: float | None = None) -> bool: ...


class ServerHandler:
    """What one server's connection tells the client; called on that connection's reader thread."""

    def __init__(self, client: ParameterClient, server: int) -> None:
        self._client, self._server = client, server

    def joined(self, peer: Any) -> None:
        """Nothing to do: the client dialled."""

    def place(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return self._client._place(self._server, message, size)

    def received(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self._client._received(self._server, message, payload)

    def lost(self, peer: Any, error: ConnectionFailed) -> None:
        self._client._lost_server(self._server, error)


class ParameterClient:
    """Push, pull, wait; see the module's docstring for the order of calls and who changes what when.

    Args:
        me: this worker.
        world: number of workers.
        decision: layout, shards, assignment and whether the job goes on from a checkpoint.
        dial: connects to a server; raises ConnectionFailed.
        clock: the machine's time.
        patience: seconds that a server may be silent although it was asked.
        trace: called with (time, "push-bytes-left", shard, clock) when a part of a push has left this process.

    Raises:
        ConnectionFailed: a server cannot be reached; names it.
    """

    def __init__(
        self,
        me: Member,
        world: int,
        decision: Decision,
        dial: Callable[[Member, Address, ServerHandler], Any],
        clock: Clock,
        patience: float,
        trace: Callable[[tuple[float, str, int, int]], object] | None = None,
    ) -> None:
        base = decision.resume.step if decision.resume else 0
        self.base = base
        """The first clock."""
        terms = Terms(decision.layout, world, decision.update, base, decision.staleness)
        self._mind = ClientMind(terms, decision.shards, decision.assignment.owners, me.rank)
        self.landing = self._mind.landing
        """By dtype ("float32"): values, or under `update: worker` the joint mean gradient."""
        self.seconds_waiting = 0.0
        self._servers = decision.assignment.servers
        self._clock, self._patience, self._trace = clock, patience, trace
        self._changed = threading.Condition()
        self._lost: dict[int, ConnectionFailed] = {}
        self._heard = [clock.now()] * len(self._servers)
        self._closed = False
        self._waiting: tuple[str, set[int]] = ("", set())
        self._peers: list[Connection] = []
        for server, at in enumerate(self._servers):
            peer = dial(Member("server", server, at.incarnation), at.address, ServerHandler(self, server))
            if trace is not None:
                peer.on_written = self._written
            self._peers.append(peer)

    # ---- one step ----------------------------------------------------------------------------------------------

    def start(self, values: Mapping[str, torch.Tensor] | None) -> None:
        """Bring the first version to `landing`; blocks until it is there.

        Args:
            values: rank 0's start values by dtype, flat and on the CPU; None on other ranks, and on rank 0 when the
                servers load them from a checkpoint (`update: server` and a resumed job).

        Raises:
            PsctlError: as `wait`.
        """
        if values is not None:
            self._send(self._mind.begin(values))
        self.pull(self.base)
        self.wait(self.base)

    def sending(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, by dtype; waits until what it held at clock-2 is acknowledged."""
        self._wait_until(f"room for clock {clock}", clock, lambda: self._mind.unacknowledged(clock - 2))
        return self._mind.sending(clock)

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float = 1.0) -> None:
        """Push a shard of `sending(clock)`, which must stay untouched until it is given out again.

        Args:
            clock: clocks of a shard follow one another without a gap.
            shard: index of the shard.
            present: for each piece of the shard, whether this worker has a gradient; the bytes of others do not count.
            weight: examples of this rank times world, divided by the examples of the clock.
        """
        self._wait_until(f"shard {shard} of clock {clock}", clock, lambda: self._servers_of(clock, [shard]))
        with self._changed:
            outs = self._mind.push(clock, shard, present, weight)
        self._send(outs)

    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> None:
        """Order the optimizer's step of `clock`, after all its pushes; every rank orders the same.

        Under `update: worker` there is nothing to order and nothing is sent.

        Args:
            clock: the clock to apply.
            groups: numbers of each optimizer group, as store.fit.numbers returns them.
            scale: what the joint gradient is multiplied by first; None: nothing.
            save: the servers stream the result to the coordinator as the checkpoint of step clock+1.
        """
        if self._mind.terms.update == "server":
            order = Step(clock, [dict(group) for group in groups], scale, save)
            self._send([Out(server, order) for server in range(len(self._peers))])

    def save(self, version: int) -> None:
        """Have the servers save `version`, the newest that was pulled, though its step did not say so; any rank may."""
        if self._mind.terms.update == "server":
            self._send([Out(server, SaveNow(version)) for server in range(len(self._peers))])

    def norms(self, clock: int) -> dict[int, float]:
        """Return the square of the joint mean gradient's 2-norm by parameter index; blocks until all have pushed.

        Every rank gets the same numbers to the bit. Parameters that nobody had a gradient for are left out.
        """
        owners = sorted(set(self._mind.owners))
        self._send([Out(server, Norms(clock)) for server in owners])
        self._wait_until(f"norms of clock {clock}", clock + 1, lambda: self._mind.without_norms(clock))
        with self._changed:
            found = self._mind.norms(clock)
        assert found is not None, "the wait was for them"
        return found

    def pull(self, clock: int) -> None:
        """Ask for the values that clock `clock` reads; does not block. Once a clock, in order.

        Shards whose values have landed and were never waited for come to `landing` now.
        """
        with self._changed:
            self._mind.show()
            outs = self._mind.pull(clock)
        self._send(outs)

    def wait(self, clock: int, shards: Sequence[int] | None = None) -> None:
        """Block until the values that clock `clock` reads are in `landing`, for these shards (None: for all).

        Raises:
            PeerLost: a server is lost; names it and its address.
            TimedOut: a server is silent; names it and its address.
            JobFailed: the servers refuse to go on; the message says why and whose fault it is.
        """
        wanted = list(range(len(self._mind.shards))) if shards is None else list(shards)
        with self._changed:
            missing = self._mind.missing(clock, wanted)
            self._mind.opened(missing, True)
        try:
            self._wait_until(f"values of clock {clock}", clock, lambda: self._servers_of(clock, missing))
        finally:
            with self._changed:
                self._mind.opened(missing, False)
        self._mind.show(wanted)

    def presence(self, clock: int) -> list[bool]:
        """Return for each trainable parameter whether any worker had a gradient at `clock`, after wait(clock + 1)."""
        with self._changed:
            return self._mind.presence(clock)

    def held(self, shards: Sequence[int]) -> int:
        """Return the oldest version among these shards in `landing`."""
        return self._mind.shown(shards)

    # ---- about itself ------------------------------------------------------------------------------------------

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""
        return sum(peer.bytes_sent + peer.bytes_received for peer in self._peers)

    @property
    def doing(self) -> str:
        """What the client is at, for heartbeats: "compute", or whom it waits for."""
        with self._changed:
            what, servers = self._waiting
            if not servers:
                return "compute"
            late = sorted({worker for server in servers for worker in self._mind.because.get(server, [])})
            names = ", ".join(f"server/{server}" for server in sorted(servers))
            behind = f", which waits for {', '.join(f'worker/{rank}' for rank in late)}" if late else ""
            return f"sync: waiting for {what} from {names}{behind}"

    def close(self, reason: str = "") -> None:
        """End all connections; what was sent has left first."""
        with self._changed:
            self._closed = True
        for server, peer in enumerate(self._peers):
            if server not in self._lost:
                with suppress(PsctlError):  # a connection that breaks now has no one to miss it
                    peer.flush(TICK)
            peer.close(reason)
        for peer in self._peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(TICK)

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _servers_of(self, clock: int, shards: Sequence[int]) -> set[int]:
        return {self._mind.owners[shard] for shard in self._mind.missing(clock, shards)}

    def _wait_until(self, what: str, clock: int, missing: Callable[[], set[int]]) -> None:
        """Block until `missing` names no server any more; see `wait` for what it raises."""
        with self._changed:
            self._raise_if_over()
            servers = missing()
            if not servers:
                return
            began = asked = self._clock.now()
            try:
                while servers:
                    self._waiting = (what, servers)
                    self._changed.wait(TICK)
                    self._raise_if_over()
                    servers = missing()
                    if self._clock.now() - asked >= min(ASK_EVERY, self._patience / 3):
                        asked = self._clock.now()
                        self._ask(servers, clock)
                    self._raise_if_silent(servers, began, what)
            finally:
                self._waiting = ("", set())
                self.seconds_waiting += self._clock.now() - began

    def _ask(self, servers: set[int], clock: int) -> None:
        for server in servers:
            self._peers[server].send(Why(clock), urgent=True)

    def _raise_if_over(self) -> None:
        refused = self._mind.refused
        if refused is not None:
            raise JobFailed(refused.reason, refused.hint)
        for server, error in sorted(self._lost.items()):
            raise PeerLost(f"{self._name(server)} is lost: {error.message}", where=f"server/{server}") from error

    def _raise_if_silent(self, servers: set[int], began: float, what: str) -> None:
        for server in servers:
            silent = self._clock.now() - max(began, self._heard[server])
            if silent > self._patience:
                name = self._name(server)
                raise TimedOut(
                    f"{name} has not said a word for {silent:.0f} s while it was asked for {what}",
                    f"look at the log of server/{server}",
                    where=f"server/{server}",
                )

    def _name(self, server: int) -> str:
        return f"server/{server} at {self._servers[server].address}"

    # ---- the connections ---------------------------------------------------------------------------------------

    def _send(self, outs: Sequence[Out]) -> None:
        for out in outs:
            self._peers[out.server].send(out.message, out.payload)

    def _place(self, server: int, message: FromServer, size: int) -> memoryview | None:
        with self._changed:
            return self._mind.place(server, message, size)

    def _received(self, server: int, message: FromServer, payload: memoryview | None) -> None:
        with self._changed:
            self._heard[server] = self._clock.now()
            if self._mind.received(server, message, 0 if payload is None else len(payload)):
                self._changed.notify_all()

    def _lost_server(self, server: int, error: ConnectionFailed) -> None:
        with self._changed:
            if not self._closed:
                self._lost[server] = error
                self._changed.notify_all()

    def _written(self, message: Message, size: int) -> None:
        if self._trace is not None and isinstance(message, Push | PushPart):
            self._trace((self._clock.now(), "push-bytes-left", message.shard, message.clock))
