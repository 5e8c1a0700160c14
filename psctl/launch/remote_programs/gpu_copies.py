"""Measures copies between the GPUs of a host and its memory with torch. The program is sent like host_state.py.

One pair is measured at a time. The rate is the median over several repeats of consecutive large copies, in the slower
direction; the latency is that of copies of a few bytes, one after the other. The host's memory is pinned and on the
NUMA node of the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

Tensor = Any
"""A tensor. Any: torch is loaded by name, on hosts that have it."""

LARGE = 64 << 20
"""Bytes of a copy that measures the rate: its time is long beside a launch, its size small beside a GPU's memory."""

CONSECUTIVE = 4
"""Large copies per repeat, queued without a wait between them."""

REPEATS = 5
"""Repeats of the rate's measurement."""

SMALL = 30
"""Copies of a few bytes for the latency."""


def measure(question: Question) -> Question:
    """Measure the copies between all GPUs, and between each GPU and memory; `error` is the reason if there are none.

    Args:
        question: `nodes`: the NUMA node of each GPU or null; `seconds`: the time after which no further pair starts.
    """
    # all GPUs, numbered as by nvidia-smi
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return {"copies": [], "error": f"torch cannot be loaded there: {error}"}
    if not torch.cuda.is_available():
        return {"copies": [], "error": "its torch sees no GPU"}
    count, end = torch.cuda.device_count(), time.monotonic() + question["seconds"]
    data = [torch.empty(LARGE, dtype=torch.uint8, device=f"cuda:{index}") for index in range(count)]
    copies = []
    for index in range(count):
        node = question["nodes"][index] if index < len(question["nodes"]) else None
        with on_node(node):
            memory = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
            copies.append(pair(torch, f"CPU{node or 0}", memory, f"GPU{index}", data[index]))
    for a in range(count):
        for b in range(a + 1, count):
            if time.monotonic() < end:
                copies.append(pair(torch, f"GPU{a}", data[a], f"GPU{b}", data[b]))
    return {"copies": copies, "error": ""}


def pair(torch: ModuleType, a: str, one: Tensor, b: str, other: Tensor) -> Question:
    """Return the row of a pair: the lower rate, the lower latency and the larger range of its two directions."""
    directions = [one_direction(torch, one, other), one_direction(torch, other, one)]
    rate = min(directions, key=lambda each: statistics.median(each[0]))[0]
    spread = max((max(rates) - min(rates)) / statistics.median(rates) for rates, _ in directions)
    late = min(seconds for _, seconds in directions)
    return {"a": a, "b": b, "bandwidth": statistics.median(rate), "latency": late, "spread": spread}


def one_direction(torch: ModuleType, source: Tensor, target: Tensor) -> tuple[list[float], float]:
    """Return the rates of the repeats, and the seconds of a small copy, from `source` to `target`."""
    devices = [tensor.device for tensor in (source, target) if tensor.is_cuda]

    def settle() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def timed(to: Tensor, of: Tensor, times: int) -> float:
        settle()
        begin = time.perf_counter()
        for _ in range(times):
            to.copy_(of, non_blocking=True)
        settle()
        return time.perf_counter() - begin

    timed(target, source, 2)  # warm-up: the first copy makes mappings and streams
    rates = [CONSECUTIVE * LARGE / timed(target, source, CONSECUTIVE) for _ in range(REPEATS)]
    return rates, statistics.median(timed(target[:4], source[:4], 1) for _ in range(SMALL))


@contextlib.contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Run the block on the processors of a NUMA node, so that memory is allocated there."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError):  # no such node, or not permitted: memory is allocated anywhere
        if node is not None:
            with open(f"/sys/devices/system/node/node{node}/cpulist", encoding="ascii") as file:
                os.sched_setaffinity(0, numbers(file.read()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numbers(text: str) -> set[int]:
    """Return the numbers in a list of the kernel's form: "0-3,8"."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def main() -> int:
    print(json.dumps({"measure": measure}[sys.argv[1]](json.loads(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
