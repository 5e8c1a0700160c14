"""Reads the public half and the certificates of an SSH identity file."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import paramiko

_PUBLIC = ("ssh-", "ecdsa-sha2-", "sk-")
"""Beginnings of the types of public keys."""
_OPENSSH, _MAGIC = "-----BEGIN OPENSSH PRIVATE KEY-----", b"openssh-key-v1\0"


def public_half(file: str) -> bytes | None:
    """Return the public half of an identity file, by which the agent's key is recognised; None where it is unknown.

    As with OpenSSH, the file may be a public key itself. A private key in OpenSSH's format has the public half
    unencrypted (PROTOCOL.key); that of others is in FILE.pub.
    """
    for path in (file, file + ".pub"):
        with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
            text = Path(path).read_text()
            found = _of_public(text) or _of_private(text)
            if found is not None:
                return found
    return None


def is_public(file: str) -> bool:
    """Return whether a file is a public key. OSError: it cannot be read."""
    return _of_public(Path(file).read_text(errors="replace")) is not None


def certificates(public: bytes, files: Iterable[str]) -> Iterator[tuple[str, paramiko.PublicBlob]]:
    """Yield the files that are certificates of a public key, with their contents; others are passed over."""
    for file in files:
        with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
            found = paramiko.PublicBlob.from_file(file)
            if certifies(found.key_blob, public):
                yield file, found


def certifies(certificate: bytes, public: bytes) -> bool:
    """Return whether a certificate is of a public key: after its type and nonce it has the key's fields.

    Source: OpenSSH's PROTOCOL.certkeys.
    """
    ours, theirs = paramiko.Message(public), paramiko.Message(certificate)
    kind = ours.get_binary().removesuffix(b"@openssh.com")  # of hardware keys
    if not theirs.get_binary().startswith(kind + b"-cert-"):
        return False
    theirs.get_binary()  # the nonce
    fields = bytes(ours.get_remainder())
    return bool(fields) and bytes(theirs.get_remainder()).startswith(fields)


def _of_public(text: str) -> bytes | None:
    words = text.split(maxsplit=2)
    return base64.b64decode(words[1]) if len(words) > 1 and words[0].startswith(_PUBLIC) else None


def _of_private(text: str) -> bytes | None:
    lines = text.strip().splitlines()
    if not lines or lines[0] != _OPENSSH:
        return None
    data = base64.b64decode("".join(lines[1:-1]))
    if not data.startswith(_MAGIC):
        return None
    message = paramiko.Message(data[len(_MAGIC) :])
    for _ in ("cipher", "key derivation", "its options"):
        message.get_binary()
    message.get_int()  # keys in the file: one
    return bytes(message.get_binary()) or None
