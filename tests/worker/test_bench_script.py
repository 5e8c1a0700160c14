"""What every worker of `psctl bench` does itself; whole runs are in tests/whole/test_bench.py."""

from __future__ import annotations

import torch
from torch import nn

from psctl.worker.bench_script import FixedGradient


def test_autograd_takes_the_given_gradient_as_it_is() -> None:
    """A copy of it would be measured with the sum: 60 to 300 ms of 100 MB on four hosts."""
    parameter, gradient = nn.Parameter(torch.zeros(1000)), torch.arange(1000.0)
    parameter.grad = None
    FixedGradient.apply(parameter, gradient).backward()
    assert parameter.grad.data_ptr() == gradient.data_ptr()
    assert parameter.grad.equal(torch.arange(1000.0))
