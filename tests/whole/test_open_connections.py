"""`network.encryption: off` on hosts: the plan says so, and training takes the same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, steady_args
from tests.helpers.running import STEADY, Psctl

pytestmark = pytest.mark.whole


def lines(run: Any) -> list[str]:
    """What the ranks printed about their values, in order."""
    return sorted(f"{event['rank']} {event['text']}" for event in run.of("log") if event["text"].startswith("epoch"))


@pytest.mark.soak  # tests/transport has open connections
def test_open_connections_carry_the_same_values_and_are_called_open(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    found = {}
    for mode, strategy in (("on", "ring"), ("off", "ps")):
        cluster.write_text(hosts.cluster_text(more=f"network: {{encryption: {mode}}}\n"))
        run = psctl.run(
            "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", "2",
            *steady_args(3, 0.0, "--width", "20000"), "--set", f"sync.strategy={strategy}",
            "--set", "checkpoint.every=null", timeout=DEADLINE,
        )  # fmt: skip
        assert run.code == 0, run
        found[mode] = lines(run)
        reason = run.of("plan")[-1]["reason"]
        assert ("not encrypted (network.encryption: off)" in reason) == (mode == "off"), reason
        assert ("sealed connections" in reason) == (mode == "on"), reason
    # The sum of two workers' gradients has one order under every strategy.
    assert found["on"] == found["off"] != []
