"""The ports of a range that a job needs, and the holders of those that are in use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from psctl.launch.host_programs import NETWORK_CHECKS, program_command
from psctl.launch.placement.ports import PortUse, TakenPort, lacking, needed
from psctl.launch.placement.roster import Machine, assign_workers
from psctl.spec.cluster import load_cluster
from psctl.spec.job_file import load_job

TWO = "name: lab\nhosts: [{address: a, slots: 2}, {address: b, slots: 2}]\n"


def needs(job: str, cluster: str = TWO, gpus: int = 0) -> dict[str, dict[str, int]]:
    spec = load_cluster(cluster, "lab.yaml")
    machines = {
        host.name: Machine(host.name, f"10.0.0.{at}", "eth0", 8, gpus, 1e9) for at, host in enumerate(spec.hosts)
    }
    wanted = load_job(f"name: j\nscript: train.py\n{job}", "job.yaml", [])
    return needed(wanted, assign_workers(spec, machines, wanted))


HEAD = {"coordinator": 1, "torch's store": 1}


@pytest.mark.parametrize(
    ("job", "gpus", "a", "b"),
    [
        ("sync: {strategy: native}", 0, {}, {}),
        ("workers: 4\nsync: {strategy: ring}", 0, {"workers": 2}, {"workers": 2}),
        ("workers: 4\nsync: {strategy: ring}", 2, {}, {}),  # ranks on GPUs of their own use the engine's connections
        ("workers: 2\nsync: {strategy: ring}", 0, {}, {}),  # both on one host
        ("servers: 3\nsync: {strategy: ps}", 0, {"servers": 2}, {"servers": 1}),
        ("servers: {per_host: 2}\nsync: {strategy: ps}", 0, {"servers": 2}, {"servers": 2}),
        ("workers: 4", 0, {"workers": 2}, {"workers": 2}),  # auto: what it may choose, at its most
        ("workers: 4\nservers: 6", 0, {"servers": 3}, {"servers": 3}),
    ],
)
def test_needs_follow_from_what_may_listen(job: str, gpus: int, a: dict[str, int], b: dict[str, int]) -> None:
    assert needs(job, gpus=gpus) == {"a": HEAD | a, "b": b}


def test_each_of_three_hosts_may_become_the_head() -> None:
    three = TWO.replace("hosts: [", "hosts: [{address: c, slots: 2}, ")
    found = needs("servers: 1\nworkers: 6\nsync: {strategy: ps}", three)
    assert {name: set(ports) - {"servers"} for name, ports in found.items()} == {
        name: {"agent", *HEAD} for name in ("a", "b", "c")
    }


def test_this_machine_alone_has_master_port_beside_the_coordinator() -> None:
    spec = load_cluster("name: lab\nhosts: [{address: local, slots: 2}]\n", "lab.yaml")
    job = load_job("name: j\nscript: t.py\nsync: {strategy: native}\n", "job.yaml", [])
    machines = {"local": Machine("local", "127.0.0.1", "lo", 8, 0, 1e9)}
    assert needed(job, assign_workers(spec, machines, job)) == {"local": {"coordinator": 1, "MASTER_PORT": 1}}


AT = {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_each_host_that_lacks_ports_is_named_with_roles_and_holders() -> None:
    wanted = {"a": HEAD | {"servers": 2}, "b": {"servers": 2}}
    seen = {"a": PortUse(2, [TakenPort(29400, 7, "nc -l"), TakenPort(29401)]), "b": PortUse(4)}
    error = lacking((29400, 29403), wanted, seen, AT, "lab.yaml")
    assert error is not None
    assert (error.code, error.exit) == ("port-taken", 7)
    assert error.message == (
        "network.ports 29400-29403 is too small: a needs 4 ports (coordinator 1, torch's store 1, servers 2) and has 2 "
        "free (taken: 29400, by pid 7 (nc -l); 29401, by a process that only root sees)"
    )
    assert error.hint == (
        "give network.ports at least 6 ports in lab.yaml, such as 29400-29499, or end what holds them"
    )
    assert lacking((29400, 29403), wanted, {"a": PortUse(4), "b": PortUse(4)}, AT, "") is None


def test_hosts_that_share_an_address_share_its_ports() -> None:
    wanted = {"a": {"coordinator": 1}, "b": {"servers": 2}}
    seen = {"a": PortUse(2), "b": PortUse(2)}
    assert lacking((29400, 29401), wanted, seen, AT, "") is None
    error = lacking((29400, 29401), wanted, seen, dict.fromkeys(AT, "127.0.0.1"), "")
    assert error is not None
    assert "a, b needs 3 ports (coordinator 1, servers 2) and has 2 free" in error.message


def test_the_holder_of_a_port_is_read_from_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        question = {"host": "127.0.0.1", "first": port, "last": port}
        said = subprocess.run(
            program_command(sys.executable, NETWORK_CHECKS, "ports", question),
            capture_output=True,
            check=True,
        )
        answer = json.loads(said.stdout)
        assert answer["free"] == 0
        assert [(each["port"], each["pid"]) for each in answer["taken"]] == [(port, os.getpid())]
        assert answer["taken"][0]["program"].startswith(os.path.basename(sys.executable)[:6])
