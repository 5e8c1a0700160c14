"""Host sums: each rule alone, and random orders of messages, broken connections and repeated requests of servers: every
push completes, and a rank is only in sums of clocks that it offered gradients for."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from psctl.ps.dense.client.host_collection import HostCollection, HostSumTask, SeparatePush, ToPeer
from psctl.ps.dense.host_sums import RankGradients
from psctl.ps.messages import HostPush, PushAlone, SharedRange

AT = SharedRange(0, 0, 4)


def room(clock, shard):
    return torch.zeros(1)


def part(rank):
    return RankGradients(rank, 1.0, b"\x01", torch.full((1,), float(rank)))


def collecting(rank, group=(0, 1), shards=2, up=True):
    made = HostCollection(rank, group, shards, 0, room)
    for other in group if up else ():
        if other != rank:
            made.on_peer_connected(other, [])
    return made


def hand_in(clock, shard=0):
    return HostPush(shard, clock, 1.0, b"\x01", AT)


def test_the_host_sum_is_pushed_when_the_last_part_arrives():
    for own_first in (True, False):
        one = collecting(0, (0, 1, 2))
        own = [] if not own_first else one.add_own(0, 0, part(0), AT)
        assert own == []
        assert one.on_host_push(0, 0, part(2)) == []
        acts = one.on_host_push(0, 0, part(1))
        acts = acts if own_first else one.add_own(0, 0, part(0), AT)
        [gather] = acts
        assert isinstance(gather, HostSumTask)
        assert [each.rank for each in gather.parts] == [0, 1, 2], "in rank order"
        assert one.on_host_sum(0, 0)
        assert not one.on_host_sum(0, 0), "once"


def test_a_worker_of_another_group_that_was_moved_to_this_host_takes_no_members_place():
    one = collecting(0, up=False)
    assert one.on_peer_connected(2, []) == []
    assert one.add_own(0, 0, part(0), AT) == [SeparatePush(0, 0)], "it would wait for ever for worker/1"


def test_each_shard_has_one_collector_and_collectors_share_the_shards():
    two = collecting(1)
    assert [two.collector(shard) for shard in range(4)] == [0, 1, 0, 1]
    assert two.add_own(0, 0, part(1), AT) == [ToPeer(0, hand_in(0))]
    assert two.add_own(1, 0, part(1), AT) == [], "it is its own to gather"


def test_workers_without_connections_push_separately():
    assert collecting(1, up=False).add_own(0, 0, part(1), AT) == [SeparatePush(0, 0)]
    assert collecting(0, up=False).add_own(0, 0, part(0), AT) == [SeparatePush(0, 0)]


def test_a_new_connection_reports_earlier_separate_pushes():
    member = collecting(1, up=False)
    member.add_own(0, 0, part(1), AT)
    assert member.on_peer_connected(0, [(0, 0), (1, 0)]) == [ToPeer(0, PushAlone(0, 0))], "shard 1 is its own"
    collector = collecting(0)
    assert collector.on_push_alone(1, 0, 0) == []
    assert collector.add_own(0, 0, part(0), AT) == [SeparatePush(0, 0)]


def test_clocks_before_the_start_of_a_member_are_not_waited_for():
    collector, replacement = collecting(0), HostCollection(1, (0, 1), 2, 4, room)
    collector.on_peer_disconnected(1)
    for clock in range(3):
        collector.add_own(0, clock, part(0), AT)
    assert replacement.on_peer_connected(0, []) == [ToPeer(0, PushAlone(0, 3))], (
        "its start before pushed clock 3, and that counts"
    )
    collector.on_peer_connected(1, [])
    assert collector.on_push_alone(1, 0, 3) == []
    assert collector.add_own(0, 3, part(0), AT) == [SeparatePush(0, 3)]
    assert collector.add_own(0, 4, part(0), AT) == [], "from here on they go together"


def test_a_push_without_a_place_is_announced_as_separate():
    assert collecting(1).add_own(0, 0, part(1), None) == [ToPeer(0, PushAlone(0, 0)), SeparatePush(0, 0)]
    collector = collecting(0)
    collector.on_host_push(0, 0, part(1))
    assert collector.add_own(0, 0, part(0), None) == [ToPeer(1, PushAlone(0, 0)), SeparatePush(0, 0)]
    assert collector.on_host_push(1, 0, part(1)) == [], "the next clock goes together again, and so do other shards"


def test_a_late_offer_is_answered_with_push_alone():
    collector = collecting(0)
    collector.on_push_alone(1, 0, 0)
    collector.add_own(0, 0, part(0), AT)
    assert collector.on_host_push(0, 0, part(1)) == [ToPeer(1, PushAlone(0, 0))]


def test_push_alone_makes_a_member_push_once_and_only_outstanding_pushes():
    member = collecting(1)
    member.add_own(0, 0, part(1), AT)
    assert member.on_push_alone(0, 0, 0) == [SeparatePush(0, 0)]
    assert member.on_push_alone(0, 0, 0) == []
    member.add_own(0, 1, part(1), AT)
    member.on_push_staged(0, 1)
    assert member.on_push_alone(0, 0, 1) == []


@pytest.mark.parametrize("summing", [False, True])
def test_a_connection_break_before_the_host_sum_is_sent_cancels_it(summing):
    collector = collecting(0, (0, 1, 2))
    collector.add_own(0, 0, part(0), AT)
    collector.on_host_push(0, 0, part(1))
    if summing:
        assert len(collector.on_host_push(0, 0, part(2))) == 1
    assert set(collector.on_peer_disconnected(2)) == {ToPeer(1, PushAlone(0, 0)), SeparatePush(0, 0)}
    assert not collector.on_host_sum(0, 0), "what was being summed does not leave"
    assert collector.add_own(0, 1, part(0), AT) == [SeparatePush(0, 1)], "without a connection nothing is gathered"


def test_a_connection_break_after_the_host_sum_is_sent_leaves_it_to_the_server():
    collector = collecting(0)
    collector.add_own(0, 0, part(0), AT)
    collector.on_host_push(0, 0, part(1))
    assert collector.on_host_sum(0, 0)
    assert collector.on_peer_disconnected(1) == []


def test_members_of_a_lost_collector_push_everything_unacknowledged():
    member = collecting(1, shards=6)
    for shard in (0, 2, 4, 1):
        member.add_own(shard, 0, part(1), AT)
    member.on_push_staged(2, 0)
    assert member.on_peer_disconnected(0) == [SeparatePush(0, 0), SeparatePush(4, 0), SeparatePush(1, 0)]


def test_a_replacement_is_not_waited_for_at_the_last_clock_of_the_lost_member():
    collector = collecting(0)
    collector.on_peer_disconnected(1)  # its push of clock 0 counts, so the next one begins with clock 1
    collector.on_peer_connected(1, [])
    assert collector.add_own(0, 0, part(0), AT) == [SeparatePush(0, 0)]
    assert collector.add_own(0, 1, part(0), AT) == []
    assert len(collector.on_host_push(0, 1, part(1))) == 1


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_repeated_pushes_are_sent_separately(steps):
    collector = collecting(0)
    collector.add_own(0, 0, part(0), AT)
    collector.on_host_push(0, 0, part(1))
    if steps:
        assert collector.on_host_sum(0, 0)
    if steps == 2:
        collector.on_push_staged(0, 0)
    messages = collector.break_up_shard(0)
    assert messages == ([] if steps == 2 else [ToPeer(1, PushAlone(0, 0))])
    assert not collector.on_host_sum(0, 0)
    member = collecting(1)
    member.add_own(0, 0, part(1), AT)
    assert member.break_up_shard(0) == [ToPeer(0, PushAlone(0, 0))], "or its collector would wait for it"
    assert member.on_push_alone(0, 0, 0) == []


class World:
    """Workers of one host with ordered connections, and a server that accepts their pushes."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.group = tuple(range(self.random.choice([2, 2, 3, 4])))
        self.shards, self.clocks = self.random.randint(1, 4), self.random.randint(1, 5)
        self.machines = {rank: HostCollection(rank, self.group, self.shards, 0, room) for rank in self.group}
        self.messages: dict[tuple[int, int], deque] = {}  # (from, to): in flight, with "up" and "down" among them
        self.ends: set[tuple[int, int]] = set()  # ends of open connections, by (owner, other)
        self.gathers: list[tuple[int, HostSumTask]] = []
        self.done = {(rank, shard): -1 for rank in self.group for shard in range(self.shards)}  # whole at the server
        self.pushed = dict(self.done)
        self.together = 0
        for _ in range(self.random.choice([0, 20])):
            self.connect()

    def do(self, rank, acts):
        for act in acts:
            if isinstance(act, ToPeer):
                if (rank, act.rank) in self.ends:
                    self.messages[rank, act.rank].append(act.message)
            elif isinstance(act, HostSumTask):
                self.gathers.append((rank, act))
            else:
                self.take(rank, act.shard, act.clock)

    def take(self, rank, shard, clock):
        if clock == self.done[rank, shard] + 1:
            self.done[rank, shard] = clock
            self.machines[rank].on_push_staged(shard, clock)

    def outstanding(self, rank):
        """Return the pushes that are not Pushed: the server lacks some rank's."""
        whole = {shard: min(self.done[other, shard] for other in self.group) for shard in range(self.shards)}
        return [(s, c) for s in range(self.shards) for c in range(whole[s] + 1, self.pushed[rank, s] + 1)]

    def may_push(self, rank):
        for shard in range(self.shards):
            clock = self.pushed[rank, shard] + 1
            if clock < self.clocks and all(self.done[other, shard] >= clock - 1 for other in self.group):
                yield rank, shard, clock

    def push(self, rank, shard, clock):
        self.pushed[rank, shard] = clock
        at = AT if self.random.random() < 0.95 else None
        self.do(rank, self.machines[rank].add_own(shard, clock, part(rank), at))

    def connect(self):
        one, two = self.random.sample(self.group, 2)
        if {(one, two), (two, one)} & self.ends or (one, two) in self.messages:
            return
        self.messages[one, two], self.messages[two, one] = deque(), deque()
        for me, other in ((one, two), (two, one)):
            self.ends.add((me, other))  # each end is there before either is announced
            self.messages[other, me].append("up")

    def cut(self):
        for one, two in self.random.sample(sorted(self.ends), 1) if self.ends else ():
            lines = ((one, two), (two, one))
            if not set(lines) <= self.ends or any("down" in self.messages[line] for line in lines):
                return
            for line in lines:
                kept = list(self.messages[line])
                self.messages[line] = deque(kept[: max(self.random.randint(0, len(kept)), "up" in kept)])
                self.messages[line].append("down")

    def deliver(self, line):
        """Deliver the next message of a connection."""
        sender, to = line
        message, machine = self.messages[line].popleft(), self.machines[to]
        if message == "up":
            self.do(to, machine.on_peer_connected(sender, self.outstanding(to)))
        elif message == "down":
            self.ends.discard((to, sender))
            self.do(to, machine.on_peer_disconnected(sender))
            if not {(to, sender), (sender, to)} & self.ends:
                del self.messages[to, sender], self.messages[sender, to]
        elif isinstance(message, PushAlone):
            self.do(to, machine.on_push_alone(sender, message.shard, message.clock))
        else:
            self.do(to, machine.on_host_push(message.shard, message.clock, part(sender)))

    def sum(self, index):
        rank, gather = self.gathers.pop(index)
        ranks = [each.rank for each in gather.parts]
        assert ranks == list(self.group)
        for each in ranks:
            assert self.pushed[each, gather.shard] >= gather.clock, "nothing is summed before it is there"
        if self.machines[rank].on_host_sum(gather.shard, gather.clock):
            if all(self.done[each, gather.shard] == gather.clock - 1 for each in ranks):
                self.together += 1
                for each in ranks:
                    self.take(each, gather.shard, gather.clock)
            else:  # as the server does: dropped, and those that lack it are asked again
                for each in ranks:
                    if self.done[each, gather.shard] < gather.clock:
                        self.ask_again(each, gather.shard)

    def ask_again(self, rank, shard):
        self.do(rank, self.machines[rank].break_up_shard(shard))
        self.take(rank, shard, self.pushed[rank, shard])

    def step(self, calm):
        """Execute one event; return False when there is none."""
        ways = [lambda line=line: self.deliver(line) for line, queued in self.messages.items() if queued]
        ways += [lambda index=index: self.sum(index) for index in range(len(self.gathers))]
        ways += [lambda one=one: self.push(*one) for rank in self.group for one in self.may_push(rank)]
        trouble = self.random.random()
        if not calm and trouble < 0.1:
            self.connect()
        elif not calm and trouble < 0.13:
            self.cut()
        elif not calm and trouble < 0.15:
            self.ask_again(self.random.choice(self.group), self.random.randrange(self.shards))
        elif ways:
            self.random.choice(ways)()
        return bool(ways)


@pytest.mark.parametrize("chunk", range(10))
def test_every_push_completes_under_connection_and_server_failures(chunk):
    together = 0
    for seed in range(chunk * 150, chunk * 150 + 150):
        world = World(seed)
        for _ in range(world.random.choice([0, 30, 300])):
            world.connect() if world.random.random() < 0.02 else world.step(calm=False)
        for _ in range(20_000):
            if not world.step(calm=True):
                break
        assert set(world.done.values()) == {world.clocks - 1}, f"seed {seed}: {world.done}"
        together += world.together
    assert together > 100, "sums were made"
