"""`update: auto` under ps and a script that changes gradients itself: it trains on, with the optimizer on workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.running import Psctl

pytestmark = pytest.mark.whole

JOB = """
version: 1
name: clipped
script: train.py
workers: 2
servers: 1
sync: {strategy: ps, update: auto}
restart: {max: 0}
"""

SCRIPT = """
import json, os
from pathlib import Path
import torch
from torch import nn
import psctl

run = psctl.init()
torch.manual_seed(1)
net = nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for x in run.loader(torch.arange(64.0).view(16, 4), batch_size=4, shuffle=False):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
values = {name: value.tolist() for name, value in model.state_dict().items()}
Path(f"{os.environ['RESULT']}.{run.rank}").write_text(json.dumps([run.step, norm.item(), values]))
"""


def alone() -> tuple[float, dict[str, torch.Tensor]]:
    """Train on whole batches in this process; return the last norm and the values."""
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x in torch.arange(64.0).view(4, 4, 4):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    return norm.item(), net.state_dict()


@pytest.mark.soak
def test_a_script_that_clips_by_torch_starts_again_with_the_optimizer_on_workers(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = psctl.run("train", "job.yaml", "-o", "jsonl", "--env", f"RESULT={tmp_path / 'result'}")
    assert run.code == 0, run.out[-3000:]
    assert [event["chosen"] for event in run.of("plan")] == ["ps", "ps"]
    (log,) = (tmp_path / ".psctl").glob("**/clipped-1/**/events.jsonl")
    notices = [event["text"] for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "notice"]
    assert any("changed after it was pushed" in text and "all start again" in text for text in notices)
    assert not run.of("worker-lost")
    found = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    steps, norm, values = found[0]
    expected, reference = alone()
    assert steps == 4
    assert norm == pytest.approx(expected, rel=1e-5)
    for name, value in reference.items():
        torch.testing.assert_close(torch.tensor(values[name]), value)
