"""Links that are slower than measured: the event says so, and `sync.replan` changes strategy at checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, steady_args, values_of
from tests.helpers.running import STEADY, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]


def test_a_strategy_that_is_slower_than_its_plan_is_changed_and_no_step_is_lost(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    assert psctl.run("up", str(cluster), timeout=DEADLINE).code == 0
    found, epochs = [], 24
    for rate, more in (("50mbit", ("--set", "sync.replan=true")), ("5gbit", ())):
        for name in hosts:
            hosts.rate(name, rate)
        run = psctl.run(
            "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", "2",
            *steady_args(epochs, 0.0, "--width", "10000"), "--set", "sync.strategy=auto", *more,
            "--set", "servers=auto", "--set", "checkpoint.every=100000 steps", timeout=DEADLINE,
        )  # fmt: skip
        assert run.code == 0, run
        found.append(run)
    slow = found[0]
    checks = slow.of("plan-check")
    print(*checks, sep="\n")
    print(slow.of("plan")[-1])
    assert checks != [], slow
    for check in checks:
        assert check["measured"] > 1.25 * check["predicted"]
    taken = [check["fastest"] for check in checks if check["changes"]]
    assert taken != [], checks
    assert [event["chosen"] for event in slow.of("plan")][1:] == taken
    assert [event["lost"] for event in slow.of("restored")] == [0] * len(taken)
    digests = [values_of([each["text"] for each in run.of("log") if each["rank"] == "worker/0"]) for run in found]
    assert sorted(digests[0]) == list(range(epochs))
    assert digests[0] == digests[1], "no step is lost or done twice, whatever the strategies"
