"""Between real processes every collective of a run has torch.distributed's result (`helpers/gloo_collectives.py`)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers.running import ROOT

WORLD = 3


def test_every_collective_has_the_result_of_torch_distributed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(WORLD):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.helpers.gloo_collectives", str(tmp_path / f"{rank}.json")]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        for process in processes:
            out, _ = process.communicate(timeout=110)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for rank in range(WORLD):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"differ": []}
