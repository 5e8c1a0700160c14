"""Copies of checkpoints on two further hosts: the head and the first copy's host are lost, the job is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, Psctl, next_event, set_args

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(600)]


def test_a_job_is_restored_from_the_second_copy(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(4)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    options = ["--cluster", str(cluster), "--servers", "1", "--set", "checkpoint.copies=2"]
    slow = set_args("--epochs", "40", "--pause", "0.05")
    job = psctl.run("train", str(STEADY), *options, "-d", "-o", "json", *slow, timeout=200).document["job"]
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        next_event(follower, "checkpoint")
        stopped = psctl.run("stop", job, "--save", timeout=120)
        assert stopped.code == 0, stopped
        last = next_event(follower, "finished")["steps"]

    listed = {row["step"]: row for row in psctl.run("checkpoint", "list", job, "-o", "json").document["checkpoints"]}
    assert listed[last]["hosts"] == ["h1", "h2", "h3"], listed
    shown = psctl.run("checkpoint", "show", f"{job}@latest", "-o", "json").document
    assert (shown["step"], shown["hosts"]) == (last, ["h1", "h2", "h3"])
    assert len(listed) > 1
    pruned = psctl.run("checkpoint", "prune", job, "--keep", "1", "--yes", "-o", "json").document
    assert set(pruned["copies"]) == {"h2", "h3"}

    hosts.crash("h1")
    hosts.crash("h2")
    third = psctl.run("checkpoint", "show", f"{job}@latest", "-o", "json")
    assert third.document["hosts"] == ["h3"], third
    other = tmp_path / "other.yaml"
    other.write_text(hosts.cluster_text(["h4"], name="other"))
    epochs = last // 10 + 2
    again = psctl.run(
        "checkpoint", "restore", f"{job}@latest", "--cluster", str(other), "--workers", "1", "--servers", "1",
        "-o", "jsonl", *set_args("--epochs", str(epochs)), timeout=200,
    )  # fmt: skip
    assert again.code == 0, again
    assert again.of("restored")[0]["step"] == last
    assert again.of("progress")[-1]["step"] == 10 * epochs
