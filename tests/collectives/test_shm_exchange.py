"""The exchange of short vectors in shared memory: each process reads all vectors, in whatever order they arrive."""

from __future__ import annotations

import platform
import random
import threading

import pytest
import torch

from psctl.collectives.shm_exchange import LINE, SLOT, WRAP, ShmExchange, exchange_size, is_supported
from psctl.schedule.algorithms import catalog
from tests.helpers.data_planes import DataPlanes

needs = pytest.mark.skipif(not is_supported(), reason="the exchange needs Linux on x86-64")


def nobody_is_gone() -> None:
    return


@needs
@pytest.mark.parametrize("before", [0, WRAP - 20])
def test_all_ranks_read_all_vectors_also_where_the_count_begins_anew(before: int) -> None:
    world, turns = 4, 60
    memory = torch.zeros(exchange_size(world), dtype=torch.uint8)
    memory[: LINE * (world + 1)].view(torch.uint32).fill_(before)
    sizes = [random.Random(turn).choice([1, 3, 1000, SLOT // 8]) for turn in range(turns)]
    wrong: list[str] = []

    def play(me: int) -> None:
        exchange = ShmExchange(memory, me, world, nobody_is_gone)
        for turn, size in enumerate(sizes):
            found = exchange.exchange(torch.full((size,), 100 * turn + me, dtype=torch.int64))
            for rank in range(world):
                if rank != me and not torch.equal(found[rank], torch.full((size,), 100 * turn + rank)):
                    wrong.append(f"rank {me}, vector {turn}, of rank {rank}")

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it hangs"
    assert not wrong


@needs
def test_a_waiting_rank_notices_that_another_has_ended() -> None:
    looked = 0

    def look() -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            raise RuntimeError("worker/1: its process ended")

    exchange = ShmExchange(torch.zeros(exchange_size(2), dtype=torch.uint8), 0, 2, look)
    with pytest.raises(RuntimeError, match="worker/1"):
        exchange.exchange(torch.zeros(10))


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "ppc64le"])
def test_no_exchange_where_stores_may_be_seen_in_another_order(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with DataPlanes([0, 0, 0]) as cast:
        assert [plane.exchange_for(100) for plane in cast.planes] == [None] * 3
        vectors = [torch.arange(10) * (rank + 1) for rank in range(3)]
        assert cast.play(catalog.build("one-shot", 3), vectors) == [None] * 3
        assert all(torch.equal(vector, 6 * torch.arange(10)) for vector in vectors)
        assert any(sent for sent, _ in cast.planes[0].bytes_by_peer.values()), "they travelled as records"
