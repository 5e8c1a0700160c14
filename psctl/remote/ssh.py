"""A host over SSH, on fabric's connection with what it leaves out put right. ssh*.py are the only door to fabric.

What is put right: every hop's host key is checked before anything is sent to it (ssh_hop.py); commands go over bare
channels under psctl's guard (fabric's `run` leaves them running after Ctrl-C); a host that vanished is an error within
SILENCE seconds, also behind a jump host, where TCP would not tell.
"""

from __future__ import annotations

import contextlib
import logging
import random
import select
import threading
import time
from collections.abc import Callable, Sequence

import paramiko

from psctl.errors import HostUnreachable, PsctlError, TimedOut
from psctl.remote import login_shell
from psctl.remote.posix import Pipe, PosixShell
from psctl.remote.ssh_hop import SILENCE, WINDOW, Dropped, Hop, open_chain
from psctl.remote.target import Target

_TRIES = 6  # of a connection that sshd dropped before its banner; waits add up to about 8 s
_BUSY = 10.0  # seconds to wait for a free session when all connections have theirs in use (MaxSessions)
_SETTLED = 0.5  # seconds after which a refusal is not of a session that closed a moment ago and still counts
_LOGINS = 8  # connections at most, where sshd allows few sessions on each


def _quiet() -> None:
    """Keep paramiko's tracebacks off standard error; what they say is in the errors raised."""
    logger = logging.getLogger("paramiko")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


class SshShell(PosixShell):
    """A shell over SSH; see `connect`."""

    def __init__(self, target: Target, hops: list[Hop]) -> None:
        self.name = target.name
        self.home = ""
        self._target = target
        self._chains = [hops]  # further ones where sshd allows few sessions on each
        self._closed = threading.Event()
        self._opening, self._growing = threading.Lock(), threading.Lock()
        self._lost = ""
        self.patience = max(self.patience, target.connect_timeout)
        for hop in hops:
            hop.keep_alive()
        threading.Thread(target=self._watch, daemon=True, name=f"psctl-watch-{self.name}").start()

    @classmethod
    def connect(
        cls, target: Target, deadline: float | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> SshShell:
        """Log in, through the jump hosts if there are any, and learn the home folder.

        A connection that sshd drops before its banner (MaxStartups: too many logins at once) is tried again a few
        times, after waits that differ.

        Args:
            target: the host, resolved.
            deadline: on the monotonic clock; no try begins after it.
            sleep: how to wait between tries.

        Raises:
            HostUnreachable: a name that is unknown, no route, refused, or no answer in connect_timeout.
            AuthFailed: not let in, on the host or a jump host.
            HostKeyUnknown, HostKeyChanged: of the host or a jump host.
        """
        _quiet()
        for attempt in range(_TRIES):
            try:
                shell = cls(target, open_chain(target))
                break
            except Dropped as error:
                if attempt == _TRIES - 1 or (deadline is not None and time.monotonic() >= deadline):
                    raise HostUnreachable(
                        f"{target.name}: sshd at {target.first.address} hung up before a login, "
                        f"{attempt + 1} times ({error})",
                        "too many logins at once (MaxStartups there): use a smaller --forks; or no sshd listens there",
                        where=target.name,
                    ) from error
                sleep(random.uniform(0.1, 0.4) * 1.7**attempt)  # noqa: S311
        try:
            shell.home = shell._learn_home()
        except BaseException:
            shell.close()
            raise
        return shell

    def _learn_home(self) -> str:
        home = self.run(["sh", "-c", "cd && pwd"], timeout=2 * self.patience).stdout
        return home.decode("utf-8", "surrogateescape").rstrip("\n")

    def _watch(self) -> None:
        """Drop the connection when a hop was silent for too long, which wakes whoever waits on it."""
        while not self._closed.wait(1.0):
            endpoints = (*self._target.jumps, self._target.host)
            for hop, endpoint in [pair for chain in self._chains for pair in zip(chain, endpoints, strict=True)]:
                if hop.heard and time.monotonic() - hop.heard.last > SILENCE:
                    self._lost = f"nothing was heard from {endpoint.address} for {SILENCE:g} s"
                elif not hop.transport.is_active():
                    self._lost = f"the connection to {endpoint.address} broke"
                if self._lost:
                    self._drop()
                    return

    def _drop(self) -> None:
        for chain in list(self._chains):
            for hop in reversed(chain):
                hop.drop()

    @property
    def logins(self) -> int:
        """How many connections it has: more than one where sshd allows few sessions on each (MaxSessions)."""
        return len(self._chains)

    def close(self) -> None:
        self._closed.set()
        self._drop()

    def lost(self) -> HostUnreachable:
        """Return the error for a connection that broke."""
        if self._closed.is_set():
            return HostUnreachable(f"{self.name}: this connection was closed", where=self.name)
        why = self._lost or f"the connection to {self._target.host.address} broke"
        return HostUnreachable(
            f"{self.name}: {why}", "look at the host and the network, then try again", where=self.name
        )

    def _open(self, argv: Sequence[str]) -> Pipe:
        line, head = login_shell.carried(argv)
        pipe = self._open_line(line)
        view, deadline = memoryview(head), time.monotonic() + self.patience
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its exit status and output say why
            while view:
                view = view[pipe.write(view) :]
                if view and time.monotonic() > deadline:
                    raise self._never_begun(pipe)
        return pipe

    def _not_begun(self, pipe: Pipe, status: int | None, said: bytes) -> PsctlError | None:
        if status is None:
            return self._never_begun(pipe, said)
        pipe.close()
        return login_shell.explained(self.name, self._open_line, status, said)

    def _never_begun(self, pipe: Pipe, said: bytes = b"") -> PsctlError:
        pipe.close()
        return login_shell.explained(self.name, self._open_line, None, said) or TimedOut(
            f"{self.name}: its login shell began no command for {self.patience:g} s, and does so now",
            "the host was busy: try again",
            where=self.name,
        )

    def _session(self) -> tuple[paramiko.Channel, paramiko.Transport]:
        """Open a session on the first connection that takes one more; log in again where none does."""
        began = time.monotonic()
        while True:
            logins = self.logins
            for chain in self._chains[:logins]:
                if (found := self._session_on(chain)) is not None:
                    return found
            waited = time.monotonic() - began
            if waited > _BUSY:
                raise TimedOut(
                    f"{self.name}: sshd opens no further session on {logins} connections (MaxSessions there)",
                    "do fewer things at once, or set a larger MaxSessions in sshd_config there; 0 allows no commands",
                    where=self.name,
                )
            if waited > _SETTLED and logins < _LOGINS:
                self._log_in_again(logins)
            else:
                time.sleep(random.uniform(0.02, 0.1))  # noqa: S311

    def _session_on(self, chain: list[Hop]) -> tuple[paramiko.Channel, paramiko.Transport] | None:
        """Open a session; None where sshd refuses it, for the connection has as many as it may."""
        transport = chain[-1].transport
        if self._closed.is_set() or transport is None or not transport.is_active():
            raise self.lost()
        try:
            with self._opening:  # paramiko mixes up the refusals of two that open at once
                return transport.open_session(window_size=WINDOW, timeout=SILENCE + 3), transport
        except paramiko.ChannelException:
            return None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self.lost() from error

    def _log_in_again(self, logins: int) -> None:
        """Add a connection to the `logins` that are there, unless another thread did so meanwhile."""
        with self._growing:
            if self.logins != logins:
                return
            try:
                chain = open_chain(self._target)
            except Dropped:
                return  # too many logins at once: the caller waits for a session, or tries again
            for hop in chain:
                hop.keep_alive()
            self._chains.append(chain)
            if self._closed.is_set():
                self._drop()

    def _open_line(self, line: str) -> _SshPipe:
        """Have the login shell run one line."""
        channel, transport = self._session()
        try:
            channel.exec_command(line)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            if transport.is_active():
                raise HostUnreachable(f"{self.name}: sshd starts no commands: {error}", where=self.name) from error
            raise self.lost() from error
        return _SshPipe(self, channel, transport)


class _SshPipe:
    def __init__(self, shell: SshShell, channel: paramiko.Channel, transport: paramiko.Transport) -> None:
        self._shell, self._channel, self._transport = shell, channel, transport
        channel.settimeout(0.2)  # of send; reading asks first what is there
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def write(self, data: memoryview) -> int:
        try:
            sent: int = self._channel.send(data)
        except TimeoutError:
            return 0
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError from error
        if sent == 0:
            raise BrokenPipeError
        return sent

    def end(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def read(self, timeout: float) -> tuple[bytes, bytes] | None:
        channel = self._channel
        finished = channel.eof_received or channel.closed
        if not finished:
            self._poll.poll(timeout * 1000)
        out = self._take(channel.recv_ready, channel.recv)
        error = self._take(channel.recv_stderr_ready, channel.recv_stderr)
        if out or error or not finished:
            return out, error
        if not self._transport.is_active() and channel.exit_status == -1:
            raise self._shell.lost()
        return None

    @staticmethod
    def _take(ready: Callable[[], bool], take: Callable[[int], bytes]) -> bytes:
        parts = []
        size = 0
        while ready() and size < 1 << 22:
            parts.append(take(1 << 20))
            size += len(parts[-1])
        return b"".join(parts)

    def status(self) -> int | None:
        if not self._channel.exit_status_ready():
            return None
        status: int = self._channel.exit_status
        if status != -1:
            return status
        if not self._transport.is_active():
            raise self._shell.lost()
        return 137  # sshd named a signal, which paramiko drops: the guard's own shell was killed

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
