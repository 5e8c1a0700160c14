"""The coordinator's connections: who is there, what they say, and the bytes that pass through without thought.

What needs thought goes into one queue, to the mind. Bytes do not: parts of checkpoints go to the saver, wanted slices
are read and sent by a thread a request, start values are handed from worker 0 to the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from psctl.checkpoint import files
from psctl.errors import ConnectionFailed, PsctlError
from psctl.job import messages
from psctl.job.instructions import Connected, ConnectionLost, Happening, Heard
from psctl.job.messages import AnyMessage, LoadEnd, LoadPart, LoadWanted
from psctl.job.stores import ReadBy, ReadRows, ReadWanted
from psctl.net.peer import Peer
from psctl.runtime.saver import Saver
from psctl.words import Member

QUEUED = 8 << 20
"""Bytes of bulk that wait for one peer's network at most."""

PATIENCE = 60.0
"""Seconds in which the network must take them."""


class Desk:
    """All peers of the coordinator, as net's handler.

    Args:
        put: takes what happened, from any thread.
        saver: takes parts of checkpoints.
        resume: folder of the checkpoint that the job goes on from.
    """

    def __init__(self, put: Callable[[Happening], None], saver: Saver, resume: Path | None) -> None:
        self._put, self._saver, self._resume = put, saver, resume
        self._lock = threading.Lock()
        self._peers: dict[Member, Peer] = {}

    def go_on_from(self, folder: Path | None) -> None:
        """Read from this checkpoint from now on; None: there is none, all begin with their start values."""
        self._resume = folder

    def tell(self, member: Member, message: AnyMessage) -> None:
        """Send a message to a member, before any bulk; it is dropped when the member is not connected."""
        peer = self.peer(member)
        if peer is not None:
            peer.send(message, urgent=True)

    def peer(self, member: Member) -> Peer | None:
        """Return the connection of a member."""
        with self._lock:
            return self._peers.get(member)

    def close(self, timeout: float) -> None:
        """Say what is left to say to everyone, then end all connections."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            with contextlib.suppress(PsctlError):  # it is gone, or does not listen: it will notice our end
                peer.flush(timeout)
        for peer in peers:
            peer.close("the job is over")

    # ---- net's handler, on each peer's reader thread ---------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """A member is connected; a newer connection of the same member takes the place of an older one."""
        with self._lock:
            self._peers[peer.member] = peer
        self._put(Connected(peer.member))

    def place(self, peer: Peer, message: Any, size: int) -> memoryview | None:
        """Payloads are written or handed on from a lent buffer."""
        return None

    def received(self, peer: Peer, message: Any, payload: memoryview | None) -> None:
        """Bytes go their way, the rest goes to the mind."""
        source = str(peer.member)
        match message:
            case messages.SavePart():
                self._saver.part(_sender(peer, message), message, payload)
            case messages.SaveBegin():
                self._saver.begin(_sender(peer, message), message)
                self._put(Heard(peer.member, messages.SaveBegin(message.step, [], tables=message.tables)))
            case messages.SaveEnd():
                self._saver.end(_sender(peer, message), message.step)
                self._put(Heard(peer.member, message))
            case messages.StartBegin() | messages.StartPart() | messages.StartEnd():
                self._hand_on(peer, message, payload)
            case LoadWanted():
                threading.Thread(
                    target=self._load, args=(peer, message), name=f"psctl load {source}", daemon=True
                ).start()
            case ReadWanted():
                self._ask_servers(peer, message)
            case ReadRows():
                self._answer_reader(peer, message, payload)
            case _:
                self._put(Heard(peer.member, message))

    def lost(self, peer: Peer, error: ConnectionFailed) -> None:
        """A connection ended; an older one of a member that came again does not count."""
        with self._lock:
            current = self._peers.get(peer.member) is peer
            if current:
                del self._peers[peer.member]
        if current:
            self._put(ConnectionLost(peer.member, error.message))

    # ---- bulk ------------------------------------------------------------------------------------------------------

    def _hand_on(self, peer: Peer, message: AnyMessage, payload: memoryview | None) -> None:
        """Start values of worker 0 go to every other worker."""
        if (peer.member.role, peer.member.rank) != ("worker", 0):
            return
        data = bytes(payload) if payload is not None else None
        with self._lock:
            others = [each for member, each in self._peers.items() if member.role == "worker" and member.rank != 0]
        for other in others:
            other.send(message, data)
            _wait(other)

    def _ask_servers(self, peer: Peer, wanted: ReadWanted) -> None:
        """Hand on what a reader outside the job wants."""
        if peer.member.role != "agent":
            return
        with self._lock:
            servers = [each for member, each in self._peers.items() if member.role == "server"]
        peer.send(ReadBy(wanted.ticket, len(servers)))
        for server in servers:
            server.send(msgspec.structs.replace(wanted, host=peer.member.rank))

    def _answer_reader(self, peer: Peer, rows: ReadRows, payload: memoryview | None) -> None:
        """Hand on a server's answer; a reader that does not take what it asked for asks again."""
        reader = self.peer(Member("agent", rows.host))
        if peer.member.role == "server" and reader is not None and reader.pending() <= QUEUED:
            reader.send(rows, bytes(payload) if payload is not None else None)

    def _load(self, peer: Peer, wanted: LoadWanted) -> None:
        """Send the wanted slices of the checkpoint that the job goes on from."""
        try:
            if self._resume is None:
                peer.send(LoadEnd(wanted.ticket, "the job does not go on from a checkpoint"))
                return
            manifest = files.open_checkpoint(self._resume)
            for index, piece in enumerate(wanted.slices):
                for offset, data in files.read(self._resume, manifest, piece):
                    peer.send(LoadPart(wanted.ticket, index, offset), data)
                    _wait(peer)
            peer.send(LoadEnd(wanted.ticket))
        except PsctlError as error:
            peer.send(LoadEnd(wanted.ticket, error.message))


def _sender(peer: Peer, message: messages.SaveBegin | messages.SavePart | messages.SaveEnd) -> str:
    """Return whose part of a checkpoint this is, as its file is called."""
    return f"tables/{peer.member.rank}" if message.tables else str(peer.member)


def _wait(peer: Peer) -> None:
    """Let the network take what is queued, so that memory does not."""
    if peer.pending() > QUEUED:
        with contextlib.suppress(ConnectionFailed):  # told by `lost`
            peer.flush(PATIENCE)
