"""A simulation of tables: servers are lost, added and released, shards move, connections break, workers are replaced.

The state machines are the shipped ones: servers and workers (psctl/ps), and the placement of shards
(psctl/coordinator/policies/shard_placement.py). Every message, also the coordinator's to each server, arrives at a
random time; a connection keeps its order and loses the messages in flight when it breaks. The checked invariants: every
push is applied once, a read contains all of the reader's own pushes and no value that was not pushed, no ticket
remains, and all replicas are equal. Some tables have an optimizer, whose settings change, and limits, by which rows
leave; others have a filter that encodes rows, and are read one clock ahead; of others bags of rows are summed on
servers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from psctl.coordinator.policies.shard_placement import ServerPlace, ShardPlacement
from psctl.ps.outputs import LeadMoved, ReplicaCaughtUp
from psctl.ps.table_messages import Admission, FilterSpec, RowOptimizerSpec, TableSpec
from psctl.ps.tables import table_packing
from psctl.ps.tables.client.calls_in_flight import result
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.server import client_sessions
from psctl.ps.tables.table_kinds import KEY_BYTES
from psctl.types import Address, ServerAt
from tests.ps.table_world import World, spec
from tests.simulation.kernel import Violation
from tests.simulation.outcome import Outcome

SHARDS = 4
KEYS = 12
ACTIONS = 60
MESSAGE_LIMIT = 20_000
"""Messages within which a run without further faults must become idle."""


def check(what: object, invariant: str, text: str = "") -> None:
    """Raise Violation when a condition does not hold."""
    if not what:
        raise Violation(invariant, text or invariant)


@contextmanager
def small_limits() -> Iterator[None]:
    """Let short key lists have hashes too, and servers remember few of them."""
    before = table_packing.HASHED, client_sessions.REMEMBERED
    table_packing.HASHED, client_sessions.REMEMBERED = 2, 80
    try:
        yield
    finally:
        table_packing.HASHED, client_sessions.REMEMBERED = before


class TableRun(World):
    """A run: a world of tables with a coordinator and faults."""

    def __init__(self, seed: int) -> None:
        self.numbers = numbers = random.Random(seed)
        self.orders: dict[int, deque] = {}
        self.known: dict[int, dict[int, int]] = {}  # by server: incarnations in its newest assignment
        self.incarnations = dict.fromkeys(range(6), 0)
        workers, servers = numbers.randint(1, 3), numbers.randint(2, 4)
        replicas = numbers.randint(1, servers - 1)
        self.placement = ShardPlacement([1] * SHARDS, replicas, [self.place(rank) for rank in range(servers)])
        super().__init__(
            workers, servers, numbers.choice([None, 0, 1]), numbers.random() < 0.5, SHARDS, random=numbers,
            replicas=replicas, shares=numbers.random() < 0.5,
        )  # fmt: skip
        self.counts_pushes, self.table = table_of(seed, self.store.staleness, eager=self.store.eager)
        self.expected = np.zeros(KEYS)
        self.own_pushes = np.zeros((workers, KEYS))
        self.next_step = [0] * workers
        self.last_push: dict[int, tuple[np.ndarray, bool]] = {}  # by worker: (keys, whether pushed one by one)
        self.repeat: set[int] = set()  # replaced workers that must repeat their last step
        self.reads: list = []  # (worker, client, read, the worker's own pushes)
        self.more = random.Random(f"{seed} more")  # of choices that were added later
        self.pools, self.prefetches = seed % 10 == 4, seed % 10 == 3
        self.by_clock: dict[int, np.ndarray] = {}  # pushes of all workers in each of their clocks
        self.early_reads: dict[int, int] = {}  # by ticket: the clock whose pushes the rows must contain
        self.sum_reads: list = []  # (worker, client, read, keys of each bag)
        self.row_reads: list = []  # (worker, client, ticket, key, the worker's own pushes)
        self.values_checked = 0

    def place(self, rank: int) -> ServerPlace:
        return ServerPlace(ServerAt(rank, self.incarnations[rank], Address("h", rank)), rank)

    # ---- the coordinator ----

    def assign(self, chains, copies=None) -> None:
        assignment = self.placement.assignment
        for rank in self.servers:
            self.orders[rank].append(assignment)

    def start(self, rank: int):
        self.orders[rank], self.known[rank] = deque(), {}
        return super().start(rank)

    def meet(self, rank: int) -> None:
        """Connect two servers when both have received each other's incarnation."""
        for other in self.servers:
            known = [self.known[one].get(another) for one, another in ((rank, other), (other, rank))]
            if known == [self.incarnations[other], self.incarnations[rank]] and rank != other:
                self.connect(("server", rank), ("server", other))

    def handle_reports(self) -> None:
        """Handle the servers' reports, and send the assignment that follows."""
        for rank, output in self.reports:
            if isinstance(output, ReplicaCaughtUp):
                self.placement.on_caught_up(output.epoch, output.shard, output.server)
            elif isinstance(output, LeadMoved):
                self.placement.on_transferred(output.shard, rank)
        self.reports.clear()
        self.placement.advance(patient=self.numbers.random() < 0.5)
        self.send_assignment()
        for rank in self.placement.forget_released():
            self.end_server(rank)

    def send_assignment(self) -> None:
        if self.placement.news_for_servers() is not None:
            self.assign(None)
        self.placement.news_for_workers()

    def end_server(self, rank: int) -> None:
        del self.orders[rank], self.known[rank]
        self.incarnations[rank] += 1
        self.kill(rank)

    # ---- random actions ----

    def lose_server(self) -> None:
        rank = self.numbers.choice(list(self.servers))
        if self.placement.survives([rank]) and self.placement.remove_lost([rank]):
            self.end_server(rank)
            self.send_assignment()  # at once, before shards move for another reason

    def add_server(self) -> None:
        free = [rank for rank in range(5) if rank not in self.servers]
        if free:
            self.start(free[0])
            self.placement.add_server(self.place(free[0]))

    def release_server(self) -> None:
        staying = [rank for rank in self.placement.places if rank not in self.placement.leaving]
        if len(staying) > 2 and self.placement.settled:
            self.placement.release([self.numbers.choice(staying)])

    def break_connection(self) -> None:
        """Break a connection of a worker or between servers."""
        servers = list(self.servers)
        between = [link for link in self.links if link[0][0] == link[1][0] == "server"]
        if self.numbers.random() < 0.5 and between:
            self.connect(*self.numbers.choice(between))
        else:
            self.cut(self.numbers.randrange(len(self.clients)), self.numbers.choice(servers))

    def take_step(self) -> None:
        """Let a worker run one step or two, or repeat a step if it replaced another one."""
        rank = self.numbers.randrange(len(self.clients))
        client = self.clients[rank]
        if not client.is_open or client.lagging_shards():
            return
        step = self.next_step[rank]
        keys = np.array(sorted(self.numbers.sample(range(KEYS), self.numbers.randint(1, KEYS))))
        if rank in self.repeat:
            self.repeat.discard(rank)
            self.run_step(rank, step - 1, *self.last_push[rank], repeat=True)
            return
        one_by_one = self.numbers.random() < 0.5
        for _ in range(1 + (self.numbers.random() < 0.1)):
            self.expected[keys] += 1
            self.own_pushes[rank, keys] += 1
            self.by_clock.setdefault(client.clock, np.zeros(KEYS))[keys] += 1
            self.last_push[rank] = keys, one_by_one
            self.run_step(rank, step, keys, one_by_one)
            self.next_step[rank] = step = step + 1

    def run_step(self, rank: int, step: int, keys: np.ndarray, one_by_one: bool, *, repeat: bool = False) -> None:
        """Run one step of a worker.

        Args:
            one_by_one: push the keys one by one, the first of them in two halves, with other messages between.
            repeat: the step repeats one of a lost worker, whose pushes in it are not the new worker's own.
        """
        if self.table.optimizer is not None and step % 3 == 1:
            self.configure(rank, step)
        if self.pools and one_by_one:
            self.push_bags(rank, step, keys)
        elif one_by_one:
            for key in (keys[0], *keys):
                self.push_single(rank, int(key), 0.5 if key == keys[0] else 1.0, step)
                for _ in range(self.numbers.randrange(3)):
                    self.step()
        else:
            self.push(rank, self.table, keys, torch.ones(len(keys)), place=step)
        own = self.own_pushes[rank, keys] * (not repeat)
        if self.numbers.random() < 0.3:
            for key, of_key in zip(keys.tolist(), own.tolist(), strict=True):
                ticket = self.begin_one(rank, self.table, key)
                self.row_reads.append((rank, self.clients[rank], ticket, key, of_key))
        if self.numbers.random() < 0.3:
            self.reads.append((rank, self.clients[rank], self.begin(rank, self.table, keys), own))
        if self.pools and self.more.random() < 0.5:
            bags = bags_of(keys)
            read = self.begin_sums(rank, self.route_bags(rank, self.table, keys, bags))
            self.sum_reads.append((rank, self.clients[rank], read, np.split(keys[bags.places], bags.lengths[:1])))
        if self.prefetches and self.more.random() < 0.5:
            ahead = int(self.store.staleness is not None)
            read = self.begin(rank, self.table, keys, ahead)
            self.reads.append((rank, self.clients[rank], read, own))
            if self.store.staleness == 0:
                self.early_reads[read.ticket] = self.clients[rank].clock
        if self.store.staleness is not None:
            self.clock(rank, place=step)
        if step % 5 == 4 and self.steps[rank] < step:
            self.mark(rank, step, place=step)

    def push_single(self, rank: int, key: int, value: float, step: int) -> None:
        """Push one row, in a batch if the table's rows may be in one."""
        if self.clients[rank].resolve_kind(self.table).batchable:
            self.push_one(rank, self.table, key, value, place=step)
        else:
            self.push(rank, self.table, [key], [value], place=step)

    def push_bags(self, rank: int, step: int, keys: np.ndarray) -> None:
        """Push gradients of bags that add up to one for each key."""
        route = self.route_bags(rank, self.table, keys, bags_of(keys))
        self.push_sums(rank, route, torch.tensor([[1.0], [0.5]], dtype=torch.float64), place=step)

    def configure(self, rank: int, step: int) -> None:
        """Set the optimizer's settings: where pushes are counted, to those that it has."""
        client = self.clients[rank]
        settings = {"lr": 1.0} if self.counts_pushes else {"lr": 1.0 / (1 + step), "weight_decay": 0.01 * (step % 2)}
        for change in client.prepare_settings(client.resolve_kind(self.table), settings, self.ticket()):
            self.put(rank, client.send_change(change, step))

    def replace(self) -> None:
        """Replace a worker within its step; the new worker repeats the step."""
        rank = self.numbers.randrange(len(self.clients))
        outstanding = [change.sequence for change in self.clients[rank].outstanding]
        if (
            self.next_step[rank]
            and self.clients[rank].is_open
            and all(each >> 32 >= self.next_step[rank] - 1 for each in outstanding)
        ):
            self.repeat.add(rank)
            self.join(rank)

    def pushes_in(self, rows):
        """Return the pushes that rows contain: the steps of an optimizer go down."""
        return rows if self.table.optimizer is None else -rows

    def check_reads(self) -> None:
        """Compare the results of finished reads."""
        for each in list(self.reads):
            rank, client, read, own = each
            if self.clients[rank] is not client:
                self.reads.remove(each)
            elif self.done(rank, read):
                self.reads.remove(each)
                keys, lanes = result(read.wants[0])
                found, most = self.pushes_in(lanes.values.flatten().numpy()), self.expected[keys]
                if not self.counts_pushes:
                    check(np.isfinite(found).all(), "finite rows", f"{rank} read {found}")
                    continue
                own = own * (self.table.optimizer is None)  # only servers apply gradients
                check((found <= most).all(), "nothing twice", f"{rank} read {found} where {most} was pushed")
                check((found >= own).all(), "read my writes", f"{rank} read {found}, and pushed {own} itself")
                early = self.early_reads.pop(read.ticket, -1)
                least = sum((pushed[keys] for clock, pushed in self.by_clock.items() if clock <= early), 0 * found)
                check((found >= least).all(), "nothing lost", f"{rank} read {found} where {least} was pushed before")
                self.values_checked += len(found)
        for each in list(self.sum_reads):
            rank, client, read, bags = each
            if self.clients[rank] is not client:
                self.sum_reads.remove(each)
            elif self.done(rank, read):
                self.sum_reads.remove(each)
                found = self.pushes_in(read.wants[0].total().flatten().numpy())
                most = [self.expected[keys].sum() for keys in bags]
                check((found <= most).all() and (found >= 0).all(), "nothing twice", f"sums {found}, pushed {most}")
                self.values_checked += len(found)
        self.row_reads = [each for each in self.row_reads if self.clients[each[0]] is each[1]]
        for each in [each for each in self.row_reads if each[2] in each[1].rows]:
            rank, client, ticket, key, own = each
            self.row_reads.remove(each)
            found, most = float(self.pushes_in(client.rows.pop(ticket))), self.expected[key]
            if not self.counts_pushes:
                continue
            own = own * (self.table.optimizer is None)
            check(own <= found <= most, "read my writes", f"{rank} read {found} of {key}: {own} its own, {most} of all")
            self.values_checked += 1

    def deliver_assignment(self) -> None:
        """Deliver an assignment to a server."""
        waiting = [rank for rank, queue in self.orders.items() if queue]
        if waiting:
            rank = self.numbers.choice(waiting)
            assignment = self.orders[rank].popleft()
            alive = [at.rank for at in assignment.servers]
            before, self.known[rank] = self.known[rank], {at.rank: at.incarnation for at in assignment.servers}
            self.follow(
                rank, self.servers[rank].on_assignment(assignment.epoch, assignment.chains, assignment.copies, alive)
            )
            if before != self.known[rank]:
                self.meet(rank)


def run_and_check(world: TableRun) -> None:
    """Run random actions, deliver all messages, and check the invariants."""
    numbers = world.numbers
    faults = [world.lose_server, world.add_server, world.release_server, world.break_connection, world.replace]
    for _ in range(ACTIONS):
        numbers.choices([world.take_step, numbers.choice(faults)], [5, 1])[0]()
        for _ in range(numbers.randrange(25)):
            (world.deliver_assignment if numbers.random() < 0.1 else world.step)()
            world.handle_reports()
        world.check_reads()
    drain(world)
    for rank in sorted(world.repeat):
        check(world.clients[rank].is_open, "no ticket left", f"worker {rank} has not opened the store")
        world.run_step(rank, world.next_step[rank] - 1, *world.last_push[rank], repeat=True)
    for rank in range(len(world.clients)):  # no worker waits for another one from here on
        world.put(rank, world.clients[rank].leave(world.next_step[rank], world.ticket()))
    drain(world)
    check(world.placement.settled, "shards add_server to drain")
    world.check_reads()
    check(not world.sum_reads, "no ticket left", f"reads of sums: {world.sum_reads}")
    check(not world.row_reads, "no ticket left", f"reads of one row: {world.row_reads}")
    outstanding = [
        (client.outstanding.bytes_in_flight, list(client._reads), client.is_open) for client in world.clients
    ]
    check(
        all(each == (0, [], True) for each in outstanding),
        "no ticket left",
        f"kept, reads, opened: {outstanding}",
    )
    last = len(world.clients) - 1
    world.join(last)
    world.run()
    found = world.pushes_in(world.pull(last, world.table, np.arange(KEYS)).flatten().numpy())
    if world.counts_pushes:
        text = f"{found.tolist()} where {world.expected.tolist()} was pushed"
        check(
            found.tolist() == world.expected.tolist(),
            "nothing twice" if found.sum() > world.expected.sum() else "nothing lost",
            text,
        )
    for shard, chain in enumerate(world.placement.chains):
        check(
            len({shard_state(world, rank, shard) for rank in chain}) == 1,
            "replicas are equal",
            f"shard {shard}: {chain}",
        )


def table_of(seed: int, staleness: int | None, *, eager: bool) -> tuple[bool, TableSpec]:
    """Return whether rows tell the pushes that they contain, and the table: sums, some of them filtered, or the rows of
    an optimizer; of these some with all limits that the store can keep."""
    if seed % 10 == 3:
        return True, spec(filters=(FilterSpec("bf16"),))
    if seed % 10 == 4:
        return True, spec(optimizer=complete(RowOptimizerSpec("sgd", {"lr": 1.0})))
    if seed % 5 != 2:
        return True, spec()
    if seed % 10 == 2:
        return True, spec(optimizer=complete(RowOptimizerSpec("sgd", {"lr": 1.0})))
    own = complete(RowOptimizerSpec("adagrad", {"lr": 1.0}))
    expire = 4 if staleness is not None and not eager else 0
    capacity = 0 if eager else 2 * SHARDS * (8 + 8 + KEY_BYTES)
    return False, spec(optimizer=own, admit=Admission(count=2), expire=expire, capacity=capacity)


def bags_of(keys: np.ndarray) -> RowBags:
    """Return two bags of the keys at even and at odd places; the second bag has each of its keys twice."""
    places = np.arange(len(keys), dtype=np.int32)
    odd = np.repeat(places[1::2], 2)
    return RowBags(np.concatenate([places[::2], odd]), np.array([len(places[::2]), len(odd)], dtype=np.int32))


def drain(world: TableRun) -> None:
    """Deliver messages until none is in flight."""
    for _ in range(MESSAGE_LIMIT):
        delivered = world.step()
        world.deliver_assignment()
        world.handle_reports()
        if not delivered and not any(world.orders.values()) and not any(world.links.values()):
            return


def shard_state(world: TableRun, rank: int, shard: int) -> bytes:
    """Return a server's state of a shard."""
    _, data = world.servers[rank].shards_here[shard].state.snapshot()
    return bytes(data)


def run_tables(seed: int, traced: bool = False) -> Outcome:
    """Run one seed."""
    outcome = Outcome(seed)
    with small_limits():
        try:
            world = TableRun(seed)
            world.trace = outcome.trace if traced else None
            run_and_check(world)
            outcome.values_checked = world.values_checked
        except Violation as error:
            outcome.invariant, outcome.text = error.invariant, str(error)
        except Exception as error:  # noqa: BLE001  any exception of the product is a failure
            outcome.invariant, outcome.text = "no error", f"{type(error).__name__}: {error}"
    return outcome
