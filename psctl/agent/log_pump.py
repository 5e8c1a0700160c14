"""What processes print: one thread takes it all, keeps a file a stream, and passes lines on.

The processes write into pipes, so that secrets are struck out before anything reaches a disk. A disk that is full must
not stop the job: what cannot be written is counted, said once, and training goes on. What is passed on is limited to
RATE lines a second a process; what is left out is counted and stands in the file. Files are limited too (log_files.py).
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from psctl.agent.log_files import RankLogs, StreamLog
from psctl.job.process_messages import OutputLines
from psctl.process.secret_masking import Secrets
from psctl.types import Member

RATE = 200
"""Lines a second of one process that are passed on, on average; twice as many at once."""

TAIL = 20
"""Last lines of a stream that are kept for the account of a failure."""

LONGEST = 64 << 10
"""Bytes without a line's end that are taken as a line."""

ROUND = 0.5
"""Seconds for which a process that prints more than its share is told together: lines, then how many are left out."""

BUSY = 32 << 10
"""Bytes at once that tell of a process which prints more than a person reads: it is not kept waiting for its pipe."""

SHOWN = 4096
"""Characters of a line that are passed on."""


class _Stream:
    """One stream of one process."""

    def __init__(self, member: Member, name: str, source: int, log: StreamLog) -> None:
        self.member, self.name, self.source, self.log = member, name, source, log
        self.rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.lines: list[str] = []
        self.dropped = 0
        self.allowed, self.since = 2.0 * RATE, time.monotonic()
        self.unwritten, self.was_full = 0, False
        self.open = True


class LogPump:
    """Takes in the output of all processes of a host.

    Args:
        folder: where the log files lie.
        limit: bytes of the log files of one rank.
        secrets: what is struck out.
        deliver: called with lines that are passed on, on the pump's thread or a caller's of `drain`.
        trouble: called with a sentence when a log cannot be written, once a stream.
    """

    def __init__(
        self, folder: Path, limit: int, secrets: Secrets, deliver: Callable[[OutputLines], None],
        trouble: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._limit = folder, limit
        self._logs: dict[tuple[str, int], RankLogs] = {}
        self._secrets, self._deliver, self._trouble = secrets, deliver, trouble
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._thread = threading.Thread(target=self._run, name="psctl logs", daemon=True)
        self._thread.start()

    def add(self, member: Member, name: str, source: int) -> None:
        """Take in a pipe, whose reading end is handed over: one stream of a process."""
        os.set_blocking(source, False)
        with self._lock:
            logs = self._logs.setdefault(
                (member.role, member.rank), RankLogs(self._folder, f"{member.role}-{member.rank}", self._limit)
            )
            stream = _Stream(member, name, source, logs.stream(name))
            self._streams.append(stream)
            self._selector.register(source, selectors.EVENT_READ, stream)

    def drain(self, member: Member) -> list[str]:
        """A process has ended: take all that it wrote, pass it on, and return its last lines (of stderr, if any)."""
        with self._lock:
            mine = [stream for stream in self._streams if stream.member == member]
            for stream in mine:
                self._read(stream)
                self._pass_on(stream)
            tails = {stream.name: list(stream.tail) for stream in mine}
        return tails.get("stderr") or tails.get("stdout") or []

    def close(self, member: Member) -> None:
        """All processes that could write there are gone: give the pipes and files back."""
        with self._lock:
            for stream in [stream for stream in self._streams if stream.member == member]:
                self._read(stream)
                self._end(stream)
                self._pass_on(stream)
                stream.log.close()
                self._streams.remove(stream)

    def _run(self) -> None:
        while True:
            ready = self._selector.select(0.2)
            taken = 0
            with self._lock:
                for key, _ in ready:
                    if key.data.open:
                        taken += self._read(key.data)
                for stream in self._streams:
                    if stream.lines or time.monotonic() - stream.since >= ROUND:
                        self._pass_on(stream)
            if 0 < taken < BUSY:
                time.sleep(0.02)  # let lines gather, so that a chatty process does not cost a message a line

    def _read(self, stream: _Stream) -> int:
        """Take what is there, within reason; return how many bytes it was."""
        taken = 0
        while stream.open and taken < 1 << 20:  # so that one process does not keep the others waiting
            try:
                data = os.read(stream.source, 1 << 16)
            except BlockingIOError:
                break
            taken += len(data)
            if not data:
                self._end(stream)
                break
            *lines, stream.rest = (stream.rest + data).split(b"\n")
            if len(stream.rest) > LONGEST + self._secrets.longest:
                rest = self._secrets.strike(stream.rest)
                cut = max(0, len(rest) - self._secrets.longest)  # a secret may have begun behind that
                lines += [rest[:cut]] if cut else []
                stream.rest = rest[cut:]
            self._take(stream, lines)
        return taken

    def _end(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            self._selector.unregister(stream.source)
            os.close(stream.source)
            if stream.rest:
                self._take(stream, [stream.rest])
                stream.rest = b""

    def _take(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        lines = self._secrets.strike(b"\n".join(lines)).split(b"\n")
        self._write(stream, b"\n".join(lines) + b"\n", len(lines))
        now = time.monotonic()
        if now - stream.since >= ROUND:
            stream.allowed = min(2.0 * RATE, stream.allowed + (now - stream.since) * RATE)
            stream.since = now
        shown = min(int(stream.allowed), len(lines))
        stream.allowed -= shown
        stream.lines.extend(_text(line) for line in lines[:shown])
        stream.dropped += len(lines) - shown
        stream.tail.extend(_text(line) for line in lines[-TAIL:])

    def _write(self, stream: _Stream, data: bytes, lines: int) -> None:
        if stream.log.write(data, lines):
            return
        stream.unwritten += lines
        if not stream.was_full:
            stream.was_full = True
            self._trouble(f"the log of {stream.member} ({stream.name}) cannot be written: the disk is full")

    def _pass_on(self, stream: _Stream) -> None:
        if stream.lines or stream.dropped or stream.unwritten:
            message = OutputLines(stream.member, stream.name, stream.lines, stream.dropped, stream.unwritten)
            stream.lines, stream.dropped, stream.unwritten = [], 0, 0
            self._deliver(message)


def _text(line: bytes) -> str:
    """Return a line as people see it: what stands behind its last carriage return."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1][:SHOWN].decode("utf-8", "replace")
