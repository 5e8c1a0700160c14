"""The time in which all ranks get rank 0's start values; what bench/start_values.py runs."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import nn

import psctl
from psctl.sync import build_synchronizer, start_broadcast


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", type=int, default=50_000_000, help="bytes of the model")
    arguments.add_argument("--sum", action="store_true", help="as a sum with zeros, whatever the plan says")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    run = psctl.init()
    found: dict[str, Any] = {}

    def timed(backend: Any, me: int, start: Any, tensors: Any) -> None:
        start_broadcast.give_start_values(backend, me, None, [torch.zeros(1)])  # all ranks are here
        began = time.perf_counter()
        start_broadcast.give_start_values(backend, me, None if options.sum else start, tensors)
        start_broadcast.give_start_values(backend, me, None, [torch.zeros(1)])
        found.update(seconds=time.perf_counter() - began, algorithm=start.algorithm if start else "sum")

    build_synchronizer.give_start_values = timed
    model = nn.ParameterList([nn.Parameter(torch.ones(options.size // 40)) for _ in range(10)])
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    if run.rank == 0:
        print("measured " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
