"""Factors of linear layers in place of gradients: the same gradients to rounding, refusals, and replaced ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from psctl.client.model_layout import linear_layers
from psctl.errors import UsageError
from psctl.sync.bucket_layout import buckets
from psctl.sync.linear_factors import LinearFactors
from psctl.train_state import random_generators
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed
from tests.helpers.running import until


def joint(layers: list[nn.Linear], factors: list[LinearFactors], weights: list[float]) -> list[torch.Tensor]:
    """Return the mean gradient that every rank writes, after the vectors of all ranks are summed."""
    dtype = layers[0].weight.dtype
    vectors = [torch.full((each.elements,), math.nan, dtype=dtype) for each in factors]
    for vector, each, weight in zip(vectors, factors, weights, strict=True):
        each.fill(vector, weight)
    total = torch.stack(vectors).sum(0)
    found = []
    for each, layer in zip(factors, layers, strict=True):
        each.write_mean(total, gradient := torch.empty_like(layer.weight))
        found.append(gradient)
    return found


def ranks(world: int, rows: int, width: int = 6, out: int = 4) -> tuple[list[nn.Linear], list[LinearFactors]]:
    layers = [nn.Linear(width, out).double() for _ in range(world)]
    for each in layers[1:]:
        each.load_state_dict(layers[0].state_dict())
    return layers, [LinearFactors("fc.weight", each, rows, rank, world) for rank, each in enumerate(layers)]


def batch(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_mean_is_that_of_the_gradients_with_uneven_weights_and_rows() -> None:
    layers, factors = ranks(3, 5)
    weights = [1.2, 1.2, 0.6]
    for rank, (layer, rows) in enumerate(zip(layers, (5, 5, 2), strict=True)):
        layer(batch(rows, 6, seed=rank)).square().mean().backward()
    right = sum(w * layer.weight.grad for w, layer in zip(weights, layers, strict=True)) / 3
    for found in joint(layers, factors, weights):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


def test_rows_of_sequences_of_several_calls_and_of_several_backwards_count_together() -> None:
    (layer,), factors = ranks(1, 24)
    x = batch(2, 3, 6)
    (layer(x).sum() + layer(input=2 * x).square().sum()).backward()
    checkpoint(layer, x.requires_grad_(), use_reentrant=False).cos().sum().backward()
    (found,) = joint([layer], factors, [1.0])
    torch.testing.assert_close(found, layer.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_step_that_was_left_out_is_forgotten_with_its_gradient() -> None:
    (layer,), factors = ranks(1, 3)
    for seed in range(3):
        layer.zero_grad()  # no optimizer.step() since
        layer(batch(3, 6, seed=seed)).square().sum().backward()
        (found,) = joint([layer], factors, [1.0])
        torch.testing.assert_close(found, layer.weight.grad, rtol=1e-12, atol=1e-14)


def test_gradients_that_are_zeroed_in_place_are_forgotten_at_the_step() -> None:
    (layer,), (factors,) = ranks(1, 3)
    for seed in range(3):
        layer.zero_grad(set_to_none=False)
        layer(batch(3, 6, seed=seed)).square().sum().backward()
        (found,) = joint([layer], [factors], [1.0])
        torch.testing.assert_close(found, layer.weight.grad, rtol=1e-12, atol=1e-14)
        factors.clear()


def test_more_rows_than_were_told_are_refused() -> None:
    (layer,), _ = ranks(1, 3)
    with pytest.raises(UsageError, match=r"fc\.weight: a step has 4 rows .* sync\.factor_rows is 3"):
        layer(batch(4, 6)).sum().backward()


def test_a_weight_that_is_used_outside_its_layer_is_refused() -> None:
    (layer,), factors = ranks(1, 8)
    (layer(batch(3, 6)).sum() + layer.weight.square().sum()).backward()
    with pytest.raises(UsageError, match=r"fc\.weight: its gradient is not the product"):
        joint([layer], factors, [1.0])


def test_no_gradient_without_rows_and_none_in_evaluation() -> None:
    (layer,), (factors,) = ranks(1, 3)
    with torch.no_grad():
        layer(batch(9, 6))
    layer(batch(9, 6)).detach()
    (found,) = joint([layer], [factors], [1.0])
    assert not found.any()
    factors.close()
    layer(batch(9, 6)).sum().backward()


def test_only_weights_that_one_plain_linear_layer_holds_are_sent_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(3, 3)
            self.tied, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.tied.weight
            self.attention = nn.MultiheadAttention(4, 2)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    assert list(linear_layers(Net())) == ["plain.weight"]
    assert list(linear_layers(nn.Linear(2, 2))) == ["weight"]


def test_factors_are_alone_in_their_buckets_and_none_is_last() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 2, 100, 2)]
    assert buckets(parameters, size=4, apart={0, 2}) == [[3], [2], [0], [1]]
    assert buckets(parameters, size=4, apart={0, 1, 2}) == [[2], [1], [0], [3]]
    assert buckets(parameters, size=4) == [[3], [2], [1], [0]]


class Training:
    """Trains a small network under a collective; `deaths` are (rank, step) of the script."""

    def __init__(self, *deaths: tuple[int, int]) -> None:
        self.deaths = list(deaths)
        self.starts = 0

    def run(self, folder, factor_rows: int | None, strategy: str = "ring"):
        planes = DyingPlanes(folder, (0, 1, 0), {})
        self.job = Job(workers=3, servers=0, strategy=strategy, planes=planes, factor_rows=factor_rows, bucket=100)
        self.job.factors = ("0.weight",) if factor_rows else ()
        try:
            return self.job.run(self)
        finally:
            planes.close()

    def _may_lose(self) -> bool:
        """Whether heartbeats have reported what the coordinator must know to replace a worker."""
        job = self.job.machine.job
        return bool(job.losses.survived) or all(one.shares for one in job.live("worker"))

    def __call__(self, run):
        model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 3)).double()
        with torch.no_grad():
            for number, one in enumerate(model.parameters()):
                one.copy_((torch.arange(one.numel()).double() + 3 * number).sin().reshape(one.shape) / 8)
        self.starts += 1
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        points = torch.arange(64 * 20, dtype=torch.float64).reshape(20, 64).sin()
        for _ in run.epochs(3):
            for x in run.loader(list(points), batch_size=5):
                if run.step == 3:
                    until(self._may_lose, 10)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if (run.rank, run.step) in self.deaths:
                    self.deaths.remove((run.rank, run.step))
                    raise Killed
                loss.backward()
                optimizer.step()
        return run.step, [one.detach().clone() for one in model.parameters()]


def test_a_training_with_factors_takes_the_same_steps_to_rounding(tmp_path) -> None:
    dense, sent = tmp_path / "dense", tmp_path / "factors"
    dense.mkdir(), sent.mkdir()
    training = Training()
    wanted = training.run(dense, None)
    found = training.run(sent, 2)
    for (steps, right), (step, values) in zip(wanted, found, strict=True):
        assert step == steps == 12
        for one, other in zip(values, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(one, found[0][1][at]) for _, values in found for at, one in enumerate(values))


@pytest.mark.parametrize("deaths", [[(1, 5)], [(0, 6), (2, 9)]])
def test_a_lost_rank_is_replaced_with_the_same_bits(tmp_path, monkeypatch, deaths) -> None:
    monkeypatch.setattr(random_generators.GeneratorStates, "differing", lambda self, before: {})  # ranks are threads
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir(), disturbed.mkdir()
    wanted = Training().run(undisturbed, 2)
    training = Training(*deaths)
    found = training.run(disturbed, 2)
    assert training.starts == 3 + len(deaths)
    for (_, right), (step, values) in zip(wanted, found, strict=True):
        assert step == 12
        assert all(map(torch.equal, values, right))
