"""A worker profiles the steps after a request, which may have come before its script called init."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from psctl.process import step_ring
from psctl.process.step_ring import StepRecorder, StepRing
from psctl.worker.step_profiler import StepProfiler
from tests.helpers.step_memory import step_memory


@pytest.fixture
def memory() -> Iterator[int]:
    with step_memory() as descriptor:
        yield descriptor


def test_a_request_from_before_the_start_is_answered_and_none_twice(memory: int, tmp_path: Path) -> None:
    path = tmp_path / "profile" / "worker-0.json"
    step_ring.request_profile(memory, 2)
    profiler = StepProfiler(StepRecorder(StepRing(os.dup(memory))), str(path))
    profiler.after_step()  # it begins here
    torch.ones(3).sum()
    profiler.after_step()
    assert not path.exists()
    profiler.after_step()
    assert json.loads(path.read_text())["traceEvents"]
    assert "aten::sum" in path.with_suffix(".txt").read_text()
    path.unlink()
    for _ in range(4):
        profiler.after_step()
    assert not path.exists()
    step_ring.request_profile(memory, 1)
    profiler.after_step()
    profiler.after_step()
    assert path.exists()
