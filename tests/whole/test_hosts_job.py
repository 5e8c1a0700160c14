"""A job's life on hosts that share no disk: up, train, detach, attach, a killed psctl, stop, restore elsewhere."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, Psctl, next_event, until

pytestmark = [pytest.mark.whole, pytest.mark.timeout(240)]

STEADY = ROOT / "tests" / "whole" / "steady" / "job.yaml"


def set_args(*words: str) -> list[str]:
    return ["--set", "args=[" + ", ".join(f'"{word}"' for word in words) + "]"]


@pytest.fixture
def lab(hosts: Any, home: Any) -> tuple[Psctl, Any, Path]:
    """psctl on the driving side, three hosts, and a cluster file of them."""
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    return Psctl(home.path, environment=home.env), hosts, cluster


def assert_clean(hosts: Any) -> None:
    for name in hosts:
        until(lambda name=name: not hosts.leftovers(name), 20, name=f"{name}: {hosts.leftovers(name)}")


def test_up_converges_says_what_it_would_do_and_does_nothing_twice(lab: Any) -> None:
    psctl, hosts, cluster = lab
    for name in hosts:
        hosts.rate(name, "200mbit")  # links of a steady rate are measured once; free ones scatter on a busy machine
    dry = psctl.run("up", str(cluster), "--dry-run", "-o", "json")
    assert dry.code == 0, dry
    planned = {host["name"]: host["actions"] for host in dry.document["hosts"]}
    assert {actions[-1] for actions in planned.values()} == {"measure the links to 2 hosts"}
    assert not hosts.path("h1", "/root/.psctl").exists()
    first = psctl.run("up", str(cluster), "-o", "json")
    assert first.code == 0, first
    assert [(host["name"], host["state"]) for host in first.document["hosts"]] == [
        ("h1", "created"), ("h2", "created"), ("h3", "created"),
    ]  # fmt: skip
    assert {host["name"]: host["actions"] for host in first.document["hosts"]} == planned
    second = psctl.run("up", str(cluster), "-o", "json")
    assert [(host["state"], host["actions"]) for host in second.document["hosts"]] == [("unchanged", [])] * 3
    topo = psctl.run("topo", "-o", "json").document
    assert {device["kind"] for device in topo["hosts"][0]["devices"]} >= {"cpu", "nic"}
    doctor = psctl.run("doctor", "-o", "json")
    assert all(check["ok"] for host in doctor.document["hosts"] for check in host["checks"]), doctor
    down = psctl.run("down", "--purge")
    assert down.code == 0, down
    assert not hosts.path("h1", "/root/.psctl/host").exists()
    assert_clean(hosts)


def test_a_job_survives_its_psctl_and_is_restored_on_another_number_of_hosts(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    slow = set_args("--epochs", "40", "--pause", "0.05")
    detached = psctl.run("train", str(STEADY), "--cluster", str(cluster), "-d", "-o", "json", *slow)
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
    assert {("worker", 0), ("worker", 1), ("server", 0), ("server", 1)} <= set(ranks)
    assert len({rank["host"] for key, rank in ranks.items() if key[0] == "worker"}) == 2

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
    other = tmp_path / "other.yaml"
    other.write_text(hosts.cluster_text(["h3"], name="other"))
    again = psctl.run(
        "checkpoint", "restore", f"{job}@latest", "--cluster", str(other), "--workers", "1", "--servers", "1",
        "-o", "jsonl", timeout=120,
    )  # fmt: skip
    assert again.code == 0, again
    assert again.of("restored")[0]["step"] == last
    assert again.of("finished")[0]["steps"] == 400 - last
    assert again.of("progress")[-1]["step"] == 400
    assert_clean(hosts)


def digest(run: Any) -> str:
    found = re.findall(r"digest (\S+)", run.out)
    assert found, run
    return str(found[-1])


def test_a_resumed_run_is_equal_to_the_bit_to_the_undisturbed_one(lab: Any) -> None:
    psctl, hosts, cluster = lab
    common = ("--cluster", str(cluster), "-o", "jsonl")
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


def test_a_host_behind_a_jump_host_is_reached_and_both_keys_are_checked(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(["gate", "inner"], behind={"inner": "gate"})
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text(["inner"]))
    psctl = Psctl(home.path, environment=home.env)
    assert psctl.run("up", str(cluster)).code == 0
    lines = home.known_hosts.read_text().splitlines()
    [swapped] = [line.split()[2] for line in lines if line.startswith(hosts["inner"].address + " ")][:1]
    bent = [
        f"{line.split()[0]} {line.split()[1]} {swapped}" if line.split()[0] in hosts["gate"].addresses else line
        for line in lines
    ]
    home.known_hosts.write_text("\n".join(bent) + "\n")
    run = psctl.run("up", str(cluster), "-o", "json")
    assert run.code == 8, run
    assert "gate" in run.out or hosts["gate"].address in run.out
