"""TCP on loopback for one user only: the owner of a connection, and a listener that only chosen sockets can reach.

Any user of a host can connect to any listener on loopback. The kernel offers two means to separate users. Its table of
connections has the user of both ends, so an accepting process can look up the owner of the other end. Where another
program accepts and makes no check, a packet filter on its listening socket drops packets from all ports but those of
this process's sockets. A port is bound before the filter admits it, and released after the filter no longer admits it,
so no other process has it in between.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import sys
import threading
from pathlib import Path

from psctl.errors import PortTaken
from psctl.types import Address

HOST = "127.0.0.1"
GUARDED_HOST = "127.0.29.50"
"""Address of guarded listeners: another loopback address, so that both listeners can have the same port."""

BACKLOG = 1024
"""Connections that may wait to be accepted: all ranks of a large job at once."""
MOST = 1000
"""Connections that a guarded listener admits at once: their ports fit twice into net.core.optmem_max of any kernel."""
CONNECT = 30.0
"""Seconds for a connection to a guarded listener, whose backlog may be full temporarily."""
PROOF = 20
"""Milliseconds in which a connection on loopback is made if the kernel ignores filters."""
ATTEMPTS = 100
"""Ports to try until one is free at two addresses."""
LOOKS = 3
"""Times to read the table of connections: a read may miss a row while other connections change."""

ATTACH_FILTER = 26  # SO_ATTACH_FILTER, not in the socket module
LOAD_WORD, LOAD_HALF, JUMP, JUMP_EQUAL, RETURN = 0x20, 0x28, 0x05, 0x15, 0x06  # classic BPF
NET_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF: offsets from there on count from the IP header
IP_SOURCE = 12
WHOLE = 0xFFFFFFFF
TOGETHER = 200
"""Consecutive port checks that share one return instruction: a jump spans 255 instructions at most."""

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ANY_COOKIE = (1 << 64) - 1
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = b"\1"


# ---- owner of a connection -------------------------------------------------------------------------------------------


def owner(accepted: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a connection on loopback over IPv4.

    None: the system does not report it, or the process has closed the connection already.
    """
    if accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != ESTABLISHED:
        return None
    ours, theirs = accepted.getsockname()[:2], accepted.getpeername()[:2]
    try:
        return _ask(theirs, ours)
    except OSError:  # the kernel has no sock_diag, or this process may not ask
        return _look_up(theirs, ours)


def _ask(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Query the kernel (sock_diag) for the user of the other end."""
    ends = struct.pack("!HH4s12x4s12x", theirs[1], ours[1], socket.inet_aton(theirs[0]), socket.inet_aton(ours[0]))
    wanted = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, WHOLE) + ends + struct.pack("=IQ", 0, ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(CONNECT)
        kernel.send(struct.pack("=IHHII", 16 + len(wanted), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + wanted)
        _, kind, _, _, _, error = struct.unpack_from("=IHHIIi", answer := kernel.recv(4096))
    if kind != SOCK_DIAG_BY_FAMILY:
        raise OSError(-error, os.strerror(-error))
    user, inode = struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
    whole = answer[17:18] == ESTABLISHED and answer[20:24] == ends[:4]
    return user if whole and inode else None  # without an inode the process has closed it, and root owns it


def _look_up(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Find the other end in the kernel's table; takes milliseconds, as the kernel walks its whole hash table."""
    rows = [b" %s %s 01 " % (form(theirs), form(ours)) for form in (_four, _six)]
    for _ in range(LOOKS):
        for table, row in zip(TABLES, rows, strict=False):
            try:
                found = _fields(Path(table).read_bytes(), row)
            except OSError:  # no IPv6 here, or no /proc
                continue
            if found is not None and found[5] != b"0":
                return int(found[3])
    return None


def _fields(table: bytes, row: bytes) -> list[bytes] | None:
    """Return the fields after the addresses and the state: queues, timer, retransmits, user, timeout, inode."""
    at = table.find(row)
    return None if at < 0 else table[at + len(row) : table.find(b"\n", at)].split()


def _four(name: tuple[str, int]) -> bytes:
    return b"%08X:%04X" % (int.from_bytes(socket.inet_aton(name[0]), sys.byteorder), name[1])


def _six(name: tuple[str, int]) -> bytes:
    """Return an IPv4 address as an IPv6 socket has it: a program may connect with one."""
    return b"0000000000000000%08X" % int.from_bytes(b"\0\0\xff\xff", sys.byteorder) + _four(name)


# ---- listeners -------------------------------------------------------------------------------------------------------


def listen(ports: tuple[int, int] | None) -> socket.socket:
    """Listen on loopback.

    Args:
        ports: inclusive range of possible ports; None: any.

    Raises:
        PortTaken: no port of the range is free.
    """
    return _listen(ports, [HOST])[0]


def listen_twice(ports: tuple[int, int] | None) -> tuple[socket.socket, GuardedListener]:
    """Listen on loopback, and with a guard on the same port of another loopback address.

    Raises:
        PortTaken: as `listen`.
    """
    front, back = _listen(ports, [HOST, GUARDED_HOST])
    return front, GuardedListener(back)


def _listen(ports: tuple[int, int] | None, hosts: list[str]) -> list[socket.socket]:
    for port in range(ports[0], ports[1] + 1) if ports else [0] * ATTEMPTS:
        try:
            return _listen_at(port, hosts)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    first, last = ports or (1024, 65535)
    raise PortTaken(
        f"no free port on {' and '.join(hosts)} in {first}-{last}",
        hint=f"see which processes use them with `ss -ltnp`, or widen network.ports ({first}-{last})",
        where=HOST,
    )


def _listen_at(port: int, hosts: list[str]) -> list[socket.socket]:
    """Listen on the same port of these addresses; 0: on a port that is free on the first address."""
    made: list[socket.socket] = []
    try:
        for host in hosts:
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            if port:
                made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made[-1].bind((host, port or made[0].getsockname()[1]))
            if host == GUARDED_HOST:
                _attach(made[-1], [])  # before any process can connect
            made[-1].listen(BACKLOG)
    except OSError:
        for each in made:
            each.close()
        raise
    return made


class GuardedListener:
    """A listening socket that only connections made by `connect` reach; any program may accept them.

    Args:
        listening: on loopback, with a filter that admits no packet.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self._lock = threading.Lock()
        self._ports: set[int] = set()
        self.address = Address(*listening.getsockname())
        self.problem = self._find_problem()
        """Why this system cannot guard the socket, which is closed then; "" when it can."""
        if self.problem:
            listening.close()

    def fileno(self) -> int:
        """Return its descriptor, for the program that accepts."""
        return self._socket.fileno()

    def connect(self) -> socket.socket:
        """Connect to the listener; close the connection by `release`.

        Raises:
            OSError: the listener is closed, cannot be guarded, or has MOST connections.
        """
        if self.problem:
            raise OSError(errno.EOPNOTSUPP, self.problem)
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.bind((HOST, 0))  # without SO_REUSEADDR no other process can bind it until it is closed
            self._change(made.getsockname()[1], here=True)
        except OSError:
            made.close()
            raise
        try:
            made.settimeout(CONNECT)
            made.connect((self.address.host, self.address.port))
            made.settimeout(None)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self.release(made)
            raise
        return made

    def release(self, made: socket.socket) -> None:
        """Close a connection and remove its port from the filter.

        Raises:
            OSError: the kernel refuses the new filter.
        """
        self._change(made.getsockname()[1], here=False)
        made.close()

    def close(self) -> None:
        """Close the socket; listening ends when no other process has it either."""
        with self._lock:
            self._socket.close()

    def _change(self, port: int, *, here: bool) -> None:
        with self._lock:
            ports = self._ports | {port} if here else self._ports - {port}
            if len(ports) > MOST:
                raise OSError(errno.EMFILE, f"{MOST} connections are open already")
            if self._socket.fileno() >= 0:
                _attach(self._socket, sorted(ports))
            self._ports = ports

    def _find_problem(self) -> str:
        """Return why the filter has no effect: connect while it admits no packet; "" when that fails."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect_ex((self.address.host, self.address.port))
            poll = select.poll()
            poll.register(probe, select.POLLOUT)
            connected = poll.poll(PROOF)
        return "this system's kernel ignores socket filters (SO_ATTACH_FILTER)" if connected else ""


def _attach(listening: socket.socket, ports: list[int]) -> None:
    """Have the kernel drop packets that are not from one of these ports of HOST, by a program in classic BPF."""
    source = int.from_bytes(socket.inet_aton(HOST), "big")
    code = [(LOAD_WORD, 0, 0, NET_HEADER + IP_SOURCE), (JUMP_EQUAL, 1, 0, source), (RETURN, 0, 0, 0)]
    code.append((LOAD_HALF, 0, 0, 0))  # the filter sees TCP's header first; it begins with the source port
    for first in range(0, len(ports), TOGETHER):
        some = ports[first : first + TOGETHER]
        code += [(JUMP_EQUAL, len(some) - index, 0, port) for index, port in enumerate(some)]
        code += [(JUMP, 0, 0, 1), (RETURN, 0, 0, WHOLE)]
    code.append((RETURN, 0, 0, 0))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    listening.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("@HP", len(code), ctypes.addressof(packed)))
