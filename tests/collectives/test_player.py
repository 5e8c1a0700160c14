"""Every strategy's schedule is played right: whole numbers exactly, floats alike everywhere, whatever comes when."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from psctl.collectives.allreduce_backends import PlayQueue
from psctl.collectives.player import SchedulePlayer
from psctl.errors import PeerLost
from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.schedule.algorithms import catalog, ring
from psctl.schedule.checker import ScheduleError, prove
from psctl.schedule.schedule import Schedule, Transfer
from psctl.types import STRATEGIES
from tests.helpers.memory_channel import Hub, MemoryChannel
from tests.reference.networks import star
from tests.schedule.test_all_reduce import options

NAMES = tuple(name for name in STRATEGIES if name != "native")

WAYS = {"ahead": (True, 1 << 20), "windowed": (True, -1), "batched": (False, 0)}
"""Whether receives may be posted before their turn, and up to which size those of all steps are."""


class Cast:
    """One player a node of a schedule, each driven by a thread of its own."""

    def __init__(self, schedule: Schedule, way: str, seed: int | None = None, fails: dict[int, int] | None = None):
        ahead, short = WAYS[way]
        self.hub, self.schedule = Hub(seed), schedule
        self.channels = [
            MemoryChannel(self.hub, node, ahead, (fails or {}).get(node, -1)) for node in range(schedule.nodes)
        ]
        self.players = [SchedulePlayer(schedule, node, channel, short) for node, channel in enumerate(self.channels)]

    def play(self, vectors: Sequence[torch.Tensor]) -> list[BaseException | None]:
        """Play in place; helpers begin with anything. Returns what each rank raised."""
        errors: list[BaseException | None] = [None] * len(self.players)
        helpers = [torch.full_like(vectors[0], 99) for _ in range(self.schedule.nodes - len(vectors))]

        def run(node: int, vector: torch.Tensor) -> None:
            try:
                self.players[node].play(vector)
            except BaseException as error:  # noqa: BLE001  looked at by the test
                errors[node] = error

        threads = [threading.Thread(target=run, args=each) for each in enumerate([*vectors, *helpers])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "it hangs"
        return errors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_are_summed_exactly_at_every_length(name: str, way: str) -> None:
    for world in (2, 3, 5, 8):
        cast = Cast(catalog.build(name, world, options(world, pieces=2)), way)
        for length in (37, 0, 1, 2, world - 1, 1003, 37):
            vectors = [torch.arange(length, dtype=torch.int64) * (7**rank) - rank for rank in range(world)]
            expected = torch.stack(vectors).sum(dim=0)
            assert cast.play(vectors) == [None] * cast.schedule.nodes
            for rank, vector in enumerate(vectors):
                assert torch.equal(vector, expected), (name, world, length, rank)


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_near_the_sum_and_have_the_same_bits_everywhere(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for world in (2, 3, 5, 8):
        schedule = catalog.build(name, world, options(world))
        ahead, batched = Cast(schedule, "ahead"), Cast(schedule, "batched")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            given = [torch.randn(37 * world + 1, generator=generator).to(dtype) for _ in range(world)]
            wide = torch.stack(given).double()
            found = [[each.clone() for each in given] for _ in range(2)]
            assert not any(ahead.play(found[0]))
            assert not any(batched.play(found[1]))
            every = found[0] + found[1]
            assert all(torch.equal(each, every[0]) for each in every), (name, world, dtype)
            allowed = world * torch.finfo(dtype).eps * wide.abs().sum(dim=0)
            assert ((every[0].double() - wide.sum(dim=0)).abs() <= allowed).all(), (name, world, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_messages_may_arrive_in_any_order(name: str) -> None:
    for seed in range(6):
        world = 3 + seed % 3
        for way in WAYS:
            schedule = catalog.build(name, world, options(world, pieces=3, chunks=7))
            cast = Cast(schedule, way, seed)
            for length in (53, 11):
                vectors = [torch.arange(length) * 10**rank for rank in range(world)]
                expected = torch.stack(vectors).sum(dim=0)
                assert not any(cast.play(vectors))
                assert all(torch.equal(vector, expected) for vector in vectors), (name, seed, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["ring", "double-tree", "sharded", "ps"])
def test_a_lost_connection_ends_the_sum_everywhere_at_once(name: str, way: str) -> None:
    schedule = catalog.build(name, 4, options(4, pieces=2))
    for posts in (0, 2):
        cast = Cast(schedule, way, fails={1: posts})
        before = cast.play([torch.ones(64) for _ in range(4)])
        assert cast.channels[1].aborted
        assert isinstance(before[1], PeerLost)
        assert before[1].message == "rank 1 lost a peer in a sum of gradients: connection reset"
        assert all(isinstance(error, PeerLost) and "aborted" in error.message for error in before[2:4])
        again = cast.play([torch.ones(64) for _ in range(4)])
        assert all(isinstance(error, PeerLost) for error in again), "nothing is played after a loss"


def test_one_schedule_is_proven_predicted_and_played() -> None:
    """Change one step, and the proof, the prediction and the bytes on their way all change with it."""
    proven = ring.ring(4)
    last = max(proven.transfers)
    others = set(proven.transfers) - {last}
    doubled = Transfer(last.step, last.source, last.destination, last.chunk, "reduce")
    with pytest.raises(ScheduleError, match=f"step {last.step}, rank {last.destination}, chunk {last.chunk}"):
        prove("ring", 4, {*others, doubled}, proven.shares)

    owner = next(each.source for each in proven.transfers if each.action == "copy" and each.chunk == last.chunk)
    moved = Transfer(last.step, owner, last.destination, last.chunk, "copy")  # from the chunk's owner instead
    changed = prove("ring", 4, {*others, moved}, proven.shares)

    network, places = SimulatedNetwork(star(4, 1e6)), [f"node{rank}" for rank in range(4)]
    before, after = (simulate(each, network, places, 4000.0).seconds for each in (proven, changed))
    assert after == pytest.approx(before + 1000 / 1e6), "the owner's port carries two chunks of 1000 bytes in one step"

    traces = []
    for schedule in (proven, changed):
        cast = Cast(schedule, "ahead")
        vectors = [torch.full((500,), rank + 1.0, dtype=torch.float64) for rank in range(4)]
        assert not any(cast.play(vectors))
        assert all((vector == 10).all() for vector in vectors)
        traces.append([(source, target, size) for source, target, _, size in cast.hub.trace])
    assert traces[0].count((last.source, last.destination, 1000)) == 6
    assert traces[1].count((last.source, last.destination, 1000)) == 5
    assert sorted(traces[1]).count((owner, last.destination, 1000)) == 1


def test_buffers_are_made_once_and_hold_two_vectors_at_most() -> None:
    cast = Cast(catalog.build("ring", 4, options(4, pieces=3)), "ahead")
    places = set()
    for length in (600_000, 300_000, 600_000):
        assert not any(cast.play([torch.ones(length) for _ in range(4)]))
        held = cast.players[0]._executor._bytes
        places.add((held.data_ptr(), held.numel()))
    [(_, size)] = places
    assert size <= 2 * 600_000 * 4


def test_a_queue_plays_in_order_and_reports_failures() -> None:
    seen = []

    def play(vector: torch.Tensor) -> None:
        seen.append(int(vector[0]))
        if len(seen) == 3:
            raise PeerLost("a peer is gone")
        vector.add_(1)

    before = set(threading.enumerate())
    queue = PlayQueue()
    vectors = [torch.tensor([number]) for number in range(4)]
    tickets = [queue.put(play, vector) for vector in vectors]
    tickets[0].wait()
    tickets[1].wait()
    with pytest.raises(PeerLost, match="a peer is gone"):
        tickets[2].wait()
    tickets[3].wait()
    queue.close()
    assert seen == [0, 1, 2, 3]
    assert [int(vector) for vector in vectors] == [1, 2, 2, 4]
    assert not any(thread.name == "psctl-collective" for thread in set(threading.enumerate()) - before)


@pytest.mark.parametrize("wakes", [False, True])
def test_a_thread_that_waits_for_one_vector_goes_on_while_the_next_is_played(wakes: bool) -> None:
    """It has its values then, and computes; whoever plays keeps the turn."""
    begun, may_end = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def play(vector: torch.Tensor) -> None:
        begun[int(vector[0])].set()
        assert may_end[int(vector[0])].wait(20)

    queue = PlayQueue(short=0 if wakes else 100)
    first, second = (queue.put(play, torch.tensor([number])) for number in range(2))
    plays, waits = threading.Thread(target=second.wait), threading.Thread(target=first.wait)
    plays.start()  # or the queue's own thread does
    assert begun[0].wait(10)
    waits.start()
    may_end[0].set()
    assert begun[1].wait(10)
    waits.join(10)
    assert not waits.is_alive(), "it has what it waits for"
    may_end[1].set()
    plays.join(10)
    queue.close()
    assert second.done
