"""Ports on loopback: the kernel's table has the user, and a guarded listener accepts its own user only."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from psctl.errors import PortTaken
from psctl.transport import loopback_tcp
from psctl.transport.loopback_tcp import GUARDED_HOST, HOST, GuardedListener
from psctl.types import Address

NOBODY = 65534
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
def guarded() -> Iterator[GuardedListener]:
    front, back = loopback_tcp.listen_twice(None)
    with front:
        yield back
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


def hears(guarded: GuardedListener, caller: socket.socket, milliseconds: float) -> bool:
    """Tell whether a connection that `caller` asks for is made."""
    caller.setblocking(False)
    assert caller.connect_ex((guarded.address.host, guarded.address.port)) == errno.EINPROGRESS
    looking = select.poll()
    looking.register(caller, select.POLLOUT)
    return bool(looking.poll(milliseconds))


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


def test_a_guarded_listener_accepts_connections_of_its_own_user_only(guarded: GuardedListener) -> None:
    with socket.socket() as stranger:
        assert not hears(guarded, stranger, 50)
    ours = guarded.connect()
    listening = socket.socket(fileno=os.dup(guarded.fileno()))
    with listening, listening.accept()[0] as accepted:
        assert accepted.getpeername() == ours.getsockname()
        ours.sendall(b"word")
        assert accepted.recv(4) == b"word"
        with guarded.connect() as other:  # the filter of an accepted one stays as it was
            ours.sendall(b"more")
            assert accepted.recv(4) == b"more"
            guarded.release(other)
        with socket.socket() as stranger:
            assert not hears(guarded, stranger, 50)
    guarded.release(ours)


def test_a_recorded_port_is_ours_alone_and_is_forgotten_before_it_is_released(guarded: GuardedListener) -> None:
    ours = guarded.connect()
    port = ours.getsockname()[1]
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind((HOST, port))
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.5", port))  # another address of loopback
        assert not hears(guarded, stranger, 50)
    with socket.socket(fileno=os.dup(guarded.fileno())) as listening:
        listening.accept()[0].close()  # it waits for the end, so our port is free at once
    guarded.release(ours)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((HOST, port))
        assert not hears(guarded, stranger, 50)


def test_as_many_connections_as_are_distinguished_are_accepted(
    guarded: GuardedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback_tcp, "TOGETHER", 7)
    monkeypatch.setattr(loopback_tcp, "MOST", 20)
    ours = [guarded.connect() for _ in range(20)]
    with pytest.raises(OSError, match="20 connections are open already"):
        guarded.connect()
    guarded.release(ours.pop())
    ours.append(guarded.connect())
    for each in ours:
        guarded.release(each)


def test_the_longest_filter_is_taken_by_the_kernel(guarded: GuardedListener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * loopback_tcp.MOST)), hard))
    try:
        ours = [guarded.connect() for _ in range(loopback_tcp.MOST)]
        for each in reversed(ours):
            guarded.release(each)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_kernel_that_ignores_filters_is_found_out_and_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_tcp, "ATTACH_FILTER", socket.SO_KEEPALIVE)  # it takes a filter, which has no effect
    front, back = loopback_tcp.listen_twice(None)
    with front, socket.socket() as caller:
        assert "ignores socket filters" in back.problem
        with pytest.raises(OSError, match="ignores socket filters"):
            back.connect()
        assert caller.connect_ex((back.address.host, back.address.port)) == errno.ECONNREFUSED


def test_a_port_must_be_free_at_both_addresses() -> None:
    front, back = loopback_tcp.listen_twice(None)
    port = front.getsockname()[1]
    assert (front.getsockname(), back.address) == ((HOST, port), Address(GUARDED_HOST, port))
    for held in (front, back):
        with pytest.raises(PortTaken, match=f"no free port on .* in {port}-{port}"):
            loopback_tcp.listen_twice((port, port))
        held.close()
    again, back = loopback_tcp.listen_twice((port, port))
    again.close()
    back.close()
