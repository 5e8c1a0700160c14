"""`sync.bucket: auto` on real processes: sizes are tried, an event has the choice, and a killed worker is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.running import Psctl

pytestmark = pytest.mark.whole

JOB = """
version: 1
name: tuned
script: train.py
workers: 2
seed: 3
sync: {strategy: ring, bucket: auto}
checkpoint: {every: null, on_stop: false}
"""

SCRIPT = """
import hashlib, json, os, signal, time
from pathlib import Path
import torch
from torch import nn
import psctl

run = psctl.init()
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(8)))  # 5 MB
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
mark = Path(os.environ["RESULT"] + ".killed")
points = torch.arange(40 * 4 * 400.0).view(-1, 400).sin()
for x in run.loader(points, batch_size=4, shuffle=False):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if os.environ.get("KILLS") and run.rank == 1 and run.step == 9 and not mark.exists():
        mark.touch()
        time.sleep(2.5)  # until heartbeats, one a second, have reported what a replacement needs
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    run.report()
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
Path(f"{os.environ['RESULT']}.{run.rank}").write_text(json.dumps([run.step, digest]))
"""


@pytest.mark.soak
def test_a_size_is_chosen_although_a_worker_is_killed_meanwhile(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = tmp_path / "result"
    ended = psctl.run("train", "job.yaml", "-o", "jsonl", "--env", f"RESULT={result}", "--env", "KILLS=1")
    assert ended.code == 0, ended.out + ended.err
    events = ended.events
    assert len([each for each in events if each["event"] == "worker-lost"]) == 1
    assert not [each for each in events if each["event"] == "restored"], "nobody else starts again"
    [chosen] = [each for each in events if each["event"] == "bucket"]
    tried = {each["size"]: each["seconds"] for each in chosen["measured"]}
    assert set(tried) == {25_000_000, 1_000_000}, "those that divide 5 MB differently"
    assert chosen["size"] in tried
    assert max(tried.values()) < 1.0, "the round of the loss does not count"
    one, other = (json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(2))
    assert one == other
    assert one[0] == 40
