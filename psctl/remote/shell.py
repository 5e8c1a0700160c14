"""The interface between psctl and hosts, the same over SSH, on this machine and, in tests, in memory.

Each shell follows these rules, which the conformance test checks:

- `argv` is a list of arguments, never shell text: no argument is split, expanded or interpreted.
- A command that `run` started ends with `run`: by itself, by the deadline, by Ctrl-C, or because psctl was killed. A
  process that must live longer is started by `start`.
- A file written with `put` is complete or absent.
- A `tail` leaves no reader behind, even when psctl is killed with -9.
- Paths may begin with `~` or `~/`: the home folder there. Arguments in `argv` are not changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

OUTPUT_LIMIT = 64_000_000
"""Bytes that a command may print on standard output where its caller sets no limit, and on standard error.

psctl keeps the output in memory."""


class CommandResult(msgspec.Struct, frozen=True):
    """How a command ended. `status` is its exit status, 128 + n when signal n ended it, 127 when it was not found."""

    status: int
    stdout: bytes
    stderr: bytes


class InputStream(msgspec.Struct, frozen=True):
    """Input of a command that is too large for memory.

    Args:
        size: its bytes.
        chunks: returns exactly so many, in parts; an OSError or PsctlError that it raises ends the command.
    """

    size: int
    chunks: Callable[[], Iterator[bytes]]


class Process(msgspec.Struct, frozen=True):
    """A process on a host. `started` identifies it where its number is reused; empty: it ended at once."""

    pid: int
    started: str


class Tail(Protocol):
    """Reads the bytes of a growing file from an offset on."""

    def read(self, timeout: float | None = None) -> bytes | None:
        """Return the next bytes; b"" after `timeout` seconds without any; None after `close` or the reader's end.

        Raises:
            HostUnreachable: the connection was lost.
        """

    def close(self) -> None:
        """End the reader on the host."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __enter__(self) -> Tail: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TransferMeter(Protocol):
    """Shows how much of the files on their way has been moved, and work that lasts; used by several threads at once."""

    def transfer(self, host: str, size: int) -> AbstractContextManager[Callable[[int], object]]:
        """Return a context for one file; it gives what is called with each number of bytes that has been moved."""

    def work(self, host: str, what: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """Return a context for work on a host ("": on all) that lasts `seconds` as foretold; 0: that is not known."""


class Shell(Protocol):
    """Runs commands and transfers files on one host. Safe to use from several threads at once."""

    name: str
    home: str
    meter: TransferMeter | None
    """Shows the progress of `put` and `fetch`, and of `working`."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | InputStream = b"",
        timeout: float | None = 60,
        check: bool = True,
        limit: int = OUTPUT_LIMIT,
        take: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command to its end.

        Args:
            argv: program and arguments; on that host's PATH.
            stdin: its standard input; secrets are passed here, never in argv.
            timeout: seconds; None: no limit.
            check: raise when it ends non-zero.
            limit: bytes that it may print on standard output.
            take: called with the output as it arrives, without a limit; the result has none then.

        Raises:
            CommandFailed: it ended non-zero and `check` is set, or it printed more than `limit` and was ended.
            TimedOut: the deadline passed; the command and all processes that it started were ended.
            HostUnreachable: the connection broke.
        """

    def put(self, data: bytes | Path, path: str, mode: int = 0o600) -> None:
        """Write a file (bytes, or the content of a file here): under a temporary name, then renamed.

        Missing folders are made, readable by this user only (0700).

        Raises:
            DiskFull: the disk there is full; no part of the file is left.
            CommandFailed: it may not be written there.
        """

    def fetch(self, path: str, take: Callable[[bytes], object], limit: int) -> int:
        """Read a file and return its number of bytes. The caller, not the host, decides where they are written.

        Args:
            path: the file there.
            take: called with the content in parts, in order; never with more than `limit` bytes in all.
            limit: bytes that the file may have.

        Raises:
            CommandFailed: the file does not exist, may not be read, is longer than `limit`, or ended early.
            any error that `take` raises.
        """

    def start(self, argv: Sequence[str], *, log: str, cwd: str, env: Mapping[str, str]) -> Process:
        """Start a process that outlives the connection: own session, no standard input, output added to `log`.

        Args:
            argv: program and arguments; one that cannot be run leaves a message in the log and ends at once.
            log: path; made with its parents when missing.
            cwd: folder to start in; must exist.
            env: added to the environment; never on a command line.

        Raises:
            CommandFailed: `cwd` or `log` cannot be used.
        """

    def alive(self, process: Process) -> bool:
        """Return whether exactly this process runs (a zombie does not)."""

    def signal(self, process: Process, number: int) -> bool:
        """Send a signal to exactly this process; False when it has ended."""

    def tail(self, path: str, offset: int = 0) -> Tail:
        """Follow a file from byte `offset` on; it may not exist yet."""

    def close(self) -> None:
        """Close the connection; commands and readers that still run end with it."""


def expand(path: str, home: str) -> str:
    """Return `path` with a leading `~` replaced by `home`; `~user` is refused.

    Raises:
        ValueError: the path is empty, holds a null byte, or begins with `~user`.
    """
    if not path or "\0" in path:
        raise ValueError(f"not a path: {path!r}")
    if path == "~":
        return home
    if path.startswith("~/"):
        return home.rstrip("/") + path[1:]
    if path.startswith("~"):
        raise ValueError(f"{path}: only ~ and ~/ are understood, not the home of another user")
    return path


def command_line(argv: Sequence[str]) -> str:
    """Return arguments as one line that a POSIX shell splits back into exactly these arguments."""
    if not argv:
        raise ValueError("an empty command")
    if any("\0" in word for word in argv):
        raise ValueError("a null byte in a command")
    return " ".join(shlex.quote(word) for word in argv)


def printable(argv: Sequence[str], limit: int = 200) -> str:
    """Return a command as one line for people: long ones are cut, control characters are escaped."""
    line = command_line(argv)
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def working(shell: Shell, host: str, what: str, seconds: float = 0.0) -> AbstractContextManager[None]:
    """Return a context for work that lasts, as for `TransferMeter.work`, on the meter of a shell if it has one."""
    return shell.meter.work(host, what, seconds) if shell.meter is not None else nullcontext()
