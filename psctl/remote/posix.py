"""A shell on any POSIX host, given a function that starts `sh` there with its three streams (local, over SSH).

A running command is a `CommandPipe`. One thread may write its input while another reads its output, so that large
streams in both directions do not block each other.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from psctl.errors import CommandFailed, DiskFull, LoginShellFailed, PsctlError, TimedOut
from psctl.remote import scripts
from psctl.remote.shell import OUTPUT_LIMIT, CommandResult, InputStream, Process, TransferMeter, expand, printable
from psctl.units import format_bytes

_CHUNK = 1 << 18
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DISK_FULL = (b"No space left", b"Disk quota exceeded", b"File too large")
_SIZE_DIGITS = 19
_STALL = 300.0
"""Seconds without a byte transferred, after which a file transfer is given up: a disk there hangs."""

_LINGER = 0.5
"""Seconds to wait for the end of the output once a command has ended: a child of it may hold the output open."""

_PID_WAIT = 10.0
"""Seconds in which a command that is to be ended must report its process number."""


class CommandPipe(Protocol):
    """The streams of a command that runs on a host."""

    def write(self, data: memoryview) -> int:
        """Write input; return the number of bytes accepted, 0 when none for a while. BrokenPipeError: it is closed."""

    def end(self) -> None:
        """Close its input."""

    def read(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return new output and error output, both empty after `timeout` seconds without any; None at their end."""

    def status(self) -> int | None:
        """Return its exit status once it is known."""

    def close(self) -> None:
        """Close all streams; a command under GUARD then ends."""


class StartLine:
    """Finds the line with this call's marker and process number, and drops the output before it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker.encode()
        self.pid: int | None = None
        self._seen = b""

    @property
    def before(self) -> bytes:
        """The output so far, none of it the command's; empty once the line was found."""
        return self._seen

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that is the command's output."""
        if self.pid is not None or not data:
            return data
        self._seen += data
        found = re.search(re.escape(self.marker) + rb" (\d+)\n", self._seen)
        if found is None:
            self._seen = self._seen[-(1 << 16) :]
            return b""
        self.pid = int(found.group(1))
        rest, self._seen = self._seen[found.end() :], b""
        return rest


class _Collector:
    """Collects a command's output, up to a limit.

    Raises:
        CommandFailed: by `add`, when there is more.
    """

    def __init__(self, host: str, command: str, limit: int) -> None:
        self._host, self._command, self._limit = host, command, limit
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise output_too_large(self._host, self._command, self._limit)
        self._parts.append(data)

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)


def output_too_large(host: str, command: str, limit: int) -> CommandFailed:
    """Return the error of a command that was ended because of the size of its output."""
    why = f"it was ended, for it printed more than {format_bytes(limit)}"
    return CommandFailed(
        host, command, 137, why, "ask for less at once, or look at the host: this much is not expected"
    )


class _Feeder:
    """Writes a command's input from its own thread; an error of the source is kept for the caller."""

    def __init__(self, pipe: CommandPipe, chunks: Iterable[bytes], then_end: bool) -> None:
        self._pipe, self._chunks, self._then_end = pipe, chunks, then_end
        self._stop = threading.Event()
        self.error: OSError | PsctlError | None = None
        self.moved = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="psctl-input")
        self._thread.start()

    def _work(self) -> None:
        try:
            for chunk in self._chunks:
                view = memoryview(chunk)
                while view and not self._stop.is_set():
                    taken = self._pipe.write(view)
                    self.moved += taken
                    view = view[taken:]
                if self._stop.is_set():
                    return
        except BrokenPipeError:
            return  # it does not read all input: its exit status shows whether that is an error
        except (OSError, PsctlError) as error:
            self.error = error
        if self._then_end:
            self._pipe.end()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)


class PosixShell:
    """The shell protocol on top of `_open`; psctl.remote.shell documents the methods."""

    name: str
    home: str
    meter: TransferMeter | None = None
    patience = 30.0
    """Seconds in which a command must have started, once it was sent to the host."""

    def _start_failure(self, pipe: CommandPipe, status: int | None, output: bytes) -> PsctlError | None:
        """Return why a command did not start; None where nothing outside the command is the cause.

        Args:
            pipe: the command; it is closed.
            status: its exit status, None when it has not ended.
            output: its output and error output.
        """
        return None

    def _open(self, argv: Sequence[str]) -> CommandPipe:
        raise AssertionError("a subclass starts commands")

    def close(self) -> None:
        """End the connection."""

    def _start_script(self, script: str, *arguments: str) -> tuple[CommandPipe, StartLine]:
        marker = "psctl-" + secrets.token_hex(8)
        return self._open(["sh", "-c", script, "psctl", marker, *arguments]), StartLine(marker)

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
        shown = printable(argv)
        given = InputStream(len(stdin), lambda: _pieces_of(stdin)) if isinstance(stdin, bytes) else stdin
        pipe, opening = self._start_script(scripts.GUARD, str(given.size), *argv)
        output = _Collector(self.name, shown, limit)
        try:
            with self._counted(given.chunks(), given.size) as source:
                status, errors = self._finish(pipe, opening, source, take or output.add, timeout, shown, end=False)
        except LoginShellFailed:
            raise  # there is no command to end
        except BaseException:
            self._end_guarded(pipe, opening)
            raise
        finally:
            pipe.close()
        result = CommandResult(status, output.content, errors)
        if check and status != 0:
            tail = (result.stderr.strip() or result.stdout).decode("utf-8", "replace")
            raise CommandFailed(self.name, shown, status, tail[-4000:])
        return result

    def _end_guarded(self, pipe: CommandPipe, opening: StartLine) -> None:
        """End a command under GUARD and wait until it is gone, also when it never read its input.

        A slow host gets _PID_WAIT seconds to report the process number: without it such a command cannot be ended.
        """
        pipe.end()
        begin = time.monotonic()
        while time.monotonic() < begin + (_PID_WAIT if opening.pid is None else 1.0):
            try:
                if pipe.status() is not None or (got := pipe.read(0.05)) is None:
                    return
                opening.feed(got[0])
            except PsctlError:
                return  # the connection is gone: the host's sshd closes the input, which ends the command
        if opening.pid is not None:
            self._script(scripts.KILL_GROUP, str(opening.pid), shown="kill")

    def _finish(
        self,
        pipe: CommandPipe,
        opening: StartLine,
        source: Iterable[bytes],
        sink: Callable[[bytes], object],
        timeout: float | None,
        shown: str,
        end: bool,
    ) -> tuple[int, bytes]:
        """Write input and read output until the command has ended; return its exit status and error output."""
        deadline = None if timeout is None else time.monotonic() + timeout
        feeder = _Feeder(pipe, source, end)
        errors = _Collector(self.name, shown, OUTPUT_LIMIT)
        ended: float | None = None
        begun = active = time.monotonic()
        moved = 0
        try:
            while True:
                got = pipe.read(_LINGER if deadline is None else max(0.0, min(_LINGER, deadline - time.monotonic())))
                if got is not None:
                    if rest := opening.feed(got[0]):
                        sink(rest)
                    errors.add(got[1])
                status = pipe.status()
                now = time.monotonic()
                if status is not None:
                    ended = now if ended is None or (got and any(got)) else ended
                    if got is None or now - ended >= _LINGER:
                        break
                if feeder.error is not None:
                    raise feeder.error
                if opening.pid is None and now - begun >= self.patience:
                    self._raise_start_failure(pipe, opening, None, errors.content)
                if deadline is not None and now >= deadline:
                    raise TimedOut(
                        f"{self.name}: `{shown}` did not end within {timeout:g} s; it was ended", where=self.name
                    )
                if got is None:
                    time.sleep(0.005)  # its streams are closed, its exit status is not there yet
                if (got and any(got)) or feeder.moved != moved:
                    active, moved = now, feeder.moved
                elif deadline is None and end and now - active > _STALL:
                    raise TimedOut(f"{self.name}: {shown}: nothing moved for {_STALL:g} s", where=self.name)
        finally:
            feeder.stop()
        if opening.pid is None:
            self._raise_start_failure(pipe, opening, status, errors.content)
        return status, errors.content

    def _raise_start_failure(self, pipe: CommandPipe, opening: StartLine, status: int | None, errors: bytes) -> None:
        error = self._start_failure(pipe, status, opening.before + b"\n" + errors)
        if error is not None:
            raise error

    def _script(
        self,
        script: str,
        *arguments: str,
        shown: str,
        source: Iterable[bytes] = (),
        sink: Callable[[bytes], object] | None = None,
        timeout: float | None = 60,
    ) -> bytes:
        """Run one of psctl's own scripts; return its output unless a sink receives it."""
        output = _Collector(self.name, shown, OUTPUT_LIMIT)
        pipe, opening = self._start_script(script, *arguments)
        try:
            status, errors = self._finish(pipe, opening, source, sink or output.add, timeout, shown, end=True)
        finally:
            pipe.close()
        if status != 0:
            if any(sign in errors for sign in _DISK_FULL):
                reason = errors.decode("utf-8", "replace").strip().splitlines()[-1]
                hint = "free space there, or put workdir: on another disk"
                raise DiskFull(f"{self.name}: {shown}: {reason}", hint, where=self.name)
            raise CommandFailed(self.name, shown, status, errors.decode("utf-8", "replace"))
        return output.content

    def put(self, data: bytes | Path, path: str, mode: int = 0o600) -> None:
        target = expand(path, self.home)
        shown = f"write {target}"
        if isinstance(data, Path):
            size, source = data.stat().st_size, _chunks_of(data)
        else:
            size, source = len(data), _pieces_of(data)
        with self._counted(source, size) as counted:
            self._script(scripts.PUT, target, f"{mode:o}", str(size), shown=shown, source=counted, timeout=None)

    @contextlib.contextmanager
    def _counted(self, source: Iterator[bytes], size: int) -> Iterator[Iterator[bytes]]:
        """Give a source of `size` bytes whose progress the meter shows."""
        if self.meter is None or not size:
            yield source
            return
        with self.meter.transfer(self.name, size) as count:
            yield _counting(source, count)

    def fetch(self, path: str, take: Callable[[bytes], object], limit: int) -> int:
        target = expand(path, self.home)
        shown = f"read {target}"
        with contextlib.ExitStack() as counting:
            count: Callable[[int], object] | None = None

            def take_counted(data: bytes) -> None:
                nonlocal count
                take(data)
                if self.meter is not None:
                    if count is None:
                        count = counting.enter_context(self.meter.transfer(self.name, sized.size or 0))
                    count(len(data))

            sized = _SizedStream(take_counted, limit, lambda why: CommandFailed(self.name, shown, 1, why))
            self._script(scripts.FETCH, target, shown=shown, sink=sized.add, timeout=None)
        if sized.size is None or sized.received < sized.size:
            raise CommandFailed(self.name, shown, 1, f"{sized.received} of {sized.size} bytes arrived")
        return sized.received

    def start(self, argv: Sequence[str], *, log: str, cwd: str, env: Mapping[str, str]) -> Process:
        exports = []
        for key, value in env.items():
            if not _NAME.match(key) or "\0" in value:
                raise ValueError(f"not an environment variable: {key!r}")
            exports.append(f"export {key}={shlex.quote(value)}\n")
        text = "".join(exports).encode("utf-8", "surrogateescape")
        words = (expand(log, self.home), expand(cwd, self.home), scripts.BORN, *argv)
        out = self._start_process(words, text, f"start {printable(argv)}")
        pid, _, started = out.decode().strip().partition(" ")
        return Process(int(pid), started)

    def _start_process(self, words: Sequence[str], environment: bytes, shown: str) -> bytes:
        """Run scripts.START with these arguments and this input; return its output."""
        return self._script(scripts.START, *words, shown=shown, source=[environment] if environment else [])

    def alive(self, process: Process) -> bool:
        return self._ask_about(scripts.ALIVE, process)

    def signal(self, process: Process, number: int) -> bool:
        return self._ask_about(scripts.SIGNAL, process, str(number))

    def _ask_about(self, script: str, process: Process, *more: str) -> bool:
        if not process.started or process.pid <= 1:
            return False
        out = self._script(script, str(process.pid), process.started, *more, shown=f"look at process {process.pid}")
        return out.strip() == b"yes"

    def tail(self, path: str, offset: int = 0) -> PosixTail:
        if offset < 0:
            raise ValueError("an offset counts from 0")
        inner = ["sh", "-c", scripts.TAIL, "psctl-tail", expand(path, self.home), str(offset)]
        return PosixTail(*self._start_script(scripts.GUARD, "0", *inner))


class PosixTail:
    """Reads a growing file; the reader on the host ends with its channel."""

    def __init__(self, pipe: CommandPipe, opening: StartLine) -> None:
        self._pipe, self._opening = pipe, opening
        self._closed = threading.Event()

    def read(self, timeout: float | None = None) -> bytes | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            left = _LINGER if deadline is None else max(0.0, min(_LINGER, deadline - time.monotonic()))
            try:
                got = self._pipe.read(left)
            except PsctlError:
                if self._closed.is_set():
                    return None
                raise
            if got is None:
                return None
            if data := self._opening.feed(got[0]):
                return data
            if deadline is not None and time.monotonic() >= deadline:
                return b""
        return None

    def close(self) -> None:
        self._closed.set()
        self._pipe.close()

    def __iter__(self) -> Iterator[bytes]:
        while (data := self.read()) is not None:
            yield data

    def __enter__(self) -> PosixTail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _SizedStream:
    """Reads a stream that begins with its size on a line, and passes on that many bytes and no more."""

    def __init__(self, take: Callable[[bytes], object], limit: int, error: Callable[[str], PsctlError]) -> None:
        self._take, self._limit, self._error = take, limit, error
        self._head = b""
        self.size: int | None = None
        self.received = 0

    def add(self, data: bytes) -> None:
        if self.size is None:
            head, newline, data = (self._head + data).partition(b"\n")
            if not newline and len(head) <= _SIZE_DIGITS:
                self._head = head
                return
            if not head.isdigit() or len(head) > _SIZE_DIGITS:
                raise self._error("its size did not arrive")
            self.size = int(head)
        self.received += len(data)
        if max(self.size, self.received) > self._limit:
            raise self._error(f"it has {max(self.size, self.received)} bytes, expected {self._limit} at most")
        if data:
            self._take(data)


def _pieces_of(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def _counting(chunks: Iterable[bytes], count: Callable[[int], object]) -> Iterator[bytes]:
    """Yield chunks and count each; before it is sent, since a command may end before the next one is taken."""
    for chunk in chunks:
        count(len(chunk))
        yield chunk


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
