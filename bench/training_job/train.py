"""Steps of a 25 M-parameter model by turns: DistributedDataParallel over Gloo, and psctl as its job file says.

Each layer takes its time on a device that leaves the host's processor alone: a third of it forward, two thirds
backward. Bytes are what this host's network interfaces sent.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import psctl

WIDTH, LAYERS = 1020, 24  # 24 * (1020 * 1020 + 1020) = 25.0 M parameters


class _Device(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """A linear layer that takes `seconds` forward and twice as long backward."""

    def __init__(self, seconds: float, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self._seconds = nn.Linear(width, width), seconds

    def forward(self, values: Tensor) -> Tensor:
        return _Device.apply(torch.tanh(self.linear(values)), self._seconds)


def net(seconds: float) -> nn.Sequential:
    """Return the model; a step of it takes `seconds` of compute."""
    return nn.Sequential(*(Layer(seconds / LAYERS / 3) for _ in range(LAYERS)))


def sent() -> int:
    """Return the bytes that the interfaces of this network namespace sent, loopback left out."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split(":") for line in file.readlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


def steps(
    count: int, model: Callable[[Tensor], Tensor], optimizer: Any, tell: Callable[[], object], rows: int
) -> None:  # fmt: skip
    """Take so many steps."""
    values = torch.ones(rows, WIDTH)
    for _ in range(count):
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        tell()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--compute", type=float, default=2.5, help="seconds of a step on the device")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=4, help="of each, a round")
    arguments.add_argument("--before", type=int, default=1, help="steps of psctl before those that count")
    arguments.add_argument("--hook", action="store_true", help="psctl.accelerate_ddp instead of run.prepare")
    arguments.add_argument("--rows", type=int, default=2, help="of a worker's batch")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    run = psctl.init()
    own = net(options.compute)
    other = net(options.compute)
    other.load_state_dict(own.state_dict())
    model: nn.Module = own
    optimizer: torch.optim.Optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    if options.hook:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        model = psctl.accelerate_ddp(DistributedDataParallel(own))
    else:
        model, optimizer = run.prepare(own, optimizer)
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5)) if dist.is_initialized() else None
    if group is None:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    peer = DistributedDataParallel(other, process_group=group)
    theirs = torch.optim.SGD(other.parameters(), lr=1e-3)

    def ours(count: int) -> None:
        steps(count, model, optimizer, run.report, options.rows)
        run.wait()
        for parameter in model.parameters():  # the values are there
            parameter.sum()

    contestants: dict[str, Callable[[int], None]] = {
        "ddp": lambda count: steps(count, peer, theirs, lambda: None, options.rows),
        "psctl": ours,
    }
    contestants["ddp"](1)
    contestants["psctl"](options.before)
    for turn in range(options.rounds):
        for name, each in contestants.items():
            dist.barrier(group)
            before, spent, began = sent(), time.process_time(), time.perf_counter()
            each(options.steps)
            dist.barrier(group)
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
            line = {
                "turn": turn, "rank": int(os.environ.get("RANK", "0")), "name": name,
                "seconds": float(took) / options.steps, "sent": (sent() - before) / options.steps,
                "processor": (time.process_time() - spent) / options.steps,
            }  # fmt: skip
            print("measured", json.dumps(line), flush=True)
    dist.barrier(group)


if __name__ == "__main__":
    main()
