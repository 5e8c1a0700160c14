"""Gradients rounded to 16 bits before a collective sums them, and what error feedback keeps in checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from psctl.collectives.rank_program import ChunkWrite
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.schedule.algorithms import catalog
from psctl.sync.bucket_allreduce import BucketReducer
from psctl.sync.build_synchronizer import residual_tensors
from psctl.types import NO_PEERS, Layout, ParameterInfo


class WithOther:
    """Sums with a rank that has the same gradients twice."""

    world = 2
    bytes_by_peer = NO_PEERS

    def __init__(self) -> None:
        self.put_in: list[torch.Tensor] = []

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    def put(self, vector: torch.Tensor) -> Any:
        self.put_in.append(vector.clone())
        vector.mul_(3)
        return SimpleNamespace(wait=lambda: None)

    def close(self) -> None:
        return


def reduced(halves: torch.dtype | None, weight: float, *values: torch.Tensor | None) -> tuple[list, WithOther]:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    summing, group = WithOther(), SimpleNamespace(world=2)
    reducer = BucketReducer(group, summing, parameters, halves)  # type: ignore[arg-type]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value
    for bucket in range(len(reducer.buckets)):
        reducer.send(bucket, weight)
    with torch.no_grad():
        reducer.finish()
    return [parameter.grad for parameter in parameters], summing


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_gradients_travel_as_halves_and_come_back_as_they_were(weight: float) -> None:
    gradient, narrow = torch.tensor([1.0, 2.0, 1 / 3]), torch.tensor([1.0, 4.0], dtype=torch.bfloat16)
    found, summing = reduced(torch.bfloat16, weight, gradient.clone(), narrow.clone())
    assert {each.dtype for each in summing.put_in} == {torch.bfloat16}
    rounded = (gradient * weight / 2).to(torch.bfloat16)
    assert torch.equal(found[0], (rounded * 3).float())
    assert torch.equal(found[1], narrow * weight * 3 / 2)


def test_the_mean_of_what_fits_fits_float16() -> None:
    found, summing = reduced(torch.float16, 1.0, torch.full((3,), 60000.0), torch.ones(2, dtype=torch.bfloat16))
    assert found[0].tolist() == [90000.0] * 3 or not found[0].isfinite().all()  # 3 * 60000 / 2 is beyond it
    assert all(bool(each.isfinite().all()) for each in summing.put_in)


def test_without_compression_nothing_is_rounded() -> None:
    gradient = torch.tensor([1.0, 2.0, 1 / 3])
    found, _ = reduced(None, 1.0, gradient.clone(), None)
    assert torch.equal(found[0], gradient * 3 / 2)
    assert found[1] is None


def test_a_sum_of_many_halves_is_rounded_once() -> None:
    schedule = catalog.build("sharded", 4)
    chunks = VectorChunks(schedule.ranges(4))
    vector = torch.full((4,), 256.0, dtype=torch.bfloat16)
    aside = {rank: torch.full((1,), 1.0, dtype=torch.bfloat16) for rank in (1, 2, 3)}
    chunks.write(ChunkWrite(0, 0, (1, 2, 3), reduces=True, own=True, before=-1, readers=()), 0, vector, aside)
    assert float(vector[0]) == float(torch.tensor(259.0).to(torch.bfloat16)) != 256.0


def test_residuals_are_each_ranks_own_and_lie_by_parameter() -> None:
    infos = (
        ParameterInfo("a", (2, 3), "float32", 0),
        ParameterInfo("frozen", (5,), "float32", 0, trainable=False),
        ParameterInfo("b", (4,), "float32", 0),
    )
    flat = {"float32": torch.arange(10.0)}
    found = residual_tensors(flat, Layout(infos, "", ()), 1)
    assert {name: tuple(each.shape) for name, each in found.items()} == {"residual/1/a": (2, 3), "residual/1/b": (4,)}
    assert found["residual/1/b"].tolist() == [6, 7, 8, 9]
    found["residual/1/b"].copy_(torch.ones(4))
    assert flat["float32"].tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]
