"""Steps of a model on one thread a worker; each enters the control group that limits its processor."""

from __future__ import annotations

import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import psctl

WIDTH, BATCH, STEPS = 640, 256, 200


def main() -> None:
    run = psctl.init()
    torch.set_num_threads(1)
    Path(os.environ[f"GROUP_{run.rank}"]).write_text(str(os.getpid()))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader(list(torch.randn(BATCH, WIDTH)), batch_size=BATCH)
    ends, own = [time.perf_counter()], []
    for _ in run.epochs(STEPS):
        for x in loader:
            own.append(len(x))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ends.append(time.perf_counter())
    run.wait()
    steps = [after - before for before, after in pairwise(ends)]
    print(json.dumps({"rank": run.rank, "step": statistics.median(steps[STEPS // 2 :]), "examples": own[-1]}))


if __name__ == "__main__":
    main()
