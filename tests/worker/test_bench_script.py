"""What every worker of `psctl bench` does itself; whole runs are in tests/whole/test_bench.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psctl.job.bench_messages import BenchEffort
from psctl.worker.bench_script import BenchTurns, FixedGradient


def test_autograd_takes_the_given_gradient_as_it_is() -> None:
    """A copy of it would be measured with the sum: 60 to 300 ms of 100 MB on four hosts."""
    parameter, gradient = nn.Parameter(torch.zeros(1000)), torch.arange(1000.0)
    parameter.grad = None
    FixedGradient.apply(parameter, gradient).backward()
    assert parameter.grad.data_ptr() == gradient.data_ptr()
    assert parameter.grad.equal(torch.arange(1000.0))


@pytest.mark.parametrize(
    ("first", "later", "repeats"),
    [
        (0.001, 0.001, 50),
        (0.15, 0.006, 8),  # disturbed: it is not one of the slow ones
        (0.15, 0.15, 1),
        (0.25, 0.001, 1),  # slow enough to take it at its word
        (0.001, 1e-9, 200),
    ],
)
def test_short_operations_are_timed_together_even_if_the_first_was_disturbed(
    first: float, later: float, repeats: int
) -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return later

    assert BenchTurns(BenchEffort(lasting=0.05)).repeats(first, measure) == repeats
    assert asked == ([] if first > 0.2 else [3])
