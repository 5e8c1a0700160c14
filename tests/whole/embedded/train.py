"""A hybrid model whose values are compared bit by bit: rank 0 prints a hash of the dense values and of all rows."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import psctl
from psctl.nn import SparseEmbedding, SparseEmbeddingBag
from psctl.sparse.model_rows import ModelRows

KEYS = 200


class Net(nn.Module):
    def __init__(self, consistency: str, pool: str, filters: list[object]) -> None:
        super().__init__()
        ftrl, adagrad = {"name": "ftrl", "alpha": 0.1, "l1": 0.01}, {"name": "adagrad", "lr": 0.05}
        more = {"dtype": torch.float64, "consistency": consistency}
        self.wide = SparseEmbeddingBag(None, 1, mode="sum", optimizer=ftrl, pool=pool, **more)
        self.deep = SparseEmbedding(KEYS, 4, optimizer=adagrad, initial={"normal": 0.3}, filters=filters, **more)
        self.dense = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(x) + self.dense(self.deep(x).flatten(1))).squeeze(1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, KEYS, (310, 3), generator=generator)
    return TensorDataset(x, (x.sum(dim=1) % 7 / 7.0).double())


def die_before_the_clock(at: int) -> None:
    """Let this process be killed once, after the dense step `at` and before the end of the stores' clock."""
    once, end = Path(os.environ["DIED"]), ModelRows.end_step

    def end_or_die(rows: ModelRows, step: int, *, saves: bool) -> None:
        if step == at - 1 and not once.exists():
            time.sleep(2.5)  # until heartbeats, one a second, have reported what a replacement needs
        if step == at and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        end(rows, step, saves=saves)

    ModelRows.end_step = end_or_die


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--consistency", default="bsp")
    parser.add_argument("--pool", default="auto")
    parser.add_argument("--filters", type=json.loads, default=[])
    parser.add_argument("--dies", type=int, default=0, help="worker 1 is killed before it ends the clock of this step")
    parser.add_argument("--prefetch", action="store_true")
    given = parser.parse_args()
    run = psctl.init()
    if given.dies and run.rank == 1:
        die_before_the_clock(given.dies)
    net = Net(given.consistency, given.pool, given.filters)
    model, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
    announced = (lambda batch: {net.deep: batch[0]}) if given.prefetch else None
    for _ in run.epochs(given.epochs):
        for x, y in run.loader(data(), batch_size=32, keys=announced):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
            time.sleep(0.0 if run.resumed else given.pause)
    if run.rank == 0:
        keys = torch.arange(KEYS)
        with torch.no_grad():
            found = [*model.state_dict().values(), model.wide(keys[:, None]), model.deep(keys)]
        flat = torch.cat([one.flatten() for one in found])
        bits = blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
        rows = len(net.deep.rows.store.pull(range(KEYS))[0])
        print(f"steps {run.step} rows {rows} sum {flat.sum().item():.15f} bits {bits}", flush=True)


if __name__ == "__main__":
    main()
