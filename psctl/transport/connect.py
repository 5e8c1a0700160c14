"""How peers meet: one dials, the other accepts, both know from the other's certificate who it is."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from psctl.errors import ConnectionFailed, PeerLost
from psctl.permits import Permits
from psctl.transport import tcp_stream
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.transport.permit_gate import PermitGate
from psctl.transport.preauth_listener import PreauthListener, send_preauth_answer
from psctl.transport.protocol.connection import Codec
from psctl.transport.stream import Connect, Listen, Listener, Stream, why_gone
from psctl.types import Address, Member, Role

PATIENCE = 5.0
"""Seconds for a handshake."""
HALF_OPEN = 64
"""Connections that may be in their handshake at once."""
YOUNG = 1.0
"""Seconds that a connection in its handshake is safe from making room for another."""
OF_ONE = 16
"""Connections that one member may have to one listener at once; it needs one, and a broken one may still be there."""

Allow = Callable[[Member], str | None]


def dial(
    address: Address,
    credentials: Credentials,
    expect: Member | Role,
    kinds: Any,
    handler: ConnectionHandler,
    timeout: float = PATIENCE,
    congestion: str = "auto",
    *,
    connect: Connect = tcp_stream.connect,
) -> PeerConnection:
    """Connect to a member of the job and return it once it has joined; `handler.joined` follows on its reader thread.

    Args:
        address: where it listens.
        credentials: who we are.
        expect: who it must be: a member (with its incarnation), or any of a role.
        kinds: the rows of what may be said (permits.py), or a union of messages without further rules.
        handler: told of all that happens.
        timeout: seconds for connecting and the handshake together.
        congestion: TCP's congestion control: auto | reno | cubic | bbr.
        connect: how a stream is made; tests pass another.

    Raises:
        PeerLost: nobody answers there, or it ended; names who was expected.
        ProtocolError: it is another, a stranger, or refused us with a reason.
        UsageError: the system refuses this congestion control.
    """
    deadline = time.monotonic() + timeout
    assert credentials.dialling, "damaged credentials show before anything is opened"
    try:
        stream = connect(address, timeout, congestion)
    except OSError as error:
        why = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerLost(f"{expect} at {address}: {why}", where=str(expect)) from error
    name = f"{expect} at {address}"
    try:
        send_preauth_answer(stream, credentials.knock, deadline)
    except (OSError, ConnectionFailed) as error:
        stream.shutdown()
        stream.close()
        if isinstance(error, ConnectionFailed):
            raise type(error)(f"{name}: {error.message}", where=str(expect)) from error
        why = f"no handshake within {timeout:g} s" if time.monotonic() >= deadline else why_gone(error)
        raise PeerLost(f"{name}: {why}", where=str(expect)) from error
    peer = PeerConnection(stream, credentials, Codec(kinds), guarded(kinds, credentials, handler), accepting=False)
    peer.name = name
    try:
        peer.settle(lambda found: _unexpected(expect, found), max(0.001, deadline - time.monotonic()))
    except PeerLost as error:
        if peer.bytes_received or isinstance(error.__cause__, TimeoutError):
            raise
        why = "it hung up at our knock: it is ending, or a process of another job listens there now"
        raise PeerLost(f"{name}: {why}", where=str(expect)) from error
    peer.start()
    return peer


def guarded(kinds: Any, credentials: Credentials, handler: ConnectionHandler) -> ConnectionHandler:
    """Return the handler behind the rows of what may be said, where there are some."""
    return PermitGate(kinds, credentials.member.role, handler) if isinstance(kinds, Permits) else handler


def _unexpected(expect: Member | Role, found: Member) -> str | None:
    if isinstance(expect, str):
        return None if found.role == expect else f"expected a {expect}, found {found}"
    if (expect.role, expect.rank) != (found.role, found.rank):
        return f"expected {expect}, found {found}"
    if expect.incarnation != found.incarnation:
        return f"expected incarnation {expect.incarnation} of {expect}, found {found.incarnation}"
    return None


class Acceptor:
    """Listens, and makes a Peer of everyone who proves to be a wanted member of the job. Strangers harm nothing.

    Args:
        bind_host: numeric address to listen on; never all addresses.
        ports: inclusive range to take a port from; None: any.
        credentials: who we are.
        kinds: the rows of what may be said (permits.py), or a union of messages without further rules.
        handler: told of all peers, each on its own reader thread.
        allow: returns why a member is not wanted (an older incarnation ...), None when it is; called on many threads.
        congestion: TCP's congestion control.
        refused: told of each connection that came to nothing: (its end, why).
        patience: seconds for the knock (preauth_listener.py), and again for the handshake.
        half_open: connections that may be in their handshake at once; when there are more, the oldest makes room.
        of_one: connections that one member may have at once.
        listen: how a listener is made; tests pass another.

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
        kinds: Any,
        handler: ConnectionHandler,
        allow: Allow = lambda member: None,
        congestion: str = "auto",
        *,
        refused: Callable[[str, ConnectionFailed], None] | None = None,
        patience: float = PATIENCE,
        half_open: int = HALF_OPEN,
        of_one: int = OF_ONE,
        listen: Listen = tcp_stream.listen,
    ) -> None:
        self._credentials, self._codec = credentials, Codec(kinds)
        self._handler = guarded(kinds, credentials, handler)
        self._allow, self._refused, self._patience, self._half_open = allow, refused, patience, half_open
        self._changed = threading.Condition()
        self._shaking: dict[Stream, float] = {}  # since when; oldest first
        self._of_one = of_one
        self._made: Counter[tuple[Role, int]] = Counter()  # connections that are made, by role and rank
        self._closed = False
        assert credentials.accepting, "damaged credentials show before anything is opened"
        self._listener: Listener = listen(bind_host, ports, congestion)
        self.address = self._listener.address
        self._door = PreauthListener(self._listener, credentials.knock, patience, refused)
        self._thread = threading.Thread(target=self._accept, name=f"psctl acceptor {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end what is still in its handshake; peers that have joined stay."""
        with self._changed:
            self._closed = True
            for stream in self._shaking:
                stream.shutdown()
            self._changed.notify_all()
        self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._door.next()
            except OSError:  # closed, or descriptors are short for a while
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, 0.01)
                continue
            if not self._admit(stream):
                stream.close()
                break
            threading.Thread(target=self._meet, args=(stream,), name=f"psctl {stream.name}", daemon=True).start()
        self._door.clear()

    def _admit(self, stream: Stream) -> bool:
        """Wait until there is room for one more handshake; the oldest makes room when it has had its second."""
        with self._changed:
            while not self._closed and len(self._shaking) >= self._half_open:
                oldest, since = next(iter(self._shaking.items()))
                wait = since + YOUNG - time.monotonic()
                if wait <= 0:
                    oldest.shutdown()
                self._changed.wait(max(0.01, wait))
            if not self._closed:
                self._shaking[stream] = time.monotonic()
            return not self._closed

    def _meet(self, stream: Stream) -> None:
        """Body of the thread that shakes hands with one caller and then is its reader."""
        peer = PeerConnection(stream, self._credentials, self._codec, self._handler, accepting=True)
        try:
            peer.settle(self._against, self._patience)
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
                self._shaking.pop(stream, None)
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

    def _against(self, member: Member) -> str | None:
        """Return why a member may not connect."""
        if self._made[member.role, member.rank] >= self._of_one:
            return f"{member} has {self._of_one} connections here already"
        return self._allow(member)
