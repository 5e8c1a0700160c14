"""Strategy native on real processes: torchrun's environment, the engine's all-reduce, the trajectory of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from psctl.sync.bucket_allreduce import first_shared
from psctl.sync.bucket_layout import buckets

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, sys, torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
import psctl

run = psctl.init()
generator = torch.Generator().manual_seed(7)
x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (50,), generator=generator)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)
        self.odd, self.never = nn.Linear(6, 3, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("mark", torch.tensor(float(run.rank)))
    def encode(self, x):
        return torch.tanh(self.first(x))
    def forward(self, x):
        return self.second(self.encode(x))

net = Net()
with torch.no_grad():
    net.first.bias.fill_(run.rank + 0.5)  # rank 0's counts
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
assert isinstance(model, Net) and model is net
norms = []
for epoch in run.epochs(3):
    for bx, by in run.loader(TensorDataset(x, y), batch_size=12):
        optimizer.zero_grad()
        with run.accumulate():
            functional.cross_entropy(model(bx), by).backward()
        logits = model.second(model.encode(bx))  # methods and submodules count, not only forward
        loss = functional.cross_entropy(logits, by)
        if run.rank == 0 and epoch == 1:
            loss = loss + model.odd(bx).square().mean()
        loss.backward()
        norms.append(float(run.clip_grad_norm(1e6)))
        optimizer.step()
        run.report(loss=0.5, late=float(run.step))
    scheduler.step()
state = {name: value.flatten().tolist() for name, value in model.state_dict().items() if "odd" not in name}
odd = model.odd.weight.flatten().tolist()
print(json.dumps({"strategy": run.strategy, "step": run.step, "state": state, "norms": norms, "odd": odd}))
"""


def launch(script: Path, ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"} if ranks > 1 else {}  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", str(script)], env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    return processes


def collect(processes: list[subprocess.Popen]) -> list[tuple[dict, str]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        found.append((json.loads(out.splitlines()[-1]), err))
    return found


@pytest.mark.soak
def test_the_same_script_trains_alone_and_under_torchruns_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    processes = launch(script, 1) + launch(script, 2)
    (one, one_said), (first, first_said), (second, second_said) = collect(processes)
    assert (one["strategy"], first["strategy"], second["strategy"]) == ("alone", "native", "native")
    assert first["state"] == second["state"], "equal to the bit on every rank"
    assert first["odd"] == second["odd"], "a gradient that one rank alone had is everyone's"
    assert first["norms"] == second["norms"]
    assert one["step"] == first["step"] == 15
    for name, values in one["state"].items():
        theirs = torch.tensor(first["state"][name], dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), theirs, rtol=0, atol=1e-12)
    assert first["state"]["mark"] == [0.0]
    assert "15 steps in" in one_said
    assert "15 steps in" in first_said
    assert "late 15" in first_said
    assert second_said == "", "rank 0 alone speaks"


def test_a_second_init_names_the_first(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text("import psctl\nrun = psctl.init()\npsctl.init()\n")
    (process,) = launch(script, 1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"psctl.init() was called already, at {script}:2" in said


def test_importing_psctl_loads_no_torch() -> None:
    code = "import sys, psctl; assert psctl.__version__; assert 'torch' not in sys.modules; print(sorted(dir(psctl)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    names = [
        "GroupReader", "Reader", "RowFilter", "Run", "__version__", "accelerate_ddp", "init", "init_reader",
        "load_start_values", "nn",
    ]  # fmt: skip
    assert done.stdout.strip() == str(names)


def test_buckets_begin_with_the_last_layers_and_hold_one_type() -> None:
    wide, narrow = torch.float64, torch.float32
    kinds = [(10, narrow), (4, wide), (10, narrow), (100, narrow), (1, narrow)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=kind)) for size, kind in kinds]
    assert buckets(parameters, first=4, size=60) == [[4], [3], [2, 0], [1]]


@pytest.mark.parametrize(
    ("gpus", "pair"),
    [([], None), (["GPU-a"], None), (["GPU-a", "GPU-b"], None), (["", ""], None), (["GPU-a", "GPU-b", "GPU-a"], (0, 2)),
     (["", "GPU-b", "", "GPU-b", "GPU-b"], (1, 3))],
)  # fmt: skip
def test_two_ranks_of_one_gpu_are_found(gpus, pair) -> None:
    assert first_shared(gpus) == pair
