"""A small job whose last values are compared number by number: rank 0 writes them to the file that RESULT names."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import psctl

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
}


class Net(nn.Module):
    """Two layers, one frozen in between, and a scale that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed, self.last = nn.Linear(9, 23), nn.Linear(23, 23), nn.Linear(23, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.last(torch.tanh(self.fixed(torch.tanh(self.first(x)))))


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(94, 9, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(dim=1).sin(), x[:, 0] * x[:, 1], x[:, 2]], dim=1)
    return TensorDataset(x.to(dtype), y.to(dtype))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--epochs", type=int, default=20, help="of 5 steps")
    parser.add_argument("--clip", type=float, default=0.5, help="norm of the gradient; 0: it is not clipped")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step takes at least; none after a resume")
    given = parser.parse_args()

    dtype = getattr(torch, given.dtype)
    run = psctl.init()
    net = Net().to(dtype)
    groups = [
        {"params": net.first.parameters()},
        {"params": [*net.last.parameters(), net.scale], "lr": 0.004, "weight_decay": 0.01},
    ]
    optimizer = OPTIMIZERS[given.optimizer](groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    loader = run.loader(data(dtype), batch_size=20)  # shares are uneven, and the last step of an epoch has 14
    for _ in run.epochs(given.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if given.clip:
                run.clip_grad_norm(given.clip)
            optimizer.step()
            run.report(loss=loss)
            time.sleep(0.0 if run.resumed else given.pause)
        scheduler.step()
    if run.rank == 0:
        values = {
            name: [x.hex() for x in value.double().flatten().tolist()] for name, value in model.state_dict().items()
        }
        Path(os.environ["RESULT"]).write_text(json.dumps({"step": run.step, "world": run.world, "values": values}))


if __name__ == "__main__":
    main()
