"""Training that counts in a store which example was taken how often: in the end each as often as there were epochs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import psctl

EXAMPLES = 320


class Numbered(Dataset):
    """Examples that know their number."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / EXAMPLES), index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--consistency", default="asp")
    parser.add_argument("--dies", type=int, default=0, help="worker/1, after this step and before its clock ends")
    given = parser.parse_args()
    run = psctl.init()
    store = run.store("taken", consistency=given.consistency)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs(given.epochs):
        for inputs, numbers in run.loader(Numbered(), batch_size=32):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            store.push(numbers, torch.ones(len(numbers), 1))
            store.push("steps", 1.0)
            if given.dies:
                store.flush()  # what has not arrived is lost with its worker
            optimizer.step()
            if given.dies and run.rank == 1 and run.step == given.dies and not Path(os.environ["DIED"]).exists():
                Path(os.environ["DIED"]).touch()
                time.sleep(2.5)  # until heartbeats, one a second, have reported what a replacement needs
                os.kill(os.getpid(), signal.SIGKILL)
            if given.consistency != "asp":
                store.clock()
            run.report(loss=loss, epoch=epoch)
            time.sleep(given.pause)
    store.flush()
    store.push("ended", 1.0).wait()
    while store.pull("ended") < run.world:
        if given.consistency != "asp":
            store.clock()
        time.sleep(0.02)
    taken = store.pull(range(EXAMPLES))[1].flatten()
    steps = store.pull("steps").item() / run.world
    print(f"taken {len(taken)} examples {taken.min():.0f} to {taken.max():.0f} times, steps {steps:g}", flush=True)


if __name__ == "__main__":
    main()
