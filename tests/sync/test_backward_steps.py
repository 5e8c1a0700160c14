"""`sync.step_in_backward`: some buckets of a sharded optimizer are stepped during backward; no bit changes by it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psctl.clock import Clock
from psctl.collectives.partitioned_sums import SchedulePartition
from psctl.errors import UsageError
from psctl.job.events import StepsInBackward
from psctl.sync import backward_steps, choice_tuner
from psctl.sync.backward_steps import BackwardSteps, stepped_in_backward, waiting_counts
from psctl.sync.choice_tuner import ChoiceTuner
from psctl.types import Compression
from tests.helpers.job_world import Job
from tests.sync.test_replaced_rank import Training
from tests.sync.test_run_strategies import assert_close, train
from tests.sync.test_sharded import OPTIONS, EndingTraining, assert_same_end, odd_script, sharded


@pytest.fixture(params=[0.25, 0.5, 1.0])
def part(request, monkeypatch: pytest.MonkeyPatch) -> float:
    """The part of the buckets that are stepped during backward, in every step."""
    monkeypatch.setattr(backward_steps, "PARTS", (request.param,))
    return request.param


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_steps, "PARTS", (0.5,))


@pytest.mark.parametrize("buckets", range(1, 80))
def test_buckets_that_are_stepped_in_backward_lie_apart_and_the_last_is_not_among_them(buckets: int) -> None:
    counts = waiting_counts(buckets)
    assert counts[0] == buckets, "the usual one is tried first"
    assert min(counts) >= max(1, buckets // 2)
    for waiting in range(1, buckets + 1):
        early = sorted(stepped_in_backward(buckets, waiting))
        assert len(early) == buckets - waiting
        assert all(0 <= one < buckets - 1 for one in early)
        gaps = [after - before for before, after in pairwise([*early, buckets - 1])]
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("strategy", ["sharded", "ring", "multi-ring", "halving-doubling", "hierarchical"])
def test_bits_are_those_of_steps_after_backward(tmp_path: Path, strategy: str, part: float) -> None:
    with sharded(tmp_path / "early", strategy, bucket=60, step_in_backward=True) as job:
        found = job.run(train)
    with sharded(tmp_path / "late", strategy, bucket=60) as job:
        expected = job.run(train)[0]
    for result in found:
        assert_close(result, expected, 0.0)


def test_tied_frozen_unused_and_empty_parameters_and_accumulation(tmp_path: Path, part: float) -> None:
    with sharded(tmp_path / "early", bucket=100, step_in_backward=True) as job:
        found = job.run(odd_script)
    with sharded(tmp_path / "worker", bucket=100, update="worker") as job:
        expected = job.run(odd_script)[0]
    for result in found:
        assert_close(result, expected, 0.0)


def test_gradients_of_16_bits_are_stepped_alike(tmp_path: Path, part: float) -> None:
    def script(run):
        return odd_script(run, torch.float32)

    found = []
    for early in (False, True):
        terms = {"compression": Compression("bf16"), "bucket": 100, "step_in_backward": early}
        with sharded(tmp_path / str(early), **terms) as job:
            found.append(job.run(script))
    for result in found[1]:
        assert_close(result, found[0][0], 0.0)


def test_a_checkpoint_continues_to_the_bit(tmp_path: Path, half: None) -> None:
    with sharded(tmp_path / "whole", every=4, bucket=60, step_in_backward=True) as job:
        whole = job.run(train)
    for folder, early in (("early", True), ("late", False)):
        terms = {"bucket": 60, "step_in_backward": early, "resume": job.saved[4]}
        with sharded(tmp_path / folder, **terms) as rest:
            assert_close(rest.run(train)[1], whole[0], 0.0)


class Waiting(torch.autograd.Function):
    """Passes values on; its backward waits for an event."""

    @staticmethod
    def forward(context, values: torch.Tensor, event: threading.Event) -> torch.Tensor:
        context.event = event
        return values.view_as(values)

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert context.event.wait(10), "nothing was gathered while backward ran"
        return gradient, None


def test_values_are_gathered_while_backward_runs(tmp_path: Path, half: None, monkeypatch) -> None:
    gathered = [threading.Event() for _ in range(3)]
    gather_after = SchedulePartition.gather_after

    def noting(self, step, vector, ranges):
        def stepping() -> None:
            step()
            gathered[self.me].set()

        return gather_after(self, stepping, vector, ranges)

    monkeypatch.setattr(SchedulePartition, "gather_after", noting)

    def script(run):
        first, rest = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        model, optimizer = run.prepare(nn.ModuleList([first, rest]), torch.optim.SGD(
            [*first.parameters(), *rest.parameters()], lr=0.1))  # fmt: skip
        for _ in range(3):
            gathered[run.rank].clear()
            optimizer.zero_grad()
            rest(Waiting.apply(first(torch.ones(2, 6)), gathered[run.rank])).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    # a sum that is longer than SHORT would wake the thread; a gather wakes it always
    with sharded(tmp_path, bucket=100, step_in_backward=True) as job:
        one, other, _ = job.run(script)
    assert_close(one, other, 0.0)


def refused(tmp_path: Path, script, update: str) -> UsageError:
    on_servers = nullcontext(Job(update="server", step_in_backward=True))
    with (
        on_servers if update == "server" else sharded(tmp_path, bucket=60, step_in_backward=True) as job,
        pytest.raises(UsageError, match="step_in_backward") as found,
    ):
        job.run(script)
    assert "leave out step_in_backward" in found.value.hint
    return found.value


@pytest.mark.parametrize("update", ["sharded", "server"])
def test_clipping_is_refused(tmp_path: Path, update: str) -> None:
    refused(tmp_path, lambda run: train(run, clip=0.05), update)


@pytest.mark.parametrize("update", ["sharded", "server"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_learning_rate_that_changes_after_backward_is_refused(tmp_path: Path, at: int, update: str) -> None:
    def script(run):
        model, optimizer = run.prepare(model := nn.Linear(6, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            if step == at:
                optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step()

    assert "lr of the optimizer's group 0 was 0.1 in backward and is 0.05 now" in str(refused(tmp_path, script, update))


def test_a_learning_rate_may_change_before_backward(tmp_path: Path, half: None) -> None:
    def script(run):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(0.1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = []
    for early in (False, True):
        with sharded(tmp_path / str(early), bucket=60, step_in_backward=early) as job:
            found.append(job.run(script)[2])
    assert_close(found[0], found[1], 0.0)


class Gathers:
    """A backend of one rank, whose sums are those of the rank itself."""

    def __init__(self) -> None:
        self.sums, self.calls = self, []

    def buffer(self, length, dtype, device):
        return torch.zeros(length, dtype=dtype)

    def put(self, vector):
        self.calls.append("times")
        return self

    def wait(self) -> None:
        return


class Moving(Clock):
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize(("fastest", "seconds"), [(24, 1.0), (15, 0.8), (12, 0.9)])
def test_the_number_that_takes_the_least_time_is_kept(fastest: int, seconds: float) -> None:
    clock, backend = Moving(), Gathers()
    tuner, reports = ChoiceTuner(waiting_counts(24), clock, 1, "ring", None), []
    steps = BackwardSteps(backend, 24, tuner, torch.device("cpu"), lambda *report: reports.append(report))
    tried = set()
    for _ in range(60):
        steps.begin_round()
        early = sum(steps.has(bucket) for bucket in range(24))
        tried.add(24 - early)
        clock.time += seconds if 24 - early == fastest else 1.1
        steps.end_round()
    assert tried == set(waiting_counts(24))
    assert 24 - early == fastest
    assert len(backend.calls) < 60, "no times are sent when the choice is made"
    ((early, every, measured),) = reports
    assert (early, every) == (24 - fastest, 24)
    assert {each: pytest.approx(took) for each, took in measured} == {
        24 - waiting: seconds if waiting == fastest else 1.1 for waiting in waiting_counts(24)
    }


def test_one_bucket_is_never_stepped_in_backward_which_is_reported_at_once() -> None:
    reports: list[tuple[Any, ...]] = []
    tuner = ChoiceTuner(waiting_counts(1), Moving(), 1, "ring", None)
    BackwardSteps(Gathers(), 1, tuner, torch.device("cpu"), lambda *report: reports.append(report))
    assert reports == [(0, 1, [])]


def test_all_ranks_try_alike_and_train_to_the_same_bits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(choice_tuner, "ROUNDS", 2)
    with sharded(tmp_path / "early", bucket=60, step_in_backward=True) as job:
        found = job.run(lambda run: train(run, epochs=12))
    (chosen,) = [each for each in job.events if isinstance(each, StepsInBackward)]
    assert {each.buckets for each in chosen.measured} >= {0, chosen.buckets}
    assert chosen.buckets < chosen.all
    with sharded(tmp_path / "worker", bucket=60, update="worker") as job:
        assert_close(found[1], job.run(lambda run: train(run, epochs=12))[0], 0.0)


@pytest.mark.parametrize(
    ("strategy", "rank", "calls"),
    [
        pytest.param(strategy, rank, calls, marks=[] if calls == often else pytest.mark.soak)
        for strategy, rank, often in (("sharded", 1, 2), ("ring", 0, 9), ("hierarchical", 2, 20))
        for calls in range(40)
    ],
)
def test_a_worker_that_is_killed_at_a_call_has_all_continue_from_the_checkpoint(
    tmp_path: Path, half: None, strategy: str, rank: int, calls: int
) -> None:
    training = EndingTraining()
    given = {
        "strategy": strategy, "update": "sharded", "options": OPTIONS.get(strategy, {}), "step_in_backward": True,
        "bucket": 60,
    }  # fmt: skip
    found = training.run(tmp_path, {(rank, 0): calls}, every=3, **given)
    (tmp_path / "undisturbed").mkdir()
    assert_same_end(found, Training().run(tmp_path / "undisturbed", **given | {"step_in_backward": False}))
