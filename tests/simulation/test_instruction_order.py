"""The coordinator's instructions come in one order in all processes: a successor repeats them from its journal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings

from psctl.coordinator.state.instructions import Input
from tests.helpers.any_inputs import ROOMY, TIMED, at_their_times
from tests.helpers.driven_job import training
from tests.hypothesis_profile import examples

ROOT = Path(__file__).parents[2]


def test_the_order_of_instructions_does_not_depend_on_the_hashes_of_a_process(tmp_path: Path) -> None:
    cases: list[list[tuple[float, Input]]] = []

    @settings(max_examples=examples(25), database=None)
    @given(TIMED)
    def collect(inputs: list[tuple[float, Input]]) -> None:
        cases.append(inputs)

    collect()
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    program = "import sys; from tests.simulation import test_instruction_order as t; t.print_instructions(sys.argv[1])"
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "cases")], cwd=ROOT, check=True, capture_output=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(printed[0]) > 1000 * len(cases)
    for first, second in zip(*[each.splitlines() for each in printed], strict=True):
        assert first == second


def print_instructions(path: str) -> None:
    """Print the instructions of jobs with these inputs; called in processes of the test above."""
    for inputs in pickle.loads(Path(path).read_bytes()):
        job = training(ROOMY)
        for each in at_their_times(job, inputs):
            job.handle(each)
        sys.stdout.write("".join(f"{each!r}\n" for each in job.instructions))
