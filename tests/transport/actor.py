"""A process with one end of connections, for tests that stop it or cut its link: prints one JSON document a line.

python actor.py accept CREDENTIALS HOST         {"address"}, {"joined"}, {"lost"}; counts payloads, answers Total
python actor.py dial CREDENTIALS HOST PORT idle|pour     {"joined"}, {"lost"}
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from psctl.errors import ConnectionFailed
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member


class Part(msgspec.Struct, frozen=True, tag=True):
    """Payload: some bytes."""

    number: int


class Total(msgspec.Struct, frozen=True, tag=True):
    """To the reader: say what you have; back from it: parts, bytes and their digest."""

    parts: int = 0
    bytes: int = 0
    digest: str = ""


KINDS = Part | Total


def say(**document: Any) -> None:
    print(json.dumps({**document, "time": time.monotonic()}), flush=True)


class Actor:
    """Prints what happens; takes parts in and checks their order."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.counts: dict[PeerConnection, list[Any]] = {}

    def on_connected(self, peer: PeerConnection) -> None:
        self.counts[peer] = [0, 0, hashlib.sha256()]
        say(joined=str(peer.member))

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        count = self.counts[peer]
        if isinstance(message, Total):
            peer.send(Total(count[0], count[1], count[2].hexdigest()))
            return
        assert message.number == count[0], "in order"
        count[0] += 1
        if payload is not None:
            count[1] += len(payload)
            count[2].update(payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        say(lost=error.message, code=error.code)
        self.over.set()


def main(role: str, credentials_file: str, host: str, port: str = "0", how: str = "idle") -> None:
    credentials = msgspec.json.decode(Path(credentials_file).read_bytes(), type=Credentials)
    actor = Actor()
    if role == "accept":
        acceptor = Acceptor(host, None, credentials, KINDS, actor)
        say(address=[acceptor.address.host, acceptor.address.port])
        actor.over.wait()
        acceptor.close()
        return
    peer = dial(Address(host, int(port)), credentials, Member("server", 0), KINDS, actor)
    number, data = 0, bytes(512 << 10)
    while how == "pour" and not actor.over.is_set():
        if peer.pending() < 4 << 20:
            peer.send(Part(number), data)
            number += 1
        else:
            actor.over.wait(0.001)
    actor.over.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
