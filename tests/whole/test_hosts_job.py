"""A job's life on hosts that share no disk: detach, attach, a killed psctl, stop, restore elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, assert_clean, next_event, set_args, until

pytestmark = pytest.mark.whole


def test_a_job_survives_its_psctl_and_is_restored_on_another_number_of_hosts(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    slow = set_args("--epochs", "40", "--pause", "0.05")
    detached = psctl.run("train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-d", "-o", "json", *slow)
    assert detached.code == 0, detached
    job = detached.document["job"]
    assert job == "steady-1"

    # a second job does not get the slots that this one holds
    held = psctl.run("train", str(STEADY), "--cluster", str(cluster), "--workers", "2", "-o", "json")
    assert held.code == 7, held
    assert job in held.document["error"]["message"]

    # psctl is killed while it follows; the job goes on, and attach replays it from the start
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        next_event(follower, "checkpoint")
        follower.send_signal(signal.SIGKILL)
    status = psctl.run("status", job, "-o", "json").document["jobs"][0]
    assert status["state"] == "running"
    ranks = {(rank["role"], rank["rank"]): rank for rank in status["ranks"]}
    assert {("worker", 0), ("worker", 1), ("server", 0)} <= set(ranks)
    assert len({rank["host"] for key, rank in ranks.items() if key[0] == "worker"}) == 2

    traced = psctl.run("trace", job, "-o", str(tmp_path / "trace.json"), "--output", "json")
    assert traced.code == 0, traced
    assert set(traced.document["hosts"].values()) == {"h1", "h2"}
    assert all(error is not None and error < 0.1 for error in traced.document["clocks"].values()), traced.document

    with psctl.start("attach", job, "-o", "jsonl") as follower:
        assert next_event(follower, "started")["job"] == job
        saved = next_event(follower, "checkpoint")
        assert saved["step"] == 10
        stopped = psctl.run("stop", job, "--save")
        assert stopped.code == 0, stopped
        end = next_event(follower, "finished")
        assert follower.wait(30) == end["exit"] == 1
    assert end["status"] == "stopped"
    assert_clean(hosts)

    listed = psctl.run("checkpoint", "list", job, "-o", "json").document["checkpoints"]
    last = max(each["step"] for each in listed)
    assert last == end["steps"], "stop --save keeps the step it stopped at"
    copies = [
        name for name in hosts if list(hosts.path(name, "/root").glob(f".psctl/host/**/{last:010d}/manifest.json"))
    ]
    assert len(copies) == 2, f"one on the head, a second copy on another host: {copies}"

    # other hosts, another number of them: the head is new and gets the checkpoint carried over
    epochs = last // 10 + 3
    other = tmp_path / "other.yaml"
    other.write_text(hosts.cluster_text(["h3"], name="other"))
    again = psctl.run(
        "checkpoint", "restore", f"{job}@latest", "--cluster", str(other), "--workers", "1", "--servers", "1",
        "-o", "jsonl", *set_args("--epochs", str(epochs)), timeout=120,
    )  # fmt: skip
    assert again.code == 0, again
    assert again.of("restored")[0]["step"] == last
    assert again.of("finished")[0]["steps"] == 10 * epochs - last
    assert again.of("progress")[-1]["step"] == 10 * epochs
    assert_clean(hosts)


@pytest.mark.soak
def test_commands_run_on_all_hosts_and_beside_a_process(lab: Any) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    done = psctl.run("run", str(cluster), "--", "sh", "-c", "echo on $(hostname) >&2; test $(hostname) = h1")
    assert done.code == 10, done
    assert sorted(done.out.splitlines()) == ["h1 │ on h1", "h2 │ on h2"]
    assert "1 of 2 hosts are done" in done.err
    json = psctl.run("run", str(cluster), "-o", "json", "--", "hostname").document
    assert {(each["host"], each["text"]) for each in json["lines"]} == {("h1", "h1"), ("h2", "h2")}
    assert [each["status"] for each in json["hosts"]] == [0, 0]

    slow = set_args("--epochs", "400", "--pause", "0.05")
    detached = psctl.run("train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-d", "-o", "json", *slow)
    assert detached.code == 0, detached
    job = detached.document["job"]
    until(lambda: psctl.run("status", job, "-o", "json").document["jobs"][0]["step"], 60, 0.5)
    beside = psctl.run(
        "ssh", job, "-r", "worker:1", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE on $(hostname); ls; exit 4"
    )
    assert beside.code == 4, beside
    assert "1 of 2 on h2" in beside.out
    assert "train.py" in beside.out or "steady.py" in beside.out
    assert psctl.run("stop", job).code == 0
    after = psctl.run("ssh", job, "--", "pwd")
    assert after.code == 0, after
    assert "does not run" in after.err
    assert_clean(hosts)
