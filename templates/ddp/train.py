"""Plain DistributedDataParallel over Gloo, with nothing of psctl: what torchrun sets is enough. Parts two spirals."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 30


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on two noisy spirals and which of the two each is on; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    along = torch.rand(count, generator=random).sqrt() * 3 * math.pi
    angle = along + labels * math.pi
    points = torch.stack([along * angle.cos(), along * angle.sin()], dim=1) / (3 * math.pi)
    return points + 0.01 * torch.randn(count, 2, generator=random), labels


def main() -> None:
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment
    torch.manual_seed(0)
    data = TensorDataset(*spirals(2000, seed=0))
    sampler = DistributedSampler(data, seed=0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=100 // dist.get_world_size(), sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0 and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}/{EPOCHS} loss {loss.item():.4f}", flush=True)

    points, labels = spirals(500, seed=1)
    with torch.no_grad():
        right = (net(points).argmax(dim=1) == labels).float().mean().item()
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: accuracy {right:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
