"""DataParallel compared with DistributedDataParallel: one process with a thread a replica, and one process a replica.

    python bench/data_parallel.py [--replicas 2] [--rounds 5] [--steps 20]

torch.nn.DataParallel needs GPUs, so its algorithm runs here on processor threads: in each step the first replica's
parameters are copied to the others, threads compute, the gradients are added on the first replica, which alone has an
optimizer. DistributedDataParallel is torch's own, over Gloo on loopback. Every replica has one thread of torch. The two
take turns; it prints the medians, and checks that both end with the same parameters up to rounding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
SHAPES = {"60 layers of 128": (60, 128), "4 layers of 1024": (4, 1024)}


def build(shape: str) -> nn.Sequential:
    """Return the model of a shape, with equal values in all processes."""
    layers, width = SHAPES[shape]
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def part(shape: str, replica: int, step: int) -> torch.Tensor:
    """Return a replica's part of a step's batch."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(BATCH, SHAPES[shape][1], generator=generator)


class Threads:
    """The algorithm of DataParallel; a thread a replica."""

    def __init__(self, shape: str, replicas: int) -> None:
        self.shape, self.step = shape, 0
        self.replicas = [build(shape) for _ in range(replicas)]
        self.optimizer = torch.optim.SGD(self.replicas[0].parameters(), lr=0.01)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            threads = [threading.Thread(target=self._compute, args=(index,)) for index in range(len(self.replicas))]
            with torch.no_grad():
                for other in self.replicas[1:]:
                    for mine, theirs in zip(self.replicas[0].parameters(), other.parameters(), strict=True):
                        theirs.copy_(mine)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            first, *others = (list(one.parameters()) for one in self.replicas)
            for index, mine in enumerate(first):
                assert mine.grad is not None
                for other in others:
                    mine.grad += other[index].grad
                mine.grad /= len(self.replicas)
            self.optimizer.step()
            self.step += 1

    def _compute(self, index: int) -> None:
        model = self.replicas[index]
        model.zero_grad()
        model(part(self.shape, index, self.step)).square().mean().backward()


def rank(index: int, replicas: int, store: str, shape: str, orders: Connection) -> None:
    """Train one replica of DistributedDataParallel by orders: a number of steps; 0 asks for the parameters and ends."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=replicas)
    model = DistributedDataParallel(build(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while steps := orders.recv():
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(part(shape, index, step)).square().mean().backward()
            optimizer.step()
            step += 1
        distributed.barrier()
        orders.send(time.perf_counter() - begin)
    orders.send([one.detach().numpy() for one in model.module.parameters()])
    distributed.destroy_process_group()


def timed(train: Callable[[int], None], steps: int) -> float:
    """Return the seconds of a number of steps."""
    begin = time.perf_counter()
    train(steps)
    return time.perf_counter() - begin


def compare(shape: str, replicas: int, rounds: int, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step: of threads, of processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(replicas)]
        processes = [
            context.Process(target=rank, args=(index, replicas, str(Path(folder, "store")), shape, theirs), daemon=True)
            for index, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        threads = Threads(shape, replicas)
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):  # the first one warms up
            for ours, _ in pipes:
                ours.send(steps)
            found = max(ours.recv() for ours, _ in pipes) / steps, timed(threads.train, steps) / steps
            if turn:
                seconds[1].append(found[0])
                seconds[0].append(found[1])
        for ours, _ in pipes:
            ours.send(0)
        ends = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
    for values in zip(threads.replicas[0].parameters(), *ends, strict=True):
        mine, *others = (torch.as_tensor(one) for one in values)
        assert all(torch.equal(others[0], other) for other in others), "ranks of one training differ"
        assert torch.allclose(mine, others[0], rtol=1e-4, atol=1e-6), "the two trainings differ"
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.replicas} replicas, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print("| model | parameters | threads: ms a step | processes: ms a step | threads / processes |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        threads, processes = compare(shape, options.replicas, options.rounds, options.steps)
        count = sum(one.numel() for one in build(shape).parameters()) / 1e6
        times = f"{threads * 1e3:.1f} | {processes * 1e3:.1f} | {threads / processes:.2f}"
        print(f"| {shape} | {count:.1f} M | {times} |")


if __name__ == "__main__":
    main()
