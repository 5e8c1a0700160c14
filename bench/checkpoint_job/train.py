"""Steps of a 25 M-parameter model (100 MB); prints the time of steps with and without a save between them.

Each layer takes its time on a device that leaves the host's processor alone: a third of it forward, two thirds
backward.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

import psctl

WIDTH, LAYERS = 1020, 24  # 24 * (1020 * 1020 + 1020) = 25.0 M parameters
EVERY = 10  # steps from one save to the next, as in job.yaml


class _Device(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """A linear layer that takes `seconds` forward and twice as long backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self._seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, values: Tensor) -> Tensor:
        return _Device.apply(torch.tanh(self.linear(values)), self._seconds)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--compute", type=float, default=1.0, help="seconds of a step on the device")
    arguments.add_argument("--saves", type=int, default=5)
    options = arguments.parse_args()

    torch.set_num_threads(1)
    run = psctl.init()
    model, optimizer = run.prepare(
        model := nn.Sequential(*(Layer(options.compute / LAYERS / 3) for _ in range(LAYERS))),
        torch.optim.SGD(model.parameters(), lr=1e-3),
    )
    values = torch.ones(2, WIDTH)
    for step in range(1, EVERY * (options.saves + 1)):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        computed = time.perf_counter()
        run.report()  # saves after the steps of the rule
        now = time.perf_counter()
        line = {
            "rank": int(os.environ.get("RANK", "0")), "step": step, "saves": step % EVERY == 0,
            "seconds": now - began, "report": now - computed,
        }  # fmt: skip
        print("measured", json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
