"""Private sshd on loopback addresses for the tests of remote/: own configuration, host keys and logins in a folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psctl.remote.target import Target, resolve

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)


def make_key(path: Path, kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    """Type and base64 of a key's public half."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


class PrivateSshd:
    """One sshd on a loopback address; everything of it lies in one folder."""

    def __init__(
        self, folder: Path, address: str, login: Path, kinds: tuple[str, ...] = ("ed25519",), extra: str = ""
    ) -> None:
        self.folder, self.address = folder, address
        folder.mkdir(parents=True, exist_ok=True)
        self.host_keys = {kind: make_key(folder / f"host_{kind}", kind) for kind in kinds}
        (folder / "authorized_keys").write_text(public(login) + "\n")
        with socket.socket() as probe:
            probe.bind((address, 0))
            self.port = probe.getsockname()[1]
        lines = [
            f"Port {self.port}", f"ListenAddress {address}", f"PidFile {folder}/sshd.pid", "StrictModes no",
            f"AuthorizedKeysFile {folder}/authorized_keys", "PasswordAuthentication no", "UsePAM no",
            "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password", "MaxStartups 100", extra,
            *(f"HostKey {key}" for key in self.host_keys.values()),
            "SetEnv SHLVL=1",  # after `extra`, whose own SetEnv counts; bash then reads no ~/.bashrc of the user here
        ]  # fmt: skip
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.log = (folder / "sshd.log").open("wb")
        self.start()

    def start(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True) if os.getuid() == 0 else None
        assert SSHD
        log = self.folder / "sshd.log"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            before = log.stat().st_size
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            )  # fmt: skip
            # not by a connection: a child of the sshd before this one may still hold its listening socket
            while self.process.poll() is None and time.monotonic() < deadline:
                if b"Server listening" in log.read_bytes()[before:]:
                    return
                time.sleep(0.02)
        raise AssertionError(log.read_text())

    def known_line(self, kind: str = "ed25519", key: Path | None = None) -> str:
        return f"[{self.address}]:{self.port} {public(key or self.host_keys[kind])}\n"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Lab:
    """A folder with a login key, known_hosts, an ssh config, and any number of sshd."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.login = make_key(folder / "id_login")
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()
        self.config = folder / "config"
        self.servers: list[PrivateSshd] = []
        self.configure("")

    def sshd(self, address: str = "127.0.0.2", **options: object) -> PrivateSshd:
        server = PrivateSshd(self.folder / f"sshd{len(self.servers)}", address, self.login, **options)  # type: ignore[arg-type]
        self.servers.append(server)
        return server

    def know(self, *servers: PrivateSshd) -> None:
        self.known_hosts.write_text("".join(server.known_line() for server in servers))

    def configure(self, text: str) -> None:
        """Write the ssh config: `text`, then what holds for all hosts."""
        self.config.write_text(
            f"{text}\nHost *\n  User {getpass.getuser()}\n  IdentityFile {self.login}\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    def target(self, server: PrivateSshd, **options: object) -> Target:
        given = {"name": "node-a", "address": server.address, "port": server.port, "config": self.config, **options}
        return resolve(given.pop("name"), given.pop("address"), **given)  # type: ignore[arg-type]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


def make_lab(folder: Path) -> Iterator[Lab]:
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen (openssh-server)")
    made = Lab(folder)
    yield made
    made.stop()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    yield from make_lab(tmp_path)


@pytest.fixture(scope="module")
def node_a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One sshd for all tests of a module that only log in there."""
    for made in make_lab(tmp_path_factory.mktemp("node-a")):
        server = made.sshd()
        made.know(server)
        yield made.target(server)


@pytest.fixture
def gone_soon() -> Callable[[int], bool]:
    """Wait until a process is gone (a zombie counts), 5 s at most."""

    def check(pid: int) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return True
            if state == "Z":
                return True
            time.sleep(0.02)
        return False

    return check
