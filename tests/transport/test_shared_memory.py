"""Shared memory between children of one agent: access, sizes, and removal."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.agent.shm_broker import MOST, SegmentServer, memfd, pair
from psctl.errors import PeerLost, ProtocolError
from psctl.transport.shared_memory import Segment, SegmentClient, inherited
from psctl.types import Member

WORKER, SERVER = Member("worker", 0), Member("server", 1)


class Host:
    """An agent's end, and children that are threads of this process."""

    def __init__(self) -> None:
        self.segments = SegmentServer(1 << 24)
        self._children: list[tuple[SegmentClient, threading.Thread]] = []

    def child(self, member: Member) -> SegmentClient:
        ours, theirs = pair()
        thread = threading.Thread(target=self.segments.serve, args=(member, ours))
        thread.start()
        child = SegmentClient(member, theirs)
        self._children.append((child, thread))
        return child

    def close(self) -> None:
        for child, thread in self._children:
            child.close()
            thread.join(10)
            self.segments.ended(child.me)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def got(found: Segment | None) -> Segment:
    assert found is not None
    return found


def test_two_children_see_the_same_bytes(host: Host) -> None:
    worker, server = host.child(WORKER), host.child(SERVER)
    mine = got(worker.make(1 << 20))
    theirs = got(server.get(WORKER, mine.number))
    mine.memory[1000:1003] = b"abc"
    assert bytes(theirs.part(1000, 3)) == b"abc"
    assert (theirs.holder, theirs.size) == (WORKER, 1 << 20)


def test_numbers_count_up_and_each_names_its_own_memory(host: Host) -> None:
    worker, server = host.child(WORKER), host.child(SERVER)
    one, two = got(worker.make(4096)), got(worker.make(8192))
    worker.drop(one.number)
    three = got(worker.make(4096))
    assert len({one.number, two.number, three.number}) == 3
    assert server.get(WORKER, one.number) is None
    assert got(server.get(WORKER, two.number)).size == 8192


def test_a_segment_that_does_not_exist_on_this_host_is_not_returned(host: Host) -> None:
    worker, server = host.child(WORKER), host.child(SERVER)
    got(worker.make(4096))
    assert server.get(WORKER, 7) is None
    assert server.get(Member("worker", 0, incarnation=1), 0) is None
    assert server.get(Member("worker", 5), 0) is None


def test_a_replacement_gets_its_own_and_the_lost_ones_is_removed(host: Host) -> None:
    worker, server = host.child(WORKER), host.child(SERVER)
    old = got(worker.make(4096))
    mapped = got(server.get(WORKER, old.number))
    old.memory[:4] = b"last"
    host.segments.ended(WORKER)
    assert server.get(WORKER, old.number) is None
    assert bytes(mapped.part(0, 4)) == b"last", "who has mapped it keeps it"
    again = host.child(Member("worker", 0, incarnation=1))
    assert bytes(got(again.make(4096)).part(0, 4)) == bytes(4)
    assert worker.make(4096) is None, "the agent has seen it end"


def test_the_size_can_never_change() -> None:
    descriptor = memfd(4096)
    for size in (0, 100, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


def test_a_descriptor_that_differs_from_its_description_is_not_mapped() -> None:
    sealed, open_ended = memfd(4096), os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(open_ended, 4096)
    for descriptor, size in ((sealed, 8192), (open_ended, 4096)):
        with pytest.raises(ValueError, match="sealed size"):
            Segment(WORKER, 0, descriptor, size)
        os.close(descriptor)


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 4097), (4096, 1), (1 << 62, 1 << 62), (10, -4)])
def test_places_outside_are_refused(host: Host, offset: int, size: int) -> None:
    segment = got(host.child(WORKER).make(4096))
    with pytest.raises(ProtocolError, match="named bytes"):
        segment.part(offset, size)
    assert len(segment.part(4096, 0)) == 0


def test_too_much_is_refused(host: Host) -> None:
    worker = host.child(WORKER)
    assert worker.make((1 << 24) + 1) is None
    assert worker.make(0) is None
    assert sum(worker.make(1) is not None for _ in range(MOST + 3)) == MOST


def test_an_invalid_request_is_answered_and_does_no_harm() -> None:
    segments, (ours, theirs) = SegmentServer(4096), pair()
    thread = threading.Thread(target=segments.serve, args=(WORKER, ours))
    thread.start()
    theirs.send(b"\xc1\xc1")
    assert b"an invalid request" in theirs.recv(4096)
    child = SegmentClient(WORKER, theirs)
    assert got(child.make(4096)).number == 0
    child.close()
    thread.join(10)
    segments.ended(WORKER)


def test_without_an_agent_there_are_none() -> None:
    alone = inherited(WORKER, None)
    assert alone.make(4096) is None and alone.get(SERVER, 0) is None
    alone.close()


def test_an_agent_that_has_ended_is_named() -> None:
    ours, theirs = pair()
    ours.close()
    with pytest.raises(PeerLost, match="agent of worker/0"):
        SegmentClient(WORKER, theirs).make(4096)
    theirs.close()


def test_nothing_is_left_when_all_have_let_go(host: Host) -> None:
    def ours() -> int:
        return sum("memfd:psctl" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()  # what other tests let go
    descriptors, before = len(os.listdir("/proc/self/fd")), ours()
    worker = Member("worker", 3)
    child = host.child(worker)
    segment = got(child.make(1 << 20))
    view = segment.part(0, 10)
    assert ours() == before + 1
    host.segments.ended(worker)
    del segment
    gc.collect()
    assert ours() == before + 1, "a view keeps the mapping"
    del view
    gc.collect()
    assert ours() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2, "the pair"
