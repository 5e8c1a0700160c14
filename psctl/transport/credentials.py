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
    """A process's identity in its job, and what proves it.

    One object serves all connections of a process, so that `renew` applies to each that is made afterwards.

    Args:
        job: name of the job.
        member: of the process.
        authority, certificate, key: PEM text.
        preauth_secret: of the job, in hex (transport/protocol/preauth.py).
    """

    job: str
    member: Member
    authority: str
    certificate: str
    key: str = field(repr=False)
    preauth_secret: str = field(repr=False)

    @cached_property
    def dialling(self) -> ssl.SSLContext:
        """The TLS context of the dialling end; made once for each certificate."""
        return make_context(self.authority, self.certificate, self.key, accepting=False)

    @cached_property
    def accepting(self) -> ssl.SSLContext:
        """The TLS context of the accepting end; made once for each certificate."""
        return make_context(self.authority, self.certificate, self.key, accepting=True)

    def renew(self, certificate: str, key: str) -> None:
        """Use another certificate for connections that are made from now on; others continue.

        Raises:
            ssl.SSLError: the PEM texts are damaged or do not belong together; the former certificate stays.
        """
        dialling = make_context(self.authority, certificate, key, accepting=False)
        accepting = make_context(self.authority, certificate, key, accepting=True)
        self.certificate, self.key = certificate, key
        self.dialling, self.accepting = dialling, accepting


def make_context(authority: str, certificate: str, key: str, *, accepting: bool) -> ssl.SSLContext:
    """Return the TLS context of one end.

    Args:
        authority: PEM of the job's authority, the only one that is trusted.
        certificate: PEM of this member.
        key: PEM of its private key.
        accepting: for the accepting end.

    Raises:
        ssl.SSLError: the PEM texts are damaged or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepting else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate's URI names the member; host names are not used
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
    """Yield the path of a short-lived file with `data`, in memory or 0600: ssl reads keys from files only."""
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
