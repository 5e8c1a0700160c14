"""The same script trains to the same values alone and under servers, wherever the optimizer steps."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from psctl.clock import SystemClock
from psctl.ps.server_optimizers import FIT
from psctl.worker.run import Run
from psctl.worker.standalone import ProgressLines, StandaloneSession
from tests.helpers.job_world import Job
from tests.helpers.manual_clock import ManualClock


def data(count=60) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(6, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def train(
    run: Run, model=None, make=lambda m: torch.optim.Adam(m.parameters(), lr=0.05), epochs=3, clip=None, batch=20
):
    model = model or Net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    loader = run.loader(data(), batch_size=batch)
    for _ in run.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            if clip is not None:
                run.clip_grad_norm(clip)
            optimizer.step()
            run.report(loss=loss)
        scheduler.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def alone(script, seed=0, **options):
    run = Run(StandaloneSession(0, 1, "alone", seed), None, SystemClock())
    result = script(run, **options)
    run.finish()
    return result


def assert_close(one, other, tolerance=1e-12) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 1)])
def test_workers_and_servers_train_as_one_process_does(workers, servers, update) -> None:
    results = Job(workers, servers, update=update).run(train)
    for result in results:
        assert_close(result, alone(train))


@pytest.mark.parametrize("update", ["server", "worker"])
def test_ragged_shares_are_weighted_by_examples(update) -> None:
    results = Job(3, 1, update=update).run(lambda run: train(run, batch=17))
    assert_close(results[2], alone(train, batch=17))


@pytest.mark.parametrize("update", ["server", "worker"])
def test_clipping_goes_by_the_joint_norm(update) -> None:
    results = Job(2, 2, update=update).run(lambda run: train(run, clip=0.05))
    assert_close(results[1], alone(train, clip=0.05), 1e-9)


def test_alone_the_lines_of_progress_count_every_example_once() -> None:
    said: list[str] = []
    clock = ManualClock()
    run = Run(StandaloneSession(0, 1, "alone"), None, clock, lines=ProgressLines(said.append, clock))
    net = Net()
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in run.epochs(2):
        for x, y in run.loader(data(), batch_size=20):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            clock.advance(2)
            optimizer.step()
            run.report(loss=1.25)
    run.finish()
    assert said == [
        "psctl: step 3 · epoch 0 · loss 1.25 · 10 examples/s",
        "psctl: step 6 · epoch 1 · loss 1.25 · 10 examples/s",
        "psctl: 6 steps in 12.0 s · loss 1.25 · 10 examples/s",
    ]


def test_random_numbers_are_a_function_of_seed_step_and_rank() -> None:
    def draws(run):
        net = Net()
        first = torch.rand(()).item()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        found = [first]
        for _ in run.epochs(1):
            for x, y in run.loader(data(), batch_size=20):
                found.append(torch.rand(()).item())
                with run.accumulate():
                    functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(random.random())
        return found

    once, again = alone(draws), alone(draws)
    assert once == again
    assert len(set(once)) == len(once), "every batch and step has its own"
    assert alone(lambda run: draws(run), seed=1) != once


@pytest.mark.parametrize(
    "name",  # the others in make soak: test_trajectories.py has servers step them all
    [name if name in ("AdamW", "SGD") else pytest.param(name, marks=pytest.mark.soak) for name in sorted(FIT)],
)
def test_every_optimizer_that_servers_step_trains_as_alone(name) -> None:
    def make(model):
        return FIT[name](model.parameters(), lr=0.01)

    ways = []

    def script(run):
        result = train(run, make=make, epochs=2)
        ways.append(run._synchronizer.update)
        return result

    first, second = Job(2, 2).run(script)
    assert ways == ["server", "server"]
    assert_close(first, second, 0.0)
    assert_close(first, alone(train, make=make, epochs=2), 1e-9)


def test_parameters_of_several_types_train_under_every_way() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.bfloat16)
            with torch.no_grad():
                for index, parameter in enumerate(self.parameters()):
                    parameter.fill_(0.1 * (index + 1))

        def forward(self, x):
            return self.narrow(torch.tanh(self.wide(x)).bfloat16()).float()

    def script(run):
        return train(run, model=Mixed(), epochs=1)

    one = alone(script)
    for update in ("server", "worker"):
        for result in Job(2, 2, update=update).run(script):
            assert {name: value.dtype for name, value in result.items()} == {name: v.dtype for name, v in one.items()}
            assert_close(result, one, 0.02)
