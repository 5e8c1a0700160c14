"""A job on hosts without a shared disk fails and is resumed with the same values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, Psctl, assert_clean, set_args

pytestmark = pytest.mark.whole


def digest(run: Any) -> str:
    found = re.findall(r"digest (\S+)", run.out)
    assert found, run
    return str(found[-1])


@pytest.mark.soak  # tests/worker/test_run_checkpoints.py: to the bit; test_hosts_job.py: on other hosts
def test_a_resumed_run_is_equal_to_the_bit_to_the_undisturbed_one(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    common = ("--cluster", str(cluster), "--servers", "1", "-o", "jsonl")
    whole = psctl.run("train", str(STEADY), *common, *set_args("--epochs", "4"))
    assert whole.code == 0, whole
    broken = psctl.run("train", str(STEADY), *common, *set_args("--epochs", "4", "--raise-at", "27", "--pause", "0.1"))
    assert broken.code == 1, broken
    saved = [event["step"] for event in broken.of("checkpoint")]
    assert saved, broken
    resumed = psctl.run("train", str(STEADY), *common, "--resume", "latest", *set_args("--epochs", "4"))
    assert resumed.code == 0, resumed
    assert resumed.of("restored")[0]["step"] == saved[-1]
    assert digest(psctl.run("logs", "steady-3", "-r", "worker:0")) == digest(
        psctl.run("logs", "steady-1", "-r", "worker:0")
    )
    assert_clean(hosts)
