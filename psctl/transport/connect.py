"""How two processes of a job connect: `dial` on one side, `Acceptor` on the other.

Both learn from the other's certificate which member of the job it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from psctl.errors import ConnectionFailed, PeerLost
from psctl.permits import MessageKinds, Permits
from psctl.transport import tcp_stream
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.transport.preauth_listener import PreauthListener, send_preauth_answer
from psctl.transport.protocol.message_assembly import Codec
from psctl.transport.stream import Connect, Listen, Listener, Stream, describe_error
from psctl.types import Address, Member, Role

PATIENCE = 5.0
"""Seconds for a handshake."""
HALF_OPEN = 64
"""Connections that may be in their handshake at once."""
YOUNG = 1.0
"""Seconds for which a connection in its handshake is not dropped for a newer one."""
OF_ONE = 16
"""Connections that one member may have to one listener at once; it needs one, and a broken one may still be there."""

Allow = Callable[[Member], str | None]


def dial(
    address: Address,
    credentials: Credentials,
    expect: Member | Role,
    kinds: Permits | MessageKinds,
    handler: AnyHandler,
    timeout: float = PATIENCE,
    congestion: str = "auto",
    *,
    sealed: bool = True,
    connect: Connect = tcp_stream.connect,
) -> PeerConnection:
    """Connect to a member of the job and return the connection; `handler.on_connected` follows on its reader thread.

    Args:
        address: of its listener.
        credentials: of this process.
        expect: the member (with its incarnation), or a role of which any member will do.
        kinds: the permits of all messages (permits.py), or a union of messages without further rules.
        handler: receives messages and events.
        timeout: seconds for connecting and the handshake together.
        congestion: TCP's congestion control: auto | reno | cubic | bbr.
        sealed: messages are encrypted; both ends must agree.
        connect: makes the stream; tests pass another.

    Raises:
        PeerLost: there is no answer, or the connection ended; names the expected member.
        ProtocolError: it is another member, no member of the job, or it refused the connection with a reason.
        UsageError: the system refuses this congestion control.
    """
    deadline = time.monotonic() + timeout
    assert credentials.dialling, "damaged credentials are found before a socket is opened"
    try:
        stream = connect(address, timeout, congestion)
    except OSError as error:
        why = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerLost(f"{expect} at {address}: {why}", where=str(expect)) from error
    name = f"{expect} at {address}"
    try:
        send_preauth_answer(stream, credentials.preauth_secret, deadline)
    except (OSError, ConnectionFailed) as error:
        stream.shutdown()
        stream.close()
        if isinstance(error, ConnectionFailed):
            raise type(error)(f"{name}: {error.message}", where=str(expect)) from error
        why = f"no handshake within {timeout:g} s" if time.monotonic() >= deadline else describe_error(error)
        raise PeerLost(f"{name}: {why}", where=str(expect)) from error
    peer = PeerConnection(stream, credentials, Codec(kinds), handler, accepting=False, sealed=sealed)
    peer.name = name
    try:
        peer.handshake(lambda found: _unexpected(expect, found), max(0.001, deadline - time.monotonic()))
    except PeerLost as error:
        if peer.bytes_received or isinstance(error.__cause__, TimeoutError):
            raise
        why = "the connection ended after our proof of the job's secret:"
        why += " the process is ending, or a process of another job listens there now"
        raise PeerLost(f"{name}: {why}", where=str(expect)) from error
    peer.start()
    return peer


def _unexpected(expect: Member | Role, found: Member) -> str | None:
    if isinstance(expect, str):
        return None if found.role == expect else f"expected a {expect}, found {found}"
    if (expect.role, expect.rank) != (found.role, found.rank):
        return f"expected {expect}, found {found}"
    if expect.incarnation != found.incarnation:
        return f"expected incarnation {expect.incarnation} of {expect}, found {found.incarnation}"
    return None


class Acceptor:
    """Listens, and makes a PeerConnection of every connection from an allowed member of the job.

    Args:
        bind_host: numeric address to listen on; never all addresses.
        ports: inclusive range to take a port from; None: any.
        credentials: of this process.
        kinds: the permits of all messages (permits.py), or a union of messages without further rules.
        handler: receives messages and events of all connections, each on its own reader thread.
        allow: returns why a member may not connect (an older incarnation ...), None when it may; on many threads.
        congestion: TCP's congestion control.
        refused: called for each connection that was not made, with its address and the reason.
        patience: seconds for preauth (preauth_listener.py), and again for the handshake.
        half_open: connections that may be in their handshake at once; the oldest is dropped for a newer one.
        of_one: connections that one member may have at once.
        sealed: messages are encrypted; both ends must agree.
        listen: makes the listener; tests pass another.

    Raises:
        PortTaken: no port of the range is free.
        ConnectionFailed: the address is not of this machine.
        UsageError: the system refuses this congestion control.
    """

    def __init__(
        self,
        bind_host: str,
        ports: tuple[int, int] | None,
        credentials: Credentials,
        kinds: Permits | MessageKinds,
        handler: AnyHandler,
        allow: Allow = lambda member: None,
        congestion: str = "auto",
        *,
        refused: Callable[[str, ConnectionFailed], None] | None = None,
        patience: float = PATIENCE,
        half_open: int = HALF_OPEN,
        of_one: int = OF_ONE,
        sealed: bool = True,
        listen: Listen = tcp_stream.listen,
    ) -> None:
        self._credentials, self._codec = credentials, Codec(kinds)
        self._handler = handler
        self._allow, self._refused, self._patience, self._half_open = allow, refused, patience, half_open
        self._changed = threading.Condition()
        self._handshakes: dict[Stream, float] = {}  # with the time of their start; oldest first
        self._of_one, self._sealed = of_one, sealed
        self._made: Counter[tuple[Role, int]] = Counter()  # connections that are made, by role and rank
        self._closed = False
        assert credentials.accepting, "damaged credentials are found before a socket is opened"
        self._listener: Listener = listen(bind_host, ports, congestion)
        self.address = self._listener.address
        self._preauth = PreauthListener(self._listener, credentials.preauth_secret, patience, refused)
        self._thread = threading.Thread(target=self._accept, name=f"psctl acceptor {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end connections in their handshake; made connections stay."""
        with self._changed:
            self._closed = True
            for stream in self._handshakes:
                stream.shutdown()
            self._changed.notify_all()
        self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._preauth.accept()
            except OSError:  # closed, or descriptors are short for a while
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, 0.01)
                continue
            if not self._admit(stream):
                stream.close()
                break
            threading.Thread(target=self._serve, args=(stream,), name=f"psctl {stream.name}", daemon=True).start()
        self._preauth.clear()

    def _admit(self, stream: Stream) -> bool:
        """Wait until one more handshake may begin; the oldest is dropped once it is YOUNG no more."""
        with self._changed:
            while not self._closed and len(self._handshakes) >= self._half_open:
                oldest, since = next(iter(self._handshakes.items()))
                wait = since + YOUNG - time.monotonic()
                if wait <= 0:
                    oldest.shutdown()
                self._changed.wait(max(0.01, wait))
            if not self._closed:
                self._handshakes[stream] = time.monotonic()
            return not self._closed

    def _serve(self, stream: Stream) -> None:
        """Body of the thread that makes one connection and then is its reader."""
        peer = PeerConnection(
            stream, self._credentials, self._codec, self._handler, accepting=True, sealed=self._sealed
        )
        try:
            peer.handshake(self._reason_against, self._patience)
        except ConnectionFailed as error:
            if self._refused is not None:
                self._refused(stream.name, error)
            return
        except Exception as error:
            if self._refused is None:
                raise
            why = f"{stream.name}: our allow() failed: {type(error).__name__}: {error}"
            self._refused(stream.name, ConnectionFailed(why, where=stream.name))
            return
        finally:
            with self._changed:
                self._handshakes.pop(stream, None)
                self._changed.notify_all()
        threading.current_thread().name = f"psctl reader {peer.member}"
        who = peer.member.role, peer.member.rank
        with self._changed:
            self._made[who] += 1
        try:
            peer.run()
        finally:
            with self._changed:
                self._made[who] -= 1

    def _reason_against(self, member: Member) -> str | None:
        """Return why a member may not connect."""
        if self._made[member.role, member.rank] >= self._of_one:
            return f"{member} has {self._of_one} connections here already"
        return self._allow(member)
