"""A model with rows on servers, each of whose elements grows by 1 in a step; trained, or read by a group."""

from __future__ import annotations

import sys

import torch
from torch import nn

import psctl

STEPS = 60
KEYS = torch.tensor([[1, 2], [3, 3]])


class Rows(nn.Module):
    """An embedding, a bag of rows, and one dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"optimizer": {"name": "sgd", "lr": 1.0}, "initial": 0.0}
        self.items = psctl.nn.SparseEmbedding(None, 4, **rows)
        self.bags = psctl.nn.SparseEmbeddingBag(100, 4, mode="sum", pool="server", **rows)
        self.dense = nn.Parameter(torch.zeros(3))

    def forward(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.items(keys), self.bags(keys)


def train() -> None:
    run = psctl.init()
    model = Rows()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while run.step < STEPS:
        optimizer.zero_grad()
        items, bags = model(KEYS)
        loss = -(items.sum() + bags.sum() + model.dense.sum())
        loss.backward()
        optimizer.step()
        run.report(loss=loss)


def read() -> None:
    reader = psctl.init_reader()
    model = Rows()
    for step in reader.steps(model):
        with torch.no_grad():
            items, bags = model(KEYS)
            absent, _ = model(KEYS + 50)
        found = [step, float(model.dense[0]), float(items[0, 0, 0]), float(bags[0, 0]), float(absent.abs().max())]
        print("read", *(f"{each:g}" for each in found), items.requires_grad, flush=True)


if __name__ == "__main__":
    {"train": train, "read": read}[sys.argv[1]]()
