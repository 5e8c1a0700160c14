"""A worker dies and another takes its place in mid-run: the others never notice, the result is the same to the bit."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from psctl.clock import SystemClock

_world = runpy.run_path(str(Path(__file__).with_name("job_world.py")))
Job, Killed = _world["Job"], _world["Killed"]


class Average:
    """Something tracked: a moving average of what the model put out."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(1), 0

    def add(self, x: torch.Tensor) -> None:
        self.value, self.count = 0.9 * self.value + 0.1 * x.detach().mean(), self.count + 1

    def state_dict(self):
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state) -> None:
        self.value, self.count = state["value"], state["count"]


def until(condition, seconds: float = 10.0) -> None:
    clock = SystemClock()
    end = clock.now() + seconds
    while not condition():
        assert clock.now() < end, "it never came true"
        clock.sleep(0.002)


class Story:
    """One training; `deaths` are (rank, step, place), each once."""

    def __init__(self, *deaths) -> None:
        self.deaths, self.seen, self.starts = list(deaths), {}, []
        self.job = None

    def train(self, **terms):
        self.job = Job(workers=3, servers=2, target=200, **terms)
        return self.job.run(self)

    def die(self, run, place: str) -> None:
        if (run.rank, run.step, place) in self.deaths:
            self.deaths.remove((run.rank, run.step, place))
            if run.rank == 0:  # a worker/0 that dies before its state is with the servers cannot be replaced in mid-run
                until(lambda: any(run.step in server.mind._asides._whole for server in self.job._servers))
            raise Killed

    def __call__(self, run):
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        for index, parameter in enumerate(model.parameters()):  # threads share torch's generator
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
        average = Average()
        run.track(average=average)
        self.starts.append((run.rank, run.step))
        data = [(index, torch.randn(6, generator=torch.Generator().manual_seed(index))) for index in range(26)]
        loader = run.loader(data, batch_size=8)
        for epoch in run.epochs(3):
            for indices, x in loader:
                self.seen[run.step, run.rank] = (epoch, indices.tolist())
                optimizer.zero_grad()
                self.die(run, "before the forward")
                out = model(x)
                average.add(out)
                (out - x.sum(1, keepdim=True)).square().mean().backward()
                self.die(run, "after the backward")
                optimizer.step()
                self.die(run, "after the step")
                scheduler.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return state, optimizer.param_groups[0]["lr"], average.value.item(), average.count


@cache
def undisturbed(staleness: int):
    story = Story()
    return story.train(staleness=staleness), story.seen


PLACES = ["before the forward", "after the backward", "after the step"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_is_killed_is_replaced_and_the_result_is_the_same_to_the_bit(rank, place):
    if (rank, place) == (0, "after the step"):
        pytest.skip("rank 0 died before it left its state for the next clock: nobody else has it")
    expected, examples = undisturbed(0)
    story = Story((rank, 5, place))
    found = story.train()
    assert not story.deaths
    assert len(story.job.cuts) == 1
    assert story.starts[3:] == [(rank, story.job.cuts[0] + 1)]
    assert story.seen == examples
    for (state, lr, value, count), (state_0, lr_0, value_0, count_0) in zip(found, expected, strict=True):
        assert (lr, count) == (lr_0, count_0)
        for name, tensor in state.items():
            if "running" not in name and "batches" not in name:
                assert torch.equal(tensor, state_0[name]), name
        del value, value_0
    for name, tensor in found[0][0].items():  # of buffers rank 0's count
        assert torch.equal(tensor, expected[0][0][name]), name
    assert found[0][2] == expected[0][2]


def test_one_after_the_other_in_one_training():
    expected, examples = undisturbed(0)
    story = Story((1, 2, PLACES[0]), (2, 4, PLACES[1]), (1, 6, PLACES[2]), (0, 8, PLACES[0]))
    found = story.train()
    assert len(story.job.cuts) == 4
    assert story.seen == examples
    for name, tensor in found[0][0].items():
        assert torch.equal(tensor, expected[0][0][name]), name
