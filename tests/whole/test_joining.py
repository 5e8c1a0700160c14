"""Workers join and leave while a job trains: no other worker starts again, and every example counts once an epoch."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Ended, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

JOB = ROOT / "tests" / "whole" / "counted" / "job.yaml"
EXAMPLES, EPOCHS = 96, 20


@pytest.mark.soak
def test_scale_changes_the_workers_while_they_train(tmp_path: Path) -> None:
    psctl, result = Psctl(tmp_path), tmp_path / "result"
    cluster = tmp_path / "four.yaml"
    cluster.write_text(
        f"version: 1\nname: four\nruntime: {{python: {sys.executable}, environment: existing}}\n"
        "hosts: [{address: local, slots: 4}]\n"
    )
    options = ["--cluster", str(cluster), "--workers", "1", "--servers", "1", "--env", f"RESULT={result}"]
    events: list[dict[str, Any]] = []
    scaled: list[Ended] = []
    arguments = f'args=[--epochs, "{EPOCHS}", --hold, "60", "120"]'  # until the workers have changed, on any machine
    with psctl.start("train", str(JOB), "-o", "jsonl", *options, "--set", arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            joined = len([event for event in events if event["event"] == "worker-joined"])
            step = events[-1]["step"] if events[-1]["event"] == "progress" else 0
            if step >= 20 and len(scaled) == 0:
                scaled.append(psctl.run("scale", "counted-1", "--workers", "3", "-y"))
            if joined == 3:
                Path(f"{result}.go60").touch()
            if step > 60 and len(scaled) == 1:
                found = psctl.run("scale", "counted-1", "--workers", "2", "-y")
                if "try again when all workers train" not in found.err:
                    scaled.append(found)
                    Path(f"{result}.go120").touch()
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert [one.code for one in scaled] == [0, 0], scaled
    assert [event["rank"] for event in events if event["event"] == "worker-joined"] == [0, 1, 2]
    assert not [event for event in events if event["event"] in ("restored", "worker-lost")]
    taken = [
        json.loads(line) for path in tmp_path.glob("result.*.*") for line in path.read_text().splitlines()
    ]  # step, epoch, examples, world
    assert len(list(tmp_path.glob("result.*.*"))) == 3, "one process a worker"
    clocks, epochs = defaultdict(list), defaultdict(list)
    for step, epoch, examples, _ in taken:
        clocks[step] += examples
        epochs[epoch] += examples
    assert [sorted(epochs[epoch]) for epoch in range(EPOCHS)] == [list(range(EXAMPLES))] * EPOCHS
    assert [world for _, _, _, world in sorted(taken)] == sorted([world for *_, world in taken], key=[1, 3, 2].index)
    values = [0.0] * EXAMPLES
    for examples in clocks.values():
        for one in examples:
            values[one] += 1 / len(examples)
    assert json.loads(result.read_text()) == pytest.approx(values, rel=1e-12)
