"""Trains two parameters and calls every collective; --kill-at N ends worker 1 once, while the other waits in one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

import psctl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--stop-at", type=int, default=0)
parser.add_argument("--sleep-at", type=int, default=0)
parser.add_argument("--mark", default="")
given = parser.parse_args()

run = psctl.init()
world, rank = run.world, run.rank
run.barrier()
assert run.broadcast({"steps": given.steps, "rank": rank}, root=world - 1)["rank"] == world - 1
model = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(4 * given.steps, 2, generator=torch.Generator().manual_seed(1)))
seen = 0
for _ in run.epochs(1):
    for (x,) in run.loader(data, batch_size=4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        seen += run.all_reduce(len(x))
        if rank == 1 and run.step == given.kill_at and not Path(given.mark).exists():
            Path(given.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and run.step == given.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and run.step == given.sleep_at:
            time.sleep(10_000)
        total = run.all_reduce(torch.full((100_000,), rank + 1.0))
        assert total[0] == total[-1] == world * (world + 1) / 2
        run.report(loss=float(total[0]))

parts = run.all_to_all([f"{rank}>{other}" for other in range(world)])
assert parts == [f"{other}>{rank}" for other in range(world)], parts
assert run.scatter(list(range(world)) if rank == 0 else None) == rank
assert run.reduce_scatter(torch.ones(world * 3)).tolist() == [float(world)] * 3
assert run.gather(torch.ones(rank + 1), root=1) is None or rank == 1
assert run.reduce(rank, "max", root=0) == (world - 1 if rank == 0 else None)
if rank < 2:
    assert run.all_gather(rank, group=run.group([1]) | run.group([0])) == [1, 0]
try:
    run.all_reduce(torch.ones(3 + (rank == 1)))
except psctl.errors.UsageError as error:
    wrong = error.message
print("calls", json.dumps({"rank": rank, "strategy": run.strategy, "seen": seen, "wrong": wrong}), flush=True)
