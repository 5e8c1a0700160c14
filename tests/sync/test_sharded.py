"""`update: sharded`: ranks that each step a part of the parameters train as one process does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from psctl.errors import PeerLost, UsageError
from psctl.ps.server_optimizers import FIT
from psctl.types import Compression
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed
from tests.sync.test_replaced_rank import Training
from tests.sync.test_run_strategies import alone, assert_close, train

SMALL = 200
"""Bytes of a bucket, of which the model has three."""

OPTIONS: dict[str, dict[str, Any]] = {
    "multi-ring": {"rings": [[[0, 1, 2], 1], [[0, 2, 1], 2]]},
    "hierarchical": {"groups": [[0, 2], [1]], "inner": "sharded"},
    "ring": {"pieces": 2},
}


@contextmanager
def sharded(
    folder: Path, strategy: str = "sharded", hosts=(0, 1, 0), options=None, shared: bool = False, **terms
) -> Iterator[Job]:  # fmt: skip
    folder.mkdir(exist_ok=True)
    planes = DyingPlanes(folder, hosts, {}, shared=shared)
    try:
        job = Job(len(hosts), 0, strategy=strategy, planes=planes, **({"update": "sharded", "bucket": SMALL} | terms))
        job.options = OPTIONS.get(strategy, {}) if options is None else options
        yield job
    finally:
        planes.close()


@pytest.mark.parametrize(
    "strategy", ["sharded", "ring", "bidirectional-ring", "multi-ring", "halving-doubling", "hierarchical"]
)
def test_ranks_train_as_one_process_does(tmp_path: Path, strategy: str) -> None:
    with sharded(tmp_path, strategy) as job:
        results = job.run(train)
    for result in results:
        assert_close(result, alone(train))


def test_shares_may_be_unequal_and_one_rank_may_own_nothing(tmp_path: Path) -> None:
    with sharded(tmp_path, options={"weights": [3, 0, 1], "pieces": 2}) as job:
        results = job.run(lambda run: train(run, batch=17))
    assert_close(results[1], alone(train, batch=17))


def test_clipping_goes_by_the_joint_norm(tmp_path: Path) -> None:
    with sharded(tmp_path, "ring") as job:
        results = job.run(lambda run: train(run, clip=0.05))
    assert_close(results[1], alone(train, clip=0.05), 1e-9)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Rprop", "NAdam", "ASGD"])
def test_optimizers_that_fit_servers_fit_ranks(tmp_path: Path, name: str) -> None:
    def script(run):
        return train(run, make=lambda model: FIT[name](model.parameters(), lr=0.01))

    with sharded(tmp_path) as job:
        results = job.run(script)
    assert_close(results[2], alone(script))


def test_a_checkpoint_continues_to_the_bit_and_on_any_number_of_ranks(tmp_path: Path) -> None:
    with sharded(tmp_path / "whole", every=4) as job:
        whole = job.run(train)
    saved = job.saved[4]
    assert set(saved.tensors) >= {f"optim/first.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    for folder, hosts, tolerance in (("same", (0, 1, 0), 0.0), ("fewer", (0, 1), 1e-12)):
        with sharded(tmp_path / folder, hosts=hosts, resume=saved) as job:
            results = job.run(train)
        assert_close(results[0], whole[0], tolerance)


@pytest.mark.parametrize("writer", ["sharded", "worker"])
def test_a_checkpoint_continues_wherever_the_optimizer_steps(tmp_path: Path, writer: str) -> None:
    with sharded(tmp_path / "whole", update=writer, every=4) as job:
        whole = job.run(train)
    reader = "worker" if writer == "sharded" else "sharded"
    with sharded(tmp_path / "rest", update=reader, resume=job.saved[4]) as job:
        results = job.run(train)
    assert_close(results[0], whole[0], 0.0)


def test_servers_continue_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    with sharded(tmp_path, every=4) as job:
        whole = job.run(train)
    assert_close(Job(2, 2, resume=job.saved[4]).run(train)[0], whole[0])


class Odd(nn.Module):
    """A model with a shared, a frozen and an unused parameter, one without elements, and one laid out by channels."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=dtype)
        self.again = nn.Linear(6, 6, dtype=dtype)
        self.again.weight = self.inner.weight
        self.wide = nn.Linear(6, 70, dtype=dtype)
        self.image = nn.Conv2d(70, 3, 1, dtype=dtype).to(memory_format=torch.channels_last)
        self.unused = nn.Linear(3, 3, dtype=dtype)
        self.sometimes = nn.Parameter(torch.ones(3, dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        with torch.no_grad():
            for number, one in enumerate(self.parameters()):
                one.copy_((torch.arange(one.numel()).to(dtype) + 3 * number).sin().reshape(one.shape) / 3)

    def forward(self, x: torch.Tensor, *, more: bool) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.inner(x))))
        scores = self.image(self.wide(x)[:, :, None, None]).flatten(1)
        return scores * self.frozen + (self.sometimes if more else 0)


def odd_script(run, dtype=torch.float64, steps=6):
    model = Odd(dtype)
    halves = [list(model.inner.parameters()), [one for name, one in model.named_parameters() if "inner" not in name]]
    optimizer = torch.optim.AdamW(
        [{"params": halves[0], "lr": 0.02}, {"params": halves[1], "weight_decay": 0.1}], lr=0.05
    )  # fmt: skip
    model, optimizer = run.prepare(model, optimizer)
    points = torch.arange(6 * 24, dtype=dtype).reshape(24, 6).sin()
    for _ in run.epochs(1):
        for x in run.loader(list(points), batch_size=24 // steps):
            optimizer.zero_grad()
            with run.accumulate():
                model(x, more=False).square().mean().backward()
            scores = model(x, more=run.rank == 0 and run.step % 2 == 0)
            functional.mse_loss(scores, torch.ones_like(scores)).backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_tied_frozen_unused_and_empty_parameters_and_accumulation(tmp_path: Path) -> None:
    with sharded(tmp_path / "sharded", bucket=400) as job:
        results = job.run(odd_script)
    with sharded(tmp_path / "worker", bucket=400, update="worker") as job:
        expected = job.run(odd_script)
    for result in results:
        assert_close(result, expected[0], 0.0)


def test_in_float32_bits_are_those_of_optimizers_on_workers(tmp_path: Path) -> None:
    def script(run):
        return odd_script(run, torch.float32)

    with sharded(tmp_path / "sharded", bucket=4000) as job:
        results = job.run(script)
    with sharded(tmp_path / "worker", bucket=4000, update="worker") as job:
        assert_close(results[1], job.run(script)[0], 0.0)


def test_the_state_of_the_optimizer_is_divided(tmp_path: Path) -> None:
    with sharded(tmp_path, every=4) as job:
        job.run(train)
    held = {
        sender: sum(each.stop - each.start for each in slices if each.name.endswith("exp_avg"))
        for (sender, _), slices in job.saved[4].slices.items()
    }
    assert len(held) == 3
    assert sum(held.values()) == 6 * 16 + 16 + 16 * 3 + 3
    assert max(held.values()) <= 96, "a parameter of 96 elements is cut at 64"


def test_a_gradient_that_changes_after_it_was_sent_is_refused(tmp_path: Path) -> None:
    def script(run):
        model = nn.Linear(6, 3)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 6)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    with sharded(tmp_path) as job, pytest.raises(UsageError, match="changed after it was sent to the ranks that step"):
        job.run(script)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def script(run):
        model = nn.Linear(6, 3)
        run.prepare(model, torch.optim.LBFGS(model.parameters()))

    with sharded(tmp_path) as job, pytest.raises(UsageError, match="LBFGS is none of those that fit"):
        job.run(script)


def test_an_optimizer_that_has_state_is_refused(tmp_path: Path) -> None:
    def script(run):
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        run.prepare(model, optimizer)

    with sharded(tmp_path) as job, pytest.raises(UsageError, match="Adam has state already") as refused:
        job.run(script)
    assert "before its first step" in refused.value.hint


def test_one_rank_may_evaluate_while_the_others_wait_for_it(tmp_path: Path) -> None:
    evaluated = threading.Barrier(3, timeout=20)

    def script(run):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            if run.rank == 0:
                model(torch.ones(1, 6))  # its values are other ranks', which are not in a call of psctl
            evaluated.wait()
        return model.state_dict()

    with sharded(tmp_path) as job:
        one, other, _ = job.run(script)
    assert_close(one, other, 0.0)


def test_gradients_of_16_bits_are_rounded_and_values_are_not(tmp_path: Path) -> None:
    def script(run):
        return odd_script(run, torch.float32)

    with sharded(tmp_path / "whole") as job:
        whole = job.run(script)[0]
    with sharded(tmp_path / "halves", compression=Compression("bf16")) as job:
        one, *others = job.run(script)
    for other in others:
        assert_close(one, other, 0.0)
    assert any(not torch.equal(one[name], whole[name]) for name in whole)
    assert_close(one, whole, 0.02)


@pytest.mark.parametrize("strategy", ["sharded", "ring"])
def test_long_pieces_in_shared_memory_are_not_overwritten_while_they_are_read(tmp_path: Path, strategy: str) -> None:
    def script(run):
        model = nn.Sequential(nn.Linear(6, 30_000), nn.Tanh(), nn.Linear(30_000, 3))
        with torch.no_grad():
            for number, one in enumerate(model.parameters()):
                one.copy_((torch.arange(one.numel()) + 3 * number).sin().reshape(one.shape) / 30)
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        points = torch.arange(6 * 24.0).reshape(24, 6).sin()
        for _ in run.epochs(4):
            for x in run.loader(list(points), batch_size=6):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = {}
    for update in ("sharded", "worker"):
        terms = {"update": update, "bucket": 400_000, "shared": True}
        with sharded(tmp_path / update, strategy, (0, 0, 0), **terms) as job:
            found[update] = job.run(script)
    for result in found["sharded"]:
        assert_close(result, found["worker"][0], 0.0 if strategy == "sharded" else 1e-6)


def assert_same_end(found, whole) -> None:
    """Compare what `Training` returned on each rank: steps, and values to the bit."""
    for place, ((step, state, _), (steps, expected, _)) in enumerate(zip(found, whole, strict=True)):
        assert step == steps
        for name, value in expected.items():
            if place == 0 or not name.startswith("1."):  # only rank 0's running statistics are the job's
                assert torch.equal(state[name], value), name


class EndingTraining(Training):
    """A training whose processes end when they lose a peer, as a script's does."""

    def __call__(self, run):
        try:
            return super().__call__(run)
        except PeerLost as error:
            raise Killed from error


@pytest.mark.parametrize(
    ("strategy", "rank", "calls"),
    [
        pytest.param(strategy, rank, calls, marks=[] if calls == often else pytest.mark.soak)
        for strategy, rank, often in (("sharded", 1, 0), ("ring", 0, 9), ("hierarchical", 2, 20))
        for calls in range(40)
    ],
)
def test_a_worker_that_is_killed_at_a_call_has_all_continue_from_the_checkpoint(
    tmp_path: Path, strategy: str, rank: int, calls: int
) -> None:
    training = EndingTraining()
    given = {"strategy": strategy, "update": "sharded", "options": OPTIONS.get(strategy, {})}
    found = training.run(tmp_path, {(rank, 0): calls}, every=3, **given)
    assert len(training.starts) == 6, "all started again"
    (tmp_path / "undisturbed").mkdir()
    assert_same_end(found, Training().run(tmp_path / "undisturbed", **given))
