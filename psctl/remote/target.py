"""Resolves how a host is reached: user, port, keys, jump hosts, from the cluster file, then from ~/.ssh/config.

`ssh -G` reads ~/.ssh/config; where there is no `ssh` program, paramiko's reader does. A `ProxyJump` chain is resolved
hop by hop the same way, and the first hop's own ProxyJump or ProxyCommand counts, as with ssh itself.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from psctl.errors import InvalidFile, TimedOut, UsageError
from psctl.grouping import grouped

_ASK = 30  # seconds for `ssh -G`, which may run the user's own `Match exec`

Settings = dict[str, list[str]]
"""Keyword in lower case -> its values; identityfile may have several."""


class Endpoint(msgspec.Struct, frozen=True):
    """One sshd and how to log in there."""

    given: str
    address: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    agent: str = ""  # path of the agent's socket; "" none
    alias: str = ""  # HostKeyAlias
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    hash_known_hosts: bool = False
    revoked_host_keys: tuple[str, ...] = ()
    family: str = "any"  # any | inet | inet6
    proxy_command: str = ""
    jump: str = ""  # jump hosts that the cluster file names, which plain ssh does not have

    @property
    def login(self) -> str:
        """The command with which a user logs in there."""
        words = ["ssh", *(["-J", self.jump] if self.jump else []), *(["-p", str(self.port)] if self.port != 22 else [])]
        return " ".join([*words, f"{self.user}@{self.given}"])

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies a login: address, port, user."""
        return self.address, self.port, self.user


class Target(msgspec.Struct, frozen=True):
    """A host of the cluster, resolved. `jumps` are passed in order, the first is reached directly."""

    name: str
    host: Endpoint
    jumps: tuple[Endpoint, ...] = ()
    policy: str = "strict"  # strict | accept-new
    connect_timeout: float = 10.0

    @property
    def first(self) -> Endpoint:
        """The sshd that is connected to first."""
        return self.jumps[0] if self.jumps else self.host


def resolve(
    name: str,
    address: str,
    *,
    user: str | None = None,
    port: int | None = None,
    identity_file: str | None = None,
    proxy_jump: str | None = None,
    policy: str = "strict",
    connect_timeout: float = 10.0,
    config: Path | None = None,
) -> Target:
    """Resolve a host of the cluster file.

    Args:
        name: its name in the cluster file, for messages.
        address: host name, address, or alias of ~/.ssh/config.
        user, port, identity_file, proxy_jump: from the cluster file; None: those of ssh's configuration.
        policy: strict or accept-new, for the host and every jump host.
        connect_timeout: seconds, for each hop.
        config: another file than ~/.ssh/config.

    Raises:
        InvalidFile: ssh's configuration cannot be read.
        TimedOut: `ssh -G` hangs.
        UsageError: an address that could be taken for an option, or a jump host that is reached through itself.
    """
    settings = _settings(address, user, port, config)
    host = _endpoint(address, settings, identity_file)
    jumps: tuple[Endpoint, ...] = ()
    asked = proxy_jump if proxy_jump is not None else _one(settings, "proxyjump")
    if asked and asked.lower() != "none":
        jumps = _chain(asked, config, seen=())
        if proxy_jump is not None and any(jump.key == host.key for jump in jumps):
            jumps = ()  # `proxy_jump: bastion` for all hosts, of which the bastion is one
        host = msgspec.structs.replace(host, proxy_command="", jump=proxy_jump if proxy_jump and jumps else "")
    elif proxy_jump is not None:
        host = msgspec.structs.replace(host, proxy_command="")
    _no_loop(name, (*jumps, host))
    return Target(name, host, jumps, policy, connect_timeout)


def _no_loop(name: str, hops: tuple[Endpoint, ...]) -> None:
    keys = [hop.key for hop in hops]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(
                f"{name}: the jump host {key[0]}:{key[1]} is reached through itself",
                "in ~/.ssh/config, leave it out of its own ProxyJump: `Host * !bastion`",
                where=name,
            )


def _chain(text: str, config: Path | None, seen: tuple[str, ...]) -> tuple[Endpoint, ...]:
    """Resolve `user@host:port,...`; the first hop may itself need jumps."""
    hops: list[Endpoint] = []
    for place, part in enumerate(text.split(",")):
        user, address, port = _parse_hop(part)
        settings = _settings(address, user, port, config)
        hop = _endpoint(address, settings, None)
        own = _one(settings, "proxyjump")
        if place == 0 and own and own.lower() != "none":
            if part in seen:
                raise UsageError(f"the jump host {part} is reached through itself", "see ProxyJump in ~/.ssh/config")
            hops += _chain(own, config, (*seen, part))
            hop = msgspec.structs.replace(hop, proxy_command="")
        elif place > 0:
            hop = msgspec.structs.replace(hop, proxy_command="")
        hops.append(hop)
    return tuple(hops)


def _parse_hop(part: str) -> tuple[str | None, str, int | None]:
    user, at, place = part.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    # [address]:port, host:port, or a bare IPv6 address, which has colons of its own
    found = re.fullmatch(r"\[([^]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([^:]*(?::[^:]*){2,})", place)
    if found is None or (at and not user):
        raise UsageError(f"not a jump host: {part!r}", "write [user@]host[:port]")
    address = found[1] or found[3] or found[5]
    port = found[2] or found[4]
    return user or None, address, int(port) if port else None


def _settings(address: str, user: str | None, port: int | None, config: Path | None) -> Settings:
    if not address or address.startswith("-") or any(char.isspace() or char == "\0" for char in address):
        raise UsageError(f"not a host name or address: {address!r}")
    if user is not None and (not user or user.startswith("-")):
        raise UsageError(f"not a user name: {user!r}", where=address)
    config = config or config_of_home()
    program = shutil.which("ssh")
    if program is None:
        from psctl.remote import ssh_config

        found = ssh_config.lookup(address, user, port, config or Path(os.path.expanduser("~/.ssh/config")))
    else:
        found = _ask_ssh(program, address, user, port, config)
    found.setdefault("hostname", [address])
    found.setdefault("user", [user or _whoami()])
    found.setdefault("port", ["22"])
    return found


def config_of_home() -> Path | None:
    """Return $HOME/.ssh/config where $HOME is not the home that ssh takes from the password database."""
    home = os.environ.get("HOME")
    if home and os.path.realpath(home) != os.path.realpath(_passwd_home()):
        path = Path(home) / ".ssh/config"
        return path if path.exists() else None
    return None


def _passwd_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _whoami() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "root")


def _ask_ssh(program: str, address: str, user: str | None, port: int | None, config: Path | None) -> Settings:
    argv = [program, "-G", "-T"]
    argv += ["-F", str(config)] if config else []
    argv += ["-l", user] if user is not None else []
    argv += ["-p", str(port)] if port is not None else []
    try:
        done = subprocess.run(
            [*argv, "--", address], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_ASK,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimedOut(
            f"{address}: `ssh -G {address}` did not end within {_ASK} s",
            "does a `Match exec` in ~/.ssh/config hang?",
            where=address,
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InvalidFile(
            f"{address}: `ssh -G {address}` failed: {last}",
            "correct ~/.ssh/config",
            where=str(config or "~/.ssh/config"),
        )
    words = (line.partition(" ") for line in done.stdout.splitlines())
    return grouped((keyword.lower(), value) for keyword, _, value in words)


def _one(settings: Settings, keyword: str) -> str:
    return settings.get(keyword, [""])[0]


def _endpoint(given: str, settings: Settings, identity_file: str | None) -> Endpoint:
    address, port, user = _one(settings, "hostname"), int(_one(settings, "port")), _one(settings, "user")
    alias = _one(settings, "hostkeyalias")
    tokens = {"h": address, "n": given, "p": str(port), "r": user, "u": _whoami(), "d": os.path.expanduser("~"),
              "k": alias or given, "i": str(os.getuid()), "%": "%"}  # fmt: skip

    def files(keyword: str) -> tuple[str, ...]:
        # ssh -G prints several files on one line, unquoted: a new one begins at / or ~
        parts = [part for value in settings.get(keyword, []) for part in re.split(r" (?=[/~])", value)]
        return tuple(_file(part, tokens) for part in parts if part and part.lower() != "none")

    identities = (_file(identity_file, tokens),) if identity_file else files("identityfile")
    return Endpoint(
        given=given,
        address=address,
        port=port,
        user=user,
        identity_files=tuple(dict.fromkeys(identities)),
        certificate_files=files("certificatefile"),
        identities_only=_one(settings, "identitiesonly") == "yes",
        agent=_agent(_one(settings, "identityagent"), tokens),
        alias="" if alias.lower() == "none" else alias,
        user_known_hosts=tuple(_moved(file) for file in files("userknownhostsfile")),
        global_known_hosts=files("globalknownhostsfile"),
        hash_known_hosts=_one(settings, "hashknownhosts") == "yes",
        revoked_host_keys=files("revokedhostkeys"),
        family=_one(settings, "addressfamily") or "any",
        proxy_command=_expanded_command(_one(settings, "proxycommand"), tokens),
    )


def _expanded_command(text: str, tokens: dict[str, str]) -> str:
    return "" if text.lower() == "none" else _with_tokens(text, tokens)


def _with_tokens(text: str, tokens: dict[str, str]) -> str:
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)


def _file(text: str, tokens: dict[str, str]) -> str:
    return os.path.expanduser(_with_tokens(text.strip('"'), tokens))


def _moved(file: str) -> str:
    """Move ssh's default below the home of the password database to $HOME, where the two differ."""
    old, home = _passwd_home(), os.path.expanduser("~")
    below = os.path.join(old, ".ssh", "known_hosts")
    return home + file[len(old) :] if file in (below, below + "2") else file


def _agent(text: str, tokens: dict[str, str]) -> str:
    if text.lower() == "none":
        return ""
    if not text or text == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK", "")
    if text.startswith("$"):
        return os.environ.get(text.strip("${}"), "")
    return _file(text, tokens)
