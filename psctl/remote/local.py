"""A shell on this machine: the scripts that SSH hosts run, started as child processes in sessions of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from psctl.errors import HostUnreachable
from psctl.remote.child import ChildPipe
from psctl.remote.posix import CommandPipe, PosixShell


class LocalShell(PosixShell):
    """A shell on this machine.

    Args:
        name: the host's name in the cluster file.
        home: its home folder; the user's own by default.
    """

    def __init__(self, name: str = "local", home: str | None = None) -> None:
        self.name = name
        self.home = home or os.path.expanduser("~")
        self._lock = threading.Lock()
        self._open_pipes: set[ChildPipe] = set()
        self._closed = False

    def _open(self, argv: Sequence[str]) -> CommandPipe:
        with self._lock:
            if self._closed:
                raise HostUnreachable(f"{self.name}: this connection was closed", where=self.name)
            try:
                pipe = ChildPipe(argv, self._open_pipes.discard, self.home, {**os.environ, "HOME": self.home})
            except OSError as error:
                raise HostUnreachable(
                    f"{self.name}: no command can be started in the home folder {self.home}: {error.strerror}",
                    hint="set HOME to a folder that exists and that you may write to",
                    where=self.name,
                ) from error
            self._open_pipes.add(pipe)
        return pipe

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pipes = list(self._open_pipes)
        for pipe in pipes:
            pipe.close()
