"""The report of rejected connections: which callers count, and how often it is written."""

from __future__ import annotations

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.process.rejected_connections import PAUSE, RejectionLog


class Words:
    def __init__(self) -> None:
        self.now, self.lines = 100.0, list[str]()
        self.about = RejectionLog("server/0", self.lines.append, lambda: self.now)


def test_the_first_is_reported_at_once_and_the_rest_once_a_while() -> None:
    words = Words()
    for _ in range(50):
        words.about("10.0.0.9:1", ProtocolError("10.0.0.9:1: it did not prove this job's secret"))
    assert words.lines == ["psctl: server/0 rejected a connection: 10.0.0.9:1: it did not prove this job's secret"]
    words.now += PAUSE
    words.about("10.0.0.9:2", ConnectionFailed("10.0.0.9:2: our allow() failed"))
    assert words.lines[1:] == [
        "psctl: server/0 rejected a connection: 10.0.0.9:2: our allow() failed (and 49 others since the last such line)"
    ]


def test_a_client_that_only_closed_its_connection_is_not_reported() -> None:
    words = Words()
    words.about("10.0.0.9:1", PeerLost("10.0.0.9:1: it ended the connection during the handshake"))
    assert not words.lines
