"""A child process of psctl as the streams of a command: the local shell and `kind: command` start their commands so."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

_CHUNK = 1 << 16


class ChildPipe:
    """The streams of a child process, which has a session of its own; `close` ends its process group.

    Args:
        grace: seconds in which it may end by itself once `close` has closed its input: a child that carries a command
            to a host has to pass that on. Then it is terminated, and after the same time killed.
        argv: program and arguments.
        closed: called with the pipe when it was closed.
        cwd: folder to start in; None: psctl's own.
        environment: all its variables; None: psctl's own.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        closed: Callable[[ChildPipe], None],
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        grace: float = 0.0,
    ) -> None:
        self._grace = grace
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            bufsize=0,
            start_new_session=True,  # its own group for the guard; a Ctrl-C of the terminal is psctl's alone
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._streams = self._process.stdin, [self._process.stdout, self._process.stderr]
        for stream in (self._stdin, *self._streams):
            os.set_blocking(stream.fileno(), False)
        # a descriptor is never used after its close, which another thread may do
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._discard = closed

    def write(self, data: memoryview) -> int:
        with self._writing:
            if self._stdin.closed:
                raise BrokenPipeError
            fd = self._stdin.fileno()
            watch = select.poll()
            watch.register(fd, select.POLLOUT)
            if not watch.poll(50):
                return 0
            try:
                return os.write(fd, data[:_CHUNK])
            except BlockingIOError:
                return 0

    def end(self) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def read(self, timeout: float) -> tuple[bytes, bytes] | None:
        watch = select.poll()
        with self._reading:
            for stream in self._streams:
                if not stream.closed:
                    watch.register(stream.fileno(), select.POLLIN)
            if all(stream.closed for stream in self._streams):
                return None
        watch.poll(timeout * 1000)
        first, second = (self._take(index) for index in (0, 1))
        return None if not first and not second and all(stream.closed for stream in self._streams) else (first, second)

    def _take(self, index: int) -> bytes:
        stream = self._streams[index]
        parts: list[bytes] = []
        with self._reading:
            while not stream.closed and len(parts) < 64:
                try:
                    part = os.read(stream.fileno(), _CHUNK)
                except BlockingIOError:
                    break
                if not part:
                    stream.close()
                parts.append(part)
        return b"".join(parts)

    def status(self) -> int | None:
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def release(self) -> None:
        """Close all streams and let the child go on; it is waited for, so that it does not stay as a zombie."""
        self.end()
        threading.Thread(target=self._process.wait, daemon=True, name="psctl-child").start()
        with self._reading:
            for stream in self._streams:
                stream.close()
        self._discard(self)

    def close(self) -> None:
        self.end()
        if self._grace and not self._ends_in(self._grace):
            self._kill(signal.SIGTERM)
            self._ends_in(self._grace)
        self._kill(signal.SIGKILL)
        self._process.wait()
        with self._reading:
            for stream in self._streams:
                stream.close()
        self._discard(self)

    def _ends_in(self, seconds: float) -> bool:
        """Return whether it ends in this time; its output is dropped."""
        until = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > until:
                return False
            if self.read(0.02) is None:
                time.sleep(0.01)
        return True

    def _kill(self, number: int) -> None:
        if self._process.poll() is None:  # not reaped yet, so the number is still this process's own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
