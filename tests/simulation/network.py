"""A simulated network: connections as psctl.transport makes them, seen from their handlers, and all that can go wrong.

What a connection promises here is what TCP and sealed frames promise: its bytes arrive in order and unchanged, or it
breaks. When it breaks, each end learns of it at its own time, and what was on its way arrives up to some point only. A
payload is read from the sender's memory when it leaves, which may be long after `send`; it is written into the
receiver's memory at `place`, and `received` may follow later, with other connections' messages between. Urgent messages
leave before those that are queued. Loss on the wire is delay (a cut for a time) or, when it lasts, a broken connection;
duplication is what is sent again after it. Different connections know no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.types import Address, Member
from tests.simulation.kernel import Broken, Process, World

SILENCE = 5.0
"""Seconds until an end learns of a link or host that says nothing any more (keepalive, TCP_USER_TIMEOUT)."""

HANDSHAKE = 5.0
"""Seconds that a dial waits for an answer."""

_encode = msgspec.msgpack.Encoder().encode


class Handler(Protocol):
    """What psctl.transport.connect tells of a connection."""

    def on_connected(self, peer: Any) -> None: ...
    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None: ...
    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None: ...
    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None: ...


class Kinds:
    """The messages of a plane of connections."""

    def __init__(self, kinds: Any) -> None:
        self.decode = msgspec.msgpack.Decoder(kinds).decode


class Connection:
    """Both ends, and whether the way between them is broken."""

    def __init__(self, network: Network, kinds: Kinds, dialler: Process, acceptor: Process) -> None:
        self.network, self.kinds, self.broken = network, kinds, False
        self.hosts = frozenset((dialler.host, acceptor.host))
        self.ends = (End(self, dialler), End(self, acceptor))
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]

    def snap(self, notice: float) -> None:
        """Break the way: each end notices within `notice` seconds; what was on its way arrives up to some point."""
        if self.broken:
            return
        self.broken = True
        world = self.network.world
        for end in self.ends:
            moment = world.now + world.random.random() * notice
            end.until = min(end.until, moment)
            world.at(moment, end.drop, "the connection broke")


class End:
    """One end of a connection: the part of psctl.transport.peer_connection.PeerConnection that a handler uses."""

    def __init__(self, connection: Connection, owner: Process) -> None:
        self._connection, self.owner = connection, owner
        self._world = connection.network.world
        self.other: End
        self.member: Member
        self.handler: Handler
        self.failed: Callable[[str], None] = lambda why: None
        self.open = True
        self.until = float("inf")  # what arrives later is lost
        self._joined = self._held = self._busy = self._pumping = False
        self._urgent: deque[tuple[Any, memoryview | None]] = deque()  # order among equals is kept
        self._outbox: deque[tuple[Any, memoryview | None]] = deque()
        self._inbox: deque[tuple[Any, bytes | None]] = deque()
        self._arrival = 0.0
        owner.ends[self] = None

    # ---- what handlers' owners use ---------------------------------------------------------------------------------

    def send(self, message: Any, payload: memoryview | bytes | None = None, *, urgent: bool = False) -> None:
        """Queue a message; what an end that is over is given goes nowhere."""
        self.owner.act()
        if not self.open:
            return
        view = None if payload is None else memoryview(payload)
        (self._urgent if urgent else self._outbox).append((message, view))
        if not self._pumping:
            self._leave(self._connection.network.gap())

    def close(self, reason: str = "") -> None:
        """Hang up; what was sent leaves first, and the other end then learns the reason."""
        self._outbox.append((None, None))
        if not self._pumping:
            self._leave(0.0)

    def hold(self, held: bool) -> None:
        """Let what arrives wait, as a handler that blocks in `joined` does; or no longer."""
        self._held = held
        if not held:
            self._world.after(0.0, self._deliver)

    # ---- the way out -----------------------------------------------------------------------------------------------

    def _leave(self, gap: float) -> None:
        """Let the next message leave after a gap, at once when there is none."""
        if gap == 0.0:
            self._pump()
        else:
            self._pumping = True
            self._world.after(gap, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        queue = self._urgent or self._outbox
        if not self.open or self._connection.broken or not queue:
            return
        network = self._connection.network
        message, payload = queue.popleft()
        data = None if message is None else _encode(message)
        body = None if payload is None else bytes(payload)  # as it is when it leaves
        if network.on_leave is not None:
            network.on_leave(self.owner, message, body)
        leaves = self._world.now
        if network.cuts:
            leaves = max(leaves, network.blocked_until(self._connection.hosts))
        self._arrival = max(self._arrival, leaves + network.latency())
        self._world.at(self._arrival, self.other._arrive, data, body)
        if self._outbox or self._urgent:
            self._leave(network.gap())

    # ---- the way in ------------------------------------------------------------------------------------------------

    def _arrive(self, data: bytes | None, body: bytes | None) -> None:
        if not self.open or not self.owner.alive or self._world.now > self.until:
            return
        if data is None:
            self._inbox.append((None, None))
        else:
            self._inbox.append((self._connection.kinds.decode(data), body))
        self._deliver()

    def joins(self) -> None:
        """The handshake is done at this end."""
        if self.open and self.owner.alive:
            self.owner.act()
            self.handler.on_connected(self)
            self._joined = True
            self.owner.poke()
            self._deliver()

    def _deliver(self) -> None:
        """Hand over what has arrived, as far as can be now."""
        while self._inbox and self.open and self._joined and not (self._held or self._busy) and self.owner.alive:
            if self._world.now < self.owner.paused_until:
                self._world.at(self.owner.paused_until, self._deliver)
                return
            message, body = self._inbox.popleft()
            if message is None:
                self.drop("it hung up")
                return
            try:
                self._hand_over(message, body)
            except ProtocolError as error:
                raise self._refused(error) from error

    def _hand_over(self, message: Any, body: bytes | None) -> None:
        self.owner.act()
        if self._world.trace is not None:
            self._world.say(lambda: f"{self.owner} <- {self.other.owner}: {_short(message, body)}")
        if body is None:
            self.handler.on_message(self, message, None)
            self.owner.poke()
            return
        place = self.handler.receive_buffer_for(self, message, len(body))
        where = memoryview(bytearray(len(body))) if place is None else place.cast("B")
        assert len(where) == len(body), f"{len(where)} bytes given for a payload of {len(body)}"
        pause = self._connection.network.reading()
        if not pause:
            where[:] = body
            self.handler.on_message(self, message, where)
            self.owner.poke()
            return
        half = len(body) // 2
        where[:half] = body[:half]
        self._busy = True
        self._world.after(pause, self._complete, message, where, half, body)

    def _complete(self, message: Any, where: memoryview, half: int, body: bytes) -> None:
        if not self.open or not self.owner.alive:
            return
        where[half:] = body[half:]
        self._busy = False
        try:
            self.handler.on_message(self, message, where)
        except ProtocolError as error:
            raise self._refused(error) from error
        self.owner.poke()
        self._deliver()

    def _refused(self, error: ProtocolError) -> Broken:
        """None of ours ever sends what another may not send."""
        return Broken("protocol", f"{self.owner} refuses {self.other.owner}: {error}")

    # ---- the end ---------------------------------------------------------------------------------------------------

    def drop(self, why: str) -> None:
        """This end learns that the connection is over."""
        if not self.open:
            return
        self.open = False
        self._urgent.clear()
        self._outbox.clear()
        self._inbox.clear()
        self.owner.ends.pop(self, None)
        if not self._connection.broken:
            self._connection.snap(self._connection.network.notice())
        if self.owner.alive:
            self._world.say(lambda: f"{self.owner} loses {self.other.owner}: {why}")
            if not self._joined:
                _tell(self.owner, self.failed, why)  # the dial came to nothing
            else:
                self.handler.on_connection_lost(
                    self, PeerLost(f"{self.other.owner.member}: {why}", where=str(self.other.owner))
                )
                self.owner.poke()

    def died(self) -> None:
        """The process at this end is gone; what it had not sent is lost."""
        self.open = False
        self._urgent.clear()
        self._outbox.clear()
        network = self._connection.network
        dark = self.owner.host in network.dark
        self._connection.snap(SILENCE if dark else network.notice())


class Network:
    """All connections, listeners, and what is wrong with the ways between hosts.

    Args:
        world: time and chance.
        pace: seconds that a message takes at most, mostly; a hundredth of it at least.
        torn: share of payloads whose arrival takes a while, with other messages between.
    """

    def __init__(self, world: World, pace: float, torn: float) -> None:
        self.world, self._pace, self._torn = world, pace, torn
        self.dark: set[int] = set()
        self.memory: list[torch.Tensor] = []  # that processes of a host share (unix_channel.py)
        self.doors: dict[Member, Address] = {}  # where a worker listens for others of its host
        self.connections: list[Connection] = []
        self.on_leave: Callable[[Process, Any, bytes | None], None] | None = None
        self.cuts: dict[frozenset[int], float] = {}
        self._listeners: dict[Address, tuple[Process, Callable[[Member], str | None], Handler, Kinds]] = {}
        self._port = 20000

    def listen(self, owner: Process, handler: Handler, kinds: Any, allow: Callable[[Member], str | None]) -> Address:
        """Let `owner` accept connections; returns where."""
        self._port += 1
        address = Address(f"10.0.0.{owner.host + 1}", self._port)
        self._listeners[address] = (owner, allow, handler, Kinds(kinds) if not isinstance(kinds, Kinds) else kinds)
        return address

    def dial(
        self, owner: Process, address: Address, expect: Member, handler: Handler, failed: Callable[[str], None]
    ) -> None:
        """Connect: later the handler's `joined` is called, or `failed` with a reason."""
        self.world.after(self.latency(), self._reach, owner, address, expect, handler, failed, self.world.now)

    def _reach(
        self, owner: Process, address: Address, expect: Member, handler: Handler, failed: Callable[[str], None],
        began: float,
    ) -> None:  # fmt: skip
        if not owner.alive:
            return
        target, allow, theirs, kinds = self._listeners[address]
        blocked = self.blocked_until(frozenset((owner.host, target.host)))
        if target.host in self.dark or blocked > began + HANDSHAKE:
            self.world.at(began + HANDSHAKE, _tell, owner, failed, f"no answer within {HANDSHAKE:g} s")
            return
        if blocked > self.world.now:
            self.world.at(blocked + self.latency(), self._reach, owner, address, expect, handler, failed, began)
            return
        refusal = "connection refused" if not target.alive else allow(owner.member)
        if refusal is None and target.member != expect:
            refusal = f"expected {expect} of incarnation {expect.incarnation}, found {target}"
        if refusal is not None:
            self.world.say(lambda: f"{owner} cannot reach {expect}: {refusal}")
            self.world.after(self.latency(), _tell, owner, failed, refusal)
            return
        connection = Connection(self, kinds, owner, target)
        self.connections.append(connection)
        ours, there = connection.ends
        ours.handler, there.handler, ours.failed = handler, theirs, failed
        ours.member, there.member = target.member, owner.member
        self.world.after(self.latency(), ours.joins)
        self.world.after(self.latency(), there.joins)

    # ---- what goes wrong -------------------------------------------------------------------------------------------

    def cut(self, hosts: frozenset[int], seconds: float) -> None:
        """Nothing passes between these two hosts for a time; when it is long, connections break."""
        self.world.say(lambda: f"the link between hosts {sorted(hosts)} is cut for {seconds:.2f} s")
        self.cuts[hosts] = max(self.cuts.get(hosts, 0.0), self.world.now + seconds)
        if seconds > SILENCE:
            for connection in self.connections:
                if connection.hosts == hosts and not connection.broken:
                    self.world.after(SILENCE - 1.0, connection.snap, 1.0)

    def snap(self, a: Member, b: Member) -> None:
        """Break the connections between two members."""
        for connection in self.connections:
            if {end.owner.member for end in connection.ends} == {a, b} and not connection.broken:
                self.world.say(lambda: f"the connection between {a} and {b} breaks")
                connection.snap(self.notice())

    def blocked_until(self, hosts: frozenset[int]) -> float:
        """Return until when nothing passes between these hosts; in the past when all does."""
        return self.cuts.get(hosts, 0.0)

    def gap(self) -> float:
        """Seconds that a queued message waits before it leaves; mostly none, and sometimes long."""
        chance = self.world.random
        return chance.random() * self._pace if chance.random() < 0.15 else 0.0

    def latency(self) -> float:
        """Seconds that one message takes."""
        share = self.world.random.random()
        return self._pace * (0.01 + share * share)

    def notice(self) -> float:
        """Seconds within which an end learns that a connection broke."""
        return 4 * self._pace

    def reading(self) -> float:
        """Seconds that a payload takes to come in; 0: no other message comes between."""
        chance = self.world.random
        return chance.random() * self._pace if chance.random() < self._torn else 0.0


def _tell(owner: Process, failed: Callable[[str], None], why: str) -> None:
    if owner.alive:
        failed(why)
        owner.poke()


def _short(message: Any, body: bytes | None) -> str:
    text = repr(message)
    return (text if len(text) <= 150 else f"{text[:147]}...") + (f" +{len(body)} bytes" if body is not None else "")
