"""Lines between processes of one host: records arrive whole and in order, nothing waits, strangers get none."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.transport import unix_channel
from psctl.transport.unix_channel import BYE, DONE, HEAD, LENT, PIECE, Record, UnixChannel

OURS, THEIRS = b"a" * 16, b"b" * 16


def ends() -> tuple[UnixChannel, UnixChannel]:
    left, right = socket.socketpair()
    return UnixChannel(left, "worker/1"), UnixChannel(right, "worker/0")


def drained(line: UnixChannel, other: UnixChannel) -> list[Record]:
    """Take in all that the other end has to send."""
    found: list[Record] = []
    while True:
        other.flush()
        new = line.receive()
        found += new
        if not new and not other.waiting and line._long is None:
            return found


def test_records_arrive_in_order_and_no_send_waits_for_a_reader() -> None:
    one, other = ends()
    long = memoryview(bytes(range(256)) * 8192)  # more than a socket holds
    number = one.send(PIECE, 7, size=len(long), data=long)
    last = one.send(LENT, 8, 3, 64, 1 << 33)
    for tag in range(2000):
        one.send(DONE, tag)
    assert (one.left < number, one.waiting) == (True, True)
    found = drained(other, one)
    assert one.left == one.sent == last + 2000
    assert found[0].data == long
    assert found[1] == Record(LENT, 8, 3, 64, 1 << 33)
    assert [record.tag for record in found[2:]] == list(range(2000))
    one.close()
    other.close()


def test_a_goodbye_tells_its_reason_and_an_end_without_one_is_a_death() -> None:
    one, other = ends()
    one.bye("it gave up")
    one.shutdown()
    assert [(record.kind, record.data) for record in other.receive()] == [(BYE, b"it gave up")]
    assert (other.receive(), other.ended) == ([], "its process ended")
    other.send(DONE)
    other.send(DONE)
    assert other.left < other.sent, "nobody takes it"
    one.close()
    other.close()


def test_what_is_no_record_is_refused() -> None:
    one, other = ends()
    one._socket.send(HEAD.pack(9, 0, 0, 0, 0))
    with pytest.raises(ProtocolError, match="worker/0: sent what is no record"):
        other.receive()
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("mine", "theirs", "number", "fits"),
    [(OURS, THEIRS, 1, True), (OURS, OURS, 1, False), (THEIRS, THEIRS, 1, False), (OURS, THEIRS, 2, False)],
)
def test_both_ends_must_know_the_others_secret(
    tmp_path: Path, mine: bytes, theirs: bytes, number: int, fits: bool
) -> None:
    """`OURS` is the caller's, `THEIRS` the listener's, which knows of a rank 1 alone."""
    found: list[object] = []
    door = unix_channel.listen(tmp_path, "worker-0.line")

    def listen() -> None:
        connected, _ = door.accept()
        try:
            found.append(unix_channel.answer(connected, THEIRS, {1: OURS}, 5.0))
        except ConnectionFailed as error:
            found.append(error)
        finally:
            connected.close()

    thread = threading.Thread(target=listen)
    thread.start()
    if fits:
        unix_channel.meet(tmp_path, "worker-0.line", number, mine, theirs, 5.0).close()
    else:
        with pytest.raises(PeerLost, match=r"worker-0\.line"):
            unix_channel.meet(tmp_path, "worker-0.line", number, mine, theirs, 5.0)
    thread.join(5)
    door.close()
    assert (found == [1]) is (fits or mine == THEIRS), "who listens cannot know yet that its caller expects another"
