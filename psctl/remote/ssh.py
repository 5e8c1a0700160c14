"""A shell on a host over SSH, on paramiko's transport; only the modules ssh*.py import paramiko.

Commands run under psctl's guard script, which ends them with their channel. A host that vanished is an error within
SILENCE seconds, also behind a jump host, where TCP does not notice.
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

from psctl.clock import Clock, SystemClock
from psctl.errors import HostUnreachable, PsctlError, TimedOut
from psctl.remote import login_shell
from psctl.remote.posix import CommandPipe, PosixShell
from psctl.remote.ssh_hop import SILENCE, WINDOW, Dropped, Hop, open_chain
from psctl.remote.target import Target

DROPPED_PATIENCE = 60.0
"""Seconds in which a login that sshd drops before its banner (MaxStartups) is tried again, without another deadline."""

FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0
"""Seconds between two such tries, on average: from the first to the longest; each wait is half as long again."""

BUSY = 10.0  # seconds to wait for a free session when all connections have theirs in use (MaxSessions)
_SETTLED = 0.5  # seconds after which a refusal is not of a session that closed a moment ago and still counts
LOGINS = 8  # connections at most, where sshd allows few sessions on each


def _silence_paramiko() -> None:
    """Keep paramiko's tracebacks off standard error; the errors raised contain their text."""
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
    def connect(cls, target: Target, deadline: float | None = None, clock: Clock | None = None) -> SshShell:
        """Log in, through the jump hosts if there are any, and ask for the home folder.

        A connection that sshd drops before its banner (MaxStartups: too many logins at once) is tried again until the
        deadline, after waits that grow and differ, so that many clients do not try in step.

        Args:
            target: the host, resolved.
            deadline: on `clock`; dropped connections are tried again until then. None: for DROPPED_PATIENCE seconds.
            clock: time between tries; the system's by default.

        Raises:
            HostUnreachable: the name is unknown, there is no route, the connection is refused, there is no answer
                within connect_timeout, or sshd still drops connections at the deadline.
            AuthFailed: the login failed, on the host or a jump host.
            HostKeyUnknown, HostKeyChanged: of the host or a jump host.
        """
        _silence_paramiko()
        shell = cls(target, _open_despite_drops(target, deadline, clock or SystemClock()))
        try:
            home = shell.run(["sh", "-c", "cd && pwd"], timeout=2 * shell.patience).stdout
            shell.home = home.decode("utf-8", "surrogateescape").rstrip("\n")
        except BaseException:
            shell.close()
            raise
        return shell

    def _watch(self) -> None:
        """Drop the connection when a hop was silent for too long; calls that wait on it then raise."""
        while not self._closed.wait(1.0):
            endpoints = (*self._target.jumps, self._target.host)
            for hop, endpoint in [pair for chain in self._chains for pair in zip(chain, endpoints, strict=True)]:
                if hop.socket and time.monotonic() - hop.socket.last_receipt > SILENCE:
                    self._lost = f"{endpoint.address} sent nothing for {SILENCE:g} s"
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
        """Number of its connections: more than one where sshd allows few sessions on each (MaxSessions)."""
        return len(self._chains)

    def close(self) -> None:
        self._closed.set()
        self._drop()

    def lost_error(self) -> HostUnreachable:
        """Return the error for a connection that broke."""
        if self._closed.is_set():
            return HostUnreachable(f"{self.name}: this connection was closed", where=self.name)
        why = self._lost or f"the connection to {self._target.host.address} broke"
        return HostUnreachable(
            f"{self.name}: {why}", "look at the host and the network, then try again", where=self.name
        )

    def _open(self, argv: Sequence[str]) -> CommandPipe:
        line, head = login_shell.login_line(argv)
        pipe = self._open_line(line)
        view, deadline = memoryview(head), time.monotonic() + self.patience
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its exit status and output show why
            while view:
                view = view[pipe.write(view) :]
                if view and time.monotonic() > deadline:
                    error = self._start_failure(pipe, None, b"")
                    assert error is not None, "a command that has not ended has a failure"
                    raise error
        return pipe

    def _start_failure(self, pipe: CommandPipe, status: int | None, output: bytes) -> PsctlError | None:
        pipe.close()
        error = login_shell.find_failure(self.name, self._open_line, status, output)
        if error is None and status is None:
            return TimedOut(
                f"{self.name}: its login shell began no command for {self.patience:g} s, and does so now",
                "the host was busy: try again",
                where=self.name,
            )
        return error

    def _session(self) -> tuple[paramiko.Channel, paramiko.Transport]:
        """Open a session on the first connection that accepts one more; log in again where none does."""
        began = time.monotonic()
        while True:
            logins = self.logins
            for chain in self._chains[:logins]:
                if (found := self._session_on(chain)) is not None:
                    return found
            waited = time.monotonic() - began
            if waited > BUSY:
                raise TimedOut(
                    f"{self.name}: sshd opens no further session on {logins} connections (MaxSessions there)",
                    "do fewer things at once, or set a larger MaxSessions in sshd_config there; 0 allows no commands",
                    where=self.name,
                )
            if waited > _SETTLED and logins < LOGINS:
                self._log_in_again(logins)
            else:
                time.sleep(random.uniform(0.02, 0.1))  # noqa: S311

    def _session_on(self, chain: list[Hop]) -> tuple[paramiko.Channel, paramiko.Transport] | None:
        """Open a session; None where sshd refuses it, because the connection has as many as are allowed."""
        transport = chain[-1].transport
        if self._closed.is_set() or not transport.is_active():
            raise self.lost_error()
        try:
            with self._opening:  # paramiko mixes up the refusals of two that open at once
                return transport.open_session(window_size=WINDOW, timeout=SILENCE + 3), transport
        except paramiko.ChannelException:
            return None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self.lost_error() from error

    def _log_in_again(self, logins: int) -> None:
        """Add a connection to the `logins` existing ones, unless another thread has done so."""
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
        """Run one line in the login shell."""
        channel, transport = self._session()
        try:
            channel.exec_command(line)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            if transport.is_active():
                raise HostUnreachable(f"{self.name}: sshd starts no commands: {error}", where=self.name) from error
            raise self.lost_error() from error
        return _SshPipe(self, channel, transport)


def _open_despite_drops(target: Target, deadline: float | None, clock: Clock) -> list[Hop]:
    """Open the connections to a target; try again until the deadline while sshd drops them before its banner."""
    began = clock.now()
    until = began + DROPPED_PATIENCE if deadline is None else deadline
    wait, tries = FIRST_WAIT, 0
    while True:
        try:
            return open_chain(target)
        except Dropped as error:
            tries += 1
            left = until - clock.now()
            if left <= 0:
                raise HostUnreachable(
                    f"{target.name}: sshd at {target.first.address} closed the connection before a login for "
                    f"{clock.now() - began:.0f} s, {tries} time{'s' if tries > 1 else ''} ({error})",
                    "too many logins at once (MaxStartups there): use a smaller --forks; or no sshd listens there",
                    where=target.name,
                ) from error
        clock.sleep(min(left, wait * random.uniform(0.5, 1.5)))  # noqa: S311
        wait = min(LONGEST_WAIT, 1.5 * wait)


class _SshPipe:
    def __init__(self, shell: SshShell, channel: paramiko.Channel, transport: paramiko.Transport) -> None:
        self._shell, self._channel, self._transport = shell, channel, transport
        channel.settimeout(0.2)  # of send; reading checks first what is there
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
            raise self._shell.lost_error()
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
            raise self._shell.lost_error()
        return 137  # sshd named a signal, which paramiko drops: the guard's own shell was killed

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
