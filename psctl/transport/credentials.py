"""Credentials of a member, and TLS contexts from them: TLS 1.3 only, verified against the job's own authority."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from psctl.types import Member


@dataclass
class Credentials:
    """A process's identity in its job and its proof: PEM text, and the job's knock (transport/protocol/preauth.py),
    hex.

    One object serves all connections of a process, so that `renew` reaches each that is made afterwards.
    """

    job: str
    member: Member
    authority: str
    certificate: str
    key: str = field(repr=False)
    knock: str = field(repr=False)

    @cached_property
    def dialling(self) -> ssl.SSLContext:
        """The TLS context of the end that dials; made once a certificate."""
        return make_context(self.authority, self.certificate, self.key, accepting=False)

    @cached_property
    def accepting(self) -> ssl.SSLContext:
        """The TLS context of the end that is dialled; made once a certificate."""
        return make_context(self.authority, self.certificate, self.key, accepting=True)

    def renew(self, certificate: str, key: str) -> None:
        """Use another certificate for connections that are made from now on; others live on.

        Raises:
            ssl.SSLError: the PEM texts are damaged or do not belong together; whoever issued them. Nothing has changed.
        """
        dialling = make_context(self.authority, certificate, key, accepting=False)
        accepting = make_context(self.authority, certificate, key, accepting=True)
        self.certificate, self.key = certificate, key
        self.dialling, self.accepting = dialling, accepting


def make_context(authority: str, certificate: str, key: str, *, accepting: bool) -> ssl.SSLContext:
    """Return the context of one end.

    Args:
        authority: PEM of the job's authority; nobody else is trusted.
        certificate: PEM of this member.
        key: PEM of its private key.
        accepting: for the end that is dialled.

    Raises:
        ssl.SSLError: the PEM texts are damaged or do not belong together; psctl's own fault.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepting else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who it is stands in the certificate's URI, not in a host name
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    if accepting:
        context.num_tickets = 0  # tickets would arrive after the handshake and be read as frames
    context.load_verify_locations(cadata=authority)
    with _private_file(f"{certificate}\n{key}\n".encode()) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _private_file(data: bytes) -> Iterator[str]:
    """Give `data` as a file, for ssl reads keys from files only: in memory where possible, 0600 else, gone at once."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("psctl", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.NamedTemporaryFile() as named:  # 0600
        named.write(data)
        named.flush()
        yield named.name
