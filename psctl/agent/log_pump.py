"""Reads the output of processes on one thread, writes it to log files, and forwards lines to the coordinator.

The processes write into pipes, so that secrets are masked before output is written to a disk. A full disk does not stop
the job: lines that cannot be written are counted, the problem is reported once, and training continues. Forwarding is
limited to RATE lines per second and process; lines over the limit are counted and are in the file only, except the last
TAIL before the process ends: they tell how it ended. The size of the files is limited too (log_files.py).
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
from psctl.job.process_messages import OutputLines, Stream
from psctl.process.secret_masking import Secrets
from psctl.types import Member

RATE = 200
"""Lines per second of one process that are forwarded, on average; a burst may have twice as many."""

TAIL = 20
"""Last lines of a stream that are kept for the report of a failure."""

LONGEST = 64 << 10
"""Bytes without a newline that are treated as a line."""

ROUND = 0.5
"""Seconds of output of a process over the limit that one message covers: lines, then the number of dropped lines."""

BUSY = 32 << 10
"""Bytes in one pass from which on the thread does not pause: the processes would wait for their pipes."""

SHOWN = 4096
"""Characters of a line that are forwarded."""


class _Stream:
    """One stream of one process."""

    def __init__(self, member: Member, name: Stream, source: int, log: StreamLog) -> None:
        self.member = member
        self.name = name
        self.source = source
        self.log = log
        self.rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.lines: list[str] = []
        self.dropped = 0
        self.held: deque[str] = deque(maxlen=TAIL)
        """Last lines over the limit, since one was forwarded: forwarded if the process ends now."""
        self.allowed = 2.0 * RATE
        self.since = time.monotonic()
        self.unwritten = 0
        self.was_full = False
        self.open = True


class LogPump:
    """Reads, writes and forwards the output of all processes of a job on a host.

    Args:
        folder: the folder of the log files.
        limit: bytes of the log files of one rank.
        secrets: values that are masked.
        deliver: called with lines to forward, on the pump's thread or on the thread that calls `drain` or `close`.
        trouble: called with a sentence when a log cannot be written, once per stream.
    """

    def __init__(
        self, folder: Path, limit: int, secrets: Secrets, deliver: Callable[[OutputLines], object],
        trouble: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder = folder
        self._limit = limit
        self._logs: dict[tuple[str, int], RankLogs] = {}
        self._secrets = secrets
        self._deliver = deliver
        self._trouble = trouble
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._thread = threading.Thread(target=self._run, name="psctl logs", daemon=True)
        self._thread.start()

    def add(self, member: Member, name: Stream, source: int) -> None:
        """Add one stream of a process; the pump closes `source`, the reading end of its pipe."""
        os.set_blocking(source, False)
        with self._lock:
            logs = self._logs.setdefault(
                (member.role, member.rank), RankLogs(self._folder, f"{member.role}-{member.rank}", self._limit)
            )
            stream = _Stream(member, name, source, logs.stream(name))
            self._streams.append(stream)
            self._selector.register(source, selectors.EVENT_READ, stream)

    def drain(self, member: Member) -> list[str]:
        """Read and forward the rest of an ended process's output; return its last lines, of stderr if there are any."""
        with self._lock:
            mine = [stream for stream in self._streams if stream.member == member]
            for stream in mine:
                self._read(stream)
                self._forward_last(stream)
            tails = {stream.name: list(stream.tail) for stream in mine}
        return tails.get("stderr") or tails.get("stdout") or []

    def close(self, member: Member) -> None:
        """Close the pipes and files of a process; call it when no process can write to the pipes."""
        with self._lock:
            for stream in [stream for stream in self._streams if stream.member == member]:
                self._read(stream)
                self._close_source(stream)
                self._forward_last(stream)
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
                        self._forward(stream)
            if 0 < taken < BUSY:
                time.sleep(0.02)  # collect lines: one message for several

    def _read(self, stream: _Stream) -> int:
        """Read what the pipe holds, up to 1 MiB; return the number of bytes."""
        taken = 0
        while stream.open and taken < 1 << 20:  # the other streams are read too
            try:
                data = os.read(stream.source, 1 << 16)
            except BlockingIOError:
                break
            taken += len(data)
            if not data:
                self._close_source(stream)
                break
            *lines, stream.rest = (stream.rest + data).split(b"\n")
            if len(stream.rest) > LONGEST + self._secrets.longest:
                rest = self._secrets.mask(stream.rest)
                cut = max(0, len(rest) - self._secrets.longest)  # a secret may begin after that
                lines += [rest[:cut]] if cut else []
                stream.rest = rest[cut:]
            self._process_lines(stream, lines)
        return taken

    def _close_source(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            self._selector.unregister(stream.source)
            os.close(stream.source)
            if stream.rest:
                self._process_lines(stream, [stream.rest])
                stream.rest = b""

    def _process_lines(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        lines = self._secrets.mask(b"\n".join(lines)).split(b"\n")
        self._write(stream, b"\n".join(lines) + b"\n", len(lines))
        now = time.monotonic()
        if now - stream.since >= ROUND:
            stream.allowed = min(2.0 * RATE, stream.allowed + (now - stream.since) * RATE)
            stream.since = now
        shown = min(int(stream.allowed), len(lines))
        stream.allowed -= shown
        if shown:  # what was held is older
            stream.dropped += len(stream.held)
            stream.held.clear()
        stream.lines.extend(_text(line) for line in lines[:shown])
        over = len(stream.held) + len(lines) - shown
        stream.held.extend(_text(line) for line in lines[shown:][-TAIL:])
        stream.dropped += over - len(stream.held)
        stream.tail.extend(_text(line) for line in lines[-TAIL:])

    def _write(self, stream: _Stream, data: bytes, lines: int) -> None:
        if stream.log.write(data, lines):
            return
        stream.unwritten += lines
        if not stream.was_full:
            stream.was_full = True
            self._trouble(f"the log of {stream.member} ({stream.name}) cannot be written: the disk is full")

    def _forward(self, stream: _Stream) -> None:
        if stream.lines or stream.dropped or stream.unwritten:
            message = OutputLines(stream.member, stream.name, stream.lines, stream.dropped, stream.unwritten)
            stream.lines, stream.dropped, stream.unwritten = [], 0, 0
            self._deliver(message)

    def _forward_last(self, stream: _Stream) -> None:
        """Forward the rest of an ended process's lines, and the last ones over the limit."""
        self._forward(stream)
        stream.lines.extend(stream.held)
        stream.held.clear()
        self._forward(stream)


def _text(line: bytes) -> str:
    """Return a line as a terminal shows it: the text after its last carriage return."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1][:SHOWN].decode("utf-8", "replace")
