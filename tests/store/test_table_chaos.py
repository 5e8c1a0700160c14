"""Tables through everything at once, a seed a run: servers die, come, go and move shards; connections break.

The minds are the shipped ones: of servers and workers (store/), and of who holds what (job/holding.py). Every message,
also the coordinator's to each server, comes when chance has it; a connection keeps its order and loses what is on it
when it breaks. What must be true at the end is counted apart: every push in once, nothing twice, no ticket left, all
replicas equal.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch

from psctl.job.holding import Holdings, Place
from psctl.store.outputs import CaughtUp, HandedOver
from psctl.words import Address, ServerAt
from tests.store.table_world import World, spec

SHARDS = 4
KEYS = 12


class Chaos(World):
    """A world with a coordinator, in which anything may happen."""

    def __init__(self, seed: int) -> None:
        self.numbers = numbers = random.Random(seed)
        self.orders: dict[int, deque] = {}
        self.known: dict[int, dict[int, int]] = {}  # by server: incarnations of its newest assignment
        self.incarnations = dict.fromkeys(range(6), 0)
        workers, servers = numbers.randint(1, 3), numbers.randint(2, 4)
        replicas = numbers.randint(1, servers - 1)
        self.holdings = Holdings([1] * SHARDS, replicas, [self.place(rank) for rank in range(servers)])
        super().__init__(
            workers, servers, numbers.choice([None, 0, 1]), numbers.random() < 0.5, SHARDS, random=numbers,
            replicas=replicas,
        )  # fmt: skip
        self.right = np.zeros(KEYS)
        self.turns = [0] * workers

    def place(self, rank: int) -> Place:
        return Place(ServerAt(rank, self.incarnations[rank], Address("h", rank)), rank)

    # ---- the coordinator ----

    def assign(self, chains, copies=None) -> None:
        found = self.holdings.assignment
        for rank in self.servers:
            self.orders[rank].append(found)

    def start(self, rank: int):
        self.orders[rank], self.known[rank] = deque(), {}
        return super().start(rank)

    def meet(self, rank: int) -> None:
        """Two servers connect when both were told of each other's incarnation."""
        for other in self.servers:
            told = [self.known[one].get(another) for one, another in ((rank, other), (other, rank))]
            if told == [self.incarnations[other], self.incarnations[rank]] and rank != other:
                self.connect(("server", rank), ("server", other))

    def hear(self) -> None:
        """Tell the coordinator what servers reported; send what follows from it."""
        for rank, output in self.told:
            if isinstance(output, CaughtUp):
                self.holdings.caught_up(output.epoch, output.shard, output.server)
            elif isinstance(output, HandedOver):
                self.holdings.handed_over(output.shard, rank)
        self.told.clear()
        self.holdings.advance(patient=self.numbers.random() < 0.5)
        self.tell()
        for rank in self.holdings.may_go():
            self.gone(rank)

    def tell(self) -> None:
        if self.holdings.news_for_servers() is not None:
            self.assign(None)
        self.holdings.news_for_workers()

    def gone(self, rank: int) -> None:
        del self.orders[rank], self.known[rank]
        self.incarnations[rank] += 1
        self.kill(rank)

    # ---- what happens ----

    def die(self) -> None:
        rank = self.numbers.choice(list(self.servers))
        if self.holdings.survives([rank]) and self.holdings.lost([rank]):
            self.gone(rank)
            self.tell()  # at once, before shards move for another reason

    def come(self) -> None:
        free = [rank for rank in range(5) if rank not in self.servers]
        if free:
            self.start(free[0])
            self.holdings.joined(self.place(free[0]))

    def go(self) -> None:
        staying = [rank for rank in self.holdings.places if rank not in self.holdings.leaving]
        if len(staying) > 2 and self.holdings.settled:
            self.holdings.leave([self.numbers.choice(staying)])

    def break_one(self) -> None:
        """A connection breaks, of a worker or between servers."""
        servers = list(self.servers)
        between = [link for link in self.links if link[0][0] == link[1][0] == "server"]
        if self.numbers.random() < 0.5 and between:
            self.connect(*self.numbers.choice(between))
        else:
            self.cut(self.numbers.randrange(len(self.clients)), self.numbers.choice(servers))

    def work(self) -> None:
        """A worker pushes, reads, ends its clock, marks a step, or is replaced and does its step again."""
        rank = self.numbers.randrange(len(self.clients))
        client = self.clients[rank]
        if not client.opened or client.behind():
            return
        turn = self.turns[rank]
        keys = np.array(sorted(self.numbers.sample(range(KEYS), self.numbers.randint(1, KEYS))))
        for _ in range(1 + (self.numbers.random() < 0.1)):
            self.push(rank, spec(), keys, torch.ones(len(keys)), place=turn)
            if self.numbers.random() < 0.3:
                self.begin(rank, spec(), keys)
            if self.store.staleness is not None:
                self.clock(rank, place=turn)
            if turn % 5 == 4 and self.steps[rank] < turn:
                self.mark(rank, turn, place=turn)
            self.right[keys] += 1
            self.turns[rank] = turn = turn + 1

    def deliver(self) -> None:
        """An order of the coordinator reaches a server."""
        waiting = [rank for rank, queue in self.orders.items() if queue]
        if waiting:
            rank = self.numbers.choice(waiting)
            found = self.orders[rank].popleft()
            alive = [at.rank for at in found.servers]
            before, self.known[rank] = self.known[rank], {at.rank: at.incarnation for at in found.servers}
            self.follow(rank, self.servers[rank].assigned(found.epoch, found.chains, found.copies, alive))
            if before != self.known[rank]:
                self.meet(rank)


def play(seed: int) -> None:
    world = Chaos(seed)
    numbers = world.numbers
    trouble = [world.die, world.come, world.go, world.break_one]
    for _ in range(60):
        numbers.choices([world.work, numbers.choice(trouble)], [5, 1])[0]()
        for _ in range(numbers.randrange(25)):
            (world.deliver if numbers.random() < 0.1 else world.step)()
            world.hear()
    for rank in range(len(world.clients)):  # nobody waits for anybody any more
        if world.clients[rank].opened:
            world.put(rank, world.clients[rank].leave(world.turns[rank], world.ticket()))
    for _ in range(20_000):
        busy = world.step()
        world.deliver()
        world.hear()
        if not busy and not any(world.orders.values()) and not any(world.links.values()):
            break
    assert world.holdings.settled, "shards still move"
    assert all(client.opened for client in world.clients)
    assert all(client.kept == 0 and not client._reads for client in world.clients), "somebody waits for ever"
    reader = world.join(len(world.clients) - 1)
    world.run()
    del reader
    found = world.pull(len(world.clients) - 1, spec(), np.arange(KEYS)).flatten().numpy()
    assert found.tolist() == world.right.tolist(), f"{found.tolist()} where {world.right.tolist()} was pushed"
    held = [
        (chain, [encoded(world, rank, shard) for rank in chain]) for shard, chain in enumerate(world.holdings.chains)
    ]
    assert all(len(set(each)) == 1 for _, each in held), "replicas differ"


def encoded(world: Chaos, rank: int, shard: int) -> bytes:
    _, (data,) = world.servers[rank].slots[shard].machine.snapshot()
    return bytes(data)


def seeds(first: int, stop: int) -> None:
    for seed in range(first, stop):
        try:
            play(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_every_push_is_in_once_whatever_happens() -> None:
    seeds(0, 6)


@pytest.mark.soak
def test_every_push_is_in_once_in_many_worlds() -> None:
    seeds(6, 400)
