"""Ports on loopback: the kernel's table has the user, and a guarded listener accepts its own user only."""

from __future__ import annotations

import os
import re
import resource
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from psctl.errors import PortTaken
from psctl.transport import loopback_tcp
from psctl.transport.loopback_tcp import HOST, GuardedListener
from psctl.types import Address

NOBODY = 65534
LIMIT = 10.0
NO_NETLINK = 31
"""A number of netlink that no kernel has: asking it fails as on a kernel without sock_diag."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


def of_another_user(kind: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Return a socket that another user made."""
    os.seteuid(NOBODY)
    try:
        return socket.socket(kind, socket.SOCK_STREAM)
    finally:
        os.seteuid(0)


@pytest.fixture
def front() -> Iterator[socket.socket]:
    with loopback_tcp.listen(None) as listening:
        yield listening


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, GuardedListener]]:
    """A listener, and the guarded one at its port."""
    with loopback_tcp.listen(None) as front:
        back = GuardedListener(front)
        assert not back.problem
        front.settimeout(LIMIT)
        yield front, back
        back.close()


@pytest.fixture(params=["sock_diag", "/proc/net/tcp"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the kernel is asked: the second way is for kernels without the first."""
    if request.param == "/proc/net/tcp":
        monkeypatch.setattr(loopback_tcp, "NETLINK_SOCK_DIAG", NO_NETLINK)
    else:
        monkeypatch.setattr(loopback_tcp, "TABLES", ())


def meet(front: socket.socket, caller: socket.socket, host: str = HOST) -> socket.socket:
    caller.connect((host, front.getsockname()[1]))
    return front.accept()[0]


def reaches_front(pair: tuple[socket.socket, GuardedListener], caller: socket.socket) -> bool:
    """Connect to the common port; return whether that reaches the front, which closes it."""
    front, back = pair
    caller.connect((back.address.host, back.address.port))
    looking = select.poll()
    for each in (front, back):
        looking.register(each, select.POLLIN)
    reached = [descriptor for descriptor, _ in looking.poll(LIMIT * 1000)] == [front.fileno()]
    if reached:
        accepted, peer = front.accept()
        accepted.close()
        assert peer == caller.getsockname()
    return reached


@pytest.mark.usefixtures("table")
def test_our_own_process_is_known_as_such(front: socket.socket) -> None:
    with socket.socket() as caller, meet(front, caller) as accepted:
        assert loopback_tcp.owner(accepted) == os.geteuid()


@pytest.mark.usefixtures("table")
def test_an_ipv6_socket_that_reaches_an_ipv4_address_is_known_too(front: socket.socket) -> None:
    with socket.socket(socket.AF_INET6) as caller, meet(front, caller, f"::ffff:{HOST}") as accepted:
        assert loopback_tcp.owner(accepted) == os.geteuid()


@as_root
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("kind", [socket.AF_INET, socket.AF_INET6])
def test_another_users_process_is_known_by_its_user(front: socket.socket, kind: socket.AddressFamily) -> None:
    host = HOST if kind == socket.AF_INET else f"::ffff:{HOST}"
    with of_another_user(kind) as caller, meet(front, caller, host) as accepted:
        assert loopback_tcp.owner(accepted) == NOBODY


class Established:
    """An accepted connection, which its own end does not know to be closed."""

    def __init__(self, accepted: socket.socket) -> None:
        self.getsockname, self.getpeername = accepted.getsockname, accepted.getpeername

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return the state of a connection that nobody has closed."""
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return loopback_tcp.ESTABLISHED


@pytest.mark.usefixtures("table")
def test_a_connection_that_its_process_has_closed_has_no_owner_in_the_table_either(front: socket.socket) -> None:
    caller = socket.socket()
    with meet(front, caller) as accepted:
        still: Any = Established(accepted)
        assert loopback_tcp.owner(still) == os.geteuid()
        caller.close()
        assert loopback_tcp.owner(still) is None


def test_a_connection_that_its_process_has_closed_has_no_owner(front: socket.socket) -> None:
    caller = socket.socket()
    accepted = meet(front, caller)
    caller.sendall(b"what root would say")
    caller.close()  # the kernel's table gives it to root from now on
    with accepted:
        assert loopback_tcp.owner(accepted) is None


def test_without_an_answer_of_the_kernel_no_owner_is_known(
    front: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback_tcp, "NETLINK_SOCK_DIAG", NO_NETLINK)
    monkeypatch.setattr(loopback_tcp, "TABLES", ("/proc/net/absent", "/proc/net/absent6"))
    with socket.socket() as caller, meet(front, caller) as accepted:
        assert loopback_tcp.owner(accepted) is None


def test_a_guarded_listener_accepts_connections_of_its_own_process_only(
    pair: tuple[socket.socket, GuardedListener],
) -> None:
    guarded = pair[1]
    with socket.socket() as stranger:
        assert reaches_front(pair, stranger)
    ours = guarded.connect()
    with socket.socket(fileno=os.dup(guarded.fileno())) as listening, listening.accept()[0] as accepted:
        assert accepted.getpeername() == ours.getsockname()
        ours.sendall(b"word")
        assert accepted.recv(4) == b"word"
        with guarded.connect() as other, listening.accept()[0]:  # an accepted one stays where it is
            ours.sendall(b"more")
            assert accepted.recv(4) == b"more"
            guarded.release(other)
        with socket.socket() as stranger:
            assert reaches_front(pair, stranger)
    guarded.release(ours)


def test_a_recorded_port_is_ours_alone_and_is_forgotten_before_it_is_released(
    pair: tuple[socket.socket, GuardedListener],
) -> None:
    guarded = pair[1]
    ours = guarded.connect()
    port = ours.getsockname()[1]
    with socket.socket(fileno=os.dup(guarded.fileno())) as listening:
        listening.accept()[0].close()  # it waits for the end, so our port is free at once
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind((HOST, port))
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.5", port))  # another address of loopback
        assert reaches_front(pair, stranger)
    guarded.release(ours)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((HOST, port))
        assert reaches_front(pair, stranger)


@as_root  # the kernel takes options that it does not know from root only
def test_ip_options_cannot_stand_for_a_recorded_port(pair: tuple[socket.socket, GuardedListener]) -> None:
    """An option's type and length lie where the port is in a header without options."""
    guarded, ours = pair[1], []
    while True:
        ours.append(guarded.connect())
        kind, length = ours[-1].getsockname()[1].to_bytes(2, "big")
        if not 2 <= length <= 40:  # no option has this length
            continue
        with socket.socket() as stranger:
            try:
                stranger.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([kind, length]) + bytes(length - 2))
            except OSError:  # the kernel knows the type, which has another form
                continue
            with socket.socket(fileno=os.dup(guarded.fileno())) as listening:
                for _ in ours:
                    listening.accept()[0].close()
            assert reaches_front(pair, stranger)
            break
    for each in ours:
        guarded.release(each)


@as_root
def test_a_process_without_privileges_can_guard_a_listener() -> None:
    """A packet filter on a TCP socket needs CAP_NET_ADMIN in newer kernels; the choice between listeners does not."""
    os.seteuid(NOBODY)
    try:
        with loopback_tcp.listen(None) as front:
            guarded = GuardedListener(front)
            assert guarded.problem == ""
            ours = guarded.connect()
            with socket.socket(fileno=os.dup(guarded.fileno())) as listening, listening.accept()[0] as accepted:
                assert accepted.getpeername() == ours.getsockname()
            guarded.release(ours)
            with socket.socket() as stranger:
                assert reaches_front((front, guarded), stranger)
            guarded.close()
    finally:
        os.seteuid(0)


@as_root
def test_another_user_cannot_listen_at_the_port(pair: tuple[socket.socket, GuardedListener]) -> None:
    for host in (HOST, ""):
        with of_another_user() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="Address already in use"):
                stranger.bind((host, pair[1].address.port))


def test_as_many_connections_as_are_distinguished_are_accepted(
    pair: tuple[socket.socket, GuardedListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = pair[1]
    monkeypatch.setattr(loopback_tcp, "TOGETHER", 7)
    monkeypatch.setattr(loopback_tcp, "MOST", 20)
    ours = [guarded.connect() for _ in range(20)]
    with pytest.raises(OSError, match="20 connections are open already"):
        guarded.connect()
    guarded.release(ours.pop())
    ours.append(guarded.connect())
    with socket.socket(fileno=os.dup(guarded.fileno())) as listening:
        listening.settimeout(LIMIT)
        reached = []
        for _ in range(21):  # with the one that was released
            accepted, peer = listening.accept()
            accepted.close()
            reached.append(peer)
    assert set(reached) >= {each.getsockname() for each in ours}
    with socket.socket() as stranger:
        assert reaches_front(pair, stranger)
    for each in ours:
        guarded.release(each)


def test_the_longest_program_is_taken_by_the_kernel(pair: tuple[socket.socket, GuardedListener]) -> None:
    guarded = pair[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * loopback_tcp.MOST)), hard))
    try:
        ours = [guarded.connect() for _ in range(loopback_tcp.MOST)]
        for each in reversed(ours):
            guarded.release(each)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (socket.SO_KEEPALIVE, "ignores the choice"),  # it takes a program, which has no effect
        (1000, "refuses the choice .*Protocol not available"),
    ],
)
def test_a_kernel_that_cannot_choose_is_found_out_and_the_front_listens_alone(
    option: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback_tcp, "ATTACH_CHOICE", option)
    with loopback_tcp.listen(None) as front, socket.socket() as caller:
        back = GuardedListener(front)
        assert re.search(problem, back.problem)
        with pytest.raises(OSError, match=problem):
            back.connect()
        with meet(front, caller) as accepted:
            assert accepted.getpeername() == caller.getsockname()


def test_a_closed_listener_does_not_lead_connections_to_the_front(
    pair: tuple[socket.socket, GuardedListener],
) -> None:
    front, back = pair
    ours = back.connect()
    back.close()
    with pytest.raises(OSError, match="the listener is closed"):
        back.connect()
    back.release(ours)
    front.setblocking(False)
    with pytest.raises(BlockingIOError):
        front.accept()


def test_a_port_that_another_listener_has_is_not_shared(pair: tuple[socket.socket, GuardedListener]) -> None:
    front, back = pair
    port = back.address.port
    assert back.address == Address(HOST, port)
    with pytest.raises(PortTaken, match=f"no free port on {HOST} in {port}-{port}"):
        loopback_tcp.listen((port, port))
    front.close()
    with pytest.raises(PortTaken):
        loopback_tcp.listen((port, port))
    back.close()
    with loopback_tcp.listen((port, port)) as again:
        assert again.getsockname() == (HOST, port)
