"""Hosts behind forwarded ports of 127.0.0.1, and ranges of ports: what cannot work is refused before it starts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import PATH
from tests.helpers.running import Psctl, assert_clean

pytestmark = pytest.mark.whole


@pytest.fixture
def hosts(make_hosts: Any) -> Any:
    """Two test hosts."""
    return make_hosts(2)


@contextlib.contextmanager
def forwarded(address: str, port: int) -> Iterator[int]:
    """Forward a port of 127.0.0.1 to an address, as `docker run -p` and `ssh -L` do; gives that port."""
    ends: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                came, _ = listener.accept()
                ends.extend((came, socket.create_connection((address, port))))
            except OSError:
                return
            for source, target in (ends[-2:], ends[:-3:-1]):
                threading.Thread(target=copy, args=(source, target), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for end in ends:
            end.close()


@pytest.fixture
def forwards(hosts: Any, home: Any) -> Iterator[dict[str, str]]:
    """Cluster file lines of h1 and h2, reached at ports of 127.0.0.1 whose keys are known."""
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(forwarded(hosts[name].address, 22)) for name in ("h1", "h2")}
        with home.known_hosts.open("a") as known:
            known.writelines(f"[127.0.0.1]:{port} {hosts[name].host_key}\n" for name, port in ports.items())
        yield {name: f"  - {{name: {name}, address: 127.0.0.1, port: {port}}}\n" for name, port in ports.items()}


def write(home: Any, hosts: Any, lines: dict[str, str], more: str = "") -> str:
    text = hosts.cluster_text(["h1"], more=more).partition("hosts:\n")[0]
    path: Path = home.path / "cluster.yaml"
    path.write_text(f"{text}hosts:\n{''.join(lines.values())}")
    return str(path)


def test_hosts_behind_ports_of_loopback_reach_each_other_at_their_own_addresses(
    hosts: Any, home: Any, forwards: Any
) -> None:
    psctl, cluster = Psctl(home.path, environment=home.env), write(home, hosts, forwards)
    doctor = psctl.run("doctor", cluster, "-o", "json")
    assert doctor.code == 0, doctor
    rows = [check for host in doctor.document["hosts"] for check in host["checks"] if check["check"] == "interface"]
    assert [row["detail"].split(":")[0] for row in rows] == [f"eth0 {hosts[name].address}" for name in ("h1", "h2")]
    (home.path / "job.yaml").write_text("name: line\nscript: train.py\nsync: {strategy: ring}\n")
    (home.path / "train.py").write_text(
        "import psctl, torch\nrun = psctl.init()\nnet = torch.nn.Linear(10, 10)\n"
        "model, opt = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "for _ in run.epochs(2):\n    model(torch.ones(1, 10)).sum().backward()\n    opt.step()\n"
    )
    train = psctl.run("train", str(home.path / "job.yaml"), "--cluster", cluster, "-o", "jsonl")
    assert train.code == 0, train
    assert {rank["host"] for rank in train.of("started")[0]["roles"] if rank["role"] == "worker"} == {"h1", "h2"}
    assert_clean(hosts)


def test_hosts_that_share_an_inner_address_are_refused_with_the_cure(hosts: Any, home: Any, forwards: Any) -> None:
    for name in ("h1", "h2"):  # as rootless containers and virtual machines behind NAT have it
        hosts.exec(name, ["ip", "link", "add", "tap0", "type", "veth", "peer", "name", "tap1"])
        hosts.exec(name, ["ip", "addr", "add", "10.0.2.100/24", "dev", "tap0"])
        hosts.exec(name, ["ip", "link", "set", "tap0", "up"])
    psctl, cluster = (
        Psctl(home.path, environment=home.env),
        write(home, hosts, forwards, "network: {interface: tap0}\n"),
    )
    wrong = "h1 and h2 both have the address 10.0.2.100 on separate networks, so neither is reachable"
    doctor = psctl.run("doctor", cluster, "-o", "json")
    assert doctor.code != 0
    rows = [check for host in doctor.document["hosts"] for check in host["checks"] if check["check"] == "interface"]
    assert [(row["ok"], row["detail"]) for row in rows] == [(False, wrong)]
    assert "internal_address:" in rows[0]["cure"]
    up = psctl.run("up", cluster, "-o", "json")
    assert (up.code, up.document["error"]["message"]) == (3, wrong)
    assert not hosts.path("h1", "/root/.psctl").exists(), "it was refused before anything was done"


@pytest.mark.soak  # tests/agent/test_agent.py fills a range
def test_a_range_of_ports_that_is_too_small_is_refused_before_anything_starts(hosts: Any, home: Any) -> None:
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text(more="network: {ports: 29400-29402}\n"))
    (home.path / "job.yaml").write_text("name: line\nscript: train.py\nservers: 2\nsync: {strategy: ps}\n")
    (home.path / "train.py").write_text("")
    holder = "import socket, sys\ns = socket.create_server((sys.argv[1], 29401))\nprint('on', flush=True)\ninput()\n"
    words = [*hosts.command("h1"), "env", "-i", f"PATH={PATH}", hosts.python, "-c", holder, hosts["h1"].address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        for more in (["--dry-run"], []):
            done = psctl.run(
                "train",
                str(home.path / "job.yaml"),
                "--cluster",
                str(cluster),
                "-o",
                "json" if more else "jsonl",
                *more,
            )
            assert done.code == 7, done
            error = done.document["error"] if more else done.events[-1]["error"]
            assert error["code"] == "port-taken"
            assert "h1 needs 3 ports (coordinator 1, torch's store 1, servers 1) and has 2 free" in error["message"]
            assert "29401, by pid " in error["message"]
            assert "h2" not in error["message"]
            assert "at least 4 ports" in error["hint"]
            assert not hosts.path("h1", "/root/.psctl").exists()
        doctor = psctl.run("doctor", str(cluster), "-o", "json").document
        rows = {
            host["name"]: check for host in doctor["hosts"] for check in host["checks"] if check["check"] == "ports"
        }
        assert (rows["h1"]["ok"], rows["h2"]["ok"]) == (False, True)
        process.communicate("end\n")
