"""Which certificates are of which key, and what an identity file says of its public half."""

from __future__ import annotations

import base64
from pathlib import Path

import paramiko
import pytest

from psctl.remote.ssh_identities import certificates, certifies, is_public, public_half

TYPES = ["ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "sk-ssh-ed25519@openssh.com"]


def blob(*parts: bytes) -> bytes:
    message = paramiko.Message()
    for part in parts:
        message.add_string(part)
    return bytes(message.asbytes())


def certificate(kind: str, *fields: bytes) -> bytes:
    name = kind.removesuffix("@openssh.com").encode() + b"-cert-v01@openssh.com"
    return blob(name, b"nonce", *fields, b"serial and the rest")


@pytest.mark.parametrize("kind", TYPES)
def test_a_certificate_has_its_keys_fields(kind: str) -> None:
    public = blob(kind.encode(), b"first", b"second")
    assert certifies(certificate(kind, b"first", b"second"), public)
    assert not certifies(certificate(kind, b"first", b"other"), public)
    assert not certifies(public, public), "a key is no certificate"
    for other in TYPES:
        assert certifies(certificate(other, b"first", b"second"), public) is (other == kind)


@pytest.mark.parametrize("damaged", [b"", b"\0\0\0\xff", blob(b"ssh-ed25519"), b"\xff" * 40])
def test_damaged_bytes_certify_nothing(damaged: bytes) -> None:
    assert not certifies(damaged, blob(b"ssh-ed25519", b"key"))
    assert not certifies(certificate("ssh-ed25519", b"key"), damaged)


def test_files_that_are_no_certificate_of_the_key_are_passed_over(tmp_path: Path) -> None:
    public, right = blob(b"ssh-ed25519", b"key"), tmp_path / "right.pub"
    name = "ssh-ed25519-cert-v01@openssh.com"
    right.write_text(f"{name} {base64.b64encode(certificate('ssh-ed25519', b'key')).decode()} me\n")
    (tmp_path / "other.pub").write_text(f"{name} {base64.b64encode(certificate('ssh-ed25519', b'yek')).decode()}\n")
    (tmp_path / "damaged.pub").write_text(f"{name} AAA")
    (tmp_path / "empty.pub").touch()
    (tmp_path / "bytes.pub").write_bytes(b"\xff\xfe\x00")
    files = [str(tmp_path / each) for each in ("absent.pub", "other.pub", "damaged.pub", "empty.pub", "bytes.pub")]
    assert [file for file, _ in certificates(public, [*files, str(right)])] == [str(right)]


def test_the_public_half_of_files(tmp_path: Path) -> None:
    public = blob(b"ssh-ed25519", b"key")
    line = f"ssh-ed25519 {base64.b64encode(public).decode()} me@here\n"
    (tmp_path / "a.pub").write_text(line)
    assert public_half(str(tmp_path / "a.pub")) == public
    assert is_public(str(tmp_path / "a.pub"))
    assert public_half(str(tmp_path / "a")) == public, "only a.pub is there"
    for text in (
        "",
        "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END\n",
    ):
        (tmp_path / "b").write_text(text)
        assert public_half(str(tmp_path / "b")) is None
        assert not is_public(str(tmp_path / "b"))
    (tmp_path / "b.pub").write_text(line)
    assert public_half(str(tmp_path / "b")) == public
