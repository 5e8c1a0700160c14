"""Test hosts: namespaces on one machine that act as hosts, which can lose power, be cut off and be slowed down.

    the machine's own network                a switch (a network namespace)        a host (net, pid, mount, uts, ipc)
    the test, psctl  -- veth 10.x.y.254 --   bridge br0 -- port of h1 ------------ eth0 10.x.y.1   sshd, own /root ...
                                             '---------- port of h2 -------------- eth0 10.x.y.2
                                             bridge br1 (hosts behind a jump host) --- eth1 of h1, eth0 of h3
                                             bridge br2 (a second rack, by a trunk to br0) --- eth0 of h4

A host shares the root file system, except /root, /tmp, /run, /var/tmp and /dev/shm, which are its own; the Python that
runs the tests is visible. One supervisor process, the first of a process namespace of its own, is the parent of all; it
ends with the pipe to the test. So when the test ends, is interrupted or is killed with -9, the kernel ends all
processes and removes the namespaces, mounts and links. No name is shared by two runs.

Needs root, iproute2, util-linux and openssh-server; `Loopback` stands in where root is missing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PATH = "/run/psctl-test/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ORDINARY, ORDINARY_ID = "trainer", 20001
"""A user without privileges, whom only test hosts know, with the numbers of the user and of its group."""
PRIVATE = ("/root", "/tmp", "/run", "/var/tmp")
START_LIMIT = 20.0  # seconds until all sshd must answer


def missing() -> str:
    """Return what the test hosts lack on this machine, or ""."""
    if os.getuid() != 0:
        return "test hosts need root"
    lacking = [name for name in ("ip", "tc", "unshare", "nsenter", "ssh-keygen", "ssh") if shutil.which(name) is None]
    if SSHD is None:
        lacking.append("sshd")
    if lacking:
        return f"test hosts need {', '.join(lacking)} (iproute2, util-linux, openssh-server)"
    probe = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else f"test hosts need namespaces: {probe.stderr.decode().strip()}"


def _ip(*words: str, inside: int | None = None, check: bool = True) -> str:
    enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
    done = subprocess.run([*enter, *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def make_key(path: Path) -> str:
    """Make an ed25519 key pair; return type and base64 of the public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@dataclass
class Host:
    """One test host, as the user's machine reaches it."""

    name: str
    address: str  # its first; of a host behind another, reachable from that one only
    addresses: list[str]
    port: int = 22
    user: str = "root"
    behind: str = ""
    init: int = 0  # its first process, numbered as on this machine
    ports: list[str] = field(default_factory=list)  # names of its links' ends on the switch
    host_key: str = ""


class _Ssh:
    """The common part of test hosts: login key, known_hosts, ssh configuration, psctl's home on the user's machine."""

    hosts: dict[str, Host]
    folder: Path
    python = sys.executable

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hosts)

    @property
    def key(self) -> Path:
        """Private key that opens all hosts."""
        return self.folder / "id_login"

    def known_lines(self) -> str:
        """Complete and correct known_hosts."""
        lines = []
        for host in self.hosts.values():
            for address in host.addresses:
                name = address if host.port == 22 else f"[{address}]:{host.port}"
                lines.append(f"{name} {host.host_key}\n")
        return "".join(lines)

    def ssh_config(self, known_hosts: Path) -> str:
        """A ~/.ssh/config by which every host is reached by name, jump hosts included."""
        blocks = []
        for host in self.hosts.values():
            jump = f"  ProxyJump {host.behind}\n" if host.behind else ""
            blocks.append(f"Host {host.name}\n  HostName {host.address}\n  Port {host.port}\n{jump}")
        return "".join(blocks) + (
            f"Host *\n  User {next(iter(self.hosts.values())).user}\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    def make_home(self, folder: Path) -> Home:
        """Make a home folder for psctl on the driving side, with ssh set up for these hosts."""
        ssh = folder / ".ssh"
        ssh.mkdir(mode=0o700, parents=True)
        (ssh / "known_hosts").write_text(self.known_lines())
        (ssh / "config").write_text(self.ssh_config(ssh / "known_hosts"))
        return Home(folder)

    def cluster_text(
        self, names: Sequence[str] | None = None, name: str = "lab", more: str = "", *, messages: bool = False
    ) -> str:
        """A cluster file of these hosts (all by default) that uses the tests' Python; `more` is added as it is.

        `messages`: `up` measures the cost of messages, which takes 15 s and more on shared cores.
        """
        if not messages:
            own = "network: {measure_messages: false"
            more = more.replace("network: {", own + ", ") if "network: {" in more else f"{own}}}\n{more}"
        lines = "".join(f"  - {host}\n" for host in names or self.hosts)
        # Each host counts all cores as its own; more threads would slow all hosts.
        settings = f"python: {self.python}, environment: existing, env: {{OMP_NUM_THREADS: 1}}"
        runtime = "" if "runtime:" in more else f"runtime: {{{settings}}}\n"
        return f"version: 1\nname: {name}\n{runtime}{more}hosts:\n{lines}"


@dataclass(frozen=True)
class Home:
    """A home for psctl on the user's machine."""

    path: Path

    @property
    def known_hosts(self) -> Path:
        return self.path / ".ssh/known_hosts"

    @property
    def config(self) -> Path:
        return self.path / ".ssh/config"

    @property
    def env(self) -> dict[str, str]:
        """Environment for a psctl that lives in this home."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PSCTL_", "SSH_"))}
        return {**kept, "HOME": str(self.path), "PSCTL_HOME": str(self.path / ".psctl")}


class Hosts(_Ssh):
    """Test hosts h1, h2 ...; a context manager.

    Args:
        names: their number, or their names.
        rate: of every link, as tc writes it ("500mbit"), or of each host's; None: as fast as the machine.
        behind: host -> the host it is reached through; it has no link of its own to the driving side.
        second: rate of a second link of every host, eth1 on a network of their own; "": as fast as the machine.
        far: hosts that hang on another switch, a second rack.
        trunk: rate of the cable between the two switches.
        ordinary: log in as a user without privileges, whose home is the host's /root.
    """

    def __init__(
        self,
        names: int | Sequence[str] = 3,
        rate: str | Mapping[str, str] | None = None,
        behind: Mapping[str, str] | None = None,
        *,
        second: str | None = None,
        far: Sequence[str] = (),
        trunk: str | None = None,
        ordinary: bool = False,
    ) -> None:
        if reason := missing():
            raise RuntimeError(reason)
        chosen = [f"h{index}" for index in range(1, names + 1)] if isinstance(names, int) else list(names)
        self._rate, self._behind, self._second_rate = rate, dict(behind or {}), second
        self._far, self._trunk, self._ordinary = tuple(far), trunk, ordinary
        self.folder = Path(tempfile.mkdtemp(prefix="psctl-hosts-"))
        self._net = _free_network()
        self._second = self._net.rsplit(".", 1)[0] + f".{int(self._net.rsplit('.', 1)[1]) + 1}"
        self.driver = f"{self._net}.254"
        self.link = f"pst{secrets.token_hex(4)}"
        self.hosts = self._plan(chosen)
        self._supervisor: subprocess.Popen[str] | None = None
        self._switch = 0
        try:
            self._up()
        except BaseException:
            self.close()
            raise

    def _plan(self, names: list[str]) -> dict[str, Host]:
        hosts = {}
        for index, name in enumerate(names, 1):
            inner = name in self._behind or name in self._behind.values() or self._second_rate is not None
            outer = name not in self._behind
            addresses = [f"{self._net}.{index}"] * outer + [f"{self._second}.{index}"] * inner
            user = ORDINARY if self._ordinary else "root"
            hosts[name] = Host(name, addresses[0], addresses, user=user, behind=self._behind.get(name, ""))
        return hosts

    def _up(self) -> None:
        public = make_key(self.key)
        pythons = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), sys.base_prefix, sys.prefix}
        through = sorted({*pythons, str(Path(__file__).resolve().parents[2])})  # a checkout may be below /root
        plan = {
            "folder": str(self.folder),
            "login": public,
            "sshd": SSHD,
            "trunk": self._trunk,
            "ordinary": self._ordinary,
            "python": sys.executable,
            "through": [path for path in through if any(path.startswith(top + "/") for top in PRIVATE)],
            "hosts": [
                {"name": host.name, "addresses": host.addresses, "bridges": self._bridges(host),
                 "rates": self._rates(host)}
                for host in self.hosts.values()
            ],
        }  # fmt: skip
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self._supervisor = subprocess.Popen(
            ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", sys.executable, "-I", __file__,
             str(self.folder / "plan.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._switch = int(self._await_line("switch"))
        _ip("ip", "link", "add", self.link, "type", "veth", "peer", "name", "up0", "netns", str(self._switch))
        _ip("ip", "addr", "add", f"{self.driver}/24", "dev", self.link)
        _ip("ip", "link", "set", self.link, "up")
        # the route leads nowhere: no packet for a host behind another may leave by the machine's own route
        _ip("ip", "route", "add", f"{self._second}.0/24", "dev", self.link)
        self._send_line("linked")
        for name, found in json.loads(self._await_line("ready")).items():
            host = self.hosts[name]
            host.init, host.ports, host.host_key = found["init"], found["ports"], found["key"]
        for host in self.hosts.values():
            self._await_sshd(host)

    def _bridges(self, host: Host) -> list[str]:
        near = "br2" if host.name in self._far else "br0"
        return [near if address.startswith(self._net + ".") else "br1" for address in host.addresses]

    def _rates(self, host: Host) -> list[str | None]:
        own = self._rate if isinstance(self._rate, str) or self._rate is None else self._rate.get(host.name)
        return [own, self._second_rate if self._second_rate is not None else own][: len(host.addresses)]

    def _await_line(self, word: str) -> str:
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line.startswith(word + " "):
            raise RuntimeError(f"the test hosts did not come up: {line!r} instead of {word}")
        return line[len(word) + 1 :]

    def _send_line(self, word: str) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(word + "\n")
        self._supervisor.stdin.flush()

    def _await_sshd(self, host: Host) -> None:
        deadline = time.monotonic() + START_LIMIT
        while host.port not in self.ports(host.name, all_of_them=True):
            if time.monotonic() > deadline or not Path(f"/proc/{host.init}").exists():
                raise RuntimeError(f"{host.name}: no sshd: {(self.folder / host.name / 'log').read_text()[-2000:]}")
            time.sleep(0.01)

    # ---- faults and queries ----

    def exec(
        self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, not by SSH: it works also when the host is cut off."""
        done = subprocess.run(
            [*self.command(name), "env", "-i", "-C", "/root", f"PATH={PATH}", "HOME=/root", *argv],
            input=stdin, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(f"{name}: {' '.join(argv)}: {done.returncode}: {done.stderr.strip()}")
        return done

    def command(self, name: str) -> list[str]:
        """Return the words that, put before a command, run it on a host, as root."""
        return ["nsenter", "-t", str(self.hosts[name].init), "-m", "-u", "-i", "-n", "-p", "--"]

    def ordinary_command(self, name: str) -> list[str]:
        """Return the words that, put before a command, run it on a host as its user without privileges."""
        user = str(ORDINARY_ID)
        return [*self.command(name), "setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]

    def outer_pid(self, name: str, pid: int) -> int:
        """Return the number outside the host of a process that has the number `pid` there."""
        space = os.readlink(f"/proc/{self.hosts[name].init}/ns/pid")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # it has just ended
                found = re.search(r"^NSpid:.*\t(\d+)$", status.read_text(), re.MULTILINE)
                if found is not None and int(found[1]) == pid and os.readlink(status.parent / "ns/pid") == space:
                    return int(status.parent.name)
        raise ProcessLookupError(f"{name} has no process {pid}")

    def path(self, name: str, path: str) -> Path:
        """Return the path of a host's file on this machine."""
        return Path(f"/proc/{self.hosts[name].init}/root{path}")

    def crash(self, name: str) -> None:
        """Cut its power: its processes end without closing connections, and no packet leaves it."""
        self.cut(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hosts[name].init, signal.SIGKILL)

    def boot(self, name: str) -> None:
        """Boot it anew: its processes end without closing connections, and what was in memory is gone."""
        self.cut(name)
        inside = {int(pid) for pid, _ in self.processes(name)}
        self.exec(name, ["sh", "-c", f"kill -KILL {' '.join(map(str, sorted(inside)))}"], check=False)
        self.exec(name, ["sh", "-c", "rm -rf /dev/shm/* /run/user/*"], check=False)
        time.sleep(1.0)  # what was sent meanwhile is lost
        self.heal(name)

    def cut(self, name: str, link: int | None = None) -> None:
        """Cut all its links, or that of one ethN, silently: to both ends the cable looks plugged in."""
        for index, port in enumerate(self.hosts[name].ports):
            if link in (None, index):
                _ip("ip", "link", "set", "dev", port, "nomaster", inside=self._switch)

    def heal(self, name: str) -> None:
        """Mend its links."""
        for port, bridge in zip(self.hosts[name].ports, self._bridges(self.hosts[name]), strict=True):
            _ip("ip", "link", "set", "dev", port, "master", bridge, inside=self._switch)

    def part(self, *names: str, apart: bool = True) -> None:
        """Let these hosts reach no other of them, but all the rest; `apart` False: let them again."""
        for name in names:
            for port in self.hosts[name].ports:
                flag = "on" if apart else "off"
                _ip("bridge", "link", "set", "dev", port, "isolated", flag, inside=self._switch)

    def drop_packets(self, name: str, toward: str, *, dropped: bool = True) -> None:
        """Drop all packets of a host to another one, but not those of the other direction; or end that."""
        words = ["replace", "lladdr", "02:00:00:00:00:01", "nud", "permanent"] if dropped else ["del"]
        for index, address in enumerate(self.hosts[toward].addresses):
            _ip("ip", "neigh", words[0], address, *words[1:], "dev", f"eth{index}", inside=self.hosts[name].init)

    def lose(self, name: str, seconds: float) -> None:
        """Lose some tenth of the packets to and from a host: its links are cut for 20 ms five times a second."""
        ports = zip(self.hosts[name].ports, self._bridges(self.hosts[name]), strict=True)
        steps = [
            (f"ip link set dev {port} nomaster", f"ip link set dev {port} master {bridge}") for port, bridge in ports
        ]
        cut, heal = ("; ".join(each) for each in zip(*steps, strict=True))
        loop = f"for _ in $(seq {int(seconds * 5)}); do {cut}; sleep 0.02; {heal}; sleep 0.18; done"
        _ip("sh", "-c", loop, inside=self._switch)

    def rate(self, name: str, rate: str, link: int | None = None) -> None:
        """Change the speed of its links, or that of one ethN, both directions, as tc writes it ("100mbit")."""
        host = self.hosts[name]
        for index, port in enumerate(host.ports):
            if link in (None, index):
                _ip(*_shape(port, rate), inside=self._switch)
                _ip(*_shape(f"eth{index}", rate), inside=host.init)

    def sent(self, name: str, interface: str) -> int:
        """Bytes that have left a host by an interface."""
        for line in Path(f"/proc/{self.hosts[name].init}/net/dev").read_text().splitlines():
            label, _, rest = line.partition(":")
            if label.strip() == interface:
                return int(rest.split()[8])
        raise KeyError(interface)

    def between_racks(self) -> int:
        """Bytes that have crossed the cable between the two switches, both directions."""
        for line in Path(f"/proc/{self._switch}/net/dev").read_text().splitlines():
            label, _, rest = line.partition(":")
            if label.strip() == "trunk0":
                return int(rest.split()[0]) + int(rest.split()[8])
        raise KeyError("trunk0")

    def disk(self, name: str, path: str, size: str) -> None:
        """Put a small disk of its own (tmpfs, "4m") at a folder of a host."""
        self.exec(name, ["mkdir", "-p", path])
        self.exec(name, ["mount", "-t", "tmpfs", "-o", f"mode=755,size={size}", "tmpfs", path])

    def program(self, name: str, program: str, text: str) -> None:
        """Put a program of the test's own first on a host's PATH: a recorded nvidia-smi, say."""
        path = self.path(name, "/run/psctl-test/bin") / program
        path.write_text(text)
        path.chmod(0o755)

    def hide(self, name: str, path: str) -> None:
        """Make a program of a host impossible to run."""
        self.exec(name, ["mount", "--bind", "/dev/null", path])

    def without_python(self, name: str) -> None:
        """Take every Python off a host's PATH."""
        for folder in PATH.split(":"):
            for found in self.path(name, folder).glob("python*"):
                inside = f"{folder}/{found.name}"
                if found.is_symlink():
                    inside = self.exec(name, ["readlink", "-f", inside]).stdout.strip()
                if inside and self.exec(name, ["test", "-x", inside], check=False).returncode == 0:
                    self.hide(name, inside)

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Every process of a host with its command line, except its first, and sshd; numbered as there."""
        space = _namespace(self.hosts[name].init, "pid")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and space and _namespace(int(entry), "pid") == space:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    line = b" ".join(words).decode("utf-8", "replace").strip()
                    status = Path(f"/proc/{entry}/status").read_text()
                    comm = status.split("\n", 1)[0].split("\t", 1)[1]
                    inner = int(status.split("NSpid:", 1)[1].split("\n", 1)[0].split()[-1])
                    if inner != 1 and not comm.startswith("sshd") and line:
                        found.append((inner, line))
        return sorted(found)

    def ports(self, name: str, all_of_them: bool = False) -> set[int]:
        """TCP ports that something on a host listens at; without sshd's own."""
        found = set()
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{self.hosts[name].init}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A":
                        found.add(int(words[1].rpartition(":")[2], 16))
        return found if all_of_them else found - {self.hosts[name].port}

    def shm(self, name: str) -> list[str]:
        """Names in a host's /dev/shm."""
        try:
            return sorted(os.listdir(self.path(name, "/dev/shm")))
        except OSError:
            return []

    def leftovers(self, name: str) -> list[str]:
        """What a job left on a host: processes, ports, shared memory, as lines to print; empty when clean."""
        return [
            *(f"process {pid}: {line}" for pid, line in self.processes(name)),
            *(f"port {port}" for port in sorted(self.ports(name))),
            *(f"shared memory {entry}" for entry in self.shm(name)),
        ]

    def close(self) -> None:
        """Remove everything."""
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            assert self._supervisor.stdout is not None
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()
            try:
                self._supervisor.wait(10)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._supervisor.stdout.close()
            _ip("ip", "link", "del", self.link, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def missing_for_loopback() -> str:
    """Return what the stand-in lacks on this machine, or ""."""
    lacking = [name for name in ("ssh-keygen", "ssh") if shutil.which(name) is None] + ["sshd"] * (SSHD is None)
    return f"test hosts need {', '.join(lacking)} (openssh-server)" if lacking else ""


class Loopback(_Ssh):
    """Stand-in without root: an sshd on 127.0.0.2, one on 127.0.0.3 ..., each with its own HOME; a context manager.

    They share disk, memory and process numbers, so a link cannot be cut or slowed. A variable in the environment of
    processes names their host.

    Args:
        names: their number, or their names.
        sshd: further lines of sshd_config.
    """

    def __init__(self, names: int | Sequence[str] = 3, sshd: str = "") -> None:
        if reason := missing_for_loopback():
            raise RuntimeError(reason)
        chosen = [f"h{index}" for index in range(1, names + 1)] if isinstance(names, int) else list(names)
        self.folder = Path(tempfile.mkdtemp(prefix="psctl-hosts-"))
        self._word = f"PSCTL_TEST_HOST={secrets.token_hex(6)}"
        self._shm = set(os.listdir("/dev/shm"))
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self._options = sshd
        self.hosts = {}
        try:
            public = make_key(self.key)
            for index, name in enumerate(chosen, 2):
                self._begin(name, f"127.0.0.{index}", public)
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, address: str, login: str) -> None:
        own = self.folder / name
        (own / "home").mkdir(parents=True)
        (own / "authorized_keys").write_text(login + "\n")
        host_key = make_key(own / "host_key")
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        (own / "sshd_config").write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {own}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {own}/authorized_keys\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nPrintMotd no\n{self._options}\n"
            f"SetEnv HOME={own}/home {self._word}-{name} PATH={Path(sys.executable).parent}:{PATH}\n"
        )
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        assert SSHD is not None
        with (own / "log").open("wb") as log:
            self._sshd[name] = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(own / "sshd_config")], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        user = pwd.getpwuid(os.getuid()).pw_name
        self.hosts[name] = Host(name, address, [address], port=port, user=user, host_key=host_key)
        deadline = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
                return
            if time.monotonic() > deadline or self._sshd[name].poll() is not None:
                raise RuntimeError(f"{name}: no sshd: {(own / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def exec(
        self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as if on that host."""
        key, _, word = self._word.partition("=")
        home = self.folder / name / "home"
        done = subprocess.run(
            list(argv), input=stdin, capture_output=True, text=True, timeout=timeout, check=False, cwd=home,
            env={**os.environ, "HOME": str(home), key: f"{word}-{name}"},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(f"{name}: {' '.join(argv)}: {done.returncode}: {done.stderr.strip()}")
        return done

    def path(self, name: str, path: str) -> Path:
        """Where a host's file is; `~/x` is in its home."""
        return self.folder / name / "home" / path[2:] if path.startswith("~/") else Path(path)

    def crash(self, name: str) -> None:
        """Kill its sshd and all its processes; unlike a power cut, this closes the sockets."""
        self._sshd[name].kill()
        self._sshd[name].wait()
        for pid in self._pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self, name: str) -> list[int]:
        mark = f"{self._word}-{name}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Every process of a host with its command line, except sshd."""
        found = []
        for pid in self._pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                if line and not line.startswith("sshd"):
                    found.append((pid, line))
        return found

    def ports(self, name: str) -> set[int]:
        """TCP ports that the host's processes listen at."""
        sockets = set()
        for pid in self._pids(name):
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        sockets.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        found = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                found.add(int(words[1].rpartition(":")[2], 16))
        return found

    def shm(self, name: str) -> list[str]:
        """Names in /dev/shm that were not there at first; of all hosts together."""
        return sorted(set(os.listdir("/dev/shm")) - self._shm)

    def leftovers(self, name: str) -> list[str]:
        """What a job left on a host, as lines to print; empty when clean."""
        return [
            *(f"process {pid}: {line}" for pid, line in self.processes(name)),
            *(f"port {port}" for port in sorted(self.ports(name))),
            *(f"shared memory {entry}" for entry in self.shm(name)),
        ]

    def close(self) -> None:
        """Remove everything."""
        for name in self._sshd:
            self.crash(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _shape(device: str, rate: str) -> list[str]:
    # a burst of 64kb would cost TCP a quarter of the rate
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]


def _free_network() -> str:
    """Return "10.x.y" with y even, such that nothing here routes to 10.x.y.0/23."""
    taken = []
    for line in _ip("ip", "-4", "-o", "route", "show", "table", "all").splitlines():
        for word in line.split()[:2]:
            with contextlib.suppress(ValueError):
                taken.append(ipaddress.ip_network(word, strict=False))
    chance = random.SystemRandom()
    for _ in range(1000):
        net = f"10.{chance.randrange(64, 255)}.{chance.randrange(0, 127) * 2}"
        wanted = ipaddress.ip_network(f"{net}.0/23")
        if not any(wanted.overlaps(other) for other in taken if other.prefixlen > 8):
            return net
    raise RuntimeError("no free network in 10.64.0.0 to 10.254.0.0")


# ---- the supervisor: first process of its own process namespace, in the switch's network namespace ------------------

_HOST = r"""
read pid _ </proc/self/stat; echo $pid; read go
mount --make-rprivate /; hostname "$NAME"
ip link set lo up
i=0; for address in $ADDRESSES; do ip addr add $address/24 dev eth$i; ip link set eth$i up; i=$((i + 1)); done
for path in $THROUGH; do
  for top in /root /tmp /run /var/tmp; do
    case $path in $top/*) mkdir -p "$DIR$path"; mount --rbind "$path" "$DIR$path";; esac
  done
done
mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /dev/shm
mount --bind "$DIR/hosts" /etc/hosts; mount --bind "$DIR/passwd" /etc/passwd
mount --rbind "$DIR/root" /root; mount --rbind "$DIR/var/tmp" /var/tmp; mount --rbind "$DIR/run" /run
echo 0 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
umount -l /proc; mount -t proc proc /proc
mount --rbind "$DIR/tmp" /tmp
cd /; exec "$SSHD" -D -e -f /run/psctl-test/sshd_config
"""


def _supervise(plan: dict[str, Any]) -> None:
    folder = Path(plan["folder"])
    print("switch", Path("/proc/self/stat").read_text().split()[0], flush=True)
    if sys.stdin.readline() != "linked\n":
        return
    for word in ("link set lo up", "link add br0 type bridge", "link add br1 type bridge", "link add br2 type bridge",
                 "link set br0 up", "link set br1 up", "link set br2 up", "link set up0 master br0 up",
                 "link add trunk0 type veth peer name trunk2", "link set trunk0 master br0 up",
                 "link set trunk2 master br2 up"):  # fmt: skip
        _ip("ip", *word.split())
    if plan["trunk"]:
        _ip(*_shape("trunk0", plan["trunk"]))
        _ip(*_shape("trunk2", plan["trunk"]))
    children = {host["name"]: _begin(host, plan, folder) for host in plan["hosts"]}
    ready = {}
    for number, host in enumerate(plan["hosts"], 1):
        child = children[host["name"]]
        assert child.stdin is not None
        assert child.stdout is not None
        init = int(child.stdout.readline())
        ports = [f"p{number}.{index}" for index in range(len(host["bridges"]))]
        for index, (port, bridge, rate) in enumerate(zip(ports, host["bridges"], host["rates"], strict=True)):
            _ip("ip", "link", "add", port, "type", "veth", "peer", "name", f"eth{index}", "netns", str(child.pid))
            _ip("ip", "link", "set", port, "master", bridge, "up")
            if rate:
                _ip(*_shape(port, rate))
                _ip(*_shape(f"eth{index}", rate), inside=init)
        child.stdin.write("go\n")
        child.stdin.close()
        ready[host["name"]] = {"init": init, "ports": ports, "key": (folder / host["name"] / "key").read_text()}
    print("ready", json.dumps(ready), flush=True)
    sys.stdin.read()  # until the test ends
    for child in children.values():
        child.kill()
    for child in children.values():
        child.wait()


def _begin(host: dict[str, Any], plan: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    own = folder / host["name"]
    inner = own / "run/psctl-test"
    for sub in ("root/.ssh", "tmp", "run/sshd", "var/tmp"):
        (own / sub).mkdir(parents=True)
    (inner / "bin").mkdir(parents=True)
    for sub in ("tmp", "var/tmp"):
        (own / sub).chmod(0o1777)
    (own / "root").chmod(0o700)
    (own / "root/.ssh").chmod(0o700)
    (own / "root/.ssh/authorized_keys").write_text(plan["login"] + "\n")
    users = Path("/etc/passwd").read_text()
    if plan["ordinary"]:
        users += f"{ORDINARY}:x:{ORDINARY_ID}:{ORDINARY_ID}::/root:/bin/sh\n"
        for path in (own / "root", *(own / "root").rglob("*")):
            os.chown(path, ORDINARY_ID, ORDINARY_ID)
        (own / "root").chmod(0o711)
    (own / "passwd").write_text(users)
    (own / "key").write_text(make_key(inner / "host_key"))
    names = "".join(f"{other['addresses'][0]} {other['name']}\n" for other in plan["hosts"])
    (own / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + names)
    (inner / "sshd_config").write_text(
        "Port 22\n" + "".join(f"ListenAddress {address}\n" for address in host["addresses"])
        + "HostKey /run/psctl-test/host_key\nPidFile none\nPermitRootLogin prohibit-password\nUsePAM no\n"
        "AuthorizedKeysFile /root/.ssh/authorized_keys\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"MaxStartups 100\nPrintMotd no\nSetEnv PATH={PATH}\n"
    )  # fmt: skip
    python = inner / "bin/python3"
    python.write_text(f'#!/bin/sh\nexec "{plan["python"]}" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "NAME": host["name"], "ADDRESSES": " ".join(host["addresses"]), "DIR": str(own),
                   "THROUGH": " ".join(plan["through"]), "SSHD": plan["sshd"]}  # fmt: skip
    return subprocess.Popen(
        ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", _HOST],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(own / "log").open("wb"), text=True,
    )  # fmt: skip


if __name__ == "__main__":
    _plan_file = Path(sys.argv[1])
    try:
        _supervise(json.loads(_plan_file.read_text()))
    finally:
        shutil.rmtree(_plan_file.parent, ignore_errors=True)
