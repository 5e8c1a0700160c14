"""Every command of the guide to checkpoints, in its order, on the local cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.test_documents import ROOT, shown
from tests.helpers.running import Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]

CLUSTER = f"""
version: 1
name: here
runtime: {{environment: existing, python: {sys.executable}}}
hosts: [{{address: local, slots: 10}}]
"""
"""With slots for the workers that the guide asks for."""


def test_the_commands_of_the_guide_to_checkpoints_do_what_it_says(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    assert psctl.run("init", "mine", "--template", "digits").code == 0
    (tmp_path / "mine" / "cluster.yaml").write_text(CLUSTER)
    assert psctl.run("up", "mine/cluster.yaml", "--yes").code == 0
    assert psctl.run("use", "mine/cluster.yaml").code == 0
    bucket = f"file://{tmp_path}/bucket"  # in the place of the guide's, which needs a service
    few = (
        "--set",
        f"checkpoint.to={bucket}",
        "--set",
        "args=[--epochs, '6']",
        "--set",
        "checkpoint.every='50 steps'",
        "--strategy",
        "ps",
    )
    first = psctl.run("train", "mine/job.yaml", "--workers", "2", *few)
    assert first.code == 0, first
    commands = list(shown(ROOT / "docs" / "checkpoints.md"))
    assert len(commands) >= 9
    for words in commands:
        more = few if words[0] == "train" else ()
        words = [word.replace("s3://bucket/folder", bucket) for word in words]
        done = psctl.run(*words, *more, "--yes")
        assert done.code == 0, f"{words}: {done}"
    assert (tmp_path / "model.safetensors").stat().st_size > 1000
    assert list((tmp_path / "saved").rglob("*"))
    listed = psctl.run("checkpoint", "list", "digits-1", "-o", "json").document["checkpoints"]
    assert len(listed) == 2, "prune --keep 2"
    assert {row["state"] for row in psctl.run("jobs", "-o", "json").document["jobs"]} == {"done"}
