"""Steps of a model of many layers, as the job file has its gradients summed; what bench/buckets.py runs."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn
from train import Layer

import psctl


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--compute", type=float, default=0.5, help="seconds of a step on the device")
    arguments.add_argument("--before", type=int, default=3, help="steps that are not measured")
    arguments.add_argument("--steps", type=int, default=8)
    options = arguments.parse_args()

    torch.set_num_threads(1)
    run = psctl.init()
    layers = (Layer(options.compute / options.layers / 3, options.width) for _ in range(options.layers))
    model: nn.Module = nn.Sequential(*layers)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    values, times = torch.ones(2, options.width), []
    for _ in range(options.before + options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        run.report()
        times.append(time.perf_counter() - began)
    if run.rank == 0:
        print("measured " + json.dumps({"seconds": statistics.median(times[options.before :])}), flush=True)


if __name__ == "__main__":
    main()
