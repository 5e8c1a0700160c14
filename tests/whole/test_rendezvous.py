"""The store behind MASTER_PORT on two hosts: plain DistributedDataParallel works, and strangers reach nothing."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psctl.transport.protocol import preauth
from tests.helpers.running import ROOT, Psctl, assert_clean, next_event

pytestmark = pytest.mark.whole

RING = """
import os, psutil, torch, torch.distributed as dist
import psctl
run = psctl.init()
torch.manual_seed(run.rank)
net = torch.nn.Linear(2, 1)
net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
print("starts with", net.weight.tolist())
for _ in run.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4):
    optimizer.zero_grad()
    net(_[0]).sum().backward()
    optimizer.step()
beside = [one.cmdline() for one in psutil.Process(os.getppid()).children()]
print("store", any("psctl.agent.torch_store_host" in line for line in beside), "engine", dist.is_initialized())
"""

SLEEPS = """
import os, time
print(os.environ["PSCTL_HOST"], os.environ["MASTER_PORT"], flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def site(module_hosts: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Psctl, Any, Path]:
    """psctl on the driving side, two hosts, and a cluster file of them."""
    hosts = module_hosts(2)
    home = hosts.make_home(tmp_path_factory.mktemp("site") / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    return Psctl(home.path, environment=home.env), hosts, cluster


def test_plain_ddp_trains_over_two_hosts(site: tuple[Psctl, Any, Path]) -> None:
    psctl, hosts, cluster = site
    job = str(ROOT / "templates" / "ddp" / "job.yaml")
    run = psctl.run("train", job, "--cluster", str(cluster), "--workers", "2", "-o", "jsonl")
    assert run.code == 0, run
    said = [event["text"] for event in run.of("log") if "accuracy" in event["text"]]
    assert sorted(line.split(":")[0] for line in said) == [f"rank {rank} of 2" for rank in range(2)]
    assert_clean(hosts)


def test_the_network_reaches_doors_alone_and_starts_no_store(site: tuple[Psctl, Any, Path], tmp_path: Path) -> None:
    psctl, hosts, cluster = site
    (tmp_path / "train.py").write_text(SLEEPS)
    (tmp_path / "job.yaml").write_text("version: 1\nname: sleeps\nscript: train.py\n")
    told: dict[str, int] = {}
    with psctl.start("train", str(tmp_path / "job.yaml"), "--cluster", str(cluster), "-o", "jsonl") as follower:
        while len(told) < len(list(hosts)):
            host, port = next_event(follower, "log")["text"].split()
            told[host] = int(port)
        for name in hosts:
            address = hosts[name].address
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, told[name]), 5)
            for port in outside(hosts, name):
                with socket.create_connection((address, port), 5) as stranger:
                    stranger.settimeout(10)
                    greeting = stranger.recv(preauth.GREETING, socket.MSG_WAITALL)
                    preauth.check_greeting(greeting)
                    stranger.sendall(b"\0" * preauth.ANSWER)
                    assert stranger.recv(1) == b""
            assert not [line for _, line in hosts.processes(name) if "store_host" in line]
        assert psctl.run("stop", "--force").code in (0, 1)
        follower.wait(30)
    assert_clean(hosts)


@pytest.mark.soak  # test_sharded_optimizer.py plays one
def test_a_schedule_on_cpus_needs_neither_the_engine_nor_its_store(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RING)
    (tmp_path / "job.yaml").write_text("version: 1\nname: ring\nscript: train.py\nsync: {strategy: ring}\n")
    run = Psctl(tmp_path / "home").run(
        "train", str(tmp_path / "job.yaml"), "--workers", "2", "-o", "jsonl", cwd=tmp_path
    )
    assert run.code == 0, run
    texts = [event["text"] for event in run.of("log")]
    assert texts.count("store False engine False") == 2, run
    assert len({text for text in texts if text.startswith("starts with")}) == 1, "both have rank 0's values"


@pytest.mark.soak  # tests/plan/test_choose.py has the refusal
def test_where_encryption_is_required_the_engine_is_refused_and_psctls_own_trains(
    site: tuple[Psctl, Any, Path], tmp_path: Path
) -> None:
    psctl, hosts, _ = site
    cluster = tmp_path / "sealed.yaml"
    cluster.write_text(hosts.cluster_text(more="network: {require_encryption: true}\n"))
    (tmp_path / "train.py").write_text(RING)
    (tmp_path / "job.yaml").write_text("version: 1\nname: ring\nscript: train.py\n")
    job = ("train", str(tmp_path / "job.yaml"), "--cluster", str(cluster), "-o", "jsonl")
    refused = psctl.run(*job, "--strategy", "native")
    assert refused.code == 2, refused
    assert '"started"' not in refused.out
    assert "network: require_encryption: true, and between hosts it goes over Gloo" in refused.out
    run = psctl.run(*job, "--strategy", "ring")
    assert run.code == 0, run.out
    assert [event["text"] for event in run.of("log")].count("store False engine False") == 2, run
    assert run.of("plan")[-1]["chosen"] == "ring"
    sizes = ("--sizes", "1KB", "--workers", "2", "--cluster", str(cluster), "-o", "json")
    assert "require_encryption" in psctl.run("bench", "allreduce", "--strategy", "native", *sizes).out
    assert_clean(hosts)


@pytest.mark.soak  # test_bench.py measures it on this machine
def test_where_encryption_is_required_psctls_own_is_measured(site: tuple[Psctl, Any, Path], tmp_path: Path) -> None:
    psctl, hosts, _ = site
    cluster = tmp_path / "sealed.yaml"
    cluster.write_text(hosts.cluster_text(more="network: {require_encryption: true}\n"))
    words = ("--strategy", "ring", "--sizes", "1KB", "--workers", "2", "--cluster", str(cluster))
    measured = psctl.run("bench", "allreduce", *words)
    assert measured.code == 0, psctl.run("logs", "bench").out
    assert_clean(hosts)


def outside(hosts: Any, name: str) -> list[int]:
    """Return the ports at which something listens that other hosts can reach, without sshd's."""
    rows = Path(f"/proc/{hosts[name].init}/net/tcp").read_text()
    found = re.findall(r"^ *\d+: (\w{8}):(\w{4}) \w+:\w+ 0A", rows, re.MULTILINE)
    ports = {int(port, 16) for address, port in found if not address.endswith("7F")}
    return sorted(ports - {hosts[name].port})
