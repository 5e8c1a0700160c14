"""`update: auto` under ps and a script that changes gradients itself: it trains on, with the optimizer on workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.running import Psctl

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

JOB = """
version: 1
name: clipped
script: train.py
workers: 2
servers: 1
sync: {strategy: ps}
restart: {max: 0}
"""

SCRIPT = """
import json, os
from pathlib import Path
import torch
from torch import nn
import psctl

run = psctl.init()
net = nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for x in run.loader(torch.arange(64.0).view(16, 4), batch_size=4):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
values = {name: value.tolist() for name, value in model.state_dict().items()}
Path(f"{os.environ['RESULT']}.{run.rank}").write_text(json.dumps([run.step, norm.item(), values]))
"""


def test_a_script_that_clips_by_torch_starts_again_with_the_optimizer_on_workers(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    found = {}
    for update in ("worker", "auto"):
        result = tmp_path / f"result.{update}"
        words = ("-o", "jsonl", "--env", f"RESULT={result}", "--set", f"sync.update={update}")
        run = psctl.run("train", "job.yaml", *words)
        assert run.code == 0, run.out[-3000:]
        found[update] = [json.loads((tmp_path / f"result.{update}.{rank}").read_text()) for rank in range(2)]
    assert [event["chosen"] for event in run.of("plan")] == ["ps", "ps"]
    (log,) = (tmp_path / ".psctl").glob("**/clipped-2/**/events.jsonl")
    notices = [event["text"] for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "notice"]
    assert any("changed after it was pushed" in text and "all start again" in text for text in notices)
    assert not run.of("worker-lost")
    assert found["auto"] == found["worker"]
    assert found["auto"][0] == found["auto"][1]
    assert found["auto"][0][0] == 4
    run = psctl.run("train", "job.yaml", "-o", "jsonl", "--env", f"RESULT={result}", "--set", "sync.update=server")
    assert run.code == 2, run
    assert "update: worker" in run.events[-1]["failure"]["hint"]
