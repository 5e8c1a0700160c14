"""The protocol of byte streams that connections use; every implementation passes the same conformance test."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Protocol

from psctl.transport.protocol.frames import Bytes
from psctl.types import Address

SILENCE = 5.0
"""Seconds without a packet from the other end after which a stream fails, unless it is set otherwise."""


class Stream(Protocol):
    """A reliable bidirectional stream of bytes. One thread may send while another receives; any thread may shut down.

    Errors are OSErrors: ConnectionError when the other end has ended, TimeoutError with errno ETIMEDOUT when it is
    silent for too long, TimeoutError without errno when the limit set by `limit` has passed.
    """

    name: str
    """The other end, for messages: "10.0.0.3:29400"."""
    window: int
    """Bytes that this end buffers for certain while no thread reads."""
    silence: float
    """Seconds without a packet from the other end after which the stream fails."""

    def tolerate(self, silence: float) -> None:
        """Fail after `silence` seconds without a packet from now on; call it on a connected stream."""

    def silent_for(self) -> float:
        """Return the seconds since the last packet of the other end; packets come each second on an idle stream too."""

    def send(self, data: memoryview) -> None:
        """Send all of `data`; blocks while the other end receives nothing. `data` may be reused afterwards."""

    def send_parts(self, parts: Sequence[Bytes]) -> int:
        """Send all bytes of some buffers, one after the other, as `send` does; return their number."""

    def send_now(self, data: memoryview) -> int:
        """Send as much of `data` as is possible without blocking; return the number of bytes."""

    def in_flight(self) -> int:
        """Return the number of bytes sent that the other end's system has not acknowledged."""

    def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        """Wait for bytes, read them into `buffer`, return their number; 0: the other end has ended its stream.

        Args:
            least: number of bytes that the caller needs; a stream may sleep until they have arrived.
        """

    def arrives(self, seconds: float) -> bool:
        """Wait until `receive_into` would not block (bytes, the end or an error); False: not within `seconds`."""

    def limit(self, seconds: float | None) -> None:
        """Make every later wait raise TimeoutError after `seconds`; None: no limit."""

    def shutdown(self) -> None:
        """End both directions and wake all waiting threads; may be called twice, and by any thread."""

    def close(self) -> None:
        """Release the resources; call it when no thread waits here."""


class Listener(Protocol):
    """Accepts streams."""

    address: Address

    def accept(self, seconds: float | None = None) -> Stream | None:
        """Wait for a new stream, or for one whose bytes `await_bytes` has requested; called by one thread only.

        Returns:
            The stream; None: there was none within `seconds`.

        Raises:
            OSError: the listener was closed, or the system lacks resources.
        """

    def await_bytes(self, stream: Stream, least: int) -> None:
        """Make `accept` return this stream again when `least` bytes of it have arrived, or its end.

        Call this and `forget` on the thread that calls `accept`.
        """

    def forget(self, stream: Stream) -> None:
        """Cancel `await_bytes` for this stream; call it before the stream is closed."""

    def close(self) -> None:
        """Stop listening and wake a thread that waits in `accept`."""


class Connect(Protocol):
    """Makes a stream to an address."""

    def __call__(self, address: Address, timeout: float, congestion: str) -> Stream:
        """Return a connected stream.

        Raises:
            OSError: connecting failed, or took longer than `timeout` seconds.
        """


class Listen(Protocol):
    """Makes a listener."""

    def __call__(self, host: str, ports: tuple[int, int] | None, congestion: str) -> Listener:
        """Return a listener on a port of the inclusive range, or on any free port."""


def describe_error(error: OSError, silence: float = SILENCE) -> str:
    """Return the meaning of a stream's error, for messages; `silence`: the stream's."""
    if error.errno == errno.ETIMEDOUT:
        return f"no sign of life for {silence:g} s"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "connection reset"
    return error.strerror or str(error)
