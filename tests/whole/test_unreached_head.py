"""What is said of a job whose head has lost its power, and of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, Psctl, set_args, until

pytestmark = pytest.mark.whole


@pytest.mark.soak
def test_a_job_whose_head_is_unreachable_is_unknown_and_its_copies_are_listed(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    few = ("--cluster", str(cluster), "--workers", "1", "--servers", "1")
    script = set_args("--epochs", "400", "--pause", "0.1")
    began = psctl.run("train", str(STEADY), *few, "-d", "-o", "json", *script)
    assert began.code == 0, began
    copies = hosts.path("h2", "/root/.psctl/host/checkpoints/steady-1")
    until(lambda: list(copies.glob("*/manifest.json")), 120, name="a copy on h2")
    running = psctl.run("status", "-o", "json").document["jobs"][0]
    workers = [rank["step"] for rank in running["ranks"] if rank["role"] == "worker"]
    assert (running["state"], running["step"]) == ("running", max(workers)), running
    hosts.crash("h1")
    told = psctl.run("status", "--timeout", "5s", "-o", "json")
    job = told.document["jobs"][0]
    assert (told.code, job["state"], job["step"], job["head"]) == (0, "unknown", None, "h1"), told
    assert job["problem"].startswith("its head h1 is not reached: "), told
    listed = psctl.run("checkpoint", "list", "--timeout", "5s", "-o", "json")
    rows = listed.document["checkpoints"]
    assert rows, listed
    assert {(row["job"], row["host"], row["complete"]) for row in rows} == {("steady-1", "h2", True)}, listed
    assert "steady-1: its head h1 is not reached" in listed.err
