"""Reads the model of buckets.py from the servers while it trains; what bench/readers.py runs beside it."""

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
    arguments.add_argument("--every", type=int, default=1)
    options = arguments.parse_args()

    torch.set_num_threads(1)
    reader = psctl.init_reader()
    model = nn.Sequential(*(Layer(0.0, options.width) for _ in range(options.layers)))
    times, steps, began = [], [], time.perf_counter()
    for step in reader.steps(model, every=options.every):
        times.append(time.perf_counter() - began)
        steps.append(step)
        began = time.perf_counter()
    print("read " + json.dumps({"reads": len(times), "seconds": statistics.median(times)}), flush=True)


if __name__ == "__main__":
    main()
