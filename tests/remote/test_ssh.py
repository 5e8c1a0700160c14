"""Over SSH: no login before a host key is known, on any hop; errors that say what is wrong; nothing is left behind."""

from __future__ import annotations

import contextlib
import getpass
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl.clock import SystemClock
from psctl.errors import (
    AuthFailed,
    HostKeyChanged,
    HostKeyUnknown,
    HostUnreachable,
    InvalidFile,
    PsctlError,
    TimedOut,
    UsageError,
)
from psctl.remote import known_hosts, scripts, ssh_auth
from psctl.remote.ssh import DROPPED_PATIENCE, LONGEST_WAIT, SshShell
from psctl.remote.target import Target, resolve
from tests.helpers.manual_clock import ManualClock

ROOT = Path(__file__).resolve().parent.parent.parent


def login(target: Target) -> str:
    """Log in, say who answers, leave."""
    shell = SshShell.connect(target)
    try:
        return shell.run(["printenv", "SSH_CONNECTION"]).stdout.decode().split()[2]
    finally:
        shell.close()


def key(conftest_lab: Any, name: str, kind: str = "ed25519") -> Path:
    path = conftest_lab.folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    return path


# ---- host keys ----


def test_a_host_that_is_known_is_let_talk(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    assert login(lab.target(server)) == "127.0.0.2"


def test_an_unknown_host_is_refused_with_its_fingerprint_and_the_cure(lab: Any) -> None:
    server = lab.sshd()
    with pytest.raises(HostKeyUnknown) as caught:
        login(lab.target(server))
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(server.host_keys["ed25519"])], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert shown in caught.value.message
    user = getpass.getuser()
    assert f"log in once with `ssh -p {server.port} {user}@127.0.0.2` or" in caught.value.hint
    assert f"ssh-keyscan -p {server.port} -t ed25519 127.0.0.2 >> {lab.known_hosts}" in caught.value.hint
    assert caught.value.where == "node-a"
    assert lab.known_hosts.read_text() == ""


def test_a_changed_key_is_refused_naming_file_and_line(lab: Any) -> None:
    server = lab.sshd()
    lab.known_hosts.write_text("# a comment\n\n" + server.known_line(key=key(lab, "other")))
    for policy in ("strict", "accept-new"):
        with pytest.raises(HostKeyChanged, match=f"{lab.known_hosts}:3 has ssh-ed25519") as caught:
            login(lab.target(server, policy=policy))
    assert "ssh-keygen -f" in caught.value.hint


def test_a_key_of_a_type_not_yet_known_does_not_pass_for_a_new_host(lab: Any) -> None:
    server = lab.sshd(kinds=("rsa",))
    lab.known_hosts.write_text(server.known_line(key=key(lab, "other")))
    with pytest.raises(HostKeyChanged):
        login(lab.target(server, policy="accept-new"))


@pytest.mark.parametrize("known", ["ed25519", "ecdsa", "rsa"])
def test_the_type_that_is_known_is_requested(lab: Any, known: str) -> None:
    server = lab.sshd(kinds=("ed25519", "ecdsa", "rsa"))
    lab.known_hosts.write_text(server.known_line(known))
    assert login(lab.target(server)) == "127.0.0.2"


def test_accept_new_adds_the_key_once_and_holds_it_to_that(lab: Any) -> None:
    server = lab.sshd()
    lab.known_hosts.write_text("other ssh-ed25519 AAAA")  # no newline at its end
    lab.known_hosts.chmod(0o600)
    for _ in range(2):
        assert login(lab.target(server, policy="accept-new")) == "127.0.0.2"
    assert lab.known_hosts.read_text() == "other ssh-ed25519 AAAA\n" + server.known_line()
    assert login(lab.target(server)) == "127.0.0.2"


def test_accept_new_makes_a_private_file(lab: Any) -> None:
    server = lab.sshd()
    lab.known_hosts = lab.folder / "fresh" / "known_hosts"
    lab.configure("")
    login(lab.target(server, policy="accept-new"))
    assert (lab.known_hosts.stat().st_mode & 0o777, lab.known_hosts.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_accept_new_of_many_threads_writes_one_line(lab: Any) -> None:
    server = lab.sshd()
    target = lab.target(server, policy="accept-new")
    threads = [threading.Thread(target=login, args=(target,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lab.known_hosts.read_text() == server.known_line()


def test_hashed_names_are_read_and_written(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(lab.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.2" not in lab.known_hosts.read_text()
    assert login(lab.target(server)) == "127.0.0.2"
    lab.known_hosts.write_text("")
    lab.configure("HashKnownHosts yes")
    login(lab.target(server, policy="accept-new"))
    assert lab.known_hosts.read_text().startswith("|1|")
    found = subprocess.run(
        ["ssh-keygen", "-F", f"[127.0.0.2]:{server.port}", "-f", str(lab.known_hosts)], capture_output=True, check=False
    )
    assert found.returncode == 0, "ssh finds what psctl wrote"


def test_an_alias_and_a_revoked_key(lab: Any) -> None:
    server = lab.sshd()
    lab.configure("Host 127.0.0.2\n  HostKeyAlias storage")
    public = server.known_line().split(" ", 1)[1]
    lab.known_hosts.write_text(f"@cert-authority * {public}not base64 at all\nstorage {public}")
    assert login(lab.target(server)) == "127.0.0.2"
    lab.known_hosts.write_text(f"storage {public}@revoked * {public}")
    with pytest.raises(HostKeyChanged, match="@revoked"):
        login(lab.target(server, policy="accept-new"))


@pytest.mark.parametrize("form", ["text", "list"])
def test_revoked_host_keys_of_the_configuration(lab: Any, tmp_path: Path, form: str) -> None:
    server, other = lab.sshd(), lab.sshd()
    lab.know(server, other)
    public = tmp_path / "public"
    public.write_text("# taken back\n" + server.known_line().split(" ", 1)[1])
    revoked = tmp_path / "revoked"
    if form == "list":
        subprocess.run(["ssh-keygen", "-k", "-f", str(revoked), str(public)], check=True, capture_output=True)
    else:
        revoked.write_bytes(public.read_bytes())
    lab.configure(f"Host *\n  RevokedHostKeys {revoked}")
    with pytest.raises(HostKeyChanged, match=f"is revoked by {revoked}"):
        login(lab.target(server))
    assert login(lab.target(other)) == "127.0.0.2"
    revoked.unlink()
    with pytest.raises(InvalidFile, match="no host key can be accepted"):
        login(lab.target(other))


def test_weak_message_authentication_is_not_offered(lab: Any) -> None:
    server = lab.sshd(extra="MACs hmac-sha1,hmac-md5\nCiphers aes128-ctr")
    lab.know(server)
    with pytest.raises(HostUnreachable):
        login(lab.target(server))
    strong = lab.sshd(extra="MACs hmac-sha2-512-etm@openssh.com\nCiphers aes128-ctr")
    lab.know(strong)
    assert login(lab.target(strong)) == "127.0.0.2"


def test_an_authoritys_line_does_not_make_a_host_known(lab: Any) -> None:
    server = lab.sshd()
    lab.known_hosts.write_text("@cert-authority * " + server.known_line().split(" ", 1)[1])
    with pytest.raises(HostKeyUnknown):
        login(lab.target(server))


# ---- jump hosts ----


@pytest.fixture
def pair(lab: Any) -> tuple[Any, Any]:
    """A jump host and a target, on the same address with other ports: they are not one."""
    jump, server = lab.sshd("127.0.0.3"), lab.sshd("127.0.0.3")
    lab.configure(f"Host bastion\n  HostName 127.0.0.3\n  Port {jump.port}\n")
    return jump, server


def test_right_keys_on_both_hops_pass(lab: Any, pair: tuple[Any, Any]) -> None:
    jump, server = pair
    lab.know(jump, server)
    log = jump.folder / "sshd.log"
    assert login(lab.target(server, proxy_jump="bastion")) == "127.0.0.3"
    assert "Accepted publickey" in log.read_text(), "it went through the jump host"
    assert login(lab.target(server, proxy_jump=f"127.0.0.3:{jump.port}")) == "127.0.0.3"


def test_a_wrong_key_on_the_jump_host_is_refused(lab: Any, pair: tuple[Any, Any]) -> None:
    jump, server = pair
    wrong = jump.known_line(key=key(lab, "other"))
    lab.known_hosts.write_text(wrong + server.known_line())
    with pytest.raises(HostKeyChanged, match="node-a: bastion "):
        login(lab.target(server, proxy_jump="bastion"))
    assert "Accepted" not in (jump.folder / "sshd.log").read_text()


def test_an_unknown_jump_host_is_refused(lab: Any, pair: tuple[Any, Any]) -> None:
    jump, server = pair
    lab.know(server)
    with pytest.raises(HostKeyUnknown, match="bastion"):
        login(lab.target(server, proxy_jump="bastion"))
    assert "Accepted" not in (jump.folder / "sshd.log").read_text()


def test_a_wrong_key_behind_the_jump_host_is_refused(lab: Any, pair: tuple[Any, Any]) -> None:
    jump, server = pair
    lab.known_hosts.write_text(jump.known_line() + server.known_line(key=key(lab, "other")))
    with pytest.raises(HostKeyChanged):
        login(lab.target(server, proxy_jump="bastion"))
    assert "Accepted" not in (server.folder / "sshd.log").read_text()


def test_a_chain_of_jumps_and_an_included_file(lab: Any) -> None:
    first, second, server = lab.sshd("127.0.0.4"), lab.sshd("127.0.0.5"), lab.sshd("127.0.0.6")
    lab.know(first, second, server)
    (lab.folder / "more.conf").write_text(
        f"Host first\n  HostName 127.0.0.4\n  Port {first.port}\n"
        f"Host second\n  HostName 127.0.0.5\n  Port {second.port}\n  ProxyJump first\n"
        f"Host last\n  HostName 127.0.0.6\n  Port {server.port}\n  ProxyJump second\n"
    )
    lab.configure(f"Include {lab.folder}/more.conf")
    target = resolve("node-a", "last", config=lab.config)
    assert [jump.address for jump in target.jumps] == ["127.0.0.4", "127.0.0.5"]
    assert login(target) == "127.0.0.6"


def test_a_proxy_command_is_used(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    relay = lab.folder / "relay.py"
    relay.write_text(
        "import os, select, socket, sys\n"
        "peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "while True:\n"
        "    for ready in select.select([0, peer], [], [])[0]:\n"
        "        data = os.read(0, 65536) if ready == 0 else peer.recv(65536)\n"
        "        if not data:\n"
        "            sys.exit()\n"
        "        peer.sendall(data) if ready == 0 else os.write(1, data)\n"
    )
    lab.configure(
        f"Host behind\n  HostName 127.0.0.2\n  Port {server.port}\n  ProxyCommand {sys.executable} {relay} %h %p"
    )
    assert login(resolve("node-a", "behind", config=lab.config)) == "127.0.0.2"


def test_what_the_jump_host_cannot_reach_is_reported(lab: Any, pair: tuple[Any, Any]) -> None:
    jump, server = pair
    lab.know(jump, server)
    target = lab.target(server, proxy_jump="bastion")
    server.stop()
    lab.servers.remove(server)
    with pytest.raises(HostUnreachable, match="the jump host cannot reach it"):
        login(target)


def test_a_jump_host_through_itself_is_a_mistake_but_one_of_the_cluster_is_reached_directly(lab: Any) -> None:
    lab.configure("Host bastion\n  HostName 127.0.0.9\nHost *\n  ProxyJump bastion")
    with pytest.raises(UsageError, match="through itself"):
        resolve("node-a", "node-a", config=lab.config)
    lab.configure("Host bastion\n  HostName 127.0.0.9")
    assert resolve("b", "bastion", proxy_jump="bastion", config=lab.config).jumps == ()


# ---- logging in ----


def test_a_login_that_fails_reports_what_was_tried(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    other = key(lab, "id_other")
    with pytest.raises(AuthFailed) as caught:
        login(lab.target(server, identity_file=str(other)))
    assert f"tried key {other}" in caught.value.message
    assert "ssh-copy-id" in caught.value.hint


def test_a_login_without_any_key_reports_that(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    locked = lab.folder / "id_locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", str(locked)], check=True)
    with pytest.raises(AuthFailed, match=r"no usable key was found.*has a passphrase"):
        login(lab.target(server, identity_file=str(locked)))


@pytest.fixture
def agent(lab: Any) -> Iterator[str]:
    path = str(lab.folder / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 5
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield path
    process.terminate()
    process.wait()


def test_the_agents_keys_are_used(lab: Any, agent: str) -> None:
    server = lab.sshd()
    lab.know(server)
    for _ in range(7):  # more than sshd's MaxAuthTries, and all wrong
        wrong = key(lab, f"wrong{_}")
        subprocess.run(
            ["ssh-add", "-q", str(wrong)], check=True, env={**os.environ, "SSH_AUTH_SOCK": agent}, capture_output=True
        )
    subprocess.run(
        ["ssh-add", "-q", str(lab.login)], check=True, env={**os.environ, "SSH_AUTH_SOCK": agent}, capture_output=True
    )
    lab.login.unlink()  # its public half stays: the agent has the key
    lab.configure(f"IdentityAgent {agent}")
    assert login(lab.target(server)) == "127.0.0.2"


class AskingAgent:
    """An agent in front of another one: it waits before it signs, as one that asks its user, or refuses.

    Args:
        path: its socket.
        behind: the other one's.
        delay: seconds; None: it refuses.
    """

    def __init__(self, path: Path, behind: str, delay: float | None) -> None:
        self._behind, self._delay = behind, delay
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the test has ended
            while True:
                caller, _ = self.listening.accept()
                with caller, socket.socket(socket.AF_UNIX) as agent:
                    agent.connect(self._behind)
                    while asked := self._read(caller):
                        signs = asked[4] == 13
                        if signs and self._delay is not None:
                            time.sleep(self._delay)
                        if signs and self._delay is None:
                            caller.sendall(b"\0\0\0\1\5")
                            continue
                        agent.sendall(asked)
                        caller.sendall(self._read(agent))

    def _read(self, end: socket.socket) -> bytes:
        head = end.recv(4, socket.MSG_WAITALL)
        return head + end.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL) if head else b""


@pytest.mark.parametrize(
    ("delay", "confirmation", "why"),
    [
        (1.0, 30.0, ""),
        (1.0, 0.2, "the agent did not sign: no answer in 0.2 s; asked for: "),
        (None, 30.0, "the agent refused to sign; asked for: "),
    ],
)
def test_an_agent_may_ask_its_user(
    lab: Any, agent: str, delay: float | None, confirmation: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_auth, "CONFIRMATION", confirmation)
    monkeypatch.setattr(ssh_auth, "ANSWER", 0.5)
    server = lab.sshd()
    lab.know(server)
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    subprocess.run(["ssh-add", "-q", str(lab.login)], check=True, env=environment, capture_output=True)
    lab.login.unlink()
    asking = AskingAgent(lab.folder / "asking", agent, delay)
    lab.configure(f"IdentityAgent {lab.folder}/asking")
    with asking.listening:
        if not why:
            assert login(lab.target(server)) == "127.0.0.2"
            return
        with pytest.raises(AuthFailed) as caught:
            login(lab.target(server))
        assert why in caught.value.message
        assert "accepts no key" not in caught.value.message
        assert caught.value.hint.startswith("confirm in the agent")


@pytest.mark.parametrize("named", ["its public half", "a locked file without it"])
def test_an_identity_file_selects_a_key_of_the_agent(lab: Any, agent: str, named: str) -> None:
    """As keys of 1Password and of hardware are configured: the file names the key, and only the agent has it."""
    server = lab.sshd()
    lab.know(server)
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    for each in [*(key(lab, f"wrong{number}") for number in range(7)), lab.login]:
        subprocess.run(["ssh-add", "-q", str(each)], check=True, env=environment, capture_output=True)
    public = lab.login.with_name(lab.login.name + ".pub")
    if named == "its public half":
        lab.login.unlink()
        file = public
    else:
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(lab.login)], check=True)
        public.unlink()
        file = lab.login
    lab.configure(f"IdentityAgent {agent}\nIdentitiesOnly yes")
    assert login(lab.target(server, identity_file=str(file))) == "127.0.0.2"
    subprocess.run(["ssh-add", "-q", "-D"], check=True, env=environment, capture_output=True)
    why = "a public key, and no agent has its private half" if named == "its public half" else "has a passphrase"
    with pytest.raises(AuthFailed, match=why):
        login(lab.target(server, identity_file=str(file)))


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
@pytest.mark.parametrize(
    "way", ["next to its key", "named", "of a key in the agent", "in the agent", "in the agent, selected by a file"]
)
def test_certificates_of_an_authority_log_in(lab: Any, agent: str, kind: str, way: str) -> None:
    """As Vault, Teleport and step issue them: sshd knows no key of the user, only the authority."""
    authority, user = key(lab, "authority"), key(lab, "id_user", kind)
    certificate = lab.folder / "id_user-cert.pub"
    words = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", getpass.getuser(), f"{user}.pub"]
    subprocess.run(words, check=True)
    server = lab.sshd(extra=f"TrustedUserCAKeys {authority}.pub")
    (server.folder / "authorized_keys").write_text("")
    lab.know(server)
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    settings = f"IdentityAgent {agent}\n"
    if way == "named":
        settings += f"CertificateFile {certificate.rename(lab.folder / 'elsewhere.pub')}\n"
    elif way == "of a key in the agent":
        moved = certificate.rename(lab.folder / "elsewhere.pub")
        subprocess.run(["ssh-add", "-q", str(user)], check=True, env=environment, capture_output=True)
        user.unlink()
        settings += f"CertificateFile {moved}\nIdentitiesOnly yes\n"
    elif way != "next to its key":
        subprocess.run(["ssh-add", "-q", str(user)], check=True, env=environment, capture_output=True)
        certificate.unlink()
        user.unlink()
        settings += "IdentitiesOnly yes\n" if way.endswith("file") else ""
    lab.configure(settings)
    named = {} if way == "in the agent" else {"identity_file": f"{user}.pub" if way.endswith("file") else str(user)}
    assert login(lab.target(server, **named)) == "127.0.0.2"


def test_a_certificate_that_a_host_does_not_know_leaves_the_key_itself(lab: Any) -> None:
    authority = key(lab, "authority")
    words = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", "another", f"{lab.login}.pub"]
    subprocess.run(words, check=True)
    server = lab.sshd()
    lab.know(server)
    assert login(lab.target(server)) == "127.0.0.2"


# ---- unreachable ----


def test_a_refused_connection_an_unknown_name_and_silence_are_distinguished(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        with pytest.raises(HostUnreachable, match="connection refused"):
            login(lab.target(server, port=free.getsockname()[1]))
    with pytest.raises(HostUnreachable, match="no such name"):
        login(lab.target(server, address="no-such-host.invalid"))
    with socket.socket() as mute:
        mute.bind(("127.0.0.2", 0))
        mute.listen()
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="no SSH answer in 1 s"):
            login(lab.target(server, port=mute.getsockname()[1], connect_timeout=1.0))
        assert time.monotonic() - began < 5


class RudeGate:
    """A port that hangs up on the first connections, and carries later ones to an sshd."""

    def __init__(self, server: Any, refusals: int, greeting: bytes = b"") -> None:
        self._server, self._left, self._greeting = server, refusals, greeting
        self._listener = socket.create_server((server.address, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            if self._left > 0:
                self._left -= 1
                client.sendall(self._greeting)
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        upstream = socket.create_connection((self._server.address, self._server.port))
        ends = {client: upstream, upstream: client}
        with client, upstream:
            while True:
                for source in select.select([*ends], [], [])[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    ends[source].sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class RecordedClock(ManualClock):
    """Records each wait; time passes in waits only."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        super().sleep(seconds)


@pytest.fixture
def gate(lab: Any) -> Iterator[Callable[..., RudeGate]]:
    made: list[RudeGate] = []

    def make(refusals: int, greeting: bytes = b"") -> RudeGate:
        made.append(RudeGate(lab.sshd(), refusals, greeting))
        server = made[-1]._server
        lab.known_hosts.write_text(f"[{server.address}]:{made[-1].port} {server.known_line().split(' ', 1)[1]}")
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("greeting", [b"", b"Exceeded MaxStartups\r\n"])
def test_an_sshd_that_hangs_up_is_tried_again_until_it_answers(
    lab: Any, gate: Callable[..., RudeGate], greeting: bytes
) -> None:
    rude, clock = gate(12, greeting), RecordedClock()
    shell = SshShell.connect(lab.target(lab.servers[0], port=rude.port), clock=clock)
    try:
        assert shell.run(["echo", "here"]).stdout == b"here\n"
    finally:
        shell.close()
    assert len(clock.waits) == 12, "one wait for each time that sshd closed the connection"
    assert max(clock.waits[:3]) < min(clock.waits[9:]), "waits grow"
    assert max(clock.waits) <= 1.5 * LONGEST_WAIT


@pytest.mark.parametrize(("given", "patience"), [(None, DROPPED_PATIENCE), (300.0, 300.0), (3.0, 3.0)])
def test_an_sshd_that_hangs_up_is_given_up_at_the_deadline_and_not_before(
    lab: Any, gate: Callable[..., RudeGate], given: float | None, patience: float
) -> None:
    rude, clock = gate(10**9), RecordedClock()
    with pytest.raises(HostUnreachable, match=f"closed the connection before a login for {patience:.0f} s") as caught:
        SshShell.connect(lab.target(lab.servers[0], port=rude.port), given, clock)
    assert "MaxStartups" in caught.value.hint
    assert f"{len(clock.waits) + 1} times" in caught.value.message
    assert clock.now() == pytest.approx(patience)


def test_waits_of_many_clients_differ(lab: Any, gate: Callable[..., RudeGate]) -> None:
    rude, clocks = gate(10**9), [RecordedClock() for _ in range(4)]
    for clock in clocks:
        with pytest.raises(HostUnreachable):
            SshShell.connect(lab.target(lab.servers[0], port=rude.port), 5.0, clock)
    assert len({clock.waits[0] for clock in clocks}) == len(clocks)


def test_what_is_no_sshd_is_named_at_once(lab: Any, gate: Callable[..., RudeGate]) -> None:
    rude, clock = gate(10**9, b"HTTP/1.1 400 Bad Request\r\n\r\n"), RecordedClock()
    with pytest.raises(HostUnreachable, match=r"no sshd answers there, but: 'HTTP/1\.1 400 Bad Request'"):
        SshShell.connect(lab.target(lab.servers[0], port=rude.port), clock=clock)
    assert not clock.waits


class CountedClock(SystemClock):
    """The system's time; records that somebody waits."""

    def __init__(self) -> None:
        self.waited = threading.Event()

    def sleep(self, seconds: float) -> None:
        self.waited.set()
        super().sleep(seconds)


def test_many_logins_at_once_get_past_a_small_max_startups(lab: Any) -> None:
    """All logins that sshd may have open are taken at first, so that each of ours is dropped at least once."""
    server = lab.sshd(extra="MaxStartups 2:50:4")
    # the first value counts: the fixture's own comes before
    text = (server.folder / "sshd_config").read_text().replace("MaxStartups 100\n", "")
    server.stop()
    (server.folder / "sshd_config").write_text(text)
    server.log = (server.folder / "sshd.log").open("ab")
    server.start()
    lab.know(server)
    target, found, clocks = lab.target(server), [], [CountedClock() for _ in range(8)]

    def log_in(clock: CountedClock) -> None:
        try:
            shell = SshShell.connect(target, time.monotonic() + 300, clock)
        except PsctlError as error:
            found.append(error.message)
            return
        found.append(shell.run(["printenv", "SSH_CONNECTION"]).stdout.decode().split()[2])
        shell.close()

    holding: list[socket.socket] = []
    while len(holding) < 4:  # above 2 each is dropped with some probability
        idle = socket.create_connection((server.address, server.port))
        idle.settimeout(60)
        if idle.recv(8).startswith(b"SSH-"):
            holding.append(idle)
        else:
            idle.close()
    threads = [threading.Thread(target=log_in, args=(clock,)) for clock in clocks]
    for thread in threads:
        thread.start()
    assert all(clock.waited.wait(120) for clock in clocks), "each was dropped, and tries again"
    for idle in holding:
        idle.close()
    for thread in threads:
        thread.join()
    assert found == ["127.0.0.2"] * 8


def test_an_sshd_that_allows_one_session_a_connection_is_logged_into_again(lab: Any, tmp_path: Path) -> None:
    server = lab.sshd(extra="MaxSessions 1")
    lab.know(server)
    shell = SshShell.connect(lab.target(server))
    try:
        (tmp_path / "log").write_bytes(b"line\n")
        assert shell.run(["echo", "one"]).stdout == b"one\n"
        assert shell.logins == 1, "one thing after another needs no more"
        with shell.tail(f"{tmp_path}/log") as first, shell.tail(f"{tmp_path}/log") as second:
            assert (first.read(20), second.read(20)) == (b"line\n", b"line\n")
            assert shell.run(["echo", "three"]).stdout == b"three\n"
            assert shell.logins == 3
        for number in range(5):
            assert shell.run(["echo", str(number)]).stdout == f"{number}\n".encode()
        assert shell.logins == 3
    finally:
        shell.close()
    deadline = time.monotonic() + 5
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    while children.read_text():
        assert time.monotonic() < deadline, "all connections end with the shell"
        time.sleep(0.02)


def test_an_sshd_that_allows_no_session_is_reported(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = lab.sshd(extra="MaxSessions 0")
    lab.know(server)
    monkeypatch.setattr("psctl.remote.ssh.BUSY", 2.0)
    monkeypatch.setattr("psctl.remote.ssh.LOGINS", 2)
    with pytest.raises(TimedOut, match=r"node-a: sshd opens no further session on 2 connections \(MaxSessions"):
        SshShell.connect(lab.target(server))


def test_a_connection_that_breaks_is_an_error_at_once(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    shell = SshShell.connect(lab.target(server))
    sshd = int(shell.run(["sh", "-c", "ps -o ppid= -p $PPID || echo $PPID"]).stdout.split()[-1])
    threading.Timer(0.3, os.kill, (sshd, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"node-a: the connection to 127\.0\.0\.2 broke"):
        shell.run(["sleep", "60"])
    assert time.monotonic() - began < 5
    shell.close()


# ---- nothing is left behind, nothing is said behind our back ----


@pytest.mark.parametrize("what", ["run", "tail", "fed"])
def test_a_client_that_is_killed_leaves_nothing_there(
    lab: Any, what: str, tmp_path: Path, gone_soon: Callable[[int], bool]
) -> None:
    server = lab.sshd()
    lab.know(server)
    log = tmp_path / "log"
    log.write_bytes(b"x")
    do = {
        "run": "shell.run(['sh', '-c', script])",
        "fed": "shell.run(['sh', '-c', 'cat >/dev/null; ' + script], stdin=b'x')",
        "tail": "tail = shell.tail(log); tail.read(); open(pids, 'w').write('ready'); tail.read()",
    }[what]
    code = (
        "import sys, getpass\nfrom pathlib import Path\nfrom psctl.remote.ssh import SshShell\n"
        "from psctl.remote.target import resolve\n"
        "port, config, log, pids = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]\n"
        "script = f'echo $$ >{pids}; sleep 300 & echo $! >>{pids}; wait'\n"
        "shell = SshShell.connect(resolve('node-a', '127.0.0.2', port=port, config=config))\n" + do
    )
    pids = tmp_path / "pids"
    client = subprocess.Popen(
        [sys.executable, "-c", code, str(server.port), str(lab.config), str(log), str(pids)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 20
    while not (pids.exists() and len(pids.read_text().split()) == (1 if what == "tail" else 2)):
        assert time.monotonic() < deadline
        assert client.poll() is None
        time.sleep(0.02)
    if what == "tail":
        found = _with_word(str(log), but=client.pid)
        assert found, "a reader runs"
    else:
        found = [int(pid) for pid in pids.read_text().split()]
    client.kill()
    client.wait()
    assert all(gone_soon(pid) for pid in found)


def _with_word(word: str, but: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != but:
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(entry))
    return found


def test_a_put_that_is_cut_off_leaves_no_file(lab: Any, tmp_path: Path) -> None:
    server = lab.sshd()
    lab.know(server)
    (tmp_path / "there").mkdir()
    shell = SshShell.connect(lab.target(server))

    shell.put(b"old", f"{tmp_path}/there/file")
    pipe, _ = shell._start_script(scripts.PUT, f"{tmp_path}/there/file", "644", "1000000")
    pipe.write(memoryview(b"half"))
    deadline = time.monotonic() + 5
    while len(os.listdir(tmp_path / "there")) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shell.close()
    while os.listdir(tmp_path / "there") != ["file"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "there/file").read_bytes() == b"old"


def test_a_talkative_login_shell_does_not_disturb(lab: Any, tmp_path: Path) -> None:
    rc = tmp_path / "rc"
    rc.write_text("echo welcome to the lab; echo psctl-0000000000000000 17; echo and to stderr >&2\n")
    server = lab.sshd(extra=f'SetEnv BASH_ENV={rc} ENV={rc}\nForceCommand . {rc}; eval "$SSH_ORIGINAL_COMMAND"')
    lab.know(server)
    shell = SshShell.connect(lab.target(server))
    try:
        assert shell.run(["echo", "clean"]).stdout == b"clean\n"
        shell.put(b"content", f"{tmp_path}/file")
        back: list[bytes] = []
        shell.fetch(f"{tmp_path}/file", back.append, 7)
        assert b"".join(back) == b"content"
    finally:
        shell.close()


def test_paramiko_prints_nothing_on_standard_error(lab: Any, capfd: pytest.CaptureFixture[str]) -> None:
    server = lab.sshd()
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.helpers.manual_clock import ManualClock\n"
        "from psctl.errors import HostUnreachable\n"
        "from psctl.remote.ssh import SshShell\nfrom psctl.remote.target import resolve\n"
        "import socket, threading\nrude = socket.create_server(('127.0.0.2', 0))\n"
        "threading.Thread(target=lambda: [rude.accept()[0].close() for _ in iter(int, 1)], daemon=True).start()\n"
        "try:\n    SshShell.connect(resolve('a', '127.0.0.2', port=rude.getsockname()[1], config=Path(sys.argv[1])), "
        "clock=ManualClock())\nexcept HostUnreachable:\n    print('as it should')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(lab.config)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("as it should\n", "")
    assert server.process.poll() is None


def test_a_put_of_tens_of_megabytes_is_fast(lab: Any, tmp_path: Path) -> None:
    server = lab.sshd()
    lab.know(server)
    (tmp_path / "big").write_bytes(os.urandom(1 << 20) * 40)
    shell = SshShell.connect(lab.target(server))
    try:
        began = time.monotonic()
        shell.put(tmp_path / "big", f"{tmp_path}/there")
        with (tmp_path / "back").open("wb") as file:
            shell.fetch(f"{tmp_path}/there", file.write, 40 << 20)
        seconds = time.monotonic() - began
    finally:
        shell.close()
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
    assert seconds < 8, "42 MB each way; about 0.6 s on an idle machine"


def test_known_hosts_helpers_agree_with_ssh_keygen(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    line = known_hosts.read([str(lab.known_hosts)])[0]
    assert (line.kind, known_hosts.kind_of(line.blob)) == ("ssh-ed25519", "ssh-ed25519")
