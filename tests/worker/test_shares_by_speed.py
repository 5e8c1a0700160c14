"""`loader: {share: speed}`: slow workers get fewer examples, all ranks agree, and the mean is over all examples."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from psctl.coordinator.state import example_division
from psctl.errors import InvalidFile
from psctl.job.examples import WHOLE, parts_by_speed, share
from psctl.spec.job_file import load_job
from psctl.train_state import random_generators
from psctl.types import Range
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed

COUNT, BATCH = 480, 24


@given(st.integers(0, 300), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_shares_by_parts_are_all_of_a_clock_and_none_is_empty(size, parts) -> None:
    world, of = len(parts), Range(7, 7 + size)
    found = [share(of, world, rank, parts) for rank in range(world)]
    assert [each.start for each in found] == [7, *(each.stop for each in found[:-1])]
    assert found[-1].stop == of.stop
    if size >= world:
        assert all(len(each) >= 1 for each in found)
        for each, part in zip(found, parts, strict=True):
            assert abs(len(each) - 1 - (size - world) * part / sum(parts)) < 1.0001


def test_parts_give_equal_times() -> None:
    parts, saved = parts_by_speed({0: 32.0, 1: 32.0}, {0: 1.0, 1: 3.0})
    assert parts == [WHOLE * 3 // 4, WHOLE // 4]
    assert saved == pytest.approx(0.5)
    assert parts_by_speed({0: 48.0, 1: 16.0}, {0: 1.5, 1: 1.5}) == (parts, pytest.approx(0.0))


class SlowJob(Job):
    """A job whose last worker is three times as slow."""

    def __init__(self, *args, share="speed", **options) -> None:
        super().__init__(*args, **options)
        self.machine.job.order = replace(self.machine.job.order, share=share)
        self.shares: dict[int, list[int]] = {}
        self.taken: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self.died = False


def train(run, job, epochs=6, kill_at=None, worker=1):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 5, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2).double()
    with torch.no_grad():
        for number, one in enumerate(model.parameters()):
            one.copy_((torch.arange(one.numel()).double() + number).sin().reshape(one.shape))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    loader = run.loader(list(zip(x, range(COUNT), strict=True)), batch_size=BATCH)
    for epoch in run.epochs(epochs):
        for some, numbers in loader:
            if run.rank == worker and run.step == kill_at and not job.died:
                job.died = True
                raise Killed
            job.shares.setdefault(run.step, [0, 0])[run.rank] = len(some)
            job.taken[run.rank, run.step] = epoch, numbers.tolist()
            optimizer.zero_grad()
            model(some).square().mean().backward()
            time.sleep(len(some) * (0.003 if run.rank == 1 else 0.001))
            optimizer.step()
    run.wait()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(example_division, "SECONDS", 0.05)


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """The values of one machine."""
    job = SlowJob(1, 1, share="even")
    return job.run(lambda run: train(run, job))[0]


def most(job: SlowJob) -> int:
    """The most examples that the fast worker got in a step: on a busy machine its measured speed may fall again."""
    return max(fast for fast, _ in job.shares.values())


def near(found, plain) -> None:
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_slow_worker_gets_fewer_examples_and_the_mean_stays(plain, staleness) -> None:
    job = SlowJob(2, 1, staleness=staleness)
    results = job.run(lambda run: train(run, job))
    assert job.shares[0] == [12, 12], "nothing is known at first"
    assert all(sum(each) == BATCH for each in job.shares.values())
    assert most(job) > BATCH // 2, job.shares
    assert any("shared by measured speed" in getattr(each, "text", "") for each in job.events)
    if staleness == 0:
        near(results[0], plain)


def test_without_the_key_shares_stay_even(plain) -> None:
    job = SlowJob(2, 1, share="even")
    near(job.run(lambda run: train(run, job, epochs=6))[0], plain)
    assert set(map(tuple, job.shares.values())) == {(12, 12)}


def test_a_worker_that_is_replaced_changes_no_mean(plain) -> None:
    job = SlowJob(2, 1)
    near(job.run(lambda run: train(run, job, kill_at=60))[0], plain)
    assert job.died


@pytest.mark.parametrize("kill_at", [None, 60])
def test_under_a_collective_too(plain, tmp_path, kill_at, monkeypatch) -> None:
    # workers are threads here and share the generators, so each would seem to draw numbers between steps
    monkeypatch.setattr(random_generators.GeneratorStates, "differing", lambda self, before: {})
    planes = DyingPlanes(tmp_path, (0, 1), {})
    try:
        job = SlowJob(2, 0, strategy="ring", planes=planes)
        near(job.run(lambda run: train(run, job, kill_at=kill_at))[0], plain)
    finally:
        planes.close()
    assert job.died == (kill_at is not None)
    assert most(job) > BATCH // 2, job.shares


def test_when_a_worker_is_lost_each_example_stays_once_an_epoch() -> None:
    job = SlowJob(2, 1, elastic=True)
    job.run(lambda run: train(run, job, kill_at=60))
    found: dict[int, list[int]] = {}
    for (rank, step), (epoch, numbers) in job.taken.items():
        if rank == 0 or step < job.lost[1]:
            found.setdefault(epoch, []).extend(numbers)
    assert {epoch: sorted(each) for epoch, each in found.items()} == {epoch: list(range(COUNT)) for epoch in range(6)}
    assert job.shares[max(job.shares)][0] == BATCH


@pytest.mark.parametrize(
    ("more", "said"), [("sync: {consistency: asp}", "asp"), ("sync: {factor_rows: 8}", "factor_rows")]
)
def test_what_it_cannot_be_combined_with_is_refused(more, said) -> None:
    with pytest.raises(InvalidFile) as error:
        load_job(f"version: 1\nname: x\nscript: t.py\n{more}\nloader: {{share: speed}}\n", "job.yaml")
    assert said in str(error.value)
    assert "job.yaml:5" in str(error.value.where)
    assert load_job("version: 1\nname: x\nscript: t.py\nloader: {share: speed}\n", "job.yaml").loader.share == "speed"
