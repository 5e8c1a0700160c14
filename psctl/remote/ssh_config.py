"""~/.ssh/config through paramiko's reader, for machines without an `ssh` program; `Include` is done here."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import paramiko

from psctl.errors import InvalidFile

_SYSTEM = Path("/etc/ssh/ssh_config")
_DEPTH = 16  # as OpenSSH
_KEYS = ("id_rsa", "id_ecdsa", "id_ed25519")


def lookup(
    address: str, user: str | None, port: int | None, config: Path, system: Path = _SYSTEM
) -> dict[str, list[str]]:
    """Return the settings of a host, as `ssh -G` would print them.

    Raises:
        InvalidFile: a file cannot be understood.
    """
    # the system's file is second, after a `Host *`, so that its beginning belongs to no block of the first file
    text = _with_includes(config, 0) + "\nHost *\n" + _with_includes(system, 0)
    try:
        parsed = paramiko.SSHConfig.from_text(text)
        entry = parsed.lookup(address)
    except (paramiko.ssh_exception.ConfigParseError, paramiko.ssh_exception.CouldNotCanonicalize, ValueError) as error:
        raise InvalidFile(f"{address}: {error}", "correct ~/.ssh/config", where=str(config)) from error
    found = {key: list(value) if isinstance(value, list) else [value] for key, value in entry.items()}
    if user is not None:
        found["user"] = [user]
    if port is not None:
        found["port"] = [str(port)]
    ssh = os.path.expanduser("~/.ssh")
    found.setdefault("identityfile", [f"{ssh}/{name}" for name in _KEYS])
    found.setdefault("userknownhostsfile", [f"{ssh}/known_hosts {ssh}/known_hosts2"])
    found.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])
    return found


def _with_includes(path: Path, depth: int) -> str:
    if depth > _DEPTH:
        raise InvalidFile(f"{path}: more than {_DEPTH} levels of Include", "remove the circle", where=str(path))
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""  # a missing file has no settings, as with ssh
    lines = []
    for line in text.splitlines():
        words = line.replace("=", " ", 1).split()
        if words and words[0].lower() == "include":
            for word in words[1:]:
                pattern = os.path.expanduser(word.strip('"'))
                base = Path("/etc/ssh") if path == _SYSTEM else path.parent
                for file in sorted(glob.glob(str(base / pattern))):
                    lines.append(_with_includes(Path(file), depth + 1))
        else:
            lines.append(line)
    return "\n".join(lines)
