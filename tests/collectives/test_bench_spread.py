"""Start values that travel as a sum: every rank has rank 0's bytes, of whatever type and layout."""

from __future__ import annotations

import threading

import pytest
import torch

from psctl.collectives import allreduce_backends
from psctl.collectives.allreduce_backends import broadcast
from psctl.types import NO_PEERS

LIMIT = 10.0


class Meeting:
    """Sums vectors of ranks that are threads."""

    def __init__(self, world: int) -> None:
        self.world, self.lengths = world, list[int]()
        self._barrier = threading.Barrier(world, timeout=LIMIT)
        self._lock = threading.Lock()
        self._vectors: list[torch.Tensor] = []

    def sum(self, vector: torch.Tensor) -> None:
        with self._lock:
            self._vectors.append(vector)
        if self._barrier.wait() == 0:
            total = torch.stack(self._vectors).sum(0, dtype=vector.dtype)
            for each in self._vectors:
                each.copy_(total)
            self.lengths.append(len(vector))
            self._vectors.clear()
        self._barrier.wait()


class Sum:
    """One rank's end of a meeting."""

    bytes_by_peer = NO_PEERS
    waits_for: tuple[int, ...] = ()

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self.world = meeting, meeting.world

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((length,), 7, dtype=dtype, device=device)  # whatever lay there

    def release(self, vector: torch.Tensor) -> None:
        vector.fill_(9)

    def put(self, vector: torch.Tensor) -> Sum:
        self._meeting.sum(vector)
        return self

    def wait(self) -> None:
        return

    def close(self) -> None:
        return


def tensors(seed: int) -> list[torch.Tensor]:
    """Return what a model may have, other values for another seed."""
    torch.manual_seed(seed)
    odd = torch.randn(5)
    odd[0], odd[1] = -0.0, torch.inf
    odd.view(torch.int32)[2] = 0x7FC12345 + seed  # one of the many that are no number
    return [
        torch.nn.Parameter(torch.randn(3, 7)), odd, torch.randn(4, 6).t(), torch.tensor(seed), torch.empty(0, 3),
        torch.rand(9) < 0.5, torch.randn(11).bfloat16(), torch.randn(2, 2, dtype=torch.float64),
        torch.randint(-(1 << 62), 1 << 62, (3,)), torch.randn(30)[::3],
    ]  # fmt: skip


def bits(values: list[torch.Tensor]) -> list[list[int]]:
    return [each.detach().contiguous().view(-1).view(torch.uint8).tolist() for each in values]


@pytest.mark.parametrize("together", [8 << 20, 16])
def test_every_rank_has_rank_0s_bytes(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce_backends, "BROADCAST", together)
    meeting, ranks = Meeting(3), [tensors(seed) for seed in range(3)]
    wanted = bits(ranks[0])
    assert bits(ranks[1]) != wanted
    threads = [
        threading.Thread(target=broadcast, args=(Sum(meeting), rank == 0, values)) for rank, values in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [bits(values) for values in ranks] == [wanted] * 3
    assert max(meeting.lengths) * 4 <= max(together, 400)


def test_no_tensors_need_no_sum() -> None:
    broadcast(Sum(Meeting(2)), True, [torch.empty(0)])
