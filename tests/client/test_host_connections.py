"""Connections between workers of one host: made in any order, keep messages in order, end with their process."""

from __future__ import annotations

import queue
import time

import pytest

from psctl.client.host_connections import HostConnections
from psctl.job.training_messages import WorkerAt
from psctl.ps.messages import HostPush, PushAlone, SharedRange
from psctl.transport.unix_channel import PIECE, ChannelListener
from psctl.types import Member

LONG = 20.0


class Worker:
    """One worker's connections, and their events."""

    def __init__(self, folder, rank, incarnation=0):
        self.member = Member("worker", rank, incarnation)
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.connections = HostConnections(self.member, folder, self)

    @property
    def at(self):
        return WorkerAt(self.member.rank, self.member.incarnation, None, self.connections.secret)

    def on_connected(self, member):
        self.events.put(("up", member))

    def on_message(self, member, message):
        self.events.put((message, member))

    def on_connection_lost(self, member):
        self.events.put(("down", member))

    def next(self):
        return self.events.get(timeout=LONG)


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(*ranks, incarnation=0):
        made.extend(Worker(tmp_path, rank, incarnation) for rank in ranks)
        return made[-len(ranks) :]

    yield make
    for each in made:
        each.connections.close()
    assert not list(tmp_path.iterdir()), "no socket is left behind"


def meet(*all_of_them):
    for each in all_of_them:
        each.connections.connect([other.at for other in all_of_them if other is not each])


@pytest.mark.parametrize("first", [0, 1])
def test_messages_arrive_in_order_for_every_order_of_announcements(workers, first):
    zero, one = workers(0, 1)
    both = [zero, one][:: 1 if first == 0 else -1]
    both[0].connections.connect([both[1].at])
    time.sleep(0.1)  # it dials, or is dialled, before the other has received its address
    both[1].connections.connect([both[0].at])
    assert (zero.next(), one.next()) == (("up", one.member), ("up", zero.member))
    messages = [HostPush(shard, 7, 0.5, b"\x01\x00", SharedRange(1, 2, 3)) for shard in range(3000)] + [PushAlone(3, 8)]
    for message in messages:
        zero.connections.send(1, message)
    assert [one.next() for _ in messages] == [(message, zero.member) for message in messages], (
        "more than a socket takes at once"
    )
    one.connections.send(0, PushAlone(1, 1))
    assert zero.next() == (PushAlone(1, 1), one.member)


def test_each_worker_connects_to_each_other(workers):
    three = workers(0, 1, 2)
    meet(*three)
    for each in three:
        assert {each.next(), each.next()} == {("up", other.member) for other in three if other is not each}


def test_a_replacement_gets_a_connection_after_the_former_one_has_ended(workers):
    zero, one = workers(0, 1)
    meet(zero, one)
    assert zero.next() == ("up", one.member)
    one.connections.close()
    assert zero.next() == ("down", one.member)
    zero.connections.send(1, PushAlone(0, 0))  # no connection: it is dropped
    [anew] = workers(1, incarnation=1)
    meet(zero, anew)
    assert (zero.next(), anew.next()) == (("up", anew.member), ("up", zero.member))
    zero.connections.send(1, PushAlone(0, 1))
    assert anew.next() == (PushAlone(0, 1), zero.member)


def test_an_unknown_worker_is_refused_and_blocks_no_other(workers, tmp_path):
    zero, one = workers(0, 1)
    stranger = ChannelListener(tmp_path, Member("worker", 1, 7), "push")
    unknown = WorkerAt(0, 0, None, b"s" * 32)
    with pytest.raises(Exception, match="worker-0"):
        stranger.connect(unknown, 5.0)
    meet(zero, one)
    with pytest.raises(Exception, match="worker-0"):
        stranger.connect(unknown, 5.0)
    assert (zero.next(), one.next()) == (("up", one.member), ("up", zero.member))
    assert zero.events.empty()
    stranger.close()


def test_an_unexpected_record_ends_the_connection(workers, tmp_path):
    zero, one = workers(0, 1)
    zero.connections.connect([one.at])
    odd = one.connections._listener.connect(zero.at, 5.0)
    assert zero.next() == ("up", one.member)
    odd.send(PIECE, size=4, data=memoryview(b"what"))
    assert zero.next() == ("down", one.member)
    odd.close()
