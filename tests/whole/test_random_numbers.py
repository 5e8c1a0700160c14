"""Random numbers of a real job: a split after `prepare` is the same on all ranks and after a resume, dropout is not."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import Psctl

pytestmark = pytest.mark.whole

JOB = """
version: 1
name: drawn
script: train.py
workers: 2
servers: 1
sync: {strategy: ps, update: server}
checkpoint: {every: 8 steps}
"""

SCRIPT = """
import json, os, random, time
import numpy, torch
from torch import nn
import psctl

run = psctl.init()
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
net = nn.Linear(4, 4)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
split = torch.randperm(32).tolist()
log = open(f"{os.environ['RESULT']}.{run.rank}.{os.getpid()}", "w", buffering=1)
print(json.dumps(["split", -1, split]), file=log)
loader = run.loader(torch.eye(32)[:, :4], batch_size=4)
for epoch in run.epochs(3):
    print(json.dumps(["epoch", epoch, torch.randperm(8).tolist(), random.random(), numpy.random.rand()]), file=log)
    for x in loader:
        mask = nn.functional.dropout(torch.ones(8)).tolist()
        print(json.dumps(["step", run.step, mask, random.random(), numpy.random.rand()]), file=log)
        optimizer.zero_grad()
        model(x).sum().backward()
        time.sleep(0.05)
        optimizer.step()
        print(json.dumps(["after", run.step, torch.rand(1).item()]), file=log)
"""


def drawn(home: Path) -> dict[tuple[str, int], dict[int, set[str]]]:
    """What was drawn: by occasion and its number, by rank, the numbers; then the logs are removed."""
    found: dict[tuple[str, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in home.glob("result.*"):
        for line in path.read_text().splitlines():
            occasion, at, *numbers = json.loads(line)
            found[occasion, at][int(path.suffixes[-2][1:])].add(json.dumps(numbers))
        path.unlink()
    return found


@pytest.mark.soak  # tests/train_state/test_random_generators.py has the generators
def test_a_split_is_everyones_and_every_number_the_same_after_a_death_and_a_resume(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    words, killed = ["-o", "jsonl", "--env", f"RESULT={tmp_path / 'result'}"], False
    with psctl.start("train", "job.yaml", *words) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "checkpoint" and event["step"] == 8 and not killed:
                killed = True
                (log,) = tmp_path.glob("result.1.*")
                os.kill(int(log.suffix[1:]), signal.SIGKILL)
        assert process.wait() == 0, process.stderr and process.stderr.read()
    assert killed
    assert len(list(tmp_path.glob("result.1.*"))) == 2, "a replacement trained on"
    first = drawn(tmp_path)
    for (occasion, at), ranks in first.items():
        assert {len(found) for found in ranks.values()} == {1}, f"{occasion} {at} was drawn again, and otherwise"
        if set(ranks) == {0, 1}:  # the dead one may have been killed between a step's end and its line
            assert (ranks[0] == ranks[1]) == (occasion != "step"), f"{occasion} {at}"
    assert sum(len(ranks) == 1 for ranks in first.values()) <= 2
    run = psctl.run("train", "job.yaml", "--resume", "drawn-1@8", *words)
    assert run.code == 0, run
    again = drawn(tmp_path)
    assert ("step", 23) in again
    assert ("step", 7) not in again
    for key, ranks in again.items():
        assert all(first[key].get(rank, numbers) == numbers for rank, numbers in ranks.items()), key
