"""Copies between GPUs, played by a torch that only keeps time: the right pairs, the slower direction, the median."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psctl.launch.host_programs import GPU_COPIES, program_command

TORCH = '''
"""A torch of two GPUs: a copy takes its bytes over a rate, on a clock that the test's own copies move."""
import time

uint8 = "uint8"
RATES = {RATES}
now = 0.0
time.perf_counter = lambda: now
time.monotonic = lambda: now


class Tensor:
    def __init__(self, size, device):
        self.size, self.device, self.is_cuda = size, device, device.startswith("cuda")

    def __getitem__(self, part):
        return Tensor(part.stop, self.device)

    def copy_(self, source, non_blocking):
        global now
        rate = RATES[source.device[:4] + source.device[-1], self.device[:4] + self.device[-1]]
        now += 1e-5 + self.size / rate


def empty(size, dtype, device="cpu", pin_memory=False):
    assert device != "cpu" or pin_memory
    return Tensor(size, device)


class cuda:
    is_available = staticmethod(lambda: {AVAILABLE})
    device_count = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda device: None)
'''

RATES = """{
    ("cpuu", "cuda0"): 20e9, ("cuda0", "cpuu"): 25e9, ("cpuu", "cuda1"): 10e9, ("cuda1", "cpuu"): 10e9,
    ("cuda0", "cuda1"): 50e9, ("cuda1", "cuda0"): 40e9,
}"""


def measure(folder: Path, torch: str | None, seconds: float = 60.0) -> Any:
    """Ask the program as psctl does, with another torch on the path."""
    if torch is not None:
        (folder / "torch.py").write_text(torch)
    argv = program_command(sys.executable, GPU_COPIES, "measure", {"seconds": seconds, "nodes": [0, None]})
    done = subprocess.run(
        [argv[0], "-S", *argv[1:]], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "1"},
    )  # fmt: skip
    return json.loads(done.stdout)


def played(available: bool = True) -> str:
    return TORCH.replace("{RATES}", RATES).replace("{AVAILABLE}", str(available))


def test_each_pair_has_its_slower_direction(tmp_path: Path) -> None:
    answer = measure(tmp_path, played())
    assert answer["error"] == ""
    rows = {(row["a"], row["b"]): row for row in answer["copies"]}
    assert {pair: row["bandwidth"] for pair, row in rows.items()} == pytest.approx(
        {("CPU0", "GPU0"): 20e9, ("CPU0", "GPU1"): 10e9, ("GPU0", "GPU1"): 40e9}, rel=0.01
    )
    assert rows["GPU0", "GPU1"]["latency"] == pytest.approx(1e-5, rel=0.01)
    assert rows["GPU0", "GPU1"]["spread"] == pytest.approx(0.0, abs=1e-6)


def test_when_time_is_over_pairs_of_gpus_are_left_out(tmp_path: Path) -> None:
    answer = measure(tmp_path, played(), seconds=0.0)
    assert [(row["a"], row["b"]) for row in answer["copies"]] == [("CPU0", "GPU0"), ("CPU0", "GPU1")]


def test_a_torch_without_gpus_and_none_at_all_are_reported(tmp_path: Path) -> None:
    assert measure(tmp_path, played(available=False)) == {"copies": [], "error": "its torch sees no GPU"}
    (tmp_path / "torch.py").unlink()
    assert "No module named 'torch'" in measure(tmp_path, None)["error"]
