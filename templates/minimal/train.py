"""The smallest job: a line fitted to noisy points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import psctl


def main() -> None:
    points = torch.Generator().manual_seed(0)  # every rank makes the same points
    x = torch.rand(1000, 1, generator=points)
    y = 3.0 * x - 1.0 + 0.05 * torch.randn(1000, 1, generator=points)

    run = psctl.init()
    net = nn.Linear(1, 1).to(run.device)  # this process's GPU, or the CPU
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
    loader = run.loader(TensorDataset(x, y), batch_size=100)
    for _ in run.epochs(20):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs.to(run.device)), targets.to(run.device))
            loss.backward()
            optimizer.step()
            run.report(loss=loss)


if __name__ == "__main__":
    main()
