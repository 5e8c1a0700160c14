"""`psctl up` measures what messages cost between real hosts, once, and plans use it; nothing else is left of it."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import Psctl, assert_clean, until

pytestmark = pytest.mark.whole

ACTION = "measure the cost of messages"


def two_each(hosts: Any, more: str = "") -> str:
    """A cluster file of these hosts with two slots each."""
    head, _, _ = hosts.cluster_text(messages=True, more=more).partition("hosts:\n")
    return head + "hosts:\n" + "".join(f"  - {{name: {name}, address: {name}, slots: 2}}\n" for name in hosts)


@pytest.mark.soak  # tests/launch/test_cost_fitting.py has the costs; bench/strategies.py the plan
def test_up_measures_messages_once_and_the_plan_takes_what_was_fastest(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(3, rate="200mbit")
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(two_each(hosts))
    psctl = Psctl(home.path, environment=home.env)
    dry = psctl.run("up", str(cluster), "--dry-run", "-o", "json")
    assert all(host["actions"][-1] == ACTION for host in dry.document["hosts"]), dry
    first = psctl.run("up", str(cluster), "-o", "json")
    assert first.code == 0, first
    assert "not measured" not in first.err, first
    assert first.document["hosts"] == [{**host, "state": "created"} for host in dry.document["hosts"]]
    # no job is left, here or there
    assert psctl.run("jobs", "-o", "json").document["jobs"] == []
    assert list((home.path / ".psctl/jobs").iterdir()) == []
    assert not [path for name in hosts for path in hosts.path(name, "/root/.psctl/host/jobs").glob("*/*")]
    assert_clean(hosts)
    second = psctl.run("up", str(cluster), "-o", "json")
    assert [(host["state"], host["actions"]) for host in second.document["hosts"]] == [("unchanged", [])] * 3
    # the plan of a job on the same ranks, or half of them, predicts what was measured
    groups = json.loads((home.path / ".psctl/measured/costs/lab.json").read_text())["groups"]
    assert [each["ranks"] for each in groups] == [{"h1": 2, "h2": 2, "h3": 2}, {"h1": 2, "h2": 1}]
    (tmp_path / "train.py").write_text("")
    for kept, size in itertools.product(groups, (4_000, 64_000)):
        times = {row["strategy"]: row["seconds"] for row in kept["sums"] if row["bytes"] == size}
        assert len(times) >= 3
        workers = sum(kept["ranks"].values())
        (tmp_path / "job.yaml").write_text(f"name: small\nscript: train.py\nworkers: {workers}\n")
        plan = psctl.run("plan", str(tmp_path / "job.yaml"), "--size", str(size), "-o", "json").document
        predicted = {row["strategy"]: row["seconds"] for row in plan["candidates"]}
        # servers are not measured at every size, and on busy processors not every strategy that could be the fastest
        taken = times.get(plan["chosen"], predicted[plan["chosen"]])
        assert taken <= 1.06 * min(times.values()), (plan["reason"], times)
        fastest = min(times, key=lambda name: times[name])
        assert predicted[fastest] == pytest.approx(times[fastest], rel=0.05)


@pytest.mark.parametrize("end", ["interrupt", "kill"])
@pytest.mark.soak  # test_bench.py interrupts one
def test_a_measurement_that_is_ended_leaves_nothing_and_is_made_again(
    end: str, make_hosts: Any, tmp_path: Path
) -> None:  # fmt: skip
    """Ctrl-C ends psctl with 130; a killed agent fails the job, which is a warning. The hosts are ready both times."""
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text(messages=True))
    psctl = Psctl(home.path, environment=home.env)

    def of(module: str) -> list[int]:
        return [pid for pid, line in hosts.processes("h1") if module in line]

    with psctl.start("up", str(cluster), "-o", "json") as process:
        until(lambda: of("psctl.worker"), 60, name="a worker runs")
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            hosts.exec("h1", ["kill", "-9", *map(str, of("psctl.agent"))])
        out, err = process.communicate(timeout=120)
    assert process.returncode == (130 if end == "interrupt" else 0), err
    assert ("the cost of messages was not measured" in err) == (end == "kill"), err
    assert all(ACTION not in host["actions"] for host in json.loads(out)["hosts"])
    assert psctl.run("jobs", "-o", "json").document["jobs"] == []
    assert not [path for name in hosts for path in hosts.path(name, "/root/.psctl/host/jobs").glob("*/*")]
    assert_clean(hosts)
    again = psctl.run("up", str(cluster), "--dry-run", "-o", "json")
    assert [host["actions"] for host in again.document["hosts"]] == [[ACTION]] * 2


def test_what_cannot_be_measured_is_a_warning_and_tried_again(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text(messages=True, more="network: {ports: 29400-29400}\n"))
    psctl = Psctl(home.path, environment=home.env)
    for state in ("created", "unchanged"):
        up = psctl.run("up", str(cluster), "-o", "json")
        assert up.code == 0, up
        assert [host["state"] for host in up.document["hosts"]] == [state] * 2
        assert all(ACTION not in host["actions"] for host in up.document["hosts"])
        assert "warning: the cost of messages was not measured: " in up.err
        assert "29400" in up.err
    assert psctl.run("jobs", "-o", "json").document["jobs"] == []
    cluster.write_text(hosts.cluster_text())
    assert "not measured" not in psctl.run("up", str(cluster), "-o", "json").err
    assert_clean(hosts)
