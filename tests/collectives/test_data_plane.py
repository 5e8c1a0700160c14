"""The data plane of collectives: every schedule is played right over lines, shared memory and sealed streams."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from psctl.collectives.player import SchedulePlayer
from psctl.collectives.shm_exchange import is_supported
from psctl.errors import PeerLost
from psctl.schedule.algorithms import catalog
from psctl.types import STRATEGIES, Member
from tests.helpers.data_planes import DataPlanes
from tests.helpers.running import until
from tests.schedule.test_all_reduce import options

NAMES = tuple(name for name in STRATEGIES if name not in ("native", "ps", "cpu"))

LENGTHS = (37, 0, 1, 40_007)
"""Of int64: the last is lent, what is shorter travels in its record."""


def whole(cast: DataPlanes, name: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Sum whole numbers twice in the same buffers."""
    schedule = catalog.build(name, cast.world, options(cast.world, pieces=2))
    for length in lengths:
        buffers = cast.buffers(length, torch.int64)
        for turn in range(2):
            vectors = [torch.arange(length) * (7**rank) - rank - turn for rank in range(cast.world)]
            for buffer, vector in zip(buffers, vectors, strict=True):
                buffer.copy_(vector)
            assert cast.play(schedule, buffers) == [None] * cast.world
            expected = torch.stack(vectors).sum(dim=0)
            assert all(torch.equal(buffer, expected) for buffer in buffers), (name, length, turn)


@pytest.mark.parametrize("name", NAMES)
def test_processes_of_one_host_sum_where_the_vectors_lie(name: str) -> None:
    with DataPlanes([0] * 3) as cast:
        whole(cast, name)


@pytest.mark.parametrize("name", ["ring", "sharded", "hierarchical"])
def test_hosts_sum_over_sealed_streams_and_within_a_host_in_memory(name: str) -> None:
    with DataPlanes([0, 1, 0]) as cast:
        whole(cast, name, (3, 40_007))


@pytest.mark.soak
@pytest.mark.timeout(900)  # 21 worlds of up to 8 threads each, which hand the interpreter on at every message
@pytest.mark.parametrize("name", NAMES)
def test_every_world_and_every_way_to_sit_on_hosts(name: str) -> None:
    for world in range(2, 9):
        for hosts in ([0] * world, list(range(world)), [rank % 2 for rank in range(world)]):
            with DataPlanes(hosts) as cast:
                whole(cast, name, (*LENGTHS, 300_001))


@pytest.mark.parametrize("name", ["ring", "one-shot"])
def test_floats_have_the_same_bits_on_every_rank_and_over_every_channel(name: str) -> None:
    world = 4
    schedule = catalog.build(name, world, options(world))
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.randn(40_003, generator=generator).to(dtype) for _ in range(world)]
        found = []
        for hosts in ([0] * world, [0, 1, 0, 2]):
            with DataPlanes(hosts) as cast:
                buffers = cast.buffers(40_003, dtype)
                for buffer, vector in zip(buffers, given, strict=True):
                    buffer.copy_(vector)
                assert not any(cast.play(schedule, buffers))
                found += [buffer.clone() for buffer in buffers]
        assert all(torch.equal(each, found[0]) for each in found), (name, dtype)
        wide = torch.stack(given).double()
        allowed = world * torch.finfo(dtype).eps * wide.abs().sum(dim=0)
        assert ((found[0].double() - wide.sum(dim=0)).abs() <= allowed).all(), (name, dtype)


def test_a_vector_that_lies_elsewhere_is_summed_too() -> None:
    with DataPlanes([0, 0, 0]) as cast:
        vectors = [torch.full((300_000,), float(rank)) for rank in range(3)]
        assert not any(cast.play(catalog.build("ring", 3), vectors))
        assert all(torch.equal(each, torch.full((300_000,), 3.0)) for each in vectors)


@pytest.mark.parametrize("name", ["one-shot", "ring"])
def test_a_host_without_shared_memory_sums_too(name: str) -> None:
    with DataPlanes([0, 0, 0], largest=0) as cast:
        whole(cast, name)
        assert [plane.exchange_for(8) for plane in cast.planes] == [None] * 3


@pytest.mark.skipif(not is_supported(), reason="the exchange needs Linux on x86-64")
@pytest.mark.parametrize(("hosts", "there"), [([0, 0], True), ([0, 0, 0], True), ([0, 1, 0], False)])
def test_short_vectors_of_one_host_are_exchanged_in_shared_memory(hosts: list[int], there: bool) -> None:
    with DataPlanes(hosts) as cast:
        whole(cast, "one-shot", (5,))
        before = cast.planes[0].bytes_by_peer
        whole(cast, "one-shot", (5,))
        assert (cast.planes[0].bytes_by_peer == before) == there


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]])
@pytest.mark.parametrize(("name", "length"), [("ring", 50_000), ("one-shot", 100)])
def test_a_lost_process_ends_the_sum_everywhere_and_is_named(hosts: list[int], name: str, length: int) -> None:
    cast = DataPlanes(hosts)
    buffers = cast.buffers(length, torch.float32)
    schedule = catalog.build(name, 4)
    assert not any(cast.play(schedule, buffers))

    def sum_or_die(rank: int) -> None:
        if rank == 2:  # as the kernel ends what a process had open
            for line in cast.channels[2].values():
                line.shutdown()
            cast.network.kill(Member("worker", 2))
            return
        SchedulePlayer(schedule, rank, cast.planes[rank]).play(buffers[rank])

    errors = cast.all(sum_or_die)
    cast.close()
    lost = [error for error in errors if error is not None]
    assert len(lost) == 3
    assert all(isinstance(error, PeerLost) for error in lost)
    assert all("worker/2" in error.message for error in lost), [error.message for error in lost]


def test_an_abort_while_the_plane_is_retired_writes_to_no_other_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's thread aborts a plane; the thread that waited there retires it before the former wakes anything."""
    write, unwritten = os.eventfd_write, []

    def retire_first(descriptor: int, value: int) -> None:
        retired.wait(1)
        try:
            write(descriptor, value)
        except OSError as error:
            unwritten.append(error)

    with DataPlanes([0, 0, 0]) as cast:
        plane, retired = cast.planes[0], threading.Event()

        def sum_and_retire() -> None:
            with pytest.raises(RuntimeError, match="a worker is lost"):
                plane.next_piece(1, 7)
            plane.retire("a worker is lost")
            retired.set()

        waiting = threading.Thread(target=sum_and_retire)
        waiting.start()
        until(lambda: plane.waits_for == (1,), 5)
        monkeypatch.setattr(os, "eventfd_write", retire_first)
        plane.abort("a worker is lost")
        waiting.join(5)
        assert retired.is_set()
        assert not unwritten
