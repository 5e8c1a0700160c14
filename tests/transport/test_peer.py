"""Two peers over TCP and in memory: messages arrive, and each end gets one last event with the reason."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from typing import Any

import pytest

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError, TimedOut
from psctl.transport.connect import OF_ONE
from psctl.transport.protocol.frames import MAX_PAYLOAD, TAG
from psctl.types import Member
from tests.helpers.running import until


def test_messages_and_payloads_arrive_in_order_both_ways(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    assert (mine.member, theirs.member) == (Member("server", 0), Member("worker", 3))
    for number in range(50):
        mine.send(note(f"to the server {number}"), bytes([number]) * number)
        theirs.send(note(f"to the worker {number}"))
    for number in range(50):
        _, (message, payload) = pair.server.next("received")
        assert message.text == f"to the server {number}"
        assert payload == (bytes([number]) * number or None)
        assert pair.worker.next("received")[1] == (note(f"to the worker {number}"), None)


def test_a_payload_is_received_into_the_buffer_of_place_from_any_buffer(pair: Any, note: Any) -> None:
    mine, _ = pair.join()
    landing = bytearray(4 << 20)
    pair.server.landing = memoryview(landing)
    data = os.urandom(4 << 20)
    for payload in (data, bytearray(data), memoryview(data), memoryview(data).cast("f")):
        landing[:] = bytes(4 << 20)
        mine.send(note("a payload"), payload)
        pair.server.next("received")
        assert landing == data


def test_a_payload_over_the_limit_is_the_callers_mistake(pair: Any, note: Any) -> None:
    mine, _ = pair.join()
    with (
        mmap.mmap(-1, MAX_PAYLOAD + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ) as vast,
        pytest.raises(ValueError, match="too many for one message"),
    ):
        mine.send(note("large"), vast)
    with pytest.raises(ValueError, match="too many for one message"):
        mine.send(note("x" * (17 << 20)))
    mine.send(note("the connection lives"))
    assert pair.server.next("received")[1][0].text == "the connection lives"


def test_headers_of_megabytes_pass_as_do_layouts_of_large_models(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    long = "x" * (5 << 20)
    mine.send(note(long), b"and a payload")
    theirs.send(note(long))
    mine.send(note("next"))
    assert pair.server.next("received")[1] == (note(long), b"and a payload")
    assert pair.server.next("received")[1] == (note("next"), None)
    assert pair.worker.next("received")[1] == (note(long), None)


def test_both_ends_may_send_more_than_a_narrow_window_at_once(narrow_pair: Any, note: Any) -> None:
    mine, theirs = narrow_pair.join()
    data = os.urandom(1 << 20)
    for number in range(4):
        mine.send(note(f"{number}"), data)
        theirs.send(note(f"{number}"), data)
    for number in range(4):
        assert narrow_pair.server.next("received")[1] == (note(f"{number}"), data)
        assert narrow_pair.worker.next("received")[1] == (note(f"{number}"), data)


def test_an_urgent_message_overtakes_queued_bulk_and_equals_keep_their_order(narrow_pair: Any, note: Any) -> None:
    mine, _ = narrow_pair.join()
    held = threading.Event()
    narrow_pair.server.on_received = lambda peer, message: held.wait(10) and None
    for number in range(6):
        mine.send(note(f"bulk {number}"), bytes(200_000))
    mine.send(note("urgent 1"), urgent=True)
    mine.send(note("urgent 2"), urgent=True)
    held.set()
    order = [narrow_pair.server.next("received")[1][0].text for _ in range(8)]
    assert order.index("urgent 1") < order.index("bulk 5")
    assert [text for text in order if "urgent" in text] == ["urgent 1", "urgent 2"]
    assert [text for text in order if "bulk" in text] == [f"bulk {number}" for number in range(6)]


def test_heartbeats_and_answers_pass_between_the_pieces_of_one_large_payload(narrow_pair: Any, note: Any) -> None:
    mine, theirs = narrow_pair.join()
    data = bytes(32 << 20)
    narrow_pair.server.landing = memoryview(bytearray(len(data)))
    narrow_pair.server.on_received = lambda peer, message: theirs.send(note(f"answer to {message.text}"))
    beats = iter(range(1, 4))

    def beat(peer: Any, message: Any) -> None:
        if (number := next(beats, None)) is not None:
            mine.send(note(f"heartbeat {number}"), urgent=True)

    narrow_pair.worker.on_received = beat
    mine.send(note("one payload"), data)
    mine.send(note("behind it"))
    mine.send(note("heartbeat 0"), urgent=True)
    order = [narrow_pair.server.next("received", 60)[1][0].text for _ in range(6)]
    assert order == [*(f"heartbeat {number}" for number in range(4)), "one payload", "behind it"]
    assert [narrow_pair.worker.next("received")[1][0].text for _ in order] == [f"answer to {text}" for text in order]


def test_flush_waits_until_the_network_has_it_all_and_names_the_slow_peer(narrow_pair: Any, note: Any) -> None:
    mine, _ = narrow_pair.join()
    held = threading.Event()
    narrow_pair.server.on_received = lambda peer, message: held.wait(10) and None
    mine.send(note("first"))
    mine.send(note("more than a window"), bytes(1 << 20))
    with pytest.raises(TimedOut, match=r"server/0 at .*bytes were not taken within 0.05 s"):
        mine.flush(0.05)
    assert mine.pending() > 0
    held.set()
    mine.flush(10)
    assert mine.pending() == 0
    assert mine.bytes_sent > 1 << 20


def test_what_was_written_is_reported_with_its_size(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    written: list[tuple[Any, int]] = []
    mine.on_written = lambda message, size: written.append((message, size))
    mine.send(note("a"))
    mine.send(note("b"), bytes(1000))
    mine.flush(10)
    pair.server.next("received")
    pair.server.next("received")
    assert [message for message, _ in written] == [note("a"), note("b")]
    assert written[1][1] > 1000
    seals = 0 if pair.sealed else 2 * TAG  # sizes count them
    assert sum(size for _, size in written) <= mine.bytes_sent + seals
    assert theirs.bytes_received >= mine.bytes_sent


def test_a_goodbye_carries_its_reason_and_both_ends_get_one_event(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    mine.send(note("last words"))
    mine.flush(10)
    mine.close("the job is done")
    mine.close("again")
    _, error = pair.worker.next("lost")
    assert isinstance(error, ConnectionFailed)
    assert "closed here: the job is done" in error.message
    assert pair.server.next("received")[1][0].text == "last words"
    peer, error = pair.server.next("lost")
    assert peer is theirs
    assert isinstance(error, PeerLost)
    assert error.message.startswith("worker/3 at ")
    assert error.message.endswith("left: the job is done")
    assert mine.join(10)
    assert theirs.join(10)
    assert pair.worker.told.empty()
    assert pair.server.told.empty()
    assert mine.send(note("too late")) is False
    with pytest.raises(ConnectionFailed):
        mine.flush(1)


def test_what_was_flushed_arrives_though_the_sender_closes_with_words_unread(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    held, closed = threading.Event(), threading.Event()
    pair.server.on_received = lambda peer, message: held.wait(10) and None
    pair.worker.on_received = lambda peer, message: closed.wait(10) and None
    for number in range(30):
        mine.send(note(f"{number}"), bytes(50_000))
        theirs.send(note("unread"), bytes(20_000))
    mine.flush(10)
    mine.close("all is said")
    closed.set()
    assert mine.join(10)
    theirs.send(note("to nobody"))
    held.set()
    for number in range(30):
        assert pair.server.next("received")[1] == (note(f"{number}"), bytes(50_000))
    assert pair.server.next("lost")[1].message.endswith("left: all is said")


def test_a_handler_that_raises_ends_that_peer_with_its_reason(pair: Any, note: Any) -> None:
    mine, _ = pair.join()

    def stumble(peer: Any, message: Any) -> None:
        raise KeyError("shard 7")

    pair.server.on_received = stumble
    mine.send(note("hello"))
    pair.server.next("received")
    assert "our handler failed: KeyError: 'shard 7'" in pair.server.next("lost")[1].message
    assert "KeyError: 'shard 7'" in pair.worker.next("lost")[1].message


def test_a_place_of_the_wrong_size_is_our_own_mistake(pair: Any, note: Any) -> None:
    mine, _ = pair.join()
    pair.server.landing = memoryview(bytearray(10))
    mine.send(note("hello"), bytes(11))
    assert "receive_buffer_for() returned 10 bytes for a payload of 11" in pair.server.next("lost")[1].message


def test_a_hook_that_raises_ends_the_peer_with_its_reason(pair: Any, note: Any) -> None:
    mine, _ = pair.join()

    def stumble(message: Any, size: int) -> None:
        raise ZeroDivisionError("in the trace")

    mine.on_written = stumble
    mine.send(note("hello"))
    assert "our writer failed: ZeroDivisionError: in the trace" in pair.worker.next("lost")[1].message


def test_a_message_of_unknown_kind_ends_the_connection_with_a_reason(pair: Any, other: Any, note: Any) -> None:
    class Strange(other, frozen=True, tag="Strange"):
        """Not of the union."""

    mine, _ = pair.join()
    mine.send(Strange(1))
    _, error = pair.server.next("lost")
    assert isinstance(error, ProtocolError)
    assert "an unknown message" in error.message
    assert "an unknown message" in pair.worker.next("lost")[1].message


def test_closing_wakes_a_reader_and_a_writer_that_wait(narrow_pair: Any, note: Any) -> None:
    mine, _ = narrow_pair.join()
    held = threading.Event()
    narrow_pair.server.on_received = lambda peer, message: held.wait(10) and None
    for _ in range(20):
        mine.send(note("fills the window"), bytes(100_000))
    mine.close("enough")
    narrow_pair.worker.next("lost")
    assert mine.join(2)
    assert mine.pending() == 0
    held.set()


def test_closing_from_the_handler_is_fine(pair: Any, note: Any) -> None:
    mine, _ = pair.join()
    pair.server.on_received = lambda peer, message: peer.close("I have what I wanted")
    mine.send(note("one"))
    pair.server.next("received")
    assert "closed here: I have what I wanted" in pair.server.next("lost")[1].message
    assert "left: I have what I wanted" in pair.worker.next("lost")[1].message


def test_a_killed_peer_is_lost_at_once(memory_pair: Any) -> None:
    mine, theirs = memory_pair.join()
    memory_pair.network.link(mine.member, theirs.member).kill()
    for end, name in ((memory_pair.worker, "server/0"), (memory_pair.server, "worker/3")):
        _, error = end.next("lost")
        assert isinstance(error, PeerLost)
        assert error.message.startswith(f"{name} at memory:")
        assert error.message.endswith("connection reset")


def test_a_link_cut_in_silence_is_lost_after_a_while(memory_pair: Any, note: Any) -> None:
    mine, theirs = memory_pair.join()
    memory_pair.network.link(mine.member, theirs.member).cut()
    mine.send(note("into the void"))
    for end in (memory_pair.worker, memory_pair.server):
        _, error = end.next("lost")
        assert isinstance(error, PeerLost)
        assert "no sign of life for 0.2 s" in error.message


def test_a_connection_may_outlast_a_cut_and_knows_how_long_it_lasts(memory_pair: Any, note: Any) -> None:
    mine, theirs = memory_pair.join()
    assert mine.silent_for() == 0.0
    for each in (mine, theirs):
        each.tolerate(60.0)
    memory_pair.network.link(mine.member, theirs.member).cut()
    until(lambda: mine.silent_for() > 1.0, 10, name="a second of silence")  # an error after less without `tolerate`
    assert mine.send(note("into the void")), "the connection is not over"


def test_a_flipped_bit_ends_the_connection_and_delivers_nothing(memory_pair: Any, note: Any) -> None:
    mine, theirs = memory_pair.join()
    memory_pair.network.link(mine.member, theirs.member).flip()
    mine.send(note("1000 dollars"))
    _, error = memory_pair.server.next("lost")
    assert isinstance(error, ProtocolError)
    assert "fails its check" in error.message
    assert "fails its check" in memory_pair.worker.next("lost")[1].message


def test_many_threads_may_send_through_one_peer(pair: Any, other: Any) -> None:
    mine, _ = pair.join()

    def speak(start: int) -> None:
        for number in range(start, start + 200):
            mine.send(other(number), number.to_bytes(4, "big") * 50)

    threads = [threading.Thread(target=speak, args=(start,)) for start in range(0, 800, 200)]
    for thread in threads:
        thread.start()
    found = [pair.server.next("received")[1] for _ in range(800)]
    for thread in threads:
        thread.join()
    assert sorted(message.number for message, _ in found) == list(range(800))
    assert all(payload == message.number.to_bytes(4, "big") * 50 for message, payload in found)
    for start in range(0, 800, 200):
        mine_only = [message.number for message, _ in found if start <= message.number < start + 200]
        assert mine_only == sorted(mine_only), "order among equals"


def test_nothing_is_left_behind(pair: Any, note: Any) -> None:
    gc.collect()
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    acceptor = pair.accept()
    for _ in range(5):
        mine = pair.dial(acceptor)
        pair.worker.next("joined")
        theirs, _ = pair.server.next("joined")
        mine.send(note("hello"))
        pair.server.next("received")
        mine.close("bye")
        pair.worker.next("lost")
        pair.server.next("lost")
        assert mine.join(10)
        assert theirs.join(10)
    acceptor.close()
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files


def test_what_is_answered_leaves_in_one_go_and_in_order(pair: Any, note: Any) -> None:
    mine, theirs = pair.join()
    before, seen = theirs.bytes_sent, []

    def answer(peer: Any, message: Any) -> None:
        for word in ("one", "two", "three"):
            peer.send(note(word))
        seen.append((peer.bytes_sent, peer.pending() > 0))

    pair.server.on_received = answer
    mine.send(note("say"))
    assert [pair.worker.next("received")[1][0].text for _ in range(3)] == ["one", "two", "three"]
    assert seen == [(before, True)]
    assert theirs.pending() == 0


def test_one_member_has_few_connections_to_a_listener_at_once(memory_pair: Any, job: Any) -> None:
    acceptor = memory_pair.accept()
    for _ in range(OF_ONE):
        memory_pair.dial(acceptor)
        first, _ = memory_pair.server.next("joined")
        memory_pair.peers.append(first)
    with pytest.raises(ProtocolError, match=rf"worker/3 has {OF_ONE} connections here already"):
        memory_pair.dial(acceptor)
    memory_pair.dial(acceptor, job.credentials(Member("worker", 4)))
    other, _ = memory_pair.server.next("joined")
    memory_pair.peers.append(other)
    first.close("there is room again")
    assert first.join(10)
    memory_pair.server.next("lost")
    memory_pair.dial(acceptor)
    again, _ = memory_pair.server.next("joined")
    memory_pair.peers.append(again)
