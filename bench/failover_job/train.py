"""Trains until the job is stopped; rank 0 writes when the values of each clock have arrived."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import psctl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True, help="file for rank 0's lines: step, seconds since the epoch")
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    run = psctl.init()
    model = nn.Sequential(nn.Linear(given.width, given.width), nn.Tanh(), nn.Linear(given.width, given.width))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x = torch.randn(4096, given.width)
    with open(given.log if run.rank == 0 else "/dev/null", "w", buffering=1) as log:
        for _ in run.epochs(1_000_000):
            for inputs in run.loader([*x], batch_size=32):
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.flip(1)).square().mean()
                loss.backward()
                optimizer.step()
                run.wait()
                print(run.step, time.time(), file=log)
                run.report(loss=loss)


if __name__ == "__main__":
    main()
