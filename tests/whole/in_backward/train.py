"""A model of several shards; rank 1 may end in the middle of a backward, once. Rank 0 writes a digest of the last
values to the file that RESULT names."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import psctl

LAYERS, WIDTH, STEPS = 8, 160, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--end-at", type=int, default=0, help="the step in whose backward rank 1 ends; 0: none")
    parser.add_argument("--ended", type=Path, default=Path("ended"), help="file that says that it has")
    given = parser.parse_args()

    torch.manual_seed(1)
    run = psctl.init()
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))
    first = net[0].weight
    model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def end(_gradient: torch.Tensor) -> None:
        """End this process, when the other one has pushed everything but the shard of this gradient."""
        given.ended.touch()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(run.step, STEPS):
        if step == given.end_at > 0 and run.rank == 1 and not given.ended.exists():
            first.register_hook(end)
        generator = torch.Generator().manual_seed(100 * step + run.rank)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        run.report()
    run.wait()
    if run.rank == 0:
        values = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        Path(os.environ["RESULT"]).write_text(hashlib.sha256(values).hexdigest())


if __name__ == "__main__":
    main()
