"""What a connection needs of a byte stream; tcp and memory keep to it and pass the same conformance test."""

from __future__ import annotations

import errno
from typing import Protocol

from psctl.types import Address


class Stream(Protocol):
    """A reliable two-way stream of bytes. One thread may send while another receives; any may shut down.

    Errors are OSErrors: ConnectionError when the other end is gone, TimeoutError with errno ETIMEDOUT when it has
    vanished without a word, TimeoutError without errno when the limit set by `limit` passed.
    """

    name: str
    """The other end, for messages: "10.0.0.3:29400"."""
    window: int
    """Bytes that this end holds for sure while nobody reads."""

    def send(self, data: memoryview) -> None:
        """Send all of `data`; blocks while the other end takes nothing. `data` may be reused afterwards."""

    def send_now(self, data: memoryview) -> int:
        """Send as much of `data` as is possible without blocking; return how many bytes that was."""

    def in_flight(self) -> int:
        """Return the bytes that were sent and that the other end's system does not hold yet."""

    def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        """Wait for bytes, put what there is into `buffer`, return how many; 0: the other end has ended its stream.

        `least`: fewer are of no use, so waking for them may be spared; some streams do.
        """

    def arrives(self, seconds: float) -> bool:
        """Wait until `receive_into` has something to say, bytes, the end or an error; False: not in `seconds`."""

    def limit(self, seconds: float | None) -> None:
        """Let every later wait end with TimeoutError after `seconds`; None: no limit."""

    def shutdown(self) -> None:
        """End both directions and wake whoever waits here; may be called twice, and by any thread."""

    def close(self) -> None:
        """Give everything back; called once nobody waits here."""


class Listener(Protocol):
    """Where streams come in."""

    address: Address

    def accept(self, seconds: float | None = None) -> Stream | None:
        """Wait for a stream that is new, or that has what `await_bytes` asks for; only one thread may.

        Returns:
            None: there was none within `seconds`.

        Raises:
            OSError: the listener was closed, or the system lacks means.
        """

    def await_bytes(self, stream: Stream, least: int) -> None:
        """Let `accept` return this stream once more when `least` bytes are there, or its end.

        This and `forget` are for the thread that calls `accept`.
        """

    def forget(self, stream: Stream) -> None:
        """Wait for the bytes of this stream no longer; before it is closed."""

    def close(self) -> None:
        """Stop listening and wake who waits in `accept`."""


class Connect(Protocol):
    """How a stream to an address is made."""

    def __call__(self, address: Address, timeout: float, congestion: str) -> Stream:
        """Return a connected stream; OSError when that fails or takes longer than `timeout` seconds."""


class Listen(Protocol):
    """How a listener is made."""

    def __call__(self, host: str, ports: tuple[int, int] | None, congestion: str) -> Listener:
        """Return a listener on a port of the inclusive range, or on any free port."""


def describe_error(error: OSError) -> str:
    """Say in plain words what an error of a stream means."""
    if error.errno == errno.ETIMEDOUT:
        return "no sign of life for 5 s"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "connection reset"
    return error.strerror or str(error)
