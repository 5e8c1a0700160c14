"""The job `exact`, run in several ways, and the comparison of its last values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.running import ROOT, Ended, Psctl, set_args

EXACT = ROOT / "tests" / "whole" / "exact"


@dataclass(frozen=True)
class Result:
    """The result that rank 0 writes at the end of a run; `values` are the parameters, flat."""

    step: int
    world: int
    values: list[float]


class ExactJob:
    """Runs the job on this machine under a HOME of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "result.json"
        self.psctl = Psctl(folder)
        self._cluster = folder / "four.yaml"
        self._cluster.write_text(
            f"version: 1\nname: four\nruntime: {{python: {sys.executable}, environment: existing}}\n"
            "hosts: [{address: local, slots: 4}]\n"
        )

    def alone(self, *words: str) -> Result:
        """Run the script as one plain process."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PSCTL_")}
        environment = {**kept, "RESULT": str(self._file), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "train.py", *words],
            cwd=EXACT,
            env=environment,
            check=True,
            capture_output=True,
            timeout=240,
        )
        return self.result()

    def train(
        self,
        workers: int,
        servers: int,
        *words: str,
        update: str = "auto",
        replicas: int = 0,
        disturb: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> tuple[Ended, Result]:
        """Run it by `psctl train`, and call `disturb` with every event when it is printed.

        More than two workers need a cluster file, because the machine may have two cores.
        """
        cluster = ["--cluster", str(self._cluster)] if workers > 2 else []
        lines = []
        with self.psctl.start(
            "train",
            str(EXACT / "job.yaml"),
            "-o",
            "jsonl",
            *cluster,
            "--workers",
            str(workers),
            "--servers",
            str(servers),
            "--set",
            f"replicas={replicas}",
            *set_args(*words),
            "--set",
            f"sync.update={update}",
            "--env",
            f"RESULT={self._file}",
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                lines.append(line)
                disturb(json.loads(line))
            err = process.stderr.read()
        return self._check(Ended(process.returncode, "".join(lines), err), workers)

    def restore(self, checkpoint: str, workers: int, servers: int) -> tuple[Ended, Result]:
        """Continue from a checkpoint, with the job file of `train`."""
        run = self.psctl.run(
            "checkpoint", "restore", checkpoint, "-o", "jsonl", "--cluster", str(self._cluster),
            "--workers", str(workers), "--servers", str(servers),
        )  # fmt: skip
        return self._check(run, workers)

    def _check(self, run: Ended, workers: int) -> tuple[Ended, Result]:
        assert run.code == 0, run
        assert run.events[-1]["status"] == "done", run
        plan: dict[str, Any] = run.of("plan")[-1]
        assert (plan["chosen"], plan["world"]) == ("ps", workers), plan
        return run, self.result()

    def result(self) -> Result:
        """Read and remove the result of rank 0."""
        document = json.loads(self._file.read_text())
        self._file.unlink()
        values = [float.fromhex(text) for each in document["values"].values() for text in each]
        return Result(document["step"], document["world"], values)


def assert_near(found: Result, expected: Result) -> None:
    """Check that values are equal to 1e-12 in norm and to 1e-9 in every element."""
    assert found.step == expected.step
    assert len(found.values) == len(expected.values)
    off = [one - other for one, other in zip(found.values, expected.values, strict=True)]
    assert math.hypot(*off) <= 1e-12 * math.hypot(*expected.values)
    assert all(abs(one) <= 1e-9 * max(1.0, abs(other)) for one, other in zip(off, expected.values, strict=True))
