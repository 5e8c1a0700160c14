"""What can be done on a host: the one seam between psctl and machines, the same over SSH, locally and in memory.

Rules that every shell keeps, and the conformance test holds it to:

- `argv` is words, never shell text: no word is split, expanded or interpreted on the way.
- What `run` started ends with `run`: by itself, by the deadline, by Ctrl-C, or because psctl was killed. What is to
  live longer goes through `start`.
- A file written with `put` is there whole or not at all.
- A `tail` leaves no reader behind, even when psctl is killed with -9.
- Paths may begin with `~` or `~/`: the home folder there. Words of `argv` are not touched.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec


class Result(msgspec.Struct, frozen=True):
    """How a command ended. `status` is its exit status, 128 + n when signal n ended it, 127 when it was not found."""

    status: int
    stdout: bytes
    stderr: bytes


class Process(msgspec.Struct, frozen=True):
    """A process on a host. `started` tells it from a later one with the same number; empty: it was gone at once."""

    pid: int
    started: str


class Tail(Protocol):
    """The bytes of a file from an offset on, as they are written."""

    def read(self, timeout: float | None = None) -> bytes | None:
        """Return the next bytes; b"" when `timeout` seconds brought none; None after `close` or the reader's end.

        Raises:
            HostUnreachable: the connection is gone.
        """

    def close(self) -> None:
        """End the reader there."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __enter__(self) -> Tail: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Shell(Protocol):
    """A host that can be worked on. Safe to use from several threads at once."""

    name: str
    home: str

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = 60, check: bool = True) -> Result:
        """Run a command to its end.

        Args:
            argv: program and arguments; on that host's PATH.
            stdin: what it reads; secrets go here, never into argv.
            timeout: seconds; None waits for ever.
            check: raise when it ends non-zero.

        Raises:
            CommandFailed: it ended non-zero and `check` is set.
            TimedOut: the deadline passed; the command and all it started were ended.
            HostUnreachable: the connection broke.
        """

    def put(self, data: bytes | Path, path: str, mode: int = 0o600) -> None:
        """Write a file (bytes, or the content of a file here): under a temporary name, then renamed.

        Folders that are missing are made for this user alone (0700).

        Raises:
            DiskFull: the disk there did not take it; nothing is left of it.
            CommandFailed: it may not be written there.
        """

    def fetch(self, path: str, take: Callable[[bytes], object], limit: int) -> int:
        """Bring a file here and return its bytes' number. Where they go is the caller's, not the host's, to say.

        Args:
            path: the file there.
            take: given the content in parts, in order; never more than `limit` bytes in all.
            limit: bytes that it may have.

        Raises:
            CommandFailed: there is no such file, it may not be read, or it is longer or ends earlier than it may.
            whatever `take` raises.
        """

    def start(self, argv: Sequence[str], *, log: str, cwd: str, env: Mapping[str, str]) -> Process:
        """Start a process that outlives the connection: own session, no standard input, output added to `log`.

        Args:
            argv: program and arguments; one that cannot be run says so in the log and is gone.
            log: path; made with its parents when missing.
            cwd: folder to start in; must be there.
            env: added to the environment; never on a command line.

        Raises:
            CommandFailed: `cwd` or `log` cannot be used.
        """

    def alive(self, process: Process) -> bool:
        """Tell whether that very process runs (a zombie does not)."""

    def signal(self, process: Process, number: int) -> bool:
        """Send a signal to that very process; False when it is gone."""

    def tail(self, path: str, offset: int = 0) -> Tail:
        """Follow a file from byte `offset` on; it need not be there yet."""

    def close(self) -> None:
        """End the connection, and with it whatever `run` or `tail` still does."""


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
    """Return words as one line that a POSIX shell splits back into exactly these words."""
    if not argv:
        raise ValueError("an empty command")
    if any("\0" in word for word in argv):
        raise ValueError("a null byte in a command")
    return " ".join(shlex.quote(word) for word in argv)


def printable(argv: Sequence[str], limit: int = 200) -> str:
    """Return a command as one line for people: long ones are cut, control characters shown as they are escaped."""
    line = command_line(argv)
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."
