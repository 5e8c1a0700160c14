"""Every element of every parameter grows by exactly 1 in a step, and so does every row of a store."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import psctl

STEPS, PAUSE = int(os.environ.get("STEPS", "150")), float(os.environ.get("PAUSE", "0.02"))


class Counters(nn.Module):
    """Eight parameters of 64,000 elements and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(64_000)) for _ in range(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        """Return a loss whose gradient is -1 for every element."""
        self.calls += 1
        return -sum(layer.sum() for layer in self.layers)


def main() -> None:
    run = psctl.init()
    model = Counters()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    store = run.store("hits")
    while run.step < STEPS:
        optimizer.zero_grad()
        if run.rank == 0:  # before the step's values exist: a read of the last ones has all rows
            store.wait(store.push([1, 2, 3], torch.ones(3, 2)))
        loss = model()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
