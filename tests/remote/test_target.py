"""How a host is reached, as ssh's configuration and the cluster file say together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from psctl.errors import InvalidFile, UsageError
from psctl.remote import target
from psctl.remote.target import Target, resolve

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")


@pytest.fixture(params=["ssh -G", "paramiko"])
def ask(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Target]:
    """Resolve with a config text, by `ssh -G` and by the reader that stands in for it."""
    if request.param == "paramiko":
        monkeypatch.setattr(target.shutil, "which", lambda name: None)

    def resolve_with(text: str, address: str, **options: object) -> Target:
        (tmp_path / "config").write_text(text)
        return resolve("node-a", address, config=tmp_path / "config", **options)  # type: ignore[arg-type]

    return resolve_with


def test_the_cluster_file_overrides_the_ssh_configuration(ask: Callable[..., Target]) -> None:
    text = "Host a\n  HostName 10.0.0.1\n  Port 2222\n  User ubuntu\n  IdentityFile ~/.ssh/lab\n"
    host = ask(text, "a").host
    assert (host.address, host.port, host.user) == ("10.0.0.1", 2222, "ubuntu")
    assert host.identity_files[0] == os.path.expanduser("~/.ssh/lab")
    host = ask(text, "a", user="root", port=22, identity_file="~/.ssh/other").host
    assert (host.address, host.port, host.user) == ("10.0.0.1", 22, "root")
    assert host.identity_files == (os.path.expanduser("~/.ssh/other"),)


def test_included_files_count(ask: Callable[..., Target], tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "lab.conf").write_text("Host a\n  HostName 10.0.0.7\n")
    assert ask(f"Include {tmp_path}/conf.d/*.conf\n", "a").host.address == "10.0.0.7"


def test_jump_hosts_are_resolved_hop_by_hop(ask: Callable[..., Target]) -> None:
    text = "Host b\n  HostName 10.0.0.2\n  User jumper\n  Port 2200\nHost a\n  ProxyJump b,root@c:2022\n"
    found = ask(text, "a")
    assert [jump.key[:2] for jump in found.jumps] == [("10.0.0.2", 2200), ("c", 2022)]
    assert [jump.user for jump in found.jumps] == ["jumper", "root"]
    assert ask(text, "a", proxy_jump="none").jumps == ()
    assert [jump.address for jump in ask(text, "a", proxy_jump="[fe80::1]:24").jumps] == ["fe80::1"]
    assert found.first is found.jumps[0]


def test_the_login_that_hints_name_has_port_user_and_the_cluster_files_jump_host(ask: Callable[..., Target]) -> None:
    assert ask("", "a", user="root", port=2222).host.login == "ssh -p 2222 root@a"
    assert ask("Host a\n  User ann\n", "a").host.login == "ssh ann@a"
    assert ask("", "a", user="root", proxy_jump="me@gate:24").host.login == "ssh -J me@gate:24 root@a"
    assert ask("Host a\n  ProxyJump gate\n", "a", user="root").host.login == "ssh root@a", "ssh finds it itself"


def test_a_jump_of_the_jump_host_comes_first(ask: Callable[..., Target]) -> None:
    text = "Host outer\n  HostName 10.0.0.1\nHost inner\n  HostName 10.0.0.2\n  ProxyJump outer\n"
    found = ask(text, "a", proxy_jump="inner")
    assert [jump.address for jump in found.jumps] == ["10.0.0.1", "10.0.0.2"]


def test_known_hosts_files_an_alias_and_tokens(ask: Callable[..., Target]) -> None:
    text = "Host a\n  HostName 10.0.0.1\n  HostKeyAlias lab\n  UserKnownHostsFile ~/.ssh/one /etc/two\n"
    host = ask(text + "  IdentityFile ~/.ssh/%r@%h\n  User me\n  IdentityAgent none\n", "a").host
    assert (host.alias, host.user_known_hosts) == ("lab", (os.path.expanduser("~/.ssh/one"), "/etc/two"))
    assert os.path.expanduser("~/.ssh/me@10.0.0.1") in host.identity_files
    assert host.agent == ""


def test_a_proxy_command_gets_host_and_port(ask: Callable[..., Target]) -> None:
    assert ask("Host a\n  HostName 10.0.0.1\n  ProxyCommand nc -x %% %h %p\n", "a").host.proxy_command == (
        "nc -x % 10.0.0.1 22"
    )


@pytest.mark.parametrize("address", ["-oProxyCommand=touch /tmp/x", "", "a b", "-V"])
def test_an_address_is_never_an_option(ask: Callable[..., Target], address: str) -> None:
    with pytest.raises(UsageError, match="not a host name"):
        ask("", address)


def test_a_user_is_never_an_option(ask: Callable[..., Target]) -> None:
    with pytest.raises(UsageError, match="not a user name"):
        ask("", "a", user="-oProxyCommand=x")


@pytest.mark.parametrize("hop", ["", "@", "a:b", "user@"])
def test_a_jump_host_is_host_and_port(ask: Callable[..., Target], hop: str) -> None:
    if not hop:
        assert ask("", "a", proxy_jump=hop).jumps == ()
        return
    with pytest.raises(UsageError, match="not a jump host"):
        ask("", "a", proxy_jump=hop)


def test_a_config_that_ssh_refuses_is_an_invalid_file(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a\n  Prot 22\n")
    with pytest.raises(InvalidFile, match="ssh -G a"):
        resolve("node-a", "a", config=tmp_path / "config")


def test_another_home_brings_its_own_config_and_known_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host a\n  HostName 10.0.0.9\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    host = resolve("node-a", "a").host
    assert (host.address, host.user_known_hosts[0]) == ("10.0.0.9", f"{tmp_path}/.ssh/known_hosts")
