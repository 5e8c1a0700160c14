"""Runs a command on all hosts of a cluster at once, and hands over its lines as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from psctl.errors import CommandFailed, PsctlError
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell, printable
from psctl.types import HostName

LONGEST = 64_000
"""Bytes from which on a line is cut."""

MERGED = ("sh", "-c", 'exec "$@" 2>&1', "psctl")
"""Runs a command whose error output is part of its output, in the order in which it was written."""


class HostResult(msgspec.Struct, frozen=True):
    """How the command ended on a host; `status` is None where it did not run to its end."""

    name: str
    status: int | None
    error: dict[str, object] | None = None


class HostLines:
    """Cuts the bytes of one host into lines; used by one thread.

    Args:
        take: called with each line, without its end.
    """

    def __init__(self, take: Callable[[str], object]) -> None:
        self._take = take
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Add bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode("utf-8", "replace"))
        while len(self._rest) > LONGEST:
            self._take(self._rest[:LONGEST].decode("utf-8", "replace"))
            self._rest = self._rest[LONGEST:]

    def end(self) -> None:
        """Hand over what follows the last end of a line."""
        if self._rest:
            self._take(self._rest.decode("utf-8", "replace"))
            self._rest = b""


def run_everywhere(
    fleet: Fleet, words: Sequence[str], take: Callable[[str, str], object]
) -> tuple[list[HostResult], dict[str, PsctlError]]:
    """Run a command on all hosts of a fleet.

    Args:
        words: program and arguments; no shell reads them.
        take: called with a host and each line of its output; never by two threads at once.

    Returns:
        how it ended on each host, and the errors of the hosts on which it did not succeed.
    """
    lock = threading.Lock()

    def on_host(name: HostName, shell: Shell) -> int:
        def take_line(line: str) -> None:
            with lock:
                take(name, line)

        lines = HostLines(take_line)
        try:
            return shell.run([*MERGED, *words], timeout=None, check=False, take=lines.add).status
        finally:
            lines.end()

    results: list[HostResult] = []
    failed: dict[str, PsctlError] = {}
    for name, outcome in fleet.each(on_host).items():
        error, status = outcome.error, outcome.value if outcome.ok else None
        if error is None and status:
            error = CommandFailed(name, printable(words), status, "its output is above")
        if error is not None:
            failed[name] = error
        results.append(HostResult(name, status, error.document()["error"] if error is not None else None))
    return results, failed
