"""One rank of a real world on Gloo: sums vectors and trains a small model by every strategy, and writes the results.

python gloo_world.py FILE        with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from psctl.clock import SystemClock
from psctl.collectives.allreduce_backends import EngineAllReduce, ScheduleAllReduce
from psctl.collectives.channel import BatchChannel
from psctl.collectives.player import SchedulePlayer
from psctl.errors import PsctlError
from psctl.job.training_messages import Decision
from psctl.process import compiler_import
from psctl.schedule.algorithms import catalog
from psctl.sync.bucket_allreduce import EngineGroup, find_shared_gpu
from psctl.types import STRATEGIES, Layout
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession

NAMES = tuple(name for name in STRATEGIES if name not in ("native", "ps"))
LENGTHS = (0, 1, 3, 37, 1003, 300_000, 700_000)  # of float32: the last is too long to go step by step


def options(world: int) -> catalog.ScheduleOptions:
    ranks = tuple(range(world))
    return catalog.ScheduleOptions(
        chunks=3, pieces=2, weights=(3, *(1 for _ in ranks[1:])), rings=((ranks, 2), (ranks[::-1], 1)),
        trees=((0, tuple((0, rank) for rank in ranks[1:]), 2), (world - 1, tuple((r, r - 1) for r in ranks[:0:-1]), 1)),
        groups=(ranks[: world // 2], ranks[world // 2 :]),
    )  # fmt: skip


# ---- sums ----------------------------------------------------------------------------------------------------------


def sums(rank: int, world: int, name: str) -> dict[str, Any]:
    """Sum vectors of all lengths twice; returns whether whole numbers were right, and the bits of the floats."""
    device = torch.device("cpu")
    played = ScheduleAllReduce(catalog.build(name, world, options(world)), device)
    generator = torch.Generator().manual_seed(rank)
    right, bits = True, hashlib.sha256()
    for length in (*LENGTHS, *LENGTHS[-3::-1]):
        whole = torch.arange(length, dtype=torch.int32) * (rank + 1)
        real = torch.randn(length, generator=generator)
        first, second = played.put(whole), played.put(real)  # both in progress at once
        first.wait()
        second.wait()
        right = right and torch.equal(whole, torch.arange(length, dtype=torch.int32) * (world * (world + 1) // 2))
        bits.update(real.numpy().tobytes())
    played.close()
    return {"right": right, "bits": bits.hexdigest()}


def batched(rank: int, world: int, name: str) -> bool:
    """Sum with each step's messages in one batch, as NCCL requires."""
    schedule = catalog.build(name, world, options(world))
    player = SchedulePlayer(schedule, rank, BatchChannel(dist.new_group()))
    right = True
    for length in (0, 37, 5000):
        vector = torch.arange(length) * (rank + 1)
        player.play(vector)
        right = right and torch.equal(vector, torch.arange(length) * (world * (world + 1) // 2))
    return right


# ---- training ------------------------------------------------------------------------------------------------------


class Decided(StandaloneSession):
    """A session with the decision of a coordinator."""

    period = 1

    def prepare(self, layout: Layout, buffers: tuple[str, ...], outer: bool = False, on_gpus: bool = False) -> Decision:
        given = {} if self._strategy in ("native", "alone") else msgspec.to_builtins(options(self._welcome.world))
        plain = json.loads(json.dumps(given))  # as it is decoded from a message
        return Decision(self._strategy, "worker", layout, [], options=plain, period=self.period)


class Net(nn.Module):
    """Three layers; one is used by some ranks alone, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 23), nn.Linear(23, 3)
        self.odd, self.never = nn.Linear(9, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def train(rank: int, world: int, name: str, period: int = 1) -> dict[str, Any]:
    """Train with uneven shares, accumulated gradients and clipping; returns the values, exactly."""
    seat = Decided(rank, world, name)
    seat.period = period
    run = Run(seat, lambda _: None, SystemClock())  # type: ignore[arg-type, return-value]
    torch.manual_seed(1 + rank)  # rank 0's values count
    net = Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer = run.prepare(net, optimizer)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(62, 9, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(dim=1).sin(), x[:, 0] * x[:, 1], x[:, 2]], dim=1)
    norms = []
    for _ in run.epochs(3):
        for inputs, targets in run.loader(TensorDataset(x, y), batch_size=18):
            optimizer.zero_grad()
            with run.accumulate():
                functional.mse_loss(model(inputs), targets).backward()
            functional.mse_loss(model(inputs), targets).backward()
            norms.append(float(run.clip_grad_norm(0.5)).hex())
            optimizer.step()
            run.report(loss=0.0)
    values = [number.hex() for each in model.state_dict().values() for number in each.flatten().tolist()]
    found = {
        "values": values,
        "norms": norms,
        "step": run.step,
        "strategy": run.strategy,
        "moved": run._synchronizer.bytes_moved,
    }
    run.finish()
    return found


def gpus(rank: int) -> list[Any]:
    """Return the pairs found for ranks 1 and 3 on one GPU and for one GPU a rank, and the device of a sum."""
    found: list[Any] = [find_shared_gpu(f"GPU-{1 if rank == 3 else rank}"), find_shared_gpu(f"GPU-{rank}")]
    group = EngineGroup(torch.device("cpu"), lambda device: "GPU-0")  # all ranks report the same GPU
    vector = torch.ones(3)
    EngineAllReduce(group.group).put(vector).wait()
    return [*found, group.device.type, vector.tolist()]


def loss(rank: int, world: int) -> dict[str, Any]:
    """End the last rank while the others sum a long vector; return their errors."""
    played = ScheduleAllReduce(catalog.build("ring", world, options(world)), torch.device("cpu"))
    played.put(torch.ones(2_000_000)).wait()
    if rank == world - 1:
        os._exit(0)
    began, code = time.monotonic(), ""
    try:
        played.put(torch.ones(2_000_000)).wait()
    except PsctlError as error:
        code = error.code
    seconds = time.monotonic() - began
    played.close()
    return {"code": code, "seconds": seconds, "threads": threads()}


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("psctl")]


def main(file: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    document = {
        "sums": {name: sums(rank, world, name) for name in NAMES},
        "batched": {name: batched(rank, world, name) for name in NAMES if name != "cpu"},
        "trained": {name: train(rank, world, name) for name in ("native", *NAMES)},
        "apart": {name: train(rank, world, name, period=5) for name in ("native", "ring")},
        "gpus": gpus(rank),
        "alone": train(0, 1, "alone") if rank == 0 else {},
        "threads": threads(),
    }
    Path(file).write_text(json.dumps(document))
    document["loss"] = loss(rank, world)
    Path(file).write_text(json.dumps(document))
    os._exit(0)  # the engine's shutdown would wait for the lost rank


if __name__ == "__main__":
    compiler_import.arm()  # as in a job
    main(sys.argv[1])
