"""What every worker of `psctl bench` does itself; whole runs are in tests/whole/test_bench.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from psctl.job.bench_messages import BenchEffort, BenchProgress, BenchQuestion, BenchRound, BenchRow, from_line
from psctl.worker.bench_script import BenchTurns, FixedGradient
from tests.helpers.running import ROOT


def test_autograd_takes_the_given_gradient_as_it_is() -> None:
    """A copy of it would be measured with the sum: 60 to 300 ms of 100 MB on four hosts."""
    parameter, gradient = nn.Parameter(torch.zeros(1000)), torch.arange(1000.0)
    parameter.grad = None
    FixedGradient.apply(parameter, gradient).backward()
    assert parameter.grad.data_ptr() == gradient.data_ptr()
    assert parameter.grad.equal(torch.arange(1000.0))


@pytest.mark.parametrize(
    ("first", "later", "repeats"),
    [
        (0.001, 0.001, 50),
        (0.15, 0.006, 8),  # disturbed: it is not one of the slow ones
        (0.15, 0.15, 1),
        (0.25, 0.001, 1),  # slow enough to take it at its word
        (0.001, 1e-9, 200),
    ],
)
def test_short_operations_are_timed_together_even_if_the_first_was_disturbed(
    first: float, later: float, repeats: int
) -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return later

    assert BenchTurns(BenchEffort(lasting=0.05)).repeats(first, measure) == repeats
    assert asked == ([] if first > 0.2 else [3])


def test_the_first_ranks_measure_among_themselves_between_rounds_of_all(tmp_path: Path) -> None:
    played = {"native": {}, "ring": {}, "tree": {}}
    rounds = [BenchRound(4_000, played), BenchRound(4_000, played, 2), BenchRound(64_000, played)]
    file = tmp_path / "question.json"
    file.write_bytes(msgspec.json.encode(BenchQuestion("allreduce", rounds, BenchEffort(1, seconds=0.0, lasting=0.01))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(3):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", "psctl.worker.bench_script", str(file)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ended = [(*each.communicate(timeout=60), each.returncode) for each in processes]
    assert [code for *_, code in ended] == [0, 0, 0], ended
    assert not ended[1][0] and not ended[2][0]
    answers = [from_line(line) for line in ended[0][0].splitlines()]
    begun = [(each.bytes, each.world) for each in answers if isinstance(each, BenchProgress)]
    assert begun == [(4_000, 3), (4_000, 2), (64_000, 3)]
    rows = [each for each in answers if isinstance(each, BenchRow)]
    assert [(each.bytes, each.world, each.strategy) for each in rows] == [
        (*one, name) for one in begun for name in played
    ]
    assert all(each.correct and min(each.times) > 0 for each in rows)
