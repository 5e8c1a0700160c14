"""One SSH connection, or a chain of them through jump hosts: paramiko's transport over a socket that psctl opens.

The host key of each hop is checked before anything is sent to the hop. Each target has its own chain, because a
transport that several threads open channels on mixes up their refusals.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from typing import Protocol

import paramiko

from psctl.errors import HostUnreachable, PsctlError
from psctl.remote.ssh_auth import KeyLogin
from psctl.remote.ssh_keys import HostKeyCheck
from psctl.remote.target import Endpoint, Target

SILENCE = 12.0
"""Seconds without a byte from a host, after which it counts as lost; a keepalive is sent every PULSE seconds."""

PULSE = 4.0
WINDOW = 1 << 24
"""Bytes in flight on a channel to us: 16 MiB keeps a 1 Gbit/s link of 100 ms full."""

_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512",
)  # fmt: skip
_INET = (socket.AF_INET, socket.AF_INET6)
_SSHD_DROPS = (b"SSH-", b"Exceeded MaxStartups", b"Not allowed at this time")
_GREETING = 64


class Dropped(Exception):
    """sshd closed the connection before or during the key exchange, as it does with too many logins at once."""


class ByteChannel(Protocol):
    """The methods of a socket, and of a channel of paramiko, that _TimedSocket calls itself."""

    def recv(self, size: int, /) -> bytes: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class _TimedSocket:
    """A TCP socket or a jump host's channel that records when it last received bytes, and the first of them."""

    def __init__(self, inner: ByteChannel) -> None:
        self._inner = inner
        self._quick: socket.socket | None = None
        if hasattr(socket, "TCP_QUICKACK") and isinstance(inner, socket.socket) and inner.family in _INET:
            self._quick = inner
        self.last_receipt = time.monotonic()
        self.greeting = b""

    def recv(self, size: int) -> bytes:
        data = self._inner.recv(size)
        self.last_receipt = time.monotonic()
        self.greeting += data[: _GREETING - len(self.greeting)]
        if self._quick is not None:
            # sshd writes small packets under Nagle's rule: without this each waits 40 ms for the acknowledgement
            self._quick.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data

    def shutdown(self, how: int) -> None:
        """End both directions; threads that wait for bytes return."""
        self._inner.shutdown(how)

    def close(self) -> None:
        """Close it; paramiko's thread does so too, possibly after the jump host's connection was closed."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._inner.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Hop:
    """One SSH connection of a chain; `transport` is set while it is open.

    Args:
        host: the cluster's name of the target, for messages.
        endpoint: the sshd, and how to log in there.
        policy: strict or accept-new.
        timeout: seconds for each step of the connection.
        via: the hop before it; None: it is reached directly.
    """

    transport: paramiko.Transport

    def __init__(self, host: str, endpoint: Endpoint, policy: str, timeout: float, via: Hop | None) -> None:
        self._check = HostKeyCheck(host, endpoint, policy, jumped=via is not None)
        self._login = KeyLogin(host, endpoint)
        self._endpoint, self._timeout, self._via = endpoint, timeout, via
        self.socket: _TimedSocket | None = None

    def open(self) -> None:
        """Connect, check the host key, log in."""
        timed = _TimedSocket(self._open_socket())
        self.transport = transport = paramiko.Transport(timed, default_window_size=WINDOW)
        self.socket = timed
        transport.banner_timeout = transport.handshake_timeout = transport.channel_timeout = self._timeout
        transport.auth_timeout = max(self._timeout, 10.0)
        options = transport.get_security_options()
        options.ciphers = [name for name in _CIPHERS if name in options.ciphers]
        options.digests = [name for name in _MACS if name in options.digests]
        options.key_types = self._check.preferred(tuple(options.key_types))
        transport.start_client(timeout=self._timeout)
        self._check.check(transport.get_remote_server_key())
        self._login.authenticate(transport)

    def _open_socket(self) -> socket.socket | paramiko.Channel:
        if self._via is not None:
            return self._via.transport.open_channel(
                "direct-tcpip", (self._endpoint.address, self._endpoint.port), ("127.0.0.1", 0), timeout=self._timeout,
                window_size=WINDOW,
            )  # fmt: skip
        if self._endpoint.proxy_command:
            return _start_proxy_command(self._endpoint.proxy_command)
        return _connect_socket(self._endpoint, self._timeout)

    def keep_alive(self) -> None:
        """Request an answer after PULSE seconds without bytes (paramiko's own keepalive requests no answer)."""

        def ask() -> None:
            request = paramiko.Message()
            request.add_byte(paramiko.common.cMSG_GLOBAL_REQUEST)
            request.add_string("keepalive@openssh.com")
            request.add_boolean(True)
            self.transport._send_user_message(request)

        self.transport.packetizer.set_keepalive(PULSE, ask)

    def drop(self) -> None:
        """Close the connection, whatever it is doing."""
        if self.socket is not None:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.transport.close()
            self.socket.close()


def _connect_socket(endpoint: Endpoint, timeout: float) -> socket.socket:
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    family = families.get(endpoint.family, socket.AF_UNSPEC)
    failure: OSError = OSError(f"no address for {endpoint.address}")
    for kind, _, protocol, _, address in socket.getaddrinfo(
        endpoint.address, endpoint.port, family, socket.SOCK_STREAM
    ):
        opened = socket.socket(kind, socket.SOCK_STREAM, protocol)
        try:
            opened.settimeout(timeout)
            opened.connect(address)
        except OSError as error:
            opened.close()
            failure = error
            continue
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
        return opened
    raise failure


def _start_proxy_command(command: str) -> socket.socket:
    """Run the user's ProxyCommand with one end of a socket pair as its input and output."""
    ours, theirs = socket.socketpair()
    with theirs:
        # the user's own line of ~/.ssh/config, which ssh too runs with a shell; it ends when its socket is closed
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    threading.Thread(target=process.wait, daemon=True, name="psctl-proxy-command").start()
    return ours


def open_chain(target: Target) -> list[Hop]:
    """Open each jump host over the one before, the host last."""
    hops: list[Hop] = []
    try:
        for endpoint in (*target.jumps, target.host):
            hop = Hop(target.name, endpoint, target.policy, target.connect_timeout, hops[-1] if hops else None)
            hops.append(hop)
            _open_hop(target, endpoint, hop)
    except BaseException:
        for hop in reversed(hops):
            hop.drop()
        raise
    return hops


def _open_hop(target: Target, endpoint: Endpoint, hop: Hop) -> None:
    began = time.monotonic()
    at = f"{endpoint.address} port {endpoint.port}"
    hop_name = f"jump host {at}" if endpoint is not target.host else at

    def unreachable(why: str, hint: str) -> HostUnreachable:
        return HostUnreachable(f"{target.name}: {hop_name}: {why}", hint, where=target.name)

    try:
        hop.open()
    except PsctlError:
        raise
    except socket.gaierror as error:
        raise unreachable(
            f"no such name ({error.strerror})", "correct the address, or add it to DNS or ~/.ssh/config"
        ) from error
    except paramiko.ChannelException as error:
        raise unreachable(
            f"the jump host cannot reach it ({error.text})", "is the host up, and may the jump host connect to it?"
        ) from error
    except ConnectionRefusedError as error:
        raise unreachable(
            "connection refused", f"does sshd run there, and on that port? try `{endpoint.login}`"
        ) from error
    except (ConnectionResetError, EOFError) as error:
        raise Dropped(str(error) or "end of stream") from error
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise unreachable(
                f"no answer in {target.connect_timeout:g} s",
                f"is the host up, and the address right? try `{endpoint.login}`",
            ) from error
        raise unreachable(
            error.strerror or str(error), f"is the host up, and the address right? try `{endpoint.login}`"
        ) from error
    except paramiko.SSHException as error:
        greeting = hop.socket.greeting if hop.socket is not None else b""
        if greeting and not any(greeting.startswith(each[: len(greeting)]) for each in _SSHD_DROPS):
            first = greeting.decode("utf-8", "replace").splitlines()[0]
            raise unreachable(f"no sshd answers there, but: {first!r}", "is the port right?") from error
        if time.monotonic() - began >= target.connect_timeout:
            raise unreachable(f"no SSH answer in {target.connect_timeout:g} s", "does sshd listen there?") from error
        closed = isinstance(error.__cause__, EOFError | ConnectionResetError)
        if closed or any(sign in str(error) for sign in ("banner", "Negotiation failed", "No existing session")):
            raise Dropped(str(error)) from error
        raise unreachable(f"no SSH session: {error}", f"`{endpoint.login} -v` shows more") from error
