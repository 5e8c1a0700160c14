"""Known and revoked host keys, as OpenSSH reads known_hosts and RevokedHostKeys, and the verdict on a host's key.

    line:  [marker] names keytype base64 [comment]
    names: comma-separated patterns (* ? and ! for "not"), or one |1|salt|hash; [host]:port when the port is not 22
    marker: @revoked (that key is refused for the names), @cert-authority (host certificates: not checked by psctl)

Lines that cannot be read are passed over, as OpenSSH does. A host that is known by any key and shows another one has
changed, also when the other key is of another type: an attacker would otherwise just offer a type not yet known.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from psctl.errors import InvalidFile

_LIST = b"SSHKRL\n\0"
_LIMIT = 16_000_000
_ASK = 10.0  # seconds for ssh-keygen


class KnownHostsLine(msgspec.Struct, frozen=True):
    """One usable line of a known_hosts file."""

    file: str
    number: int
    marker: str
    names: str
    kind: str
    blob: bytes


class KeyVerdict(Enum):
    """The verdict of the known_hosts files on a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


class KeyJudgement(msgspec.Struct, frozen=True):
    """A verdict and the line it rests on."""

    verdict: KeyVerdict
    line: KnownHostsLine | None = None


def entry_names(address: str, port: int, alias: str) -> tuple[str, ...]:
    """Return the names to look a host up by: its own first, then (for another port than 22) the bare address."""
    if alias:
        return (alias.lower(),)
    address = address.lower()
    return (address,) if port == 22 else (f"[{address}]:{port}", address)


def read(files: Iterable[str]) -> list[KnownHostsLine]:
    """Return the usable lines of the files that are there, in order."""
    found = []
    for file in files:
        try:
            text = Path(file).read_bytes().decode("utf-8", "replace")
        except OSError:
            continue  # not there or not ours to read: it names no host
        for number, raw in enumerate(text.splitlines(), 1):
            if (line := _parse(file, number, raw)) is not None:
                found.append(line)
    return found


def _parse(file: str, number: int, raw: str) -> KnownHostsLine | None:
    words = raw.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3 or marker not in ("", "@revoked", "@cert-authority"):
        return None
    names, kind, text = words[:3]
    try:
        blob = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    size = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + size] != kind.encode():
        return None
    return KnownHostsLine(file, number, marker, names, kind, blob)


def of_host(lines: Iterable[KnownHostsLine], name: str) -> list[KnownHostsLine]:
    """Return the lines for this name."""
    return [line for line in lines if _names_match(line.names, name)]


def _names_match(names: str, name: str) -> bool:
    if names.startswith("|1|"):
        try:
            _, _, salt, wanted = names.split("|")
            digest = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(digest, base64.b64decode(wanted))
        except (ValueError, binascii.Error):
            return False
    hit = False
    for pattern in names.lower().split(","):
        refused = pattern.startswith("!")
        # only * and ? are special there; brackets are [host]:port
        if fnmatch.fnmatchcase(name, re.sub(r"\[", "[[]", pattern.removeprefix("!"))):
            if refused:
                return False
            hit = True
    return hit


def judge(lines: Sequence[KnownHostsLine], names: Sequence[str], blob: bytes) -> KeyJudgement:
    """Return the verdict on the key `blob` of a host with these names (see entry_names)."""
    own = of_host(lines, names[0])
    every = [line for name in names for line in of_host(lines, name)]
    for line in every:
        if line.marker == "@revoked" and line.blob == blob:
            return KeyJudgement(KeyVerdict.REVOKED, line)
    for line in every:
        if not line.marker and line.blob == blob:
            return KeyJudgement(KeyVerdict.KNOWN, line)
    others = [line for line in own if not line.marker]
    if not others:
        return KeyJudgement(KeyVerdict.UNKNOWN)
    same_kind = [line for line in others if line.kind == kind_of(blob)]
    return KeyJudgement(KeyVerdict.CHANGED, (same_kind or others)[0])


def known_kinds(lines: Sequence[KnownHostsLine], names: Sequence[str]) -> list[str]:
    """Return the key types by which a host is known, which are requested from it first."""
    kinds = [line.kind for name in names for line in of_host(lines, name) if not line.marker]
    return list(dict.fromkeys(kinds))


def kind_of(blob: bytes) -> str:
    """Return the type in a key."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode("ascii", "replace")


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def add(file: str, name: str, blob: bytes, hashed: bool) -> None:
    """Add a host's key to a known_hosts file, unless the host has a line there by now.

    Two psctl at once, or two threads, write one line: the file is locked while it is looked at and written.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b", buffering=0) as opened:
        with contextlib.suppress(OSError):  # a home without locks: at worst the line is there twice
            fcntl.flock(opened, fcntl.LOCK_EX)
        if of_host(read([file]), name):
            return
        size = opened.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(opened.fileno(), 1, size - 1) != b"\n"
        shown = _hashed(name) if hashed else name
        line = f"{shown} {kind_of(blob)} {base64.b64encode(blob).decode()}\n"
        opened.write((("\n" if torn else "") + line).encode())


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


# ---- RevokedHostKeys -------------------------------------------------------------------------------------------------


def is_revoked(file: str, blob: bytes) -> bool:
    """Return whether a file of RevokedHostKeys revokes a host key.

    As with OpenSSH a file that cannot be read revokes every key.

    Args:
        file: what RevokedHostKeys names.
        blob: the key in SSH's wire form.

    Raises:
        InvalidFile: the file cannot be read, or nothing here can read its form; the user's configuration.
    """
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_LIMIT + 1)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from error
    if len(data) > _LIMIT:
        raise _unreadable(file, f"it has more than {_LIMIT // 10**6} MB")
    return _in_list(file, blob) if data.startswith(_LIST) else _in_text(data, blob)


def _in_text(data: bytes, blob: bytes) -> bool:
    for line in data.splitlines():
        if line.lstrip().startswith(b"#"):
            continue
        for word in line.split():
            try:
                if base64.b64decode(word, validate=True) == blob:
                    return True
            except (binascii.Error, ValueError):
                continue
    return False


def _in_list(file: str, blob: bytes) -> bool:
    """Run ssh-keygen, which reads the binary form: it prints REVOKED and exits with 1 where the key is listed."""
    with tempfile.NamedTemporaryFile(prefix="psctl-", suffix=".pub") as public:
        public.write(f"{kind_of(blob)} {base64.b64encode(blob).decode()}\n".encode())
        public.flush()
        try:
            done = subprocess.run(
                ["ssh-keygen", "-Q", "-f", file, public.name], check=False, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=_ASK,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _unreadable(file, f"ssh-keygen -Q: {error}") from error
    if done.returncode == 0:
        return False
    if "REVOKED" in done.stdout:
        return True
    raise _unreadable(file, (done.stderr.strip().splitlines() or ["ssh-keygen -Q failed"])[-1])


def _unreadable(file: str, why: str) -> InvalidFile:
    return InvalidFile(
        f"RevokedHostKeys {file}: {why}; no host key can be accepted",
        "make the file readable, or take RevokedHostKeys out of ~/.ssh/config",
        where=file,
    )
