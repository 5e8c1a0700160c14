"""Steps of a 25 M-parameter model (100 MB) whose compute leaves the processor alone, and the seconds of each."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor, nn

import psctl

WIDTH, LAYERS = 1020, 24  # 24 * (1020 * 1020 + 1020) = 25.0 M parameters


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


class Net(nn.Module):
    """Linear layers that take `seconds` of a device, a third of it forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._seconds = seconds / LAYERS / 3

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = _Device.apply(torch.tanh(layer(values)), self._seconds)
        return values


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--compute", type=float, default=1.0, help="seconds of a step on the device")
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()

    torch.set_num_threads(1)
    run = psctl.init()
    own = Net(options.compute)
    model, optimizer = run.prepare(own, torch.optim.SGD(own.parameters(), lr=1e-3))
    times: list[float] = []
    began = time.perf_counter()
    for values in run.loader([torch.ones(WIDTH)] * (2 * 2 * options.steps), batch_size=2):
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        run.report()
        now = time.perf_counter()
        times.append(now - began)  # from the end of one step to the end of the next: with what lies between
        began = now
    print("measured", json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
