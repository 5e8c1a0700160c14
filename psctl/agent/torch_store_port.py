"""MASTER_PORT of a host: a port on loopback that lets this user alone in, and carries him to torch's store on the head.

The store listens on the head's loopback, behind a guard that hears nobody but the head's agent
(transport/loopback_tcp.py). The
head's agent connects its own MASTER_PORT to it directly, and those of other hosts through tunnels
(torch_store_tunnel.py), which end at a port of the head that only the job's agents are let in at.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from psctl.agent.torch_store_tunnel import TUNNELS, Tunnel, TunnelsEnd, join
from psctl.errors import ConnectionFailed, PsctlError
from psctl.job.process_messages import StartProcess
from psctl.orders import JobOrder
from psctl.process.rejected_connections import RejectionLog
from psctl.transport import loopback_tcp
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.types import Address, Member

HEAD = Member("agent", 0)


TUNNELS_OF_ONE = 1024
"""Tunnels that one host may have at once: each of its workers makes a few connections to the store."""


class MasterPort:
    """The port that workers of this host are told as MASTER_PORT.

    Args:
        order: the job.
        credentials: the agent's.
    """

    def __init__(self, order: JobOrder, credentials: Credentials) -> None:
        self._order, self._credentials = order, credentials
        self._turned_away = RejectionLog("MASTER_PORT")
        self._address: Address | None = None

    def environment(self, start: StartProcess) -> dict[str, str]:
        """Return the variables by which a process finds the store; the port is opened for the first that needs it.

        Raises:
            PortTaken, OSError: a port cannot be had.
        """
        if start.member.role != "worker":
            return {}
        if self._address is None:
            head = start.store
            assert head is not None, "a job of several hosts has a way to the head's store"
            self.open(loopback_tcp.listen(self._order.ports), lambda connection: self._tunnel(connection, head))
        assert self._address is not None, "it has just been opened"
        return {"MASTER_ADDR": self._address.host, "MASTER_PORT": str(self._address.port)}

    def open(self, listening: socket.socket, carry: Callable[[socket.socket], None]) -> None:
        """Let callers in from now on; `carry`, called on a thread for each, serves one until its end."""
        self._address = Address(*listening.getsockname())
        threading.Thread(target=self._accept, args=(listening, carry), name="psctl MASTER_PORT", daemon=True).start()

    def _accept(self, listening: socket.socket, carry: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # descriptors are short for a moment, or a caller has gone already
                threading.Event().wait(0.05)
                continue
            if self._is_ours(connection):
                threading.Thread(
                    target=self._serve, args=(connection, carry), name="psctl store connection", daemon=True
                ).start()
            else:
                connection.close()

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            caller, user = str(connection.getpeername()), loopback_tcp.owner(connection)
        except OSError:  # it has gone
            return False
        if user == os.geteuid():
            return True
        whose = "whose user the kernel does not say" if user is None else f"of user {user}"
        self._turned_away(caller, ConnectionFailed(f"a process {whose}; only this user's may use it"))
        return False

    def _serve(self, connection: socket.socket, carry: Callable[[socket.socket], None]) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                carry(connection)
            except (PsctlError, OSError) as error:
                self._turned_away("", ConnectionFailed(f"torch's store is not reached: {error}"))

    def _tunnel(self, connection: socket.socket, head: Address) -> None:
        tunnel = Tunnel(connection)
        peer = dial(head, self._credentials, HEAD, TUNNELS, tunnel, congestion=self._order.congestion)
        try:
            tunnel.run(peer)
        finally:
            with contextlib.suppress(OSError):  # its reader may be writing to it
                connection.shutdown(socket.SHUT_RDWR)
            peer.join()


class StoreSocket:
    """The socket that the store's process accepts on, on the head; connections to it come through here alone.

    Args:
        order: the job.
        credentials: the head's agent's.
        master_port: the head's own.

    Raises:
        PortTaken: no port of the job's range is free.
        OSError, ConnectionFailed: the head's address is not of this machine.
    """

    def __init__(self, order: JobOrder, credentials: Credentials, master_port: MasterPort) -> None:
        front, self._socket = loopback_tcp.listen_twice(order.ports)
        self.port = self._socket.address.port
        self.tunnels: Address | None = None
        """Where agents of other hosts dial; None: there are none."""
        master_port.open(front, self._carry)
        if len(order.hosts) > 1:
            failed = RejectionLog("the store's tunnels")
            acceptor = Acceptor(
                order.hosts[0].address, order.ports, credentials, TUNNELS, TunnelsEnd(self._socket, failed),
                lambda member: None if member.role == "agent" else f"{member} is not an agent",
                order.congestion, refused=failed, of_one=TUNNELS_OF_ONE,
            )  # fmt: skip
            self.tunnels = acceptor.address

    @property
    def problem(self) -> str:
        """Why no store can be had on this system; "" when one can."""
        return self._socket.problem

    @property
    def descriptor(self) -> int:
        """What the serving process inherits."""
        return self._socket.fileno()

    def watch(self, wanted: Callable[[], None]) -> None:
        """Call `wanted`, once, on another thread, when a connection waits that no process serves yet."""
        mine = os.dup(self.descriptor)  # so that closing ours does not pull the number away from under poll

        def wait() -> None:
            waiting = select.poll()
            waiting.register(mine, select.POLLIN)
            waiting.poll()
            os.close(mine)
            wanted()

        threading.Thread(target=wait, name="psctl store", daemon=True).start()

    def close(self) -> None:
        """Nobody will be served any more: who connects is refused, once no serving process has the socket either."""
        self._socket.close()

    def _carry(self, connection: socket.socket) -> None:
        """Join a connection of this host to one of the store's."""
        store = self._socket.connect()
        try:
            join(connection, store)
        finally:
            self._socket.release(store)
