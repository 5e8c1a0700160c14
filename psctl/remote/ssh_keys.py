"""Checks host keys: no login, on a jump host or a target, before its key was found in known_hosts."""

from __future__ import annotations

import paramiko

from psctl.errors import HostKeyChanged, HostKeyUnknown, PsctlError
from psctl.remote import known_hosts
from psctl.remote.known_hosts import KeyVerdict
from psctl.remote.target import Endpoint

_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


class HostKeyCheck:
    """Checks the host key of one sshd against known_hosts.

    Args:
        host: the cluster's name of the host, for messages.
        endpoint: the sshd, and the known_hosts files that count for it.
        policy: strict, or accept-new (the key of a host without a known key is added to the first file).
        jumped: it is reached through a jump host, so ssh-keyscan cannot see it.
    """

    def __init__(self, host: str, endpoint: Endpoint, policy: str, jumped: bool) -> None:
        self._host, self._endpoint, self._policy, self._jumped = host, endpoint, policy, jumped
        self._names = known_hosts.entry_names(endpoint.address, endpoint.port, endpoint.alias)

    def _lines(self) -> list[known_hosts.KnownHostsLine]:
        return known_hosts.read([*self._endpoint.user_known_hosts, *self._endpoint.global_known_hosts])

    def preferred(self, offered: tuple[str, ...]) -> tuple[str, ...]:
        """Order host key algorithms so that the types already known come first, as OpenSSH does.

        Otherwise a host known by its ed25519 key that also has an RSA one could look changed.
        """
        known = [name for kind in known_hosts.known_kinds(self._lines(), self._names)
                 for name in _ALGORITHMS.get(kind, (kind,)) if name in offered]  # fmt: skip
        return (*dict.fromkeys(known), *(name for name in offered if name not in known))

    def check(self, key: paramiko.PKey) -> None:
        """Return when the key is known (or was just added).

        Raises:
            HostKeyUnknown, HostKeyChanged: it is not; the message names the key and the file.
            InvalidFile: RevokedHostKeys cannot be read; the user's configuration.
        """
        blob = key.asbytes()
        for file in self._endpoint.revoked_host_keys:
            if known_hosts.is_revoked(file, blob):
                raise self._revoked(blob, file)
        judgement = known_hosts.judge(self._lines(), self._names, blob)
        if judgement.verdict is KeyVerdict.KNOWN:
            return
        if judgement.verdict is KeyVerdict.UNKNOWN:
            if self._policy != "accept-new" or not self._endpoint.user_known_hosts:
                raise self._unknown(blob)
            self._accept(blob)
            return
        raise self._changed(blob, judgement)

    def _accept(self, blob: bytes) -> None:
        file = self._endpoint.user_known_hosts[0]
        try:
            known_hosts.add(file, self._names[0], blob, self._endpoint.hash_known_hosts)
        except OSError as error:
            raise HostKeyUnknown(
                f"{self._host}: its host key cannot be added to {file}: {error.strerror}",
                "make the file writable",
                where=self._host,
            ) from error
        # another psctl may have been faster: the file's content now counts
        if known_hosts.judge(self._lines(), self._names, blob).verdict is not KeyVerdict.KNOWN:
            raise self._unknown(blob)

    def _shown_name(self) -> str:
        given, address, port = self._endpoint.given, self._endpoint.address, self._endpoint.port
        at = address if port == 22 else f"{address} port {port}"
        return at if given == self._host or given == address else f"{given} ({at})"

    def _unknown(self, blob: bytes) -> PsctlError:
        kind, shown = known_hosts.kind_of(blob), known_hosts.fingerprint(blob)
        file = self._endpoint.user_known_hosts[0] if self._endpoint.user_known_hosts else "~/.ssh/known_hosts"
        port = "" if self._endpoint.port == 22 else f" -p {self._endpoint.port}"
        scan = (
            "" if self._jumped else f" or run `ssh-keyscan{port} -t {_short(kind)} {self._endpoint.address} >> {file}`"
        )
        return HostKeyUnknown(
            f"{self._host}: the host key of {self._shown_name()} is not in known_hosts: {kind} {shown}",
            f"compare that fingerprint with the host's own, then log in once with `{self._endpoint.login}`{scan}; "
            "or set host_key_policy: accept-new",
            where=self._host,
        )

    def _revoked(self, blob: bytes, place: str) -> PsctlError:
        kind, shown = known_hosts.kind_of(blob), known_hosts.fingerprint(blob)
        return HostKeyChanged(
            f"{self._host}: the host key of {self._shown_name()} ({kind} {shown}) is revoked by {place}",
            "do not log in there before its administrator has explained it",
            where=self._host,
        )

    def _changed(self, blob: bytes, judgement: known_hosts.KeyJudgement) -> PsctlError:
        kind, shown, line = known_hosts.kind_of(blob), known_hosts.fingerprint(blob), judgement.line
        assert line is not None
        place = f"{line.file}:{line.number}"
        if judgement.verdict is KeyVerdict.REVOKED:
            return self._revoked(blob, f"{place} (@revoked)")
        return HostKeyChanged(
            f"{self._host}: {self._shown_name()} shows the key {kind} {shown}, but {place} has "
            f"{line.kind} {known_hosts.fingerprint(line.blob)}: the host was reinstalled, or "
            "another machine answers in its place",
            f"ask the host's administrator; if the new key is right: `ssh-keygen -f {line.file} -R '{self._names[0]}'`",
            where=self._host,
        )


def _short(kind: str) -> str:
    return {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa" if kind.startswith("ecdsa") else kind)
