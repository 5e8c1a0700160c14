"""Host keys that `RevokedHostKeys` of ssh's configuration takes back: a text of public keys, or a key revocation list.

As with OpenSSH a file that is named and cannot be read revokes every key: nobody can tell which it would have listed.
"""

from __future__ import annotations

import base64
import binascii
import subprocess
import tempfile
from pathlib import Path

from psctl.errors import InvalidFile
from psctl.remote import known_hosts

_LIST = b"SSHKRL\n\0"
_LIMIT = 16_000_000
_ASK = 10.0  # seconds for ssh-keygen


def lists(file: str, blob: bytes) -> bool:
    """Tell whether a file revokes a host key.

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
    """Ask ssh-keygen, which reads the binary form: its exit status is 1 and it says REVOKED where the key is listed."""
    with tempfile.NamedTemporaryFile(prefix="psctl-", suffix=".pub") as public:
        public.write(f"{known_hosts.kind_of(blob)} {base64.b64encode(blob).decode()}\n".encode())
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
