"""The steps of the whole training are foretold from the loop of epochs and its loader, or reported by the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psctl.errors import UsageError
from psctl.worker.run import Run
from tests.helpers.job_world import Job

DATA = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))


def prepared(run: Run) -> tuple[Any, Any]:
    net = nn.Linear(3, 1)
    return run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))  # type: ignore[no-any-return]


def train(run: Run, epochs: int = 3, pieces: int = 1, evaluate: bool = False, stop_after: int = 99) -> int:
    model, optimizer = prepared(run)
    loader, held_out = run.loader(DATA, batch_size=8), run.loader(DATA, batch_size=4, shuffle=False)
    for _ in run.epochs(epochs):
        for number, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().mean()
            if number % pieces < pieces - 1:
                with run.accumulate():
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
            if run.step == stop_after:
                return run.step
        for x, _ in held_out if evaluate else ():
            model(x)
    return run.step


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 18), ({"pieces": 2}, 9), ({"evaluate": True}, 18), ({"pieces": 3, "evaluate": True, "epochs": 2}, 4)],
)
def test_the_first_report_of_a_step_tells_the_last_step(options: dict[str, Any], steps: int) -> None:
    job = Job(2, 1, report_seconds=0.001)
    assert job.run(lambda run: train(run, **options)) == [steps, steps]
    assert {report.total for _, report in job.reports if report.step} == {steps}


def test_a_resumed_job_foretells_the_same_last_step() -> None:
    first = Job(2, 1, every=4)
    first.run(lambda run: train(run, stop_after=8))
    second = Job(1, 1, resume=first.saved[8])
    assert second.run(train) == [18]
    assert {report.total for _, report in second.reports if report.step > 8} == {18}


def _own_loop(run: Run, act: Callable[[Run], None]) -> None:
    model, optimizer = prepared(run)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        act(run)


def test_a_script_with_a_loop_of_its_own_tells_it_itself() -> None:
    job = Job(1, 1)
    job.run(lambda run: _own_loop(run, lambda run: run.report(loss=1.0)))
    assert {report.total for _, report in job.reports} == {0}
    job = Job(1, 1)
    job.run(lambda run: _own_loop(run, lambda run: run.report(loss=1.0, total=3)))
    assert job.reports[-1][1].total == 3
    assert all("total" not in each.metrics for _, report in job.reports for each in report.steps)


@pytest.mark.parametrize("total", [0, -1, 2.5, True, "all", 1 << 60])
def test_a_total_that_is_no_number_of_steps_is_refused(total: object) -> None:
    with pytest.raises(UsageError, match="expected the number of steps of the whole training"):
        Job(1, 1).run(lambda run: _own_loop(run, lambda run: run.report(total=total)))  # type: ignore[arg-type]
