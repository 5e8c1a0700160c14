"""MASTER_PORT of a host: a loopback port for this user alone, and the path from it to torch's store on the head.

The store listens at the head's MASTER_PORT too, where the kernel leads connections of the head's agent to it, and all
others to the agent (transport/loopback_tcp.py). The agent connects its own MASTER_PORT to it directly, and those of
other hosts through tunnels, which end at a port of the head that admits the job's agents only. Each connection has a
tunnel of its own, so one that is not read delays no other: bytes that its reader does not take stay in the tunnel's
window. Each direction ends by itself; when both have, or anything breaks, both ends are closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

import msgspec

from psctl.errors import ConnectionFailed, PsctlError
from psctl.job.process_messages import StartProcess
from psctl.orders import JobOrder
from psctl.permits import Direction, Permit, Permits, WireMessage
from psctl.process.rejected_connections import RejectionLog
from psctl.transport import loopback_tcp
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.loopback_tcp import GuardedListener
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.types import Address

CHUNK = 256 << 10
"""Bytes that are read from a connection at once."""
QUEUED = 4 << 20
"""Bytes that wait for the network before no more are read."""


class Carried(msgspec.Struct, frozen=True, tag=True):
    """Payload: the next bytes of the connection."""


class NoMore(msgspec.Struct, frozen=True, tag=True):
    """The sender has ended its direction; it may still receive."""


BETWEEN: Direction = ("agent", "agent")
TUNNELS = Permits([Permit(Carried, (BETWEEN,), payload=CHUNK), Permit(NoMore, (BETWEEN,))])
"""Every message of a tunnel, once."""

_DECODER = msgspec.msgpack.Decoder(
    TUNNELS.union
)  # made at import: msgspec crashes when threads build a type's decoder at once


class Tunnel(ConnectionHandler[WireMessage]):
    """One end of a tunneled connection; the handler of the sealed connection where this end dials.

    Args:
        local: the socket on this host; the caller closes it.
    """

    def __init__(self, local: socket.socket) -> None:
        self._local = local
        self._no_more = threading.Event()  # set by the other end

    def send_all(self, peer: PeerConnection) -> None:
        """Send the bytes of the local socket until it ends. ConnectionFailed, OSError: a connection broke."""
        while data := self._local.recv(CHUNK):
            peer.send(Carried(), data)
            if peer.pending() > QUEUED:
                peer.flush()
        peer.send(NoMore())

    def run(self, peer: PeerConnection) -> None:
        """Copy until both directions have ended or a connection broke; then close the sealed connection.

        Raises:
            ConnectionFailed, OSError: a connection broke.
        """
        try:
            self.send_all(peer)
            peer.flush()
            self._no_more.wait()
        finally:
            peer.close("the connection to the store ended")

    # ---- on the connection's reader thread --------------------------------------------------------------------------

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        """Write to the local socket; while it takes nothing, nothing more is read from the peer."""
        if payload is not None:
            self._local.sendall(payload)
        if isinstance(message, NoMore):
            self._local.shutdown(socket.SHUT_WR)
            self._no_more.set()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self._no_more.set()
        with contextlib.suppress(OSError):  # it has ended
            self._local.shutdown(socket.SHUT_RDWR)


class TunnelServer(ConnectionHandler[WireMessage]):
    """The head's end of all tunnels: each gets a connection to the store.

    Args:
        connect: connects to the store, or raises OSError.
        release: closes such a connection.
        failed: called for each tunnel that broke.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], release: Callable[[socket.socket], None],
        failed: Callable[[str, ConnectionFailed], None],
    ) -> None:  # fmt: skip
        self._connect, self._release, self._failed = connect, release, failed
        self._lock = threading.Lock()
        self._tunnels: dict[PeerConnection, Tunnel] = {}

    def on_connected(self, peer: PeerConnection) -> None:
        try:
            local = self._connect()
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
        self._release(local)

    def _broke(self, peer: PeerConnection, error: ConnectionFailed | OSError) -> None:
        why = f"the store's connection broke: {error}"
        peer.close(why)
        self._failed(peer.name, ConnectionFailed(f"{peer.name}: {why}"))

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        with self._lock:
            tunnel = self._tunnels.get(peer)
        if tunnel is not None:  # else the store could not be connected
            tunnel.on_message(peer, message, payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        with self._lock:
            tunnel = self._tunnels.pop(peer, None)
        if tunnel is not None:
            tunnel.on_connection_lost(peer, error)


def copy_both_ways(one: socket.socket, other: socket.socket) -> None:
    """Copy between two sockets until both directions have ended or one broke; the caller closes them."""
    back = threading.Thread(target=_copy, args=(other, one), name="psctl store back", daemon=True)
    back.start()
    _copy(one, other)
    back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone: end the other too
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


TUNNELS_OF_ONE = 1024
"""Tunnels that one host may have at once: each of its workers makes a few connections to the store."""


class MasterPort:
    """The loopback port that workers of this host get as MASTER_PORT.

    Args:
        order: the job.
        credentials: the agent's.
        notice: takes a sentence for the event log; called on any thread, after the coordinator was reached.
    """

    def __init__(self, order: JobOrder, credentials: Credentials, notice: Callable[[str], None]) -> None:
        self._order, self._credentials, self._notice = order, credentials, notice
        self._noticed, self._lock = False, threading.Lock()
        self._rejections = RejectionLog("MASTER_PORT")
        self._address: Address | None = None
        self._store: Address | None = None  # of the tunnels to it

    def environment(self, start: StartProcess) -> dict[str, str]:
        """Return the variables by which a process finds the store; the port is opened for the first that needs it.

        Raises:
            PortTaken, OSError: a port cannot be had.
        """
        if start.member.role != "worker":
            return {}
        self._store = start.store
        if self._address is None:
            assert start.store is not None, "in a job of several hosts, the order names the head's tunnel port"
            self.open(loopback_tcp.listen(self._order.ports), self._tunnel)
        assert self._address is not None, "it has just been opened"
        return {"MASTER_ADDR": self._address.host, "MASTER_PORT": str(self._address.port)}

    def open(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Accept connections from now on; `serve`, called on a thread for each, returns at its end."""
        self._address = Address(*listening.getsockname())
        threading.Thread(target=self._accept, args=(listening, serve), name="psctl MASTER_PORT", daemon=True).start()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # descriptors are short for a moment, or the caller has ended
                threading.Event().wait(0.05)
                continue
            if self._is_this_user(connection):
                threading.Thread(
                    target=self._serve, args=(connection, serve), name="psctl store connection", daemon=True
                ).start()
            else:
                connection.close()

    def _is_this_user(self, connection: socket.socket) -> bool:
        try:
            caller, user = str(connection.getpeername()), loopback_tcp.owner(connection)
        except OSError:  # the caller has ended
            return False
        if user == os.geteuid():
            return True
        if user is None:
            self.refuse_all("this system's kernel does not say which user owns a connection")
        whose = "whose user the kernel does not say" if user is None else f"of user {user}"
        self._rejections(caller, ConnectionFailed(f"a process {whose}: only this user's processes may connect"))
        return False

    def refuse_all(self, why: str) -> None:
        """Write to the event log, once, why connections are refused: scripts wait for them in init_process_group."""
        with self._lock:
            before, self._noticed = self._noticed, True
        if not before:
            self._notice(
                f"MASTER_PORT refuses connections, because torch's store cannot be used: {why}; scripts that call "
                "init_process_group wait there until their own time limit, others train"
            )

    def _serve(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(connection)
            except (PsctlError, OSError) as error:
                self._rejections("", ConnectionFailed(f"torch's store cannot be reached: {error}"))

    def _tunnel(self, connection: socket.socket) -> None:
        tunnel = Tunnel(connection)
        assert self._store is not None, "an order to start a worker has named it"
        peer = dial(self._store, self._credentials, "agent", TUNNELS, tunnel, congestion=self._order.congestion)
        try:
            tunnel.run(peer)
        finally:
            with contextlib.suppress(OSError):  # wakes its reader, which may be writing to it
                connection.shutdown(socket.SHUT_RDWR)
            peer.join()


class StoreSocket:
    """The socket that the store's process accepts on, on the head; all connections to it are made here.

    Args:
        order: the job.
        credentials: the head's agent's.
        master_port: the head's own.

    Raises:
        PortTaken: no port of the job's range is free.
        OSError, ConnectionFailed: the head's address is not of this machine.
    """

    def __init__(self, order: JobOrder, credentials: Credentials, master_port: MasterPort) -> None:
        front = loopback_tcp.listen(order.ports)
        self._socket = GuardedListener(front)
        self.port = self._socket.address.port
        self._master_port = master_port
        self.tunnels: Address | None = None
        """The address that agents of other hosts dial; None: there are no other hosts."""
        master_port.open(front, self._serve_local)
        if len(order.hosts) > 1:
            failed = RejectionLog("the store's tunnels")
            acceptor = Acceptor(
                order.hosts[credentials.member.rank].address, order.ports, credentials, TUNNELS,
                TunnelServer(self.connect, self._socket.release, failed),
                lambda member: None if member.role == "agent" else f"{member} is not an agent",
                order.congestion, refused=failed, of_one=TUNNELS_OF_ONE,
            )  # fmt: skip
            self.tunnels = acceptor.address

    @property
    def problem(self) -> str:
        """Why this system can have no store; "" when it can."""
        return self._socket.problem

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the serving process inherits; it accepts on the first."""
        return self._socket.descriptors

    def connect(self) -> socket.socket:
        """Connect to the store, as `GuardedListener.connect`; tell the job when this system can have none."""
        if self.problem:
            self._master_port.refuse_all(self.problem)
        return self._socket.connect()

    def watch(self, wanted: Callable[[], None]) -> None:
        """Call `wanted`, once, on another thread, when a connection waits for a process to serve it."""
        mine = os.dup(self._socket.fileno())  # so that poll keeps its descriptor when ours is closed

        def wait() -> None:
            waiting = select.poll()
            waiting.register(mine, select.POLLIN)
            waiting.poll()
            os.close(mine)
            wanted()

        threading.Thread(target=wait, name="psctl store", daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on, once no serving process has the socket either."""
        self._socket.close()

    def _serve_local(self, connection: socket.socket) -> None:
        """Connect a connection of this host to the store."""
        store = self.connect()
        try:
            copy_both_ways(connection, store)
        finally:
            self._socket.release(store)
