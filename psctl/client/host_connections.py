"""Lines between the workers of one host that push together: they come up in their own time, and again after a death.

Each listens in the folder that this user alone can enter, and tells the coordinator the secret that others show there
(job/training_messages.py). On the coordinator's word of who else of the host does, the one with the higher rank
dials. Nobody
waits for a line: what needs one that is not up goes without. One thread accepts, one reads all lines; dialling has a
thread of its own until it is done.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.job.training_messages import WorkerAt
from psctl.ps.messages import Beside
from psctl.transport import unix_channel
from psctl.transport.unix_channel import BYE, PIECE, UnixChannel
from psctl.types import Member

PATIENCE = 2.0
"""Seconds for two ends to show each other their secrets."""

ATTEMPTS = 100
"""Times that a worker is dialled: its end may not have heard of us yet."""

PAUSE = 0.05
"""Seconds between two of them."""

GOODBYE = 1.0
"""Seconds that the end waits for the threads."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Beside).decode


class HostMessages(Protocol):
    """Whom it is told to, on the reading thread alone."""

    def up(self, member: Member) -> None: ...
    def received(self, member: Member, message: Beside) -> None: ...
    def down(self, member: Member) -> None: ...


class HostConnections:
    """One worker's lines. `send` and `told` may be called by any thread.

    Args:
        me: this worker.
        folder: that this user alone can enter, the same for all processes of this host.
        heard: told of lines and of what comes.
    """

    def __init__(self, me: Member, folder: Path, heard: HostMessages) -> None:
        self._me, self._folder, self._heard = me, folder, heard
        self.secret = secrets.token_bytes(unix_channel.SECRET)
        """What others of this host must show."""
        self._door = unix_channel.listen(folder, _name(me.rank, me.incarnation))
        self._lock = threading.Lock()
        self._known: dict[int, WorkerAt] = {}
        self._lines: dict[int, tuple[Member, UnixChannel]] = {}
        self._made: queue.SimpleQueue[tuple[Member, UnixChannel]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)
        self._begin(self._read)

    def _begin(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"psctl host lines {self._me.rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def told(self, workers: Sequence[WorkerAt]) -> None:
        """Take in who of this host listens: with each there is to be a line."""
        with self._lock:
            new = [each for each in workers if each.secret and each != self._known.get(each.rank)]
            self._known.update({each.rank: each for each in new})
        for each in new:
            if each.rank < self._me.rank:
                self._begin(lambda each=each: self._dial(each))  # type: ignore[misc]

    def send(self, rank: int, message: Beside) -> None:
        """Send a message, in the order of calls; nothing where there is no line."""
        data = memoryview(_encode(message))
        with self._lock:
            found = self._lines.get(rank)
            if found is None:
                return
            found[1].send(PIECE, size=len(data), data=data)
            waiting = found[1].waiting
        if waiting:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End all lines."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(GOODBYE)
        while not self._made.empty():
            self._made.get()[1].close()
        self._door.close()
        (self._folder / _name(self._me.rank, self._me.incarnation)).unlink(missing_ok=True)

    # ---- meeting -------------------------------------------------------------------------------------------------

    def _dial(self, each: WorkerAt) -> None:
        for _ in range(ATTEMPTS):
            if self._closed.is_set() or self._known[each.rank] != each:
                return
            try:
                name = _name(each.rank, each.incarnation)
                connected = unix_channel.meet(self._folder, name, self._me.rank, self.secret, each.secret, PATIENCE)
            except PeerLost:
                self._closed.wait(PAUSE)
                continue
            self._add(each, connected)
            return

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._door.accept()
            except OSError:  # closed, or descriptors are short for a while
                self._closed.wait(PAUSE)
                continue
            with self._lock:
                known = dict(self._known)
            try:
                coming = {rank: each.secret for rank, each in known.items() if rank > self._me.rank}
                rank = unix_channel.answer(connected, self.secret, coming, PATIENCE)
            except ConnectionFailed:  # a stranger, or one that the coordinator has not told us of yet
                connected.close()
                continue
            self._add(known[rank], connected)

    def _add(self, each: WorkerAt, connected: socket.socket) -> None:
        member = Member("worker", each.rank, each.incarnation)
        self._made.put((member, UnixChannel(connected, str(member))))
        os.eventfd_write(self._wake, 1)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_descriptor: dict[int, tuple[Member, UnixChannel]] = {}
        while not self._closed.is_set():
            for descriptor, event in poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                member, line = by_descriptor[descriptor]
                if not self._serve(member, line, event):
                    del by_descriptor[descriptor]
                    poll.unregister(descriptor)
                    self._over(member, line)
            while not self._made.empty():
                member, line = self._made.get()
                former = self._lines.get(member.rank)
                if former is not None:
                    del by_descriptor[former[1].fileno()]
                    poll.unregister(former[1].fileno())
                    self._over(*former)
                by_descriptor[line.fileno()] = member, line
                poll.register(line.fileno(), select.POLLIN)
                with self._lock:
                    self._lines[member.rank] = member, line
                self._heard.up(member)
            with self._lock:
                for descriptor, (_, line) in by_descriptor.items():
                    poll.modify(descriptor, select.POLLIN | (select.POLLOUT if line.waiting else 0))
        with self._lock:
            for _, line in self._lines.values():
                line.bye("it has finished")
                line.shutdown()
                line.close()
            self._lines.clear()

    def _serve(self, member: Member, line: UnixChannel, event: int) -> bool:
        """Send what waits and take in what has come; tell whether more may come."""
        try:
            with self._lock:
                if event & select.POLLOUT:
                    line.flush()
                records = line.receive() if event & ~select.POLLOUT else []
                ended = bool(line.ended) or any(record.kind == BYE for record in records)
            for record in records:
                if record.kind == PIECE:
                    self._heard.received(member, _decode(record.data or b""))
        except (ProtocolError, msgspec.DecodeError):
            return False  # it speaks another language: we do without it
        return not ended

    def _over(self, member: Member, line: UnixChannel) -> None:
        with self._lock:
            if self._lines.get(member.rank) == (member, line):
                del self._lines[member.rank]
            line.close()
        self._heard.down(member)


def _name(rank: int, incarnation: int) -> str:
    return f"worker-{rank}-{incarnation}.push"
