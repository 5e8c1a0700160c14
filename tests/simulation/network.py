"""A simulated network: connections with the interface of psctl.transport, and their faults.

A connection has the guarantees of TCP and sealed frames: bytes arrive in order and unchanged, or the connection breaks.
When it breaks, each end detects it at a time of its own, and messages in flight arrive up to some point. A payload is
read from the sender's memory when it is sent, which may be long after `send`, and is written into the receiver's
buffer; `on_message` may follow later, after messages of other connections. Urgent messages are sent before queued ones.
A lost packet is a delay (a link that is cut for a time) or a broken connection; messages that are sent again after it
are the duplicates. Messages of different connections have no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.types import Address, Member
from tests.simulation.kernel import Process, Violation, World

KEEPALIVE_TIMEOUT = 5.0
"""Seconds until an end detects that a link or host is silent (keepalive, TCP_USER_TIMEOUT)."""

DIAL_TIMEOUT = 5.0
"""Seconds until a dial without an answer fails."""

_encode = msgspec.msgpack.Encoder().encode


class Handler(Protocol):
    """The handler of a connection, as psctl.transport.connect calls it."""

    def on_connected(self, peer: Any) -> None: ...
    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None: ...
    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None: ...
    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None: ...


class MessageDecoder:
    """Decodes the messages of one kind of connection."""

    def __init__(self, messages: Any) -> None:
        self.decode = msgspec.msgpack.Decoder(messages).decode


class Connection:
    """Both ends of a connection."""

    def __init__(self, network: Network, decoder: MessageDecoder, dialler: Process, acceptor: Process) -> None:
        self.network, self.decoder, self.broken = network, decoder, False
        self.hosts = frozenset((dialler.host, acceptor.host))
        self.ends = (End(self, dialler), End(self, acceptor))
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]

    def disconnect(self, delay: float) -> None:
        """Break the connection. Each end detects it within `delay` seconds; messages in flight arrive until then."""
        if self.broken:
            return
        self.broken = True
        world = self.network.world
        for end in self.ends:
            moment = world.now + world.random.random() * delay
            end.arrival_deadline = min(end.arrival_deadline, moment)
            world.at(moment, end.drop, "the connection broke")


class End:
    """One end of a connection: the part of psctl.transport.peer_connection.PeerConnection that a handler uses."""

    def __init__(self, connection: Connection, owner: Process) -> None:
        self._connection, self.owner = connection, owner
        self._world = connection.network.world
        self.other: End
        self.member: Member
        self.handler: Handler
        self.on_dial_failed: Callable[[str], None] = lambda why: None
        self.open = True
        self.arrival_deadline = float("inf")  # simulated seconds; messages that arrive later are lost
        self._connected = self._held = self._receiving = self._sending = False
        self._urgent: deque[tuple[Any, memoryview | None]] = deque()
        self._outbox: deque[tuple[Any, memoryview | None]] = deque()
        self._inbox: deque[tuple[Any, bytes | None]] = deque()
        self._last_arrival = 0.0
        owner.ends[self] = None

    # ---- called by the owner -----------------------------------------------------------------------------------

    def send(self, message: Any, payload: memoryview | bytes | None = None, *, urgent: bool = False) -> None:
        """Queue a message. It is dropped if the connection is over."""
        self.owner.count_action()
        if not self.open:
            return
        view = None if payload is None else memoryview(payload)
        (self._urgent if urgent else self._outbox).append((message, view))
        if not self._sending:
            self._schedule_send(self._connection.network.gap())

    def close(self, reason: str = "") -> None:
        """Close the connection after the queued messages are sent."""
        self._outbox.append((None, None))
        if not self._sending:
            self._schedule_send(0.0)

    def hold(self, held: bool) -> None:
        """Hold back arriving messages, as a handler that blocks in `on_connected` does, or deliver them again."""
        self._held = held
        if not held:
            self._world.after(0.0, self._deliver)

    # ---- sending -----------------------------------------------------------------------------------------------

    def _schedule_send(self, gap: float) -> None:
        """Send the next message after `gap` seconds."""
        if gap == 0.0:
            self._send_next()
        else:
            self._sending = True
            self._world.after(gap, self._send_next)

    def _send_next(self) -> None:
        self._sending = False
        queue = self._urgent or self._outbox
        if not self.open or self._connection.broken or not queue:
            return
        network = self._connection.network
        message, payload = queue.popleft()
        data = None if message is None else _encode(message)
        body = None if payload is None else bytes(payload)  # the bytes at the time of sending
        if network.on_send is not None:
            network.on_send(self.owner, message, body)
        leaves = self._world.now
        if network.cuts:
            leaves = max(leaves, network.blocked_until(self._connection.hosts))
        self._last_arrival = max(self._last_arrival, leaves + network.latency())
        self._world.at(self._last_arrival, self.other._arrive, data, body)
        if self._outbox or self._urgent:
            self._schedule_send(network.gap())

    # ---- receiving ---------------------------------------------------------------------------------------------

    def _arrive(self, data: bytes | None, body: bytes | None) -> None:
        if not self.open or not self.owner.alive or self._world.now > self.arrival_deadline:
            return
        if data is None:
            self._inbox.append((None, None))
        else:
            self._inbox.append((self._connection.decoder.decode(data), body))
        self._deliver()

    def complete_handshake(self) -> None:
        """End the handshake at this end."""
        if self.open and self.owner.alive:
            self.owner.count_action()
            self.handler.on_connected(self)
            self._connected = True
            self.owner.wake_tasks()
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the messages that have arrived and can be handled now."""
        while (
            self._inbox and self.open and self._connected and not (self._held or self._receiving) and self.owner.alive
        ):
            if self._world.now < self.owner.paused_until:
                self._world.at(self.owner.paused_until, self._deliver)
                return
            message, body = self._inbox.popleft()
            if message is None:
                self.drop("it hung up")
                return
            try:
                self._deliver_one(message, body)
            except ProtocolError as error:
                raise self._invariant_broken(error) from error

    def _deliver_one(self, message: Any, body: bytes | None) -> None:
        self.owner.count_action()
        if self._world.trace is not None:
            self._world.log(lambda: f"{self.owner} <- {self.other.owner}: {_short(message, body)}")
        if body is None:
            self.handler.on_message(self, message, None)
            self.owner.wake_tasks()
            return
        given = self.handler.receive_buffer_for(self, message, len(body))
        buffer = memoryview(bytearray(len(body))) if given is None else given.cast("B")
        assert len(buffer) == len(body), f"{len(buffer)} bytes given for a payload of {len(body)}"
        pause = self._connection.network.payload_delay()
        if not pause:
            buffer[:] = body
            self.handler.on_message(self, message, buffer)
            self.owner.wake_tasks()
            return
        half = len(body) // 2
        buffer[:half] = body[:half]
        self._receiving = True
        self._world.after(pause, self._complete, message, buffer, half, body)

    def _complete(self, message: Any, buffer: memoryview, half: int, body: bytes) -> None:
        if not self.open or not self.owner.alive:
            return
        buffer[half:] = body[half:]
        self._receiving = False
        try:
            self.handler.on_message(self, message, buffer)
        except ProtocolError as error:
            raise self._invariant_broken(error) from error
        self.owner.wake_tasks()
        self._deliver()

    def _invariant_broken(self, error: ProtocolError) -> Violation:
        """Return the error for a refused message: its sender or its receiver is wrong."""
        return Violation("protocol", f"{self.owner} refuses {self.other.owner}: {error}")

    # ---- closing -----------------------------------------------------------------------------------------------

    def drop(self, why: str) -> None:
        """End the connection at this end."""
        if not self.open:
            return
        self.open = False
        self._urgent.clear()
        self._outbox.clear()
        self._inbox.clear()
        self.owner.ends.pop(self, None)
        if not self._connection.broken:
            self._connection.disconnect(self._connection.network.detection_delay())
        if self.owner.alive:
            self._world.log(lambda: f"{self.owner} loses {self.other.owner}: {why}")
            if not self._connected:
                _report_failure(self.owner, self.on_dial_failed, why)
            else:
                self.handler.on_connection_lost(
                    self, PeerLost(f"{self.other.owner.member}: {why}", where=str(self.other.owner))
                )
                self.owner.wake_tasks()

    def on_process_end(self) -> None:
        """End the connection with its process; queued messages are lost."""
        self.open = False
        self._urgent.clear()
        self._outbox.clear()
        network = self._connection.network
        dark = self.owner.host in network.hosts_down
        self._connection.disconnect(KEEPALIVE_TIMEOUT if dark else network.detection_delay())


class Network:
    """All connections, listeners and network faults.

    Args:
        world: the event queue.
        max_latency: seconds that a message takes at most; the least is a hundredth of it.
        slow_payloads: share of payloads that arrive in two parts, with other messages between.
    """

    def __init__(self, world: World, max_latency: float, slow_payloads: float) -> None:
        self.world, self._max_latency, self._slow_payloads = world, max_latency, slow_payloads
        self.hosts_down: set[int] = set()
        self.shared_memory: list[torch.Tensor] = []  # segments of all hosts
        self.peer_addresses: dict[Member, Address] = {}  # where a worker listens for workers of its host
        self.connections: list[Connection] = []
        self.on_send: Callable[[Process, Any, bytes | None], None] | None = None
        self.cuts: dict[frozenset[int], float] = {}
        self._listeners: dict[Address, tuple[Process, Callable[[Member], str | None], Handler, MessageDecoder]] = {}
        self._port = 20000

    def listen(self, owner: Process, handler: Handler, messages: Any, allow: Callable[[Member], str | None]) -> Address:
        """Let `owner` accept connections; return the address."""
        self._port += 1
        address = Address(f"10.0.0.{owner.host + 1}", self._port)
        self._listeners[address] = (owner, allow, handler, MessageDecoder(messages))
        return address

    def dial(
        self, owner: Process, address: Address, expect: Member, handler: Handler, failed: Callable[[str], None]
    ) -> None:
        """Connect; later the handler's `on_connected` is called, or `failed` with a reason."""
        self.world.after(self.latency(), self._connect, owner, address, expect, handler, failed, self.world.now)

    def _connect(
        self, owner: Process, address: Address, expect: Member, handler: Handler, failed: Callable[[str], None],
        began: float,
    ) -> None:  # fmt: skip
        if not owner.alive:
            return
        target, allow, theirs, decoder = self._listeners[address]
        blocked = self.blocked_until(frozenset((owner.host, target.host)))
        if target.host in self.hosts_down or blocked > began + DIAL_TIMEOUT:
            self.world.at(began + DIAL_TIMEOUT, _report_failure, owner, failed, f"no answer within {DIAL_TIMEOUT:g} s")
            return
        if blocked > self.world.now:
            self.world.at(blocked + self.latency(), self._connect, owner, address, expect, handler, failed, began)
            return
        refusal = "connection refused" if not target.alive else allow(owner.member)
        if refusal is None and target.member != expect:
            refusal = f"expected {expect} of incarnation {expect.incarnation}, found {target}"
        if refusal is not None:
            self.world.log(lambda: f"{owner} cannot reach {expect}: {refusal}")
            self.world.after(self.latency(), _report_failure, owner, failed, refusal)
            return
        connection = Connection(self, decoder, owner, target)
        self.connections.append(connection)
        ours, theirs_end = connection.ends
        ours.handler, theirs_end.handler, ours.on_dial_failed = handler, theirs, failed
        ours.member, theirs_end.member = target.member, owner.member
        self.world.after(self.latency(), ours.complete_handshake)
        self.world.after(self.latency(), theirs_end.complete_handshake)

    # ---- faults ------------------------------------------------------------------------------------------------

    def cut(self, hosts: frozenset[int], seconds: float) -> None:
        """Deliver nothing between two hosts for `seconds`. A long cut breaks the connections."""
        self.world.log(lambda: f"the link between hosts {sorted(hosts)} is cut for {seconds:.2f} s")
        self.cuts[hosts] = max(self.cuts.get(hosts, 0.0), self.world.now + seconds)
        if seconds > KEEPALIVE_TIMEOUT:
            for connection in self.connections:
                if connection.hosts == hosts and not connection.broken:
                    self.world.after(KEEPALIVE_TIMEOUT - 1.0, connection.disconnect, 1.0)

    def disconnect(self, a: Member, b: Member) -> None:
        """Break the connections between two members."""
        for connection in self.connections:
            if {end.owner.member for end in connection.ends} == {a, b} and not connection.broken:
                self.world.log(lambda: f"the connection between {a} and {b} breaks")
                connection.disconnect(self.detection_delay())

    def blocked_until(self, hosts: frozenset[int]) -> float:
        """Return the simulated time until which the link between two hosts is cut; 0 if it never was."""
        return self.cuts.get(hosts, 0.0)

    def gap(self) -> float:
        """Return the seconds that a queued message waits before it is sent; 0 for most."""
        rng = self.world.random
        return rng.random() * self._max_latency if rng.random() < 0.15 else 0.0

    def latency(self) -> float:
        """Return the seconds that one message takes."""
        share = self.world.random.random()
        return self._max_latency * (0.01 + share * share)

    def detection_delay(self) -> float:
        """Return the seconds within which an end detects that a connection broke."""
        return 4 * self._max_latency

    def payload_delay(self) -> float:
        """Return the seconds between the two parts of a payload; 0 for a payload that arrives at once."""
        rng = self.world.random
        return rng.random() * self._max_latency if rng.random() < self._slow_payloads else 0.0


def _report_failure(owner: Process, failed: Callable[[str], None], why: str) -> None:
    if owner.alive:
        failed(why)
        owner.wake_tasks()


def _short(message: Any, body: bytes | None) -> str:
    text = repr(message)
    return (text if len(text) <= 150 else f"{text[:147]}...") + (f" +{len(body)} bytes" if body is not None else "")
