"""Connections between workers of one host that sum their gradients; made again after a worker is replaced.

Each worker listens on a socket in a directory that only this user can enter, and reports to the coordinator the secret
with which others authenticate (job/training_messages.py). The coordinator sends each worker the others of its host;
of two the one with the higher rank dials. No operation waits for a connection: without one the worker pushes alone. One
thread accepts, one reads all connections; each dial has a thread of its own until it is done.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.job.training_messages import WorkerAt
from psctl.ps.messages import BetweenPeers
from psctl.transport.unix_channel import BYE, PIECE, ChannelListener, UnixChannel
from psctl.types import UNDECODABLE, Address, Member

PATIENCE = 2.0
"""Seconds for the two ends of a connection to authenticate."""

ATTEMPTS = 100
"""Attempts to dial a worker, which may not have this one's secret yet."""

PAUSE = 0.05
"""Seconds between two attempts."""

JOIN = 1.0
"""Seconds that `close` waits for each thread."""

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[BetweenPeers] = msgspec.msgpack.Decoder(BetweenPeers)


def _decode(data: bytes | bytearray) -> BetweenPeers:
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise ProtocolError(f"a worker of this host sent an invalid message: {error}") from error


class HostMessages(Protocol):
    """Called on the reading thread alone."""

    def on_connected(self, member: Member) -> None: ...
    def on_message(self, member: Member, message: BetweenPeers) -> None: ...
    def on_connection_lost(self, member: Member) -> None: ...


class HostConnections:
    """One worker's connections. `send` and `connect` may be called by any thread.

    Args:
        me: this worker.
        folder: the directory of this host's sockets.
        handler: called for connections and messages.
    """

    def __init__(self, me: Member, folder: Path, handler: HostMessages) -> None:
        self._me, self._handler = me, handler
        self._listener = ChannelListener(folder, me, "push")
        self.address: Address | None = None
        """None: no worker of another host connects."""
        self.secret = self._listener.secret
        """The secret with which other workers authenticate to this one."""
        self._lock = threading.Lock()
        self._known: dict[int, WorkerAt] = {}
        self._channels: dict[int, tuple[Member, UnixChannel]] = {}
        self._made: queue.SimpleQueue[tuple[Member, UnixChannel]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads: list[threading.Thread] = []
        self._start_thread(self._accept)
        self._start_thread(self._read)

    def _start_thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"psctl host connections {self._me.rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def connect(self, workers: Sequence[WorkerAt]) -> None:
        """Connect to each listening worker of this host."""
        with self._lock:
            new = [each for each in workers if each.secret and each != self._known.get(each.rank)]
            self._known.update({each.rank: each for each in new})
        for each in new:
            if each.rank < self._me.rank:
                self._start_thread(lambda each=each: self._dial(each))  # type: ignore[misc]

    def send(self, rank: int, message: BetweenPeers, payload: memoryview | None = None) -> None:
        """Send a message, in the order of calls; dropped where there is no connection."""
        assert payload is None, "workers of one host read each other's memory"
        data = memoryview(_encode(message))
        with self._lock:
            found = self._channels.get(rank)
            if found is None:
                return
            found[1].send(PIECE, size=len(data), data=data)
            waiting = found[1].has_queued
        if waiting:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End all connections."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.shutdown()
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(JOIN)
        while not self._made.empty():
            self._made.get()[1].close()
        self._listener.close()

    # ---- connecting ----------------------------------------------------------------------------------------------

    def _dial(self, each: WorkerAt) -> None:
        for _ in range(ATTEMPTS):
            if self._closed.is_set() or self._known[each.rank] != each:
                return
            try:
                channel = self._listener.connect(each, PATIENCE)
            except PeerLost:
                self._closed.wait(PAUSE)
                continue
            self._add(each, channel)
            return

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._add(*self._listener.accept(self._dialling, PATIENCE))
            except OSError:  # closed, or descriptors are short for a while
                self._closed.wait(PAUSE)
            except ConnectionFailed:  # no worker of the job, or one that the coordinator has not reported yet
                continue

    def _dialling(self) -> list[WorkerAt]:
        """Return the workers that dial this one."""
        with self._lock:
            return [each for rank, each in self._known.items() if rank > self._me.rank]

    def _add(self, each: WorkerAt, channel: UnixChannel) -> None:
        self._made.put((Member("worker", each.rank, each.incarnation), channel))
        os.eventfd_write(self._wake, 1)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_descriptor: dict[int, tuple[Member, UnixChannel]] = {}
        while not self._closed.is_set():
            for descriptor, event in poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                member, channel = by_descriptor[descriptor]
                if not self._serve(member, channel, event):
                    del by_descriptor[descriptor]
                    poll.unregister(descriptor)
                    self._over(member, channel)
            while not self._made.empty():
                member, channel = self._made.get()
                former = self._channels.get(member.rank)
                if former is not None:
                    del by_descriptor[former[1].fileno()]
                    poll.unregister(former[1].fileno())
                    self._over(*former)
                by_descriptor[channel.fileno()] = member, channel
                poll.register(channel.fileno(), select.POLLIN)
                with self._lock:
                    self._channels[member.rank] = member, channel
                self._handler.on_connected(member)
            with self._lock:
                for descriptor, (_, channel) in by_descriptor.items():
                    poll.modify(descriptor, select.POLLIN | (select.POLLOUT if channel.has_queued else 0))
        with self._lock:
            for _, channel in self._channels.values():
                channel.send_bye("it has finished")
                channel.shutdown()
                channel.close()
            self._channels.clear()

    def _serve(self, member: Member, channel: UnixChannel, event: int) -> bool:
        """Send what is queued and process what has arrived; return False when the connection is over."""
        try:
            with self._lock:
                if event & select.POLLOUT:
                    channel.flush()
                records = channel.receive() if event & ~select.POLLOUT else []
                ended = bool(channel.ended) or any(record.kind == BYE for record in records)
            for record in records:
                if record.kind == PIECE:
                    self._handler.on_message(member, _decode(record.data or b""))
        except ProtocolError:
            return False  # the peer violates the protocol: its worker pushes alone
        return not ended

    def _over(self, member: Member, channel: UnixChannel) -> None:
        with self._lock:
            if self._channels.get(member.rank) == (member, channel):
                del self._channels[member.rank]
            channel.close()
        self._handler.on_connection_lost(member)
