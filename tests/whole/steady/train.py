"""A small job for the tests of the whole: learns a plane, slowly enough to be disturbed, in one of several ways."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import time

import torch
from torch.utils.data import TensorDataset

import psctl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step takes at least; none after a resume")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds before the backward of a step")
    parser.add_argument("--keep-pace", action="store_true", help="so many after a resume too")
    parser.add_argument("--raise-at", type=int, default=-1, help="step at which rank 1 raises")
    parser.add_argument("--hang-at", type=int, default=-1, help="step at which rank 1 stops moving")
    parser.add_argument("--loaders", type=int, default=0, help="data-loader children a worker")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--gamma", type=float, default=0.5, help="by which each epoch's learning rate falls")
    parser.add_argument("--values", action="store_true", help="rank 0 prints a digest of its values after each epoch")
    parser.add_argument("--hold-at", type=int, default=-1, help="step at which rank 1 holds the interpreter for 20 s")
    given = parser.parse_args()

    run = psctl.init()
    model = torch.nn.Sequential(
        torch.nn.Linear(8, given.width), torch.nn.BatchNorm1d(given.width), torch.nn.Linear(given.width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=given.gamma)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    torch.manual_seed(1)
    x = torch.randn(320, 8)
    y = x.sum(dim=1, keepdim=True)
    loader = run.loader(TensorDataset(x, y), batch_size=32, num_workers=given.loaders)
    for epoch in run.epochs(given.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            time.sleep(given.compute)
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
            disturb(run, given)
            time.sleep(0.0 if run.resumed and not given.keep_pace else given.pause)
        scheduler.step()
        if given.values:
            print_values(run, model, epoch)
        else:
            print(f"rank {run.rank} epoch {epoch} loss {loss.item():.4f}", flush=True)
    digest = sum(float(value.double().abs().sum()) for value in model.state_dict().values())
    print(f"digest {digest!r}", flush=True)
    run.report(digest=digest)


def print_values(run: psctl.Run, model: torch.nn.Module, epoch: int) -> None:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    if run.rank == 0:
        print(f"epoch {epoch} values {digest.hexdigest()[:16]}", flush=True)


def disturb(run: psctl.Run, given: argparse.Namespace) -> None:
    if run.rank != 1:
        return
    if run.step == given.raise_at:
        raise ValueError(f"NaN loss at step {run.step} on purpose, pid {os.getpid()}")
    if run.step == given.hang_at:
        time.sleep(10_000)
    if run.step == given.hold_at:
        ctypes.PyDLL(None).sleep(20)  # PyDLL keeps the interpreter's lock


if __name__ == "__main__":
    main()
