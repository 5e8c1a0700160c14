"""TCP on loopback for one user only: the owner of a connection, and a listener that only chosen sockets can reach.

Any user of a host can connect to any listener on loopback. The kernel offers two means to separate users. Its table of
connections has the user of both ends, so an accepting process can look up the owner of the other end. Where another
program accepts and makes no check, two sockets listen at one port (SO_REUSEPORT), and a program in the kernel chooses
which gets a connection: the unchecked one gets those from ports of this process's sockets, and the other one the rest.
A port is bound before the program knows it, and released after the program has forgotten it, so no other process has it
in between. The kernel lets any user attach such a program (Linux 4.6 and newer), but a packet filter on a TCP socket
(SO_ATTACH_FILTER) only with CAP_NET_ADMIN in newer versions.
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
BACKLOG = 1024
"""Connections that may wait to be accepted: all ranks of a large job at once."""
MOST = 1000
"""Connections that a guarded listener admits at once: their ports fit into net.core.optmem_max of any kernel."""
CONNECT = 30.0
"""Seconds for a connection to a guarded listener, whose backlog may be full temporarily."""
PROBES = 20
"""Connections that show that the kernel chooses; without a program it leaves each to one of the two by chance."""
LOOKS = 3
"""Times to read the table of connections: a read may miss a row while other connections change."""

ATTACH_CHOICE = 51  # SO_ATTACH_REUSEPORT_CBPF, not in the socket module
FRONT, SECOND = 0, 1  # the listeners, by the order of their calls of listen
LOAD_WORD, LOAD_HALF, LOAD_BYTE, JUMP, JUMP_EQUAL, RETURN = 0x20, 0x28, 0x30, 0x05, 0x15, 0x06  # classic BPF
NET_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF: offsets from there on count from the IP header
IP_SOURCE, TCP_SOURCE = 12, 20
NO_OPTIONS = 0x45  # first byte of an IP header of 20 bytes: options would move the port, and can look like one
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
    for port in range(ports[0], ports[1] + 1) if ports else [0]:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if port:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((HOST, port))
            # Set after the bind, which would else take a port of this user's other jobs; a GuardedListener needs it.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            return made
    first, last = ports or (1024, 65535)
    raise PortTaken(
        f"no free port on {HOST} in {first}-{last}",
        hint=f"see which processes use them with `ss -ltnp`, or widen network.ports ({first}-{last})",
        where=HOST,
    )


class GuardedListener:
    """A second listening socket at a listener's port, which only connections made by `connect` reach.

    Any program may accept them. All other connections reach the first socket, `front`.

    Args:
        front: from `listen`; nothing accepts on it yet.
    """

    def __init__(self, front: socket.socket) -> None:
        self._front = front.dup()  # while both are open, the kernel's choice is between two
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._ports: set[int] = set()
        self.address = Address(*front.getsockname())
        self.problem = self._find_problem()
        """Why this system cannot guard the socket, which is closed then; "" when it can."""
        if self.problem:
            self.close()

    def fileno(self) -> int:
        """Return its descriptor, for the program that accepts."""
        return self._socket.fileno()

    @property
    def descriptors(self) -> list[int]:
        """What a process that accepts must inherit: this socket, and the one that takes all other connections."""
        return [self._socket.fileno(), self._front.fileno()]

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
        """Close a connection and remove its port from the kernel's program.

        Raises:
            OSError: the kernel refuses the new program.
        """
        self._change(made.getsockname()[1], here=False)
        made.close()

    def close(self) -> None:
        """Close the socket; listening ends when no other process has it either."""
        with self._lock:
            self._socket.close()
            self._front.close()

    def _change(self, port: int, *, here: bool) -> None:
        with self._lock:
            ports = self._ports | {port} if here else self._ports - {port}
            if len(ports) > MOST:
                raise OSError(errno.EMFILE, f"{MOST} connections are open already")
            if self._socket.fileno() >= 0:
                _choose(self._socket, sorted(ports))
            elif here:  # the connection would reach the front, which may ask for the next one
                raise OSError(errno.ECONNREFUSED, "the listener is closed")
            self._ports = ports

    def _find_problem(self) -> str:
        """Listen at the port too; return why the kernel does not tell connections apart, "" when it does."""
        try:
            _choose(self._front, [])  # before the second can be reached
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((self.address.host, self.address.port))
            self._socket.listen(BACKLOG)
            for _ in range(PROBES):
                if not self._front_gets_a_stranger():
                    return "this system's kernel ignores the choice between two listeners (SO_ATTACH_REUSEPORT_CBPF)"
        except OSError as error:
            return f"this system's kernel refuses the choice between two listeners (SO_ATTACH_REUSEPORT_CBPF): {error}"
        return ""

    def _front_gets_a_stranger(self) -> bool:
        """Connect as another process would; return whether that reaches the front, and close it there."""
        waiting = select.poll()
        for each in (self._front, self._socket):
            waiting.register(each, select.POLLIN)
        with socket.create_connection((self.address.host, self.address.port), CONNECT) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT
            while True:
                ready = [descriptor for descriptor, _ in waiting.poll(CONNECT * 1000)]
                if ready != [self._front.fileno()]:
                    return False
                accepted, caller = self._front.accept()
                with accepted:
                    if caller == stranger.getsockname():
                        stranger.close()
                        return True


def _choose(listening: socket.socket, ports: list[int]) -> None:
    """Have the kernel lead connections from these ports of HOST to the second listener, by a program in classic BPF."""
    source = int.from_bytes(socket.inet_aton(HOST), "big")
    code = [(LOAD_BYTE, 0, 0, NET_HEADER), (JUMP_EQUAL, 1, 0, NO_OPTIONS), (RETURN, 0, 0, FRONT)]
    code += [(LOAD_WORD, 0, 0, NET_HEADER + IP_SOURCE), (JUMP_EQUAL, 1, 0, source), (RETURN, 0, 0, FRONT)]
    code.append((LOAD_HALF, 0, 0, NET_HEADER + TCP_SOURCE))
    for first in range(0, len(ports), TOGETHER):
        some = ports[first : first + TOGETHER]
        code += [(JUMP_EQUAL, len(some) - index, 0, port) for index, port in enumerate(some)]
        code += [(JUMP, 0, 0, 1), (RETURN, 0, 0, SECOND)]
    code.append((RETURN, 0, 0, FRONT))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    listening.setsockopt(socket.SOL_SOCKET, ATTACH_CHOICE, struct.pack("@HP", len(code), ctypes.addressof(packed)))
