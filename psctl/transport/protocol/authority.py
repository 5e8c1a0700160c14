"""A job's own certificate authority, and the identity in its certificates: job, role, rank, incarnation.

The identity is one URI in the certificate's subjectAltName: psctl://JOB/ROLE/RANK/INCARNATION. Host names are not used:
a process is identified by its part in the job, whichever host it runs on.
"""

from __future__ import annotations

import datetime
import re
from typing import cast, get_args
from urllib.parse import quote, unquote

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psctl.errors import ProtocolError
from psctl.types import Member, Role

DAY = 86400.0
LIFE = 7 * DAY
"""Seconds for which a member's certificate is valid; the coordinator issues a new one before its end
(process/certificate_renewal.py)."""
AUTHORITY_LIFE = 10 * 365 * DAY
"""Seconds for which an authority is valid, longer than any job; its key is deleted with the job."""
IDENTITY = re.compile(r"psctl://([^/]+)/([a-z]+)/(0|[1-9][0-9]{0,8})/(0|[1-9][0-9]{0,8})")


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its private key, as PEM text."""

    certificate_pem: str
    key_pem: str

    def __repr__(self) -> str:
        return "Pair(certificate, key: hidden)"


def make_authority(job: str, now: float) -> Pair:
    """Return a new certificate authority for a job; only the coordinator keeps its key.

    Args:
        job: name of the job.
        now: seconds since the epoch; validity begins a day earlier, as hosts' clocks differ, and lasts ten years.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("psctl job authority")
    builder = (
        _builder(name, name, key.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_job_uri(job))]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Pair, job: str, member: Member, now: float, life: float = LIFE) -> Pair:
    """Return a new key and a certificate with the identity of `member` in `job`.

    Args:
        authority: the job's, from `make_authority`.
        job: name of the job.
        member: the owner of the key.
        now: seconds since the epoch.
        life: seconds after `now` for which the certificate is valid.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate_pem.encode())
    issuer_key = _key_of(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    uri = f"{_job_uri(job)}/{member.role}/{member.rank}/{member.incarnation}"
    builder = (
        _builder(_name(str(member)), issuer.subject, key.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def sign(authority: Pair, data: bytes) -> bytes:
    """Return the authority's signature over `data`."""
    return _key_of(authority).sign(data, ec.ECDSA(hashes.SHA256()))


def has_signed(certificate_pem: str, data: bytes, signature: bytes) -> bool:
    """Return whether `signature` over `data` was made with the key of this authority's certificate."""
    key = x509.load_pem_x509_certificate(certificate_pem.encode()).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "psctl's authorities have EC keys"
    try:
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _key_of(authority: Pair) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(authority.key_pem.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "psctl's authorities have EC keys"
    return key


def read_identity(der: bytes) -> tuple[str, Member]:
    """Return the identity (job, member) in a verified certificate.

    Raises:
        ProtocolError: the certificate has no such identity; the peer's fault.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ProtocolError(f"its certificate names no member of a job ({error})") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = IDENTITY.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None or match[2] not in get_args(Role):
        raise ProtocolError(f"its certificate names no member of a job (its URIs: {', '.join(uris) or 'none'})")
    return unquote(match[1]), Member(cast(Role, match[2]), int(match[3]), int(match[4]))


def _job_uri(job: str) -> str:
    assert job, "a job has a name"
    return f"psctl://{quote(job, safe='')}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life: float
) -> x509.CertificateBuilder:
    start, end = (datetime.datetime.fromtimestamp(at, datetime.UTC) for at in (now - DAY, now + life))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())
