"""A worker is killed in the midst of training: whatever then follows, every example is once an epoch in what counts."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]

JOB = str(ROOT / "tests" / "whole" / "counted" / "job.yaml")
EXAMPLES, EPOCHS, CLOCKS = 96, 10, 120


class Training:
    """One training, and who took what in it. A worker is killed when a step was told of."""

    def __init__(self, home: Path, rank: int, step: int, *options: str) -> None:
        self.rank, self.killed, self.events = rank, 0, list[dict[str, Any]]()
        result = home / "result"
        arguments = ["train", JOB, "-o", "jsonl", "--env", f"RESULT={result}", *options]
        with Psctl(home).start(*arguments) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.events.append(json.loads(line))
                told = self.events[-1].get("step", 0) if self.events[-1]["event"] == "progress" else 0
                if told >= step and not self.killed:
                    (taken,) = home.glob(f"result.{rank}.*")
                    self.killed = int(taken.suffix[1:])
                    os.kill(self.killed, signal.SIGKILL)
            assert process.stderr is not None
            said = process.stderr.read()
        assert process.returncode == 0, said
        assert self.killed
        self.values = json.loads(result.read_text())
        self.taken = {
            (*map(int, path.name.split(".")[1:]), at): (epoch, examples, world)
            for path in home.glob("result.*.*")
            for at, epoch, examples, world in map(json.loads, path.read_text().splitlines())
        }

    def counted(self, cut: int) -> dict[int, list[tuple[int, list[int]]]]:
        """Return by clock the epoch and the examples of each worker, if `cut` is the dead one's last that counts."""
        found = defaultdict(list)
        for (rank, process, clock), (epoch, examples, _) in self.taken.items():
            mine = clock <= cut if process == self.killed else clock > cut or rank != self.rank
            if mine:
                found[clock].append((epoch, examples))
        return found

    def once(self, cut: int) -> bool:
        """Is every example once an epoch in what counts?"""
        epochs = defaultdict(list)
        for some in self.counted(cut).values():
            for epoch, examples in some:
                epochs[epoch] += examples
        return [sorted(epochs[epoch]) for epoch in range(EPOCHS)] == [list(range(EXAMPLES))] * EPOCHS

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@pytest.mark.parametrize("consistency", ["bsp", "{ssp: 3}"])
def test_under_continue_the_other_trains_alone(tmp_path: Path, consistency: str) -> None:
    training = Training(tmp_path, 1, 40, "--set", f"sync.consistency={consistency}")
    cuts = [cut for cut in range(CLOCKS) if training.once(cut)]
    assert cuts, "no last clock of the dead one makes every example once"
    assert any(_values(training.counted(cut)) == pytest.approx(training.values, rel=1e-12) for cut in cuts)
    assert [event["rank"] for event in training.of("worker-lost")] == [1]
    assert len(training.of("worker-joined")) == 2
    assert training.taken[max(training.taken, key=lambda one: one[2])][2] == 1
    assert CLOCKS <= training.of("finished")[0]["steps"] <= CLOCKS + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_under_asp_the_replacement_does_the_unfinished_task(tmp_path: Path, rank: int) -> None:
    training = Training(tmp_path, rank, 40, "--set", "sync.consistency=asp")
    assert any(training.once(cut) for cut in range(CLOCKS))
    assert training.values == pytest.approx([EPOCHS / 4] * EXAMPLES, rel=1e-12)  # a step is the mean of four
    assert [event["rank"] for event in training.of("worker-joined")[2:]] == [rank]


def _values(clocks: dict[int, list[tuple[int, list[int]]]]) -> list[float]:
    """Return what a training gives whose steps are means over these examples."""
    values = [0.0] * EXAMPLES
    for some in clocks.values():
        examples = [one for _, mine in some for one in mine]
        for one in examples:
            values[one] += 1 / len(examples)
    return values
