"""The thread that reads a connection: its reader, or a waiting thread with the lease; ends are reported."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from psctl.errors import ConnectionFailed
from psctl.transport.peer_connection import ReadLease
from tests.helpers.running import until


class Resting:
    """A reader thread that rests once."""

    def __init__(self) -> None:
        self.lease, self.back = ReadLease(), threading.Event()
        self._rest = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.lease.acquire()
        self._rest.wait()
        self.lease.rest()
        self.back.set()

    def rest(self) -> None:
        self._rest.set()


def test_the_lease_is_free_only_while_the_reader_rests_and_it_reads_again_when_no_thread_takes_it() -> None:
    reader = Resting()
    assert not reader.lease.try_acquire()
    reader.rest()
    until(lambda: reader.lease.try_acquire() or reader.back.is_set(), 5, every=0.001)
    reader.lease.release()
    assert reader.back.wait(5)
    assert not reader.lease.try_acquire()


def test_a_thread_that_waits_often_keeps_the_lease_and_a_recall_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psctl.transport.peer_connection.REST", 60.0)
    reader = Resting()
    reader.lease.offered = True
    reader.rest()
    until(reader.lease.try_acquire, 5, every=0.001)
    for _ in range(3):
        reader.lease.release()
        assert reader.lease.try_acquire()
    reader.lease.recall()
    assert not reader.back.wait(0.05)  # one thread reads, until it gives the turn back
    reader.lease.release()
    assert reader.back.wait(5)


def rested(pair: Any, note: Any) -> tuple[Any, Any]:
    """Return both ends; the worker's reader rests, and its turn is taken."""
    mine, theirs = pair.join()
    pair.worker.on_received = lambda peer, message: peer.offer_lease()
    theirs.send(note("short"))
    pair.worker.next("received")
    until(mine.read_lease.try_acquire, 5, every=0.001)
    return mine, theirs


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psctl.transport.peer_connection.REST", 60.0)


@pytest.mark.usefixtures("patient")
def test_the_holder_of_the_lease_handles_messages_on_its_own_thread_until_its_wait_ends(pair: Any, note: Any) -> None:
    mine, theirs = rested(pair, note)
    threads: list[int] = []
    pair.worker.on_received = lambda peer, message: threads.append(threading.get_ident())
    for number in range(3):
        theirs.send(note(f"{number}"), bytes(100_000))
    mine.read_here(lambda: len(threads) == 3, 10)
    assert threads == [threading.get_ident()] * 3
    assert mine.read_lease.try_acquire()
    mine.read_here(lambda: False, 0.01)  # nothing comes: it does not wait for ever
    assert mine.read_lease.try_acquire()
    mine.read_lease.release()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["closed there", "closed here", "a handler's fault", "interrupted"])
def test_the_end_of_a_connection_is_reported_once_by_the_reader_whichever_thread_reads(
    pair: Any, note: Any, how: str
) -> None:
    mine, theirs = rested(pair, note)
    fault: type[BaseException] = KeyboardInterrupt if how == "interrupted" else RuntimeError

    def fail(peer: Any, message: Any) -> None:
        raise fault("a bug")

    pair.worker.on_received = fail
    if how == "closed there":
        theirs.close("the job is done")
    elif how == "closed here":
        threading.Timer(0.02, mine.close, ["enough"]).start()
    else:
        theirs.send(note("bad"))
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            mine.read_here(lambda: False, 10)
    else:
        mine.read_here(lambda: False, 10)
    if how in ("a handler's fault", "interrupted"):
        pair.worker.next("received")
    _, error = pair.worker.next("lost")
    said = {"closed there": "left: the job is done", "closed here": "closed here: enough",
            "a handler's fault": "RuntimeError: a bug", "interrupted": "KeyboardInterrupt"}[how]  # fmt: skip
    assert isinstance(error, ConnectionFailed)
    assert said in error.message
    assert mine.join(10)
    assert pair.worker.told.empty()
    assert not mine.read_lease.try_acquire()
