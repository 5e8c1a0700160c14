"""A shell on a host that any command reaches (`kind: command`): one child process of that command for each of ours.

The child starts one short `sh` script on the host, which reads the real command from its standard input. So no tool on
the way has to quote, log or limit it. The script prints a line with a random word on standard error before and after
the command: where the second one is missing, the way to the host was lost, and the command did not fail.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from psctl.errors import CommandFailed, HostUnreachable, PsctlError
from psctl.remote import scripts
from psctl.remote.child import ChildPipe
from psctl.remote.posix import CommandPipe, PosixShell, StartLine
from psctl.remote.shell import command_line, printable
from psctl.spec.exec_template import ExecTemplate

_LINGER = 2.0
"""Seconds to wait for the end of a child or of its output, once the other one has ended."""

_GRACE = 1.0
"""Seconds in which a child may pass on the end of its input, which ends the command there. srun and others do not tell
the host when they are killed."""

_SHOWN = 600
"""Characters of the child's error output that an error repeats: the last ones."""

_KEPT = 1 << 16
"""Bytes of error output before the command that are kept."""


Explain = Callable[[], HostUnreachable | None]


class CommandShell(PosixShell):
    """A shell on a host that a command reaches; see `connect`."""

    def __init__(
        self, name: str, address: str, template: ExecTemplate, steps: bool = False, explain: Explain | None = None
    ) -> None:
        self.name = name
        self._steps, self._explain = steps, explain
        self.home = ""
        self._address, self._template = address, template
        self._lock = threading.Lock()
        self._open_pipes: set[ChildPipe] = set()
        self._closed = False

    @classmethod
    def connect(
        cls, name: str, address: str, template: ExecTemplate, patience: float | None = None, *,
        steps: bool = False, explain: Explain | None = None,
    ) -> CommandShell:  # fmt: skip
        """Run a first command on a host, which asks for the home folder.

        Args:
            name: the host's name in the cluster file.
            address: what stands in place of {host}.
            template: the command that reaches hosts.
            patience: seconds in which a command must begin there; None: the same as over SSH.
            steps: all processes of a command end with it there, so `start` leaves the child running.
            explain: asked why the way to the host was lost, for an error in place of the child's own.

        Raises:
            HostUnreachable: the command cannot be started, ends early, or begins nothing in time.
        """
        shell = cls(name, address, template, steps, explain)
        shell.patience = shell.patience if patience is None else patience
        try:
            home = shell.run(["sh", "-c", "cd && pwd"], timeout=2 * shell.patience).stdout
            shell.home = home.decode("utf-8", "surrogateescape").rstrip("\n")
        except BaseException:
            shell.close()
            raise
        return shell

    def _open(self, argv: Sequence[str]) -> _CarriedPipe:
        command = command_line(argv).replace("\n", "'\"$N\"'")  # quoted words have their newlines inside single quotes
        marker = "psctl-" + secrets.token_hex(8)
        script = scripts.OVER_STEP if self._steps else scripts.OVER_COMMAND
        words = self._template.argv(self._address, ["sh", "-c", script, "psctl", marker])
        words[0] = os.path.expanduser(words[0])
        with self._lock:
            if self._closed:
                raise self.closed_error()
            try:
                child = ChildPipe(words, self._open_pipes.discard, grace=_GRACE)
            except OSError as error:
                raise self._unreachable(
                    f"`{words[0]}` cannot be started: {error.strerror or error}",
                    "install it on this machine, or correct exec: in the cluster file",
                ) from error
            self._open_pipes.add(child)
        pipe = _CarriedPipe(self, child, marker)
        pipe.send(f"{command}\n".encode("utf-8", "surrogateescape"), time.monotonic() + self.patience)
        return pipe

    def _start_process(self, words: Sequence[str], environment: bytes, shown: str) -> bytes:
        if not self._steps:
            return super()._start_process(words, environment, shown)
        marker = "psctl-" + secrets.token_hex(8)
        opening = StartLine(marker)
        pipe = self._open(["sh", "-c", scripts.START_IN_STEP, "psctl", marker, *words])
        output = errors = b""
        deadline = time.monotonic() + self.patience
        try:
            pipe.send(environment, deadline)
            pipe.end()
            while b"\n" not in output:
                got = pipe.read(0.5)
                if got is None:
                    raise CommandFailed(self.name, shown, pipe.status() or 1, errors.decode("utf-8", "replace"))
                output, errors = output + opening.feed(got[0]), errors + got[1]
                if time.monotonic() > deadline:
                    raise self.start_error(None, errors)
        except BaseException:
            pipe.close()
            raise
        pipe.release()
        return output

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pipes = list(self._open_pipes)
        for pipe in pipes:
            pipe.close()

    def closed_error(self) -> HostUnreachable:
        """Return the error for a command on a closed shell."""
        return HostUnreachable(f"{self.name}: this connection was closed", where=self.name)

    def lost_error(self, begun: bool, status: int | None, output: bytes) -> HostUnreachable:
        """Return the error of a child that ended without the end of the command that it carried.

        Args:
            begun: whether the script had begun on the host.
            status: the child's exit status; None: it did not end.
            output: its error output.
        """
        if self._closed:
            return self.closed_error()
        if self._explain is not None and (error := self._explain()) is not None:
            return error
        text = " ".join(output.decode("utf-8", "replace").split())[-_SHOWN:]
        how = "did not end" if status is None else f"ended with exit status {status}"
        when = "before the command there had ended" if begun else "and began nothing there"
        return self._unreachable(f"`{self._tool}` {how} {when}{': ' if text else ''}{text}", self._hint)

    def _start_failure(self, pipe: CommandPipe, status: int | None, output: bytes) -> PsctlError | None:
        pipe.close()
        return self.start_error(status, output)

    def start_error(self, status: int | None, output: bytes) -> HostUnreachable:
        """Return the error of a command that did not begin; `status` is None when it has not ended."""
        text = " ".join(output.decode("utf-8", "replace").split())[-_SHOWN:]
        how = f"no command began in {self.patience:g} s" if status is None else "no command began"
        return self._unreachable(f"`{self._tool}`: {how}{': ' if text else ''}{text}", self._hint)

    def _unreachable(self, why: str, hint: str) -> HostUnreachable:
        return HostUnreachable(f"{self.name}: {why}", hint, where=self.name)

    @property
    def _tool(self) -> str:
        """The command up to the one that it carries, for people."""
        return printable([word for word in self._template.argv(self._address, ()) if word])

    @property
    def _hint(self) -> str:
        words = self._template.argv(self._address, ["sh", "-c", "echo yes"])
        return f"try it in a terminal: {printable(words)}; the host needs sh and setsid (util-linux or busybox)"


class _CarriedPipe:
    """The streams of a command that a child carries; the script's own lines are taken out of its error output."""

    def __init__(self, shell: CommandShell, child: ChildPipe, marker: str) -> None:
        self._shell, self._child = shell, child
        self._lines = _StatusLines(marker)
        self._silent_since: float | None = None
        self._ended: float | None = None

    def send(self, data: bytes, deadline: float) -> None:
        """Write input at once; a child that does not take it until the deadline, or ended, is found by `read`."""
        view = memoryview(data)
        try:
            while view and time.monotonic() < deadline:
                view = view[self._child.write(view) :]
        except BrokenPipeError:
            return
        if view:
            self._child.close()

    def write(self, data: memoryview) -> int:
        return self._child.write(data)

    def end(self) -> None:
        self._child.end()

    def read(self, timeout: float) -> tuple[bytes, bytes] | None:
        got = self._child.read(timeout)
        if got is not None:
            output, errors = got[0], self._lines.feed(got[1])
            if output or errors or not self._is_over():
                return output, errors
        elif self._lines.status is None and self._child.status() is None and not self._is_over(closed=True):
            time.sleep(0.01)  # its streams are closed, and it ends soon
            return b"", b""
        if self._lines.status is None:
            raise self._shell.lost_error(self._lines.begun, self._child.status(), self._lines.rest)
        return None

    def _is_over(self, closed: bool = False) -> bool:
        """Return whether the child ended, or closed its streams, so long ago that nothing more is expected of it."""
        if not closed and self._child.status() is None:
            return False  # after its end, a process on this machine may hold its streams open
        self._silent_since = self._silent_since or time.monotonic()
        return time.monotonic() - self._silent_since > _LINGER

    def status(self) -> int | None:
        if self._lines.status is None:
            return None
        self._ended = self._ended or time.monotonic()
        # output may come after the line, by another stream: until the child ends, or for a while
        over = self._child.status() is not None or time.monotonic() - self._ended > _LINGER
        return self._lines.status if over else None

    def release(self) -> None:
        """Close all streams and let the child go on."""
        self._child.release()

    def close(self) -> None:
        self._child.close()


class _StatusLines:
    """Takes the lines "MARKER begin" and "MARKER end STATUS" out of error output, with what is before and after them.

    `rest` is that: messages of the tool that carries the command.
    """

    def __init__(self, marker: str) -> None:
        self._begin, self._end = f"\n{marker} begin\n".encode(), f"\n{marker} end ".encode()
        self.begun = False
        self.status: int | None = None
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that is the command's own."""
        if self.status is not None:
            return b""
        held, self.rest = self.rest + data, b""
        if not self.begun:
            before, found, held = held.partition(self._begin)
            self.begun = bool(found)
            if not found:
                self.rest = before[-_KEPT:]
                return b""
        ended = re.search(re.escape(self._end) + rb"(\d+)\n", held)
        if ended is not None:
            self.status = int(ended[1])
            return held[: ended.start()]
        return self._hold_possible_end(held)

    def _hold_possible_end(self, held: bytes) -> bytes:
        """Keep back bytes at the end that may be the beginning of the last line."""
        line = held.rfind(b"\n")
        tail = held[line:] if line >= 0 else b""
        if tail and (self._end.startswith(tail) or tail.startswith(self._end)):
            self.rest = tail
            return held[:line]
        return held
