"""A rank that hangs is named with its own stack, whatever the others wait in; so are the ranks of a plain script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.running import STEADY, Psctl, set_args

pytestmark = pytest.mark.whole

STALL = "timeouts.stall=4s"


@pytest.mark.parametrize(
    "strategy", ["ps", *(pytest.param(name, marks=pytest.mark.soak) for name in ("native", "ring", "one-shot"))]
)
def test_the_rank_that_sleeps_is_the_headline_with_its_own_stack(tmp_path: Path, strategy: str) -> None:
    psctl = Psctl(tmp_path)
    run = psctl.run(
        "train", str(STEADY), "-o", "jsonl", "--strategy", strategy, "--set", STALL,
        *(("--servers", "1") if strategy == "ps" else ()), *set_args("--hang-at", "3"),
    )  # fmt: skip
    assert run.code == 5, run
    failure = run.events[-1]["failure"]
    assert (failure["role"], failure["rank"]) == ("worker", 1), failure
    assert failure["exception"].startswith("TimedOut: worker/1 "), failure
    assert "worker/0" not in failure["exception"], failure
    assert failure["frames"][-1].endswith("in disturb: time.sleep(10_000)"), failure
    assert "train.py:" in failure["frames"][0], failure
    assert any(line.endswith("in disturb: time.sleep(10_000)") for line in failure["stacks"]["worker/1"]), failure
    assert any("in main: " in line for line in failure["stacks"]["worker/0"]), "who waits has its stack there too"


def test_idle_ranks_of_a_script_without_psctl_have_their_stacks_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain.py").write_text(
        "import time\n\n\ndef rest():\n    time.sleep(1000)\n\n\nprint('here', flush=True)\nrest()\n"
    )
    (tmp_path / "job.yaml").write_text("version: 1\nname: plain\nscript: plain.py\nworkers: 2\ntimeouts: {stall: 5s}\n")
    run = Psctl(tmp_path).run("train", str(tmp_path / "job.yaml"), "-o", "jsonl")
    assert run.code == 5, run
    failure = run.events[-1]["failure"]
    assert "worker/0 on local, worker/1 on local printed nothing and used no processor for 5 s" in failure["exception"]
    assert failure["frames"][-1].endswith("in rest: time.sleep(1000)"), failure
    for rank in ("worker/0", "worker/1"):
        assert failure["stacks"][rank][-1].endswith("in rest: time.sleep(1000)"), failure
