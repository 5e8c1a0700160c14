"""The test hosts themselves, and a shell on machines that lose power or their cable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psctl.errors import DiskFull, HostUnreachable
from psctl.remote.local import LocalShell
from psctl.remote.ssh import SshShell
from psctl.remote.target import resolve
from tests.helpers import hosts as library
from tests.helpers.running import until

pytestmark = pytest.mark.whole
SOAK = pytest.mark.soak


def banner(address: str) -> bytes:
    """What sshd says first; a machine that answers for others is not taken for it."""
    try:
        with socket.create_connection((address, 22), 0.5) as opened:
            opened.settimeout(0.5)
            return opened.recv(4)
    except OSError:
        return b""


def links() -> set[str]:
    return {line.split()[0].split("@")[0] for line in _out("ip", "-br", "link").splitlines()}


def _out(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_hosts_are_machines_of_their_own(hosts: Any) -> None:
    assert [hosts.exec(name, ["hostname"]).stdout.strip() for name in hosts] == ["h1", "h2", "h3"]
    for folder in ("/root", "/tmp", "/run", "/var/tmp", "/dev/shm"):
        hosts.exec("h1", ["touch", f"{folder}/mark-of-h1"])
        assert not Path(f"{folder}/mark-of-h1").exists()
        assert hosts.exec("h2", ["test", "-e", f"{folder}/mark-of-h1"], check=False).returncode == 1
    assert hosts.exec("h1", ["python3", "-c", "import msgspec, sys; print(sys.prefix)"]).stdout.strip() == sys.prefix
    assert hosts.exec("h1", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]


def test_what_runs_on_a_host_is_seen(hosts: Any) -> None:
    assert [hosts.leftovers(name) for name in hosts] == [[], [], []]
    code = "import socket, time; s = socket.create_server(('', 0)); open('/dev/shm/mark', 'w').close(); time.sleep(300)"
    process = subprocess.Popen([*hosts.command("h1"), "python3", "-c", code])
    try:
        deadline = time.monotonic() + 20
        while len(hosts.leftovers("h1")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [line.split()[0] for line in hosts.leftovers("h1")] == ["process", "port", "shared"]
        assert hosts.leftovers("h2") == []
        hosts.crash("h1")
        process.wait(10)
        assert hosts.processes("h1") == []
    finally:
        process.kill()
        process.wait()


def test_a_link_is_cut_and_mended(hosts: Any) -> None:
    assert banner(hosts["h2"].address) == b"SSH-"
    hosts.cut("h2")
    assert banner(hosts["h2"].address) == b""
    hosts.heal("h2")
    assert banner(hosts["h2"].address) == b"SSH-"


def test_a_link_has_the_rate_that_was_set(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(1, rate="40mbit")
    home = hosts.make_home(tmp_path / "home")
    shell = SshShell.connect(resolve("h1", "h1", config=home.config))
    try:
        began = time.monotonic()
        shell.put(os.urandom(4_000_000), "/root/file")
        seconds = time.monotonic() - began
    finally:
        shell.close()
    assert 0.6 < seconds < 2, "4 MB at 5 MB/s, less the burst"


def test_two_sets_of_hosts_stand_side_by_side(make_hosts: Callable[..., Any]) -> None:
    one, other = make_hosts(1), make_hosts(1)
    assert one["h1"].address != other["h1"].address
    assert (banner(one["h1"].address), banner(other["h1"].address)) == (b"SSH-", b"SSH-")


@pytest.mark.parametrize("how", ["closed", "killed", "interrupted"])
def test_nothing_of_them_remains_however_the_test_ends(make_hosts: Callable[..., Any], how: str) -> None:
    before = links()
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('hosts', sys.argv[1])\n"
        "hosts = importlib.util.module_from_spec(spec); sys.modules['hosts'] = hosts; spec.loader.exec_module(hosts)\n"
        "with hosts.Hosts(2) as made:\n"
        "    print(made.folder, made.link, made['h1'].init, made['h2'].init, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, library.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdin is not None
    folder, link, *inits = run.stdout.readline().split()
    assert link in links()
    if how == "killed":
        run.kill()
    elif how == "interrupted":
        run.send_signal(signal.SIGINT)
    run.stdin.close()
    run.wait(20)
    run.stdout.close()
    deadline = time.monotonic() + 10
    while Path(folder).exists() or link in links() or any(Path(f"/proc/{pid}").exists() for pid in inits):
        assert time.monotonic() < deadline, (folder, links() - before)
        time.sleep(0.05)
    assert folder not in Path("/proc/self/mounts").read_text()  # other tests mount things of their own


def test_a_host_behind_another_is_reached_through_it_only(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(3, behind={"h3": "h1"})
    home = hosts.make_home(tmp_path / "home")
    assert banner(hosts["h3"].address) == b""
    target = resolve("h3", "h3", config=home.config)
    assert [jump.address for jump in target.jumps] == [hosts["h1"].address]
    shell = SshShell.connect(target)
    assert (shell.home, shell.run(["hostname"]).stdout) == ("/root", b"h3\n")
    shell.close()


def test_a_home_with_its_own_ssh_is_found_by_its_environment(
    hosts: Any, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home.path))
    shell = SshShell.connect(resolve("h2", "h2"))
    assert shell.run(["hostname"]).stdout == b"h2\n"
    shell.close()


def test_a_full_disk_is_reported(hosts: Any, home: Any) -> None:
    hosts.disk("h1", "/root/small", "1m")
    shell = SshShell.connect(resolve("h1", "h1", config=home.config))
    with pytest.raises(DiskFull, match=r"h1: write /root/small/file: .*No space left"):
        shell.put(bytes(8 << 20), "/root/small/file")
    assert hosts.exec("h1", ["ls", "/root/small"]).stdout == ""
    shell.close()


def test_a_host_may_lack_python(hosts: Any) -> None:
    hosts.without_python("h1")
    for program in ("python3", "python"):
        assert hosts.exec("h1", [program, "-V"], check=False).returncode in (126, 127)
    hosts.exec("h1", ["ls"])


@pytest.mark.parametrize(
    ("what", "behind"),
    [
        ("tail", True),
        pytest.param("run", False, marks=SOAK),
        pytest.param("put", False, marks=SOAK),
        pytest.param("put", True, marks=SOAK),
    ],
)
def test_a_host_that_vanishes_is_an_error_within_15_seconds(
    make_hosts: Callable[..., Any], tmp_path: Path, what: str, behind: bool
) -> None:
    hosts = make_hosts(2, behind={"h2": "h1"} if behind else None)
    home = hosts.make_home(tmp_path / "home")
    shell = SshShell.connect(resolve("h2", "h2", config=home.config))
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(300 << 20)
    hosts.rate("h2", "80mbit")
    do: dict[str, Callable[[], object]] = {
        "run": lambda: shell.run(["sleep", "60"]),
        "tail": lambda: shell.tail("/root/log").read(),
        "put": lambda: shell.put(big, "/root/file"),
    }
    threading.Timer(1.0, hosts.crash, ("h2",)).start()
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="h2: "):
        do[what]()
    assert time.monotonic() - began < 1 + 15
    shell.close()


def test_a_short_cut_of_the_link_is_outlived(hosts: Any, home: Any) -> None:
    shell = SshShell.connect(resolve("h1", "h1", config=home.config))
    threading.Timer(0.2, hosts.cut, ("h1",)).start()
    threading.Timer(4.0, hosts.heal, ("h1",)).start()
    assert shell.run(["sh", "-c", "sleep 3; echo still here"], timeout=30).stdout == b"still here\n"
    shell.close()


def test_a_started_process_outlives_a_client_that_is_killed(hosts: Any, home: Any) -> None:
    shell = SshShell.connect(resolve("h1", "h1", config=home.config))
    process = shell.start(["sleep", "300"], log="~/log", cwd="~", env={})
    shell.close()
    again = SshShell.connect(resolve("h1", "h1", config=home.config))
    assert again.alive(process)
    assert again.signal(process, signal.SIGKILL)
    again.close()


def test_the_stand_in_without_root_has_homes_of_its_own(make_loopback: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_loopback(2)
    home = hosts.make_home(tmp_path / "home")
    shells = {name: SshShell.connect(resolve(name, name, config=home.config)) for name in hosts}
    assert shells["h1"].home != shells["h2"].home
    shells["h1"].put(b"x", "~/mark")
    assert (hosts.path("h1", "~/mark").exists(), hosts.path("h2", "~/mark").exists()) == (True, False)
    process = shells["h1"].start(["sleep", "300"], log="~/log", cwd="~", env={})
    assert hosts.processes("h1") == [(process.pid, "sleep 300")]
    for shell in shells.values():
        shell.close()
    deadline = time.monotonic() + 5
    while hosts.processes("h2") != []:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hosts.crash("h1")
    until(lambda: not LocalShell().alive(process), 10)  # the kernel takes a moment on a busy machine
