"""Lines between workers of one host come up whoever speaks first, carry words in order, end with their process."""

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
    """One worker's lines, and what they told."""

    def __init__(self, folder, rank, incarnation=0):
        self.member = Member("worker", rank, incarnation)
        self.said: queue.SimpleQueue = queue.SimpleQueue()
        self.lines = HostConnections(self.member, folder, self)

    @property
    def at(self):
        return WorkerAt(self.member.rank, self.member.incarnation, None, self.lines.secret)

    def on_connected(self, member):
        self.said.put(("up", member))

    def on_message(self, member, message):
        self.said.put((message, member))

    def on_connection_lost(self, member):
        self.said.put(("down", member))

    def next(self):
        return self.said.get(timeout=LONG)


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(*ranks, incarnation=0):
        made.extend(Worker(tmp_path, rank, incarnation) for rank in ranks)
        return made[-len(ranks) :]

    yield make
    for each in made:
        each.lines.close()
    assert not list(tmp_path.iterdir()), "no socket is left behind"


def meet(*all_of_them):
    for each in all_of_them:
        each.lines.connect([other.at for other in all_of_them if other is not each])


@pytest.mark.parametrize("first", [0, 1])
def test_words_arrive_in_order_whoever_is_told_first(workers, first):
    zero, one = workers(0, 1)
    both = [zero, one][:: 1 if first == 0 else -1]
    both[0].lines.connect([both[1].at])
    time.sleep(0.1)  # it dials, or is dialled, before the other has heard of it
    both[1].lines.connect([both[0].at])
    assert (zero.next(), one.next()) == (("up", one.member), ("up", zero.member))
    words = [HostPush(shard, 7, 0.5, b"\x01\x00", SharedRange(1, 2, 3)) for shard in range(3000)] + [PushAlone(3, 8)]
    for word in words:
        zero.lines.send(1, word)
    assert [one.next() for _ in words] == [(word, zero.member) for word in words], "more than a socket takes at once"
    one.lines.send(0, PushAlone(1, 1))
    assert zero.next() == (PushAlone(1, 1), one.member)


def test_each_has_a_line_to_each(workers):
    three = workers(0, 1, 2)
    meet(*three)
    for each in three:
        assert {each.next(), each.next()} == {("up", other.member) for other in three if other is not each}


def test_who_takes_a_place_gets_a_line_and_the_former_ends_first(workers):
    zero, one = workers(0, 1)
    meet(zero, one)
    assert zero.next() == ("up", one.member)
    one.lines.close()
    assert zero.next() == ("down", one.member)
    zero.lines.send(1, PushAlone(0, 0))  # nobody is there: it is gone
    [anew] = workers(1, incarnation=1)
    meet(zero, anew)
    assert (zero.next(), anew.next()) == (("up", anew.member), ("up", zero.member))
    zero.lines.send(1, PushAlone(0, 1))
    assert anew.next() == (PushAlone(0, 1), zero.member)


def test_a_stranger_gets_no_line_and_keeps_nobody_out(workers, tmp_path):
    zero, one = workers(0, 1)
    stranger = ChannelListener(tmp_path, Member("worker", 1, 7), "push")
    unknown = WorkerAt(0, 0, None, b"s" * 32)
    with pytest.raises(Exception, match="worker-0"):
        stranger.connect(unknown, 5.0)
    meet(zero, one)
    with pytest.raises(Exception, match="worker-0"):
        stranger.connect(unknown, 5.0)
    assert (zero.next(), one.next()) == (("up", one.member), ("up", zero.member))
    assert zero.said.empty()
    stranger.close()


def test_who_speaks_another_language_is_done_without(workers, tmp_path):
    zero, one = workers(0, 1)
    zero.lines.connect([one.at])
    odd = one.lines._listener.connect(zero.at, 5.0)
    assert zero.next() == ("up", one.member)
    odd.send(PIECE, size=4, data=memoryview(b"what"))
    assert zero.next() == ("down", one.member)
    odd.close()
