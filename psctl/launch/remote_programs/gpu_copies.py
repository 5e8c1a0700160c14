"""A program that measures copies between the GPUs of a host and its memory, with torch; it is sent like host_state.py.

A pair is measured alone: consecutive large copies for bytes/s, the median of several repeats in the slower direction;
copies of a few bytes, one at a time, for the latency. The host's memory is pinned, on the node of the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from typing import Any

Question = dict[str, Any]

LARGE = 64 << 20
"""Bytes of a copy that shows the rate: large beside the cost of a launch, small beside any GPU's memory."""

BEHIND = 4
REPEATS = 5
SMALL = 30


def measure(question: Question) -> Question:
    """Return the copies of every pair of GPUs, and of each with memory; `error` says why there are none.

    `nodes` holds the NUMA node of each GPU or null; `seconds` is the time after which no further pair is begun.
    """
    # numbered as nvidia-smi numbers them, all of them
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        torch: Any = importlib.import_module("torch")
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


def pair(torch: Any, a: str, one: Any, b: str, other: Any) -> Question:
    """Return the row of a pair: the slower direction's rate, the quicker one's seconds, the wider one's scatter."""
    directions = [one_direction(torch, one, other), one_direction(torch, other, one)]
    rate = min(directions, key=lambda each: statistics.median(each[0]))[0]
    spread = max((max(rates) - min(rates)) / statistics.median(rates) for rates, _ in directions)
    late = min(seconds for _, seconds in directions)
    return {"a": a, "b": b, "bandwidth": statistics.median(rate), "latency": late, "spread": spread}


def one_direction(torch: Any, source: Any, target: Any) -> tuple[list[float], float]:
    """Return the rates of the repeats and the seconds of a small copy, one way."""
    devices = [tensor.device for tensor in (source, target) if tensor.is_cuda]

    def settle() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def timed(to: Any, of: Any, times: int) -> float:
        settle()
        begin = time.perf_counter()
        for _ in range(times):
            to.copy_(of, non_blocking=True)
        settle()
        return time.perf_counter() - begin

    timed(target, source, 2)  # the first copy sets up what later ones use
    rates = [BEHIND * LARGE / timed(target, source, BEHIND) for _ in range(REPEATS)]
    return rates, statistics.median(timed(target[:4], source[:4], 1) for _ in range(SMALL))


@contextlib.contextmanager
def on_node(node: int | None) -> Any:
    """Run on the processors of a NUMA node, so that memory taken there lies there."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError):  # no such node, or not ours to use: memory lies where it may
        if node is not None:
            with open(f"/sys/devices/system/node/node{node}/cpulist", encoding="ascii") as file:
                os.sched_setaffinity(0, numbers(file.read()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numbers(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8"."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def main() -> int:
    print(json.dumps({"measure": measure}[sys.argv[1]](json.loads(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
