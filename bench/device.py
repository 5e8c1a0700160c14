"""Rates of copies between a GPU and the host, by the kind of host memory, and the share of them that compute hides.

    python bench/device.py [--megabytes 256] [--rounds 9]

Needs a GPU. `registered` is shared memory as an agent makes it, page-locked as psctl does it; `pinned` is memory of
torch's own allocator; `pageable` is neither. Rates are medians of rounds that take turns, in 10^9 bytes/s. The overlap
runs matrix products in eight parts, as a backward would, and after each part begins to copy a gradient (an eighth of
the bytes) as psctl does in training; times are until all is done and, for the host, until it was free to go on.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable

import torch

from psctl.agent.shm_broker import memfd
from psctl.sync.device_copies import CopySpan, CudaCopies
from psctl.sync.gpu_staging import Staging

PARTS = 8


def shared(size: int) -> torch.Tensor:
    """Return memory of a segment."""
    descriptor = memfd(size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32)


def seconds(work: Callable[[], object]) -> float:
    """Return how long the device and the host take for it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def rates(size: int, rounds: int) -> None:
    """Print the rates of copies by kind of memory."""
    copies, on_device = CudaCopies(), torch.randn(size // 4, device="cuda")
    kinds = {
        "pageable": torch.empty(size // 4),
        "pinned": torch.empty(size // 4, pin_memory=True),
        "registered": shared(size),
    }
    began = time.perf_counter()
    copies.lock(kinds["registered"])
    print(f"locking {size / 1e6:.0f} MB takes {time.perf_counter() - began:.3f} s, once\n")
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, host in kinds.items():
            for way, copy in (
                ("to the host", lambda host=host: copies.to_host([CopySpan(on_device, 0, host)]).wait()),
                ("to the GPU", lambda host=host: copies.to_devices([CopySpan(on_device, 0, host)]).wait()),
            ):
                taken = seconds(copy)
                if turn:
                    found.setdefault((name, way), []).append(size / taken / 1e9)
            assert torch.equal(host, on_device.cpu()), name
    print("| memory | to the host GB/s | to the GPU GB/s |\n|---|---|---|")
    for name in kinds:
        down, up = (statistics.median(found[name, way]) for way in ("to the host", "to the GPU"))
        print(f"| {name} | {down:.1f} | {up:.1f} |")
    copies.close()


def overlap(size: int, rounds: int) -> None:
    """Print the times of compute, of copies, and of both together."""
    staging = Staging(CudaCopies())
    host = staging.lock(shared(size))
    part = size // 4 // PARTS
    weights = torch.randn(4096, 4096, device="cuda") / 64
    gradients = [torch.empty(part, device="cuda") for _ in range(PARTS)]
    arrived: list[float] = []

    def step(compute: bool, copy: bool) -> float:
        """Return the seconds after which the host was free."""
        began, value = time.perf_counter(), weights
        arrived.clear()
        for index, gradient in enumerate(gradients):
            for _ in range(8 if compute else 0):
                value = value @ weights
            gradient.fill_(float(index))
            if copy:
                staging.copy_to_host([CopySpan(gradient, 0, host[index * part : (index + 1) * part])])
                staging.run_after_copies(lambda: arrived.append(time.perf_counter() - began))
        free = time.perf_counter() - began
        staging.settle()
        return free

    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, compute, copy in (("compute", True, False), ("copies", False, True), ("both", True, True)):
            frees: list[float] = []
            taken = seconds(lambda compute=compute, copy=copy, frees=frees: frees.append(step(compute, copy)))
            if turn:
                found.setdefault(name, []).append(taken)
                found.setdefault(f"{name}: the host is free after", []).extend(frees)
                if name == "both":
                    found.setdefault("both: the first part is on the host after", []).append(arrived[0])
    assert torch.equal(host, torch.arange(float(PARTS)).repeat_interleave(part))
    print(f"\n{size / 1e6:.0f} MB in {PARTS} parts\n\n| | ms |\n|---|---|")
    for name, each in found.items():
        print(f"| {name} | {1e3 * statistics.median(each):.2f} |")
    alone = {name: statistics.median(found[name]) for name in ("compute", "copies", "both")}
    hidden = (alone["compute"] + alone["copies"] - alone["both"]) / min(alone["compute"], alone["copies"])
    print(f"\n{hidden:.0%} of the shorter one is hidden behind the other")
    staging.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    size = given.megabytes * 1_000_000 // (4096 * PARTS) * 4096 * PARTS
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    rates(size, given.rounds)
    overlap(size, given.rounds)


if __name__ == "__main__":
    main()
