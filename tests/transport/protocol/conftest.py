"""What the tests of wire/ share: two ends of a connection, and a way to carry bytes between them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from psctl.transport.credentials import make_context
from psctl.transport.protocol.authority import Pair, issue, make_authority
from psctl.transport.protocol.connection import ConnectionProtocol, Joined, Named
from psctl.transport.protocol.frames import MESSAGE
from psctl.transport.protocol.message_assembly import Codec
from psctl.transport.protocol.send_queue import NOTHING, Frame, SendQueue, framed
from psctl.types import Member

SERVER, WORKER = Member("server", 0), Member("worker", 3, 2)


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something to say."""

    text: str


class End:
    """One end: a connection, what it will send, and what happened to it."""

    def __init__(self, job: str, authority: Pair, me: Member, *, accepting: bool, **options: Any) -> None:
        pair = issue(authority, job, me, time.time())
        context = make_context(authority.certificate_pem, pair.certificate_pem, pair.key_pem, accepting=accepting)
        self.place: Any = lambda message, size: None
        self.refusal: str | None = None
        options = {"window": 1 << 20, **options}
        self.sealed = options.get("sealed", True)
        self.connection = ConnectionProtocol(
            context,
            accepting=accepting,
            job=job,
            me=me,
            codec=Codec(Note),
            receive_buffer_for=lambda message, size: self.place(message, size),
            **options,
        )
        self.events: list[Any] = []
        self.outbox: SendQueue | None = None

    def step(self) -> bytes:
        """Take all events there are; return the TLS bytes to send."""
        while (event := self.connection.next_event()) is not None:
            if getattr(event, "payload", None) is not None:
                event = type(event)(event.message, bytes(event.payload))
            self.events.append(event)
            if isinstance(event, Named):
                if self.refusal is None:
                    self.connection.accept()
                else:
                    self.connection.refuse(self.refusal)
            if isinstance(event, Joined):
                self.outbox = SendQueue(event.window)
        return self.connection.outgoing()

    def receive(self, data: bytes) -> None:
        """Copy bytes into the connection's receive buffer."""
        rest = memoryview(data)
        while rest:
            space, _ = self.connection.space()
            if not len(space):  # a payload is complete
                self.step()
                continue
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            self.connection.add_received(count)
            rest = rest[count:]

    def feed(self, data: bytes, size: int = 1 << 30) -> bytes:
        """Receive `data` in parts of `size` bytes; return the TLS bytes to send."""
        out = b""
        for start in range(0, len(data), size):
            self.receive(data[start : start + size])
            out += self.step()
        return out

    def frames(self, *messages: tuple[Any, bytes | None]) -> list[bytes]:
        """Return the sealed frames of these messages."""
        assert self.outbox is not None
        for message, payload in messages:
            header = msgspec.msgpack.encode(message)
            self.outbox.add(message, header, NOTHING if payload is None else memoryview(payload), urgent=False)
        sealed = []
        while frames := self.outbox.take():
            sealed += [self.seal(frame) for frame in frames]
        return sealed

    def seal(self, frame: Frame) -> bytes:
        out = bytearray(frame.size)
        size = self.connection.seal(frame, memoryview(out))
        assert size == len(out) or not self.sealed
        return bytes(out[:size])

    def note(self, text: str) -> bytes:
        """Return one sealed Note."""
        return self.seal(framed(MESSAGE, msgspec.msgpack.encode(Note(text)), NOTHING))


class Wire:
    """Makes ends, and carries their handshake."""

    SERVER, WORKER, Note = SERVER, WORKER, Note

    def __init__(self) -> None:
        self.authority = make_authority("digits-1", time.time())

    def ends(self, *, other: Pair | None = None, job: str = "digits-1", **options: Any) -> tuple[End, End]:
        """Return (worker's end, server's end), not shaken hands yet; the worker dials."""
        return (
            End(job, other or self.authority, WORKER, accepting=False, **options),
            End("digits-1", self.authority, SERVER, accepting=True, **options),
        )

    def shake(self, worker: End, server: End, size: int = 1 << 30) -> None:
        """Carry bytes both ways until neither has more to say."""
        to_server, to_worker = worker.step(), b""
        while to_server or to_worker:
            to_worker += server.feed(to_server, size)
            to_server, to_worker = worker.feed(to_worker, size), b""

    def joined(self, **options: Any) -> tuple[End, End]:
        """Return both ends, open and with their events so far taken away."""
        worker, server = self.ends(**options)
        self.shake(worker, server)
        for end in (worker, server):
            assert isinstance(end.events[-1], Joined)
            end.events.clear()
        return worker, server


@pytest.fixture(scope="session")
def wire() -> Wire:
    return Wire()
