"""Hosts that share no disk are made ready, looked at and cleared again; one of them stands behind a jump host."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import Psctl, assert_clean

pytestmark = pytest.mark.whole


def test_up_converges_prints_its_actions_and_does_nothing_twice(lab: Any) -> None:
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
    down = psctl.run("down", "--purge", "--yes")
    assert down.code == 0, down
    assert not hosts.path("h1", "/root/.psctl/host").exists()
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


@pytest.mark.soak  # tests/remote/test_login_shell.py has the shells
def test_up_and_doctor_work_through_tcsh_with_one_session_a_connection(make_loopback: Any, tmp_path: Path) -> None:
    tcsh = shutil.which("tcsh")
    if tcsh is None:
        pytest.skip("tcsh is not installed (make system)")
    force = f'ForceCommand SHELL={tcsh} exec {tcsh} -c "$SSH_ORIGINAL_COMMAND"'
    hosts = make_loopback(2, sshd=f"MaxSessions 1\n{force}")
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    psctl = Psctl(home.path, environment=home.env)
    up = psctl.run("up", str(cluster), "-o", "json")
    assert up.code == 0, up
    assert [host["state"] for host in up.document["hosts"]] == ["created", "created"], up
    doctor = psctl.run("doctor", "-o", "json")
    for host in doctor.document["hosts"]:
        rows = {check["check"]: check for check in host["checks"]}
        assert all(check["ok"] for check in rows.values()), doctor
        assert "MaxSessions" in rows["sessions"]["detail"]
