"""Learn to read 1,797 handwritten digits: alone (`python train.py`), under torchrun, or on a cluster with psctl."""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import psctl

HERE = Path(__file__).resolve().parent
HELD_OUT = 359  # a fifth: never trained on, the same on every rank


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return what is trained on and what is held out; the split depends on nothing but its own seed."""
    with gzip.open(HERE / "digits.csv.gz") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(1998))
    pixels, labels = (table[order, :64] / 16.0).view(-1, 1, 8, 8), table[order, 64].long()
    held_out = TensorDataset(pixels[:HELD_OUT], labels[:HELD_OUT])
    return TensorDataset(pixels[HELD_OUT:], labels[HELD_OUT:]), held_out


class Net(nn.Module):
    """Two small convolutions with batch normalisation: 8 x 8 pixels in, 10 scores out."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.eyes(pixels))


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the share of `data` that the model, on `device`, reads right."""
    pixels, labels = (one.to(device) for one in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(pixels).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--batch-size", type=int, default=64, help="examples of one step, over all workers")
    arguments.add_argument("--lr", type=float, default=3e-3)
    options = arguments.parse_args()

    torch.set_num_threads(1)  # for a model as small as this, threads cost more than they help
    run = psctl.init()
    train, held_out = digits()
    net = Net().to(run.device)  # this process's GPU, or the CPU
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    loader = run.loader(train, batch_size=options.batch_size)

    for _ in run.epochs(options.epochs):
        for pixels, labels in loader:
            pixels, labels = pixels.to(run.device), labels.to(run.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
        scheduler.step()

    right = accuracy(model, held_out, run.device)
    run.report(accuracy=right)
    if os.environ.get("RANK", "0") == "0":
        print(f"accuracy {right:.4f} on {HELD_OUT} digits that were held out", flush=True)


if __name__ == "__main__":
    main()
