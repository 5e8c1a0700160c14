"""Every example moves a value of its own, so the values say how often each was in a step that counts.

Each rank writes what it took, a line a batch, to RESULT.RANK.PID; rank 0 writes the values to RESULT at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import psctl

EXAMPLES = 96


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10, help="of 12 steps")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds a step")
    parser.add_argument("--hold", type=int, nargs="*", default=[], help="steps after which rank 0 waits for RESULT.go")
    parser.add_argument("--shards", type=int, default=0, help="read a stream of so many shards")
    given = parser.parse_args()

    run = psctl.init()
    model = nn.Linear(EXAMPLES, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = run.prepare(model, optimizer)
    data = list(torch.eye(EXAMPLES, dtype=torch.float64))
    stream = run.stream(range(given.shards), lambda shard: data[shard :: given.shards]) if given.shards else data
    loader = run.loader(stream, batch_size=8)
    result = os.environ["RESULT"]
    with Path(f"{result}.{run.rank}.{os.getpid()}").open("w", buffering=1) as taken:
        for epoch in run.epochs(given.epochs):
            for x in loader:
                print(json.dumps([run.step, epoch, x.argmax(1).tolist(), run.world]), file=taken)
                optimizer.zero_grad()
                loss = model(x).mean()
                loss.backward()
                time.sleep(given.pause)
                optimizer.step()
                run.report(loss=loss)
                while run.rank == 0 and run.step in given.hold and not Path(f"{result}.go{run.step}").exists():
                    time.sleep(0.05)
    run.wait()
    if run.rank == 0:
        Path(result).write_text(json.dumps([-one for one in model.weight.detach().reshape(-1).tolist()]))


if __name__ == "__main__":
    main()
