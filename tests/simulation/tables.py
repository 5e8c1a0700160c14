"""A simulation of tables, one seed a run: servers die, join, leave and move shards; connections break; workers are
replaced and repeat their step; servers forget key lists.

The state machines are the shipped ones: servers and workers (psctl/ps), and the placement of shards
(psctl/job/shard_placement.py). Every message, also the coordinator's to each server, arrives at a random time; a
connection keeps its order and loses the messages in flight when it breaks. An oracle of its own counts the invariants:
every push is applied once, no reader sees more than was pushed or less than it pushed itself, no ticket remains, all
replicas are equal.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from psctl.job.shard_placement import ServerPlace, ShardPlacement
from psctl.ps.outputs import LeadMoved, ReplicaCaughtUp
from psctl.ps.tables import table_packing
from psctl.ps.tables.client.calls_in_flight import result
from psctl.ps.tables.server import client_sessions
from psctl.types import Address, ServerAt
from tests.ps.table_world import World, spec
from tests.simulation.play import Outcome

SHARDS = 4
KEYS = 12
EVENTS = 60
LONGEST = 20_000
"""Messages in which all must come to rest when nothing happens any more."""


class Broken(AssertionError):
    """What must be true is not: the invariant, and what was seen."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(text)
        self.invariant = invariant


def hold(what: object, invariant: str, text: str = "") -> None:
    """Raise when an invariant does not hold."""
    if not what:
        raise Broken(invariant, text or invariant)


@contextmanager
def forgetful() -> Iterator[None]:
    """Short key lists have hashes too, and a server remembers few of them."""
    before = table_packing.HASHED, client_sessions.REMEMBERED
    table_packing.HASHED, client_sessions.REMEMBERED = 2, 80
    try:
        yield
    finally:
        table_packing.HASHED, client_sessions.REMEMBERED = before


class Chaos(World):
    """A world with a coordinator, in which anything may happen."""

    def __init__(self, seed: int) -> None:
        self.numbers = numbers = random.Random(seed)
        self.orders: dict[int, deque] = {}
        self.known: dict[int, dict[int, int]] = {}  # by server: incarnations of its newest assignment
        self.incarnations = dict.fromkeys(range(6), 0)
        workers, servers = numbers.randint(1, 3), numbers.randint(2, 4)
        replicas = numbers.randint(1, servers - 1)
        self.placement = ShardPlacement([1] * SHARDS, replicas, [self.place(rank) for rank in range(servers)])
        super().__init__(
            workers, servers, numbers.choice([None, 0, 1]), numbers.random() < 0.5, SHARDS, random=numbers,
            replicas=replicas, shares=numbers.random() < 0.5,
        )  # fmt: skip
        self.right = np.zeros(KEYS)
        self.own = np.zeros((workers, KEYS))
        self.turns = [0] * workers
        self.last: dict[int, tuple[np.ndarray, bool]] = {}  # by worker: what it pushed last; True: one by one
        self.again: set[int] = set()  # workers that were replaced and have their last step before them
        self.reads: list = []  # (worker, client, read, what it had pushed itself)
        self.alone: list = []  # (worker, client, ticket, key, what it had pushed itself): reads of one row
        self.values = 0  # that were compared

    def place(self, rank: int) -> ServerPlace:
        return ServerPlace(ServerAt(rank, self.incarnations[rank], Address("h", rank)), rank)

    # ---- the coordinator ----

    def assign(self, chains, copies=None) -> None:
        found = self.placement.assignment
        for rank in self.servers:
            self.orders[rank].append(found)

    def start(self, rank: int):
        self.orders[rank], self.known[rank] = deque(), {}
        return super().start(rank)

    def meet(self, rank: int) -> None:
        """Two servers connect when both have received each other's incarnation."""
        for other in self.servers:
            known = [self.known[one].get(another) for one, another in ((rank, other), (other, rank))]
            if known == [self.incarnations[other], self.incarnations[rank]] and rank != other:
                self.connect(("server", rank), ("server", other))

    def hear(self) -> None:
        """Tell the coordinator what servers reported; send what follows from it."""
        for rank, output in self.reports:
            if isinstance(output, ReplicaCaughtUp):
                self.placement.on_caught_up(output.epoch, output.shard, output.server)
            elif isinstance(output, LeadMoved):
                self.placement.on_transferred(output.shard, rank)
        self.reports.clear()
        self.placement.advance(patient=self.numbers.random() < 0.5)
        self.tell()
        for rank in self.placement.forget_released():
            self.gone(rank)

    def tell(self) -> None:
        if self.placement.news_for_servers() is not None:
            self.assign(None)
        self.placement.news_for_workers()

    def gone(self, rank: int) -> None:
        del self.orders[rank], self.known[rank]
        self.incarnations[rank] += 1
        self.kill(rank)

    # ---- what happens ----

    def die(self) -> None:
        rank = self.numbers.choice(list(self.servers))
        if self.placement.survives([rank]) and self.placement.remove_lost([rank]):
            self.gone(rank)
            self.tell()  # at once, before shards move for another reason

    def come(self) -> None:
        free = [rank for rank in range(5) if rank not in self.servers]
        if free:
            self.start(free[0])
            self.placement.add_server(self.place(free[0]))

    def go(self) -> None:
        staying = [rank for rank in self.placement.places if rank not in self.placement.leaving]
        if len(staying) > 2 and self.placement.settled:
            self.placement.release([self.numbers.choice(staying)])

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
        if not client.is_open or client.lagging_shards():
            return
        turn = self.turns[rank]
        keys = np.array(sorted(self.numbers.sample(range(KEYS), self.numbers.randint(1, KEYS))))
        if rank in self.again:
            self.again.discard(rank)
            self.turn(rank, turn - 1, *self.last[rank], again=True)
            return
        single = self.numbers.random() < 0.5
        for _ in range(1 + (self.numbers.random() < 0.1)):
            self.right[keys] += 1
            self.own[rank, keys] += 1
            self.last[rank] = keys, single
            self.turn(rank, turn, keys, single)
            self.turns[rank] = turn = turn + 1

    def turn(self, rank: int, turn: int, keys: np.ndarray, single: bool, *, again: bool = False) -> None:
        """One step of a worker; `again`: what the one before pushed in it is not known to this one as its own.

        Args:
            single: the keys are pushed one by one (the first of them in two halves), with anything in between.
        """
        if single:
            for key in (keys[0], *keys):
                self.push_one(rank, spec(), int(key), 0.5 if key == keys[0] else 1.0, place=turn)
                for _ in range(self.numbers.randrange(3)):
                    self.step()
        else:
            self.push(rank, spec(), keys, torch.ones(len(keys)), place=turn)
        own = self.own[rank, keys] * (not again)
        if self.numbers.random() < 0.3:
            for key, mine in zip(keys.tolist(), own.tolist(), strict=True):
                ticket = self.begin_one(rank, spec(), key)
                self.alone.append((rank, self.clients[rank], ticket, key, mine))
        if self.numbers.random() < 0.3:
            self.reads.append((rank, self.clients[rank], self.begin(rank, spec(), keys), own))
        if self.store.staleness is not None:
            self.clock(rank, place=turn)
        if turn % 5 == 4 and self.steps[rank] < turn:
            self.mark(rank, turn, place=turn)

    def replace(self) -> None:
        """A worker dies in its step, of which anything may be with the servers; another does the step again."""
        rank = self.numbers.randrange(len(self.clients))
        left = [change.sequence for change in self.clients[rank].outstanding]
        if self.turns[rank] and self.clients[rank].is_open and all(each >> 32 >= self.turns[rank] - 1 for each in left):
            self.again.add(rank)
            self.join(rank)

    def look(self) -> None:
        """Compare what was read."""
        for each in list(self.reads):
            rank, client, read, own = each
            if self.clients[rank] is not client:
                self.reads.remove(each)
            elif self.done(rank, read):
                self.reads.remove(each)
                keys, lanes = result(read.wants[0])
                found, most = lanes.values.flatten().numpy(), self.right[keys]
                hold((found <= most).all(), "nothing twice", f"{rank} read {found} where {most} was pushed")
                hold((found >= own).all(), "read my writes", f"{rank} read {found}, and pushed {own} itself")
                self.values += len(found)
        self.alone = [each for each in self.alone if self.clients[each[0]] is each[1]]
        for each in [each for each in self.alone if each[2] in each[1].rows]:
            rank, client, ticket, key, own = each
            self.alone.remove(each)
            found, most = float(client.rows.pop(ticket)), self.right[key]
            hold(own <= found <= most, "read my writes", f"{rank} read {found} of {key}: {own} its own, {most} of all")
            self.values += 1

    def deliver(self) -> None:
        """An order of the coordinator reaches a server."""
        waiting = [rank for rank, queue in self.orders.items() if queue]
        if waiting:
            rank = self.numbers.choice(waiting)
            found = self.orders[rank].popleft()
            alive = [at.rank for at in found.servers]
            before, self.known[rank] = self.known[rank], {at.rank: at.incarnation for at in found.servers}
            self.follow(rank, self.servers[rank].on_assignment(found.epoch, found.chains, found.copies, alive))
            if before != self.known[rank]:
                self.meet(rank)


def run(world: Chaos) -> None:
    """Let anything happen, then let all come to rest, and judge."""
    numbers = world.numbers
    trouble = [world.die, world.come, world.go, world.break_one, world.replace]
    for _ in range(EVENTS):
        numbers.choices([world.work, numbers.choice(trouble)], [5, 1])[0]()
        for _ in range(numbers.randrange(25)):
            (world.deliver if numbers.random() < 0.1 else world.step)()
            world.hear()
        world.look()
    rest(world)
    for rank in sorted(world.again):
        hold(world.clients[rank].is_open, "no ticket left", f"{rank} waits to begin")
        world.turn(rank, world.turns[rank] - 1, *world.last[rank], again=True)
    for rank in range(len(world.clients)):  # nobody waits for anybody any more
        world.put(rank, world.clients[rank].leave(world.turns[rank], world.ticket()))
    rest(world)
    hold(world.placement.settled, "shards come to rest")
    world.look()
    hold(not world.alone, "no ticket left", f"reads of one row: {world.alone}")
    left = [(client.outstanding.bytes_in_flight, list(client._reads), client.is_open) for client in world.clients]
    hold(all(each == (0, [], True) for each in left), "no ticket left", f"kept, reads, opened: {left}")
    last = len(world.clients) - 1
    world.join(last)
    world.run()
    found = world.pull(last, spec(), np.arange(KEYS)).flatten().numpy()
    text = f"{found.tolist()} where {world.right.tolist()} was pushed"
    hold(
        found.tolist() == world.right.tolist(),
        "nothing twice" if found.sum() > world.right.sum() else "nothing lost",
        text,
    )
    for shard, chain in enumerate(world.placement.chains):
        hold(len({encoded(world, rank, shard) for rank in chain}) == 1, "replicas are equal", f"shard {shard}: {chain}")


def rest(world: Chaos) -> None:
    """Move messages until none is on its way."""
    for _ in range(LONGEST):
        busy = world.step()
        world.deliver()
        world.hear()
        if not busy and not any(world.orders.values()) and not any(world.links.values()):
            return


def encoded(world: Chaos, rank: int, shard: int) -> bytes:
    """Return all that a server has of a shard."""
    _, data = world.servers[rank].shards_here[shard].state.snapshot()
    return bytes(data)


def play_tables(seed: int, traced: bool = False) -> Outcome:
    """Run a seed."""
    outcome = Outcome(seed)
    with forgetful():
        try:
            world = Chaos(seed)
            world.trace = outcome.trace if traced else None
            run(world)
            outcome.read = world.values
        except Broken as error:
            outcome.broken, outcome.text = error.invariant, str(error)
        except Exception as error:  # noqa: BLE001  the protocol itself says that something is wrong
            outcome.broken, outcome.text = "no error", f"{type(error).__name__}: {error}"
    return outcome
