"""Logs in with keys, from files and the agent; it never prompts, because many hosts log in at once.

Order: the agent's keys for which an identity file is named, the file itself when the agent lacks it, each with its
certificates first, then (unless IdentitiesOnly) the agent's other keys. OpenSSH tries the agent's others before the
files; here a named file is tried first, because sshd closes the connection after six keys, before a full agent has
offered the right one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from psctl.errors import AuthFailed
from psctl.remote import ssh_identities
from psctl.remote.target import Endpoint

_FAILURE = 5
"""SSH_AGENT_FAILURE of the agent's protocol."""
ANSWER = 10.0
"""Seconds for the agent to list its keys."""
CONFIRMATION = 110.0
"""Seconds for the agent to sign: it may ask its user (for a touch, in a dialog); sshd waits 120 s by default."""


class _Agent(AgentSSH):  # type: ignore[misc]
    """The agent behind a socket path (paramiko's own uses only SSH_AUTH_SOCK)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.problem = ""
        """Why it did not sign; "" while it answers."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ANSWER)
            connection.connect(path)
            self._connect(connection)
            connection.settimeout(CONFIRMATION)
        except BaseException:
            connection.close()
            raise

    def _send_message(self, msg: paramiko.Message) -> tuple[int, paramiko.Message]:
        """Ask the agent, as paramiko does, whose thread ends with a traceback at an OSError of this connection."""
        try:
            kind, answer = super()._send_message(msg)
        except OSError as error:
            why = f"no answer in {CONFIRMATION:g} s" if isinstance(error, TimeoutError) else str(error)
            self.problem = f"the agent did not sign: {why}"
            raise paramiko.SSHException(self.problem) from error
        if kind == _FAILURE:
            self.problem = "the agent refused to sign"
        return kind, answer

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
                if isinstance(key, AgentKey):
                    transport.auth_timeout = max(transport.auth_timeout, CONFIRMATION + ANSWER)
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
                    if agent is not None and agent.problem:
                        raise self._unsigned(label, agent.problem) from error
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

    def _unsigned(self, label: str, problem: str) -> AuthFailed:
        user, address = self._endpoint.user, self._endpoint.address
        return AuthFailed(
            f"{self._host}: no login as {user} at {address}: {problem}; asked for: {label}",
            "confirm in the agent (a dialog, a touch), unlock it, or name another identity_file",
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
        held = _keys_of(agent) if agent is not None else []
        given: set[bytes] = set()
        for file in self._endpoint.identity_files:
            public = ssh_identities.public_half(file)
            of_file = [key for key in held if public is not None and _is_of(key, public)]
            for key in of_file:
                given.add(key.blob)
                yield from self._with_certificates(f"agent key {file}", key, file)
            if not of_file and (loaded := self._load(file)) is not None:
                given.add(loaded.asbytes())
                yield from self._with_certificates(f"key {file}", loaded, file)
        if not self._endpoint.identities_only:
            for key in held:
                if key.blob not in given:
                    yield f"agent key {key.comment or key.get_name()}", key

    def _with_certificates(self, label: str, key: paramiko.PKey, file: str) -> Iterator[tuple[str, paramiko.PKey]]:
        """Yield a key with each of its certificates and then without, as OpenSSH: FILE-cert.pub when none is named."""
        files = self._endpoint.certificate_files or (f"{file}-cert.pub",)
        if key.public_blob is None:  # else the agent holds it as a certificate
            for certificate, contents in ssh_identities.certificates(key.asbytes(), files):
                key.public_blob = contents
                yield f"{label} with certificate {certificate}", key
            key.public_blob = None
        yield label, key

    def _load(self, file: str) -> paramiko.PKey | None:
        if not os.path.exists(file):
            return None  # ssh lists default keys that may be missing; that is no error
        try:
            if ssh_identities.is_public(file):
                self._skipped.append(f"{file}: a public key, and no agent has its private half")
                return None
            key = paramiko.PKey.from_path(file)
            key.public_blob = None  # it has taken FILE-cert.pub, and would offer nothing else
        except TypeError:  # cryptography's word for "needs a passphrase"
            self._skipped.append(f"{file}: has a passphrase, `ssh-add` it to an agent")
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            self._skipped.append(f"{file}: {error}")
        else:
            return key
        return None


def _keys_of(agent: _Agent) -> list[AgentKey]:
    """Return the agent's keys, certificates first.

    paramiko offers an RSA certificate as a plain key, so the certificate is set here. It has the plain key sign, which
    an agent may lack; then the certificate's own name is asked for.
    """
    keys: list[AgentKey] = list(agent.get_keys())
    blobs = {key.blob for key in keys}
    for key in keys:
        if "-cert-" in key.name:
            key.public_blob = paramiko.PublicBlob(key.name, key.blob)
            if key.asbytes() not in blobs:
                key.inner_key = None
    return sorted(keys, key=lambda key: key.public_blob is None)


def _is_of(key: AgentKey, public: bytes) -> bool:
    """Return whether a key of the agent, or a certificate that it holds, has this public half."""
    return bool(key.blob == public or ssh_identities.certifies(key.blob, public))
