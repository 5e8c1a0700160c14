"""A table of many rows, of which each step changes few; rank 0 prints a hash of all rows at the end."""

from __future__ import annotations

import argparse
import time
from hashlib import blake2b

import torch
from torch.utils.data import TensorDataset

import psctl

ROWS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.1)
    given = parser.parse_args()
    run = psctl.init()
    store = run.store("rows", consistency="bsp")
    store.declare(int, shape=(4,), dtype=torch.float64, optimizer={"name": "adagrad", "lr": 0.1}, expire=25)
    model = torch.nn.Linear(1, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.epochs(4):
        for x, numbers in run.loader(TensorDataset(torch.ones(320, 1), torch.arange(320)), batch_size=32):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if run.step <= 2:
                store.push(range(ROWS), torch.ones(ROWS, 4, dtype=torch.float64))
            keys = numbers * 7 + 11 * (run.step % 4)
            store.push(keys, torch.sin(keys.double())[:, None].repeat(1, 4))
            store.clock()
            run.report(loss=loss)
            time.sleep(0.0 if run.resumed else given.pause)
    if run.rank == 0:
        keys, values = store.pull(range(ROWS))
        bits = blake2b(keys.numpy().tobytes() + values.numpy().tobytes(), digest_size=8).hexdigest()
        print(f"rows {len(keys)} bits {bits}", flush=True)


if __name__ == "__main__":
    main()
