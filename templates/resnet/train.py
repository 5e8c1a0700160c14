"""A small residual network for pictures of 32 x 32 pixels: made ones, or CIFAR-10 from a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import psctl

CLASSES = 10
RECORD = 1 + 3 * 32 * 32  # bytes of a picture in CIFAR-10's binary files: its class, then red, green and blue


def made(count: int, seed: int) -> TensorDataset:
    """Return pictures of ten kinds of stripes, by direction, with noise, brightness and place at random."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(CLASSES, (count,), generator=random)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    angle = kinds * torch.pi / CLASSES
    place = torch.rand(count, generator=random) * 2 * torch.pi
    waves = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
    stripes = torch.sin(0.8 * waves + place[:, None, None])
    light = 0.5 + torch.rand(count, 3, 1, 1, generator=random)
    pictures = stripes[:, None] * light + 4.0 * torch.randn(count, 3, 32, 32, generator=random)
    return TensorDataset(pictures, kinds)


def cifar(folder: Path, names: list[str]) -> TensorDataset:
    """Return the pictures of some of CIFAR-10's binary files."""
    data = torch.cat([torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8) for name in names])
    rows = data.view(-1, RECORD)
    return TensorDataset(rows[:, 1:].reshape(-1, 3, 32, 32).float() / 64 - 2, rows[:, 0].long())


class Varied(Dataset):
    """Pictures that are mirrored and moved by up to four pixels at random, differently in every epoch."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, kind = self.data[index]
        top, left = torch.randint(9, (2,)).tolist()  # psctl seeds each batch, so a repeated step sees the same
        return F.pad(picture, (4, 4, 4, 4))[:, top : top + 32, left : left + 32], kind


class Block(nn.Module):
    """Two convolutions beside a shortcut; the first one may halve the picture."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(width: int, blocks: int) -> nn.Module:
    """Return a network of three stages of `blocks` blocks, each stage with twice the channels and half the size."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for block in range(blocks):
            outputs = width * 2**stage
            parts.append(Block(inputs, outputs, stride=2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the share of pictures that the model, on `device`, names right."""
    model.eval()
    right = 0
    for first in range(0, len(data), 500):
        pictures, kinds = (part[first : first + 500].to(device) for part in data.tensors)
        right += int((model(pictures).argmax(dim=1) == kinds).sum())
    model.train()
    return right / len(data)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, default=None, help="folder with CIFAR-10's binary files; else made")
    arguments.add_argument("--pictures", type=int, default=4000, help="made ones to train on")
    arguments.add_argument("--epochs", type=int, default=5)
    arguments.add_argument("--batch-size", type=int, default=128, help="pictures of a step, over all workers")
    arguments.add_argument("--lr", type=float, default=0.1)
    arguments.add_argument(
        "--width", type=int, default=8, help="channels of the first stage; 16 and --blocks 3: ResNet-20"
    )
    arguments.add_argument("--blocks", type=int, default=1)
    options = arguments.parse_args()

    run = psctl.init()
    if options.data is not None:
        train = cifar(options.data, [f"data_batch_{number}.bin" for number in range(1, 6)])
        held_out = cifar(options.data, ["test_batch.bin"])
    else:
        train, held_out = made(options.pictures, seed=1), made(1000, seed=2)

    net = resnet(options.width, options.blocks).to(run.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    loader = run.loader(Varied(train), batch_size=options.batch_size)

    for _ in run.epochs(options.epochs):
        for pictures, kinds in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pictures.to(run.device)), kinds.to(run.device))
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
        scheduler.step()
        run.report(accuracy=accuracy(model, held_out, run.device))

    right = accuracy(model, held_out, run.device)
    if os.environ.get("RANK", "0") == "0":
        print(f"accuracy {right:.4f} on {len(held_out)} pictures that were held out", flush=True)


if __name__ == "__main__":
    main()
