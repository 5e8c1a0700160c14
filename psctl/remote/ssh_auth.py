"""Logs in with keys, from files and the agent; it never prompts, because many hosts log in at once.

Order: the agent's keys for which an identity file is named, the file itself when the agent lacks it, then (unless
IdentitiesOnly) the agent's other keys. OpenSSH tries the agent's others before the files; here a named file is tried
first, because sshd closes the connection after six keys, before a full agent has offered the right one.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from psctl.errors import AuthFailed
from psctl.remote.target import Endpoint

_PUBLIC = ("ssh-", "ecdsa-sha2-", "sk-")
"""Beginnings of the types of public keys."""
_OPENSSH, _MAGIC = "-----BEGIN OPENSSH PRIVATE KEY-----", b"openssh-key-v1\0"


class _Agent(AgentSSH):  # type: ignore[misc]
    """The agent behind a socket path (paramiko's own uses only SSH_AUTH_SOCK)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(10)
            connection.connect(path)
            self._connect(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()


class KeyLogin:
    """Logs in over a transport whose host key was checked.

    Args:
        host: name for messages.
        endpoint: whose user and keys.
    """

    def __init__(self, host: str, endpoint: Endpoint) -> None:
        self._host, self._endpoint = host, endpoint
        self._tried: list[str] = []
        self._skipped: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in with the first key that sshd accepts.

        Raises:
            AuthFailed: sshd accepted none; the message lists those tried.
        """
        agent = self._reach_agent()
        allowed = "publickey"
        try:
            for label, key in self._keys(agent):
                self._tried.append(label)
                try:
                    if not transport.auth_publickey(self._endpoint.user, key) and transport.is_authenticated():
                        return
                    allowed = "a second factor"
                except paramiko.BadAuthenticationType as error:
                    allowed = ", ".join(error.allowed_types)
                    break
                except paramiko.AuthenticationException:
                    continue
                except paramiko.SSHException as error:
                    raise self._failed(f"; then sshd closed the connection ({error})") from error
        finally:
            if agent is not None:
                agent.close()
        raise self._failed(f"; sshd there takes: {allowed}" if allowed != "publickey" else "")

    def _failed(self, end: str) -> AuthFailed:
        user, address = self._endpoint.user, self._endpoint.address
        tried = ", ".join(self._tried) or "nothing, for no usable key was found"
        skipped = f" (not used: {', '.join(self._skipped)})" if self._skipped else ""
        port = f" -p {self._endpoint.port}" if self._endpoint.port != 22 else ""
        return AuthFailed(
            f"{self._host}: sshd at {address} accepts no key of {user}; tried {tried}{skipped}{end}",
            f"psctl logs in with keys only: `ssh-copy-id{port} {user}@{address}`, or name another identity_file",
            where=self._host,
        )

    def _reach_agent(self) -> _Agent | None:
        if not self._endpoint.agent:
            return None
        try:
            return _Agent(self._endpoint.agent)
        except (OSError, paramiko.SSHException) as error:
            self._skipped.append(f"agent {self._endpoint.agent}: {error}")
            return None

    def _keys(self, agent: _Agent | None) -> Iterator[tuple[str, paramiko.PKey]]:
        held: list[AgentKey] = list(agent.get_keys()) if agent else []
        given: set[bytes] = set()
        for file in self._endpoint.identity_files:
            public = _public_half(file)
            in_agent = [key for key in held if key.asbytes() == public]
            for key in in_agent:
                given.add(key.asbytes())
                yield f"agent key {file}", key
            if not in_agent and (loaded := self._load(file)) is not None:
                given.add(loaded.asbytes())
                yield f"key {file}", loaded
        if not self._endpoint.identities_only:
            for key in held:
                if key.asbytes() not in given:
                    yield f"agent key {key.comment or key.get_name()}", key

    def _load(self, file: str) -> paramiko.PKey | None:
        if not os.path.exists(file):
            return None  # ssh lists default keys that may be missing; that is no error
        try:
            if _of_public(Path(file).read_text(errors="replace")) is not None:
                self._skipped.append(f"{file}: a public key, and no agent has its private half")
                return None
            key = paramiko.PKey.from_path(file)
            for certificate in self._endpoint.certificate_files:
                if Path(certificate).name.startswith(Path(file).name) and os.path.exists(certificate):
                    key.load_certificate(certificate)
        except TypeError:  # cryptography's word for "needs a passphrase"
            self._skipped.append(f"{file}: has a passphrase, `ssh-add` it to an agent")
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            self._skipped.append(f"{file}: {error}")
        else:
            return key
        return None


def _public_half(file: str) -> bytes | None:
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
