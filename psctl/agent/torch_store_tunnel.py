"""Connections to MASTER_PORT on their way to the store: inside the head's host, or through a sealed stream to the head.

Each connection has a stream of its own, so one that is not read holds up no other: what its reader does not take stays
in the stream's window. Each direction ends by itself; when both have, or anything breaks, both ends are closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from psctl.errors import ConnectionFailed
from psctl.permits import Direction, Permit, Permits
from psctl.transport.loopback_tcp import GuardedListener
from psctl.transport.peer_connection import PeerConnection

ROOM = 256 << 10
"""Bytes that are read from a connection at once."""
QUEUED = 4 << 20
"""Bytes that wait for the network before no more are read."""


class Carried(msgspec.Struct, frozen=True, tag=True):
    """Payload: the connection's next bytes."""


class NoMore(msgspec.Struct, frozen=True, tag=True):
    """The sender's end sends no more; it may still receive."""


BETWEEN: Direction = ("agent", "agent")
TUNNELS = Permits([Permit(Carried, (BETWEEN,), payload=ROOM), Permit(NoMore, (BETWEEN,))])
"""Every message of a tunnel, once."""

_LEARNT = msgspec.msgpack.Decoder(TUNNELS.union)  # here, for threads that have msgspec learn a type together crash it


class Tunnel:
    """One end of a connection that goes through a stream; the handler of the peer where this end dials.

    Args:
        local: the connection's socket here; stays the caller's.
    """

    def __init__(self, local: socket.socket) -> None:
        self._local = local
        self._no_more = threading.Event()  # comes from the other end

    def send_all(self, peer: PeerConnection) -> None:
        """Send what the local end says until that ends. ConnectionFailed, OSError: it broke."""
        while data := self._local.recv(ROOM):
            peer.send(Carried(), data)
            if peer.pending() > QUEUED:
                peer.flush()
        peer.send(NoMore())

    def run(self, peer: PeerConnection) -> None:
        """Carry until both directions have ended, or anything broke; then close the peer, which we dialled.

        Raises:
            ConnectionFailed, OSError: it broke.
        """
        try:
            self.send_all(peer)
            peer.flush()
            self._no_more.wait()
        finally:
            peer.close("the connection to the store ended")

    # ---- net's handler, on the peer's reader thread ------------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """The connection is made."""

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Payloads are handed on from a lent buffer."""
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand on what comes; while the local end takes nothing, nothing more is read from the peer."""
        if payload is not None:
            self._local.sendall(payload)
        if isinstance(message, NoMore):
            self._local.shutdown(socket.SHUT_WR)
            self._no_more.set()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Nothing more comes or goes."""
        self._no_more.set()
        with contextlib.suppress(OSError):  # it has ended too
            self._local.shutdown(socket.SHUT_RDWR)


class TunnelsEnd:
    """The head's end of all tunnels, as net's handler: each gets a connection to the store.

    Args:
        store: where they go.
        failed: told of what broke.
    """

    def __init__(self, store: GuardedListener, failed: Callable[[str, ConnectionFailed], None]) -> None:
        self._store, self._failed = store, failed
        self._lock = threading.Lock()
        self._tunnels: dict[PeerConnection, Tunnel] = {}

    def on_connected(self, peer: PeerConnection) -> None:
        """Connect to the store."""
        try:
            local = self._store.connect()
        except OSError as error:
            self._broke(peer, error)
            return
        tunnel = Tunnel(local)
        with self._lock:
            self._tunnels[peer] = tunnel
        threading.Thread(target=self._run, args=(peer, tunnel, local), name=f"psctl tunnel {peer}", daemon=True).start()

    def _run(self, peer: PeerConnection, tunnel: Tunnel, local: socket.socket) -> None:
        try:
            tunnel.send_all(peer)  # the other end closes the peer
        except (ConnectionFailed, OSError) as error:
            self._broke(peer, error)
        peer.join()
        self._store.release(local)

    def _broke(self, peer: PeerConnection, error: ConnectionFailed | OSError) -> None:
        why = f"the store's connection broke: {error}"
        peer.close(why)
        self._failed(peer.name, ConnectionFailed(f"{peer.name}: {why}"))

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Payloads are handed on from a lent buffer."""
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand on to the store."""
        with self._lock:
            tunnel = self._tunnels.get(peer)
        if tunnel is not None:  # else it was closed for want of a connection
            tunnel.on_message(peer, message, payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """A tunnel ended."""
        with self._lock:
            tunnel = self._tunnels.pop(peer, None)
        if tunnel is not None:
            tunnel.on_connection_lost(peer, error)


def join(one: socket.socket, other: socket.socket) -> None:
    """Carry between two sockets until both directions have ended, or either broke; they stay the caller's."""
    back = threading.Thread(target=_copy, args=(other, one), name="psctl store back", daemon=True)
    back.start()
    _copy(one, other)
    back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(ROOM):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # an end is gone, and then the other has nobody to talk to
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
