"""A table of rows of an optimizer, of which each period between two checkpoints changes a share."""

from __future__ import annotations

import argparse
import time

import torch

import psctl

PERIOD = 5
"""Steps between two checkpoints."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--share", type=float, default=0.01, help="of the rows change between two checkpoints")
    arguments.add_argument("--saves", type=int, default=8)
    arguments.add_argument("--pause", type=float, default=1.0, help="seconds of a step")
    given = arguments.parse_args()
    run = psctl.init()
    store = run.store("rows", consistency="bsp")
    store.declare(int, shape=(16,), optimizer={"name": "adagrad", "lr": 0.1})
    model = torch.nn.Linear(1, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    store.push(range(given.rows), torch.ones(given.rows, 16)).wait()
    store.clock()
    count = int(given.rows * given.share / PERIOD)
    for x in run.loader([torch.ones(1)] * (PERIOD * given.saves), batch_size=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        keys = torch.randperm(given.rows, generator=torch.Generator().manual_seed(run.step))[:count]
        store.push(keys, torch.ones(count, 16)).wait()
        store.clock()
        run.report()
        time.sleep(given.pause)


if __name__ == "__main__":
    main()
