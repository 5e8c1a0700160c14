"""Lines between processes of one host: records arrive whole and in order, nothing waits, strangers get none."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.job.training_messages import WorkerAt
from psctl.transport.unix_channel import BYE, DONE, HEAD, PIECE, SHARED, ChannelListener, Record, UnixChannel
from psctl.types import Member

OURS, THEIRS = b"a" * 32, b"b" * 32


def ends() -> tuple[UnixChannel, UnixChannel]:
    left, right = socket.socketpair()
    return UnixChannel(left, "worker/1"), UnixChannel(right, "worker/0")


def drained(line: UnixChannel, other: UnixChannel) -> list[Record]:
    """Return all records that the other end has sent."""
    found: list[Record] = []
    while len(found) < other.sent:
        other.flush()
        found += line.receive()
    assert line.receive() == [], "it received more than was sent"
    return found


def test_records_arrive_in_order_and_no_send_waits_for_a_reader() -> None:
    one, other = ends()
    long = memoryview(bytes(range(256)) * 8192)  # more than a socket holds
    number = one.send(PIECE, 7, size=len(long), data=long)
    last = one.send(SHARED, 8, 3, 64, 1 << 33)
    for tag in range(2000):
        one.send(DONE, tag)
    assert (one.written < number, one.has_queued) == (True, True)
    found = drained(other, one)
    assert one.written == one.sent == last + 2000
    assert found[0].data == long
    assert found[1] == Record(SHARED, 8, 3, 64, 1 << 33)
    assert [record.tag for record in found[2:]] == list(range(2000))
    one.close()
    other.close()


def test_a_goodbye_has_its_reason_and_an_end_without_one_is_a_loss() -> None:
    one, other = ends()
    one.send_bye("it gave up")
    one.shutdown()
    assert [(record.kind, record.data) for record in other.receive()] == [(BYE, b"it gave up")]
    assert (other.receive(), other.ended) == ([], "its process ended")
    other.send(DONE)
    other.send(DONE)
    assert other.written < other.sent, "nobody takes it"
    one.close()
    other.close()


def test_what_is_no_record_is_refused() -> None:
    one, end = socket.socketpair()
    other = UnixChannel(end, "worker/0")
    one.send(HEAD.pack(9, 0, 0, 0, 0))
    with pytest.raises(ProtocolError, match="worker/0: sent an invalid record"):
        other.receive()
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("mine", "theirs", "rank", "fits"),
    [(OURS, THEIRS, 1, True), (OURS, OURS, 1, False), (THEIRS, THEIRS, 1, False), (OURS, THEIRS, 2, False)],
)
def test_both_ends_must_have_the_others_secret(
    tmp_path: Path, mine: bytes, theirs: bytes, rank: int, fits: bool
) -> None:
    """`OURS` is the caller's, `THEIRS` the listener's, which knows of a rank 1 alone."""
    found: list[object] = []
    listener = ChannelListener(tmp_path, Member("worker", 0), "line")
    listener.secret = THEIRS

    def listen() -> None:
        try:
            worker, channel = listener.accept(lambda: [WorkerAt(1, 0, None, OURS)], 5.0)
            found.append(worker.rank)
            channel.close()
        except ConnectionFailed as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    caller = ChannelListener(tmp_path, Member("worker", rank), "line")
    caller.secret = mine
    if fits:
        caller.connect(WorkerAt(0, 0, None, theirs), 5.0).close()
    else:
        with pytest.raises(PeerLost, match=r"worker-0-0\.line"):
            caller.connect(WorkerAt(0, 0, None, theirs), 5.0)
    thread.join(5)
    caller.close()
    listener.close()
    assert (found == [1]) is (fits or mine == THEIRS), "who listens cannot know yet that its caller expects another"
    assert not list(tmp_path.iterdir()), "no socket is left behind"
