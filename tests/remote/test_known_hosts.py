"""known_hosts lines as OpenSSH reads them."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.remote.known_hosts import (
    KeyJudgement,
    KeyVerdict,
    KnownHostsLine,
    add,
    entry_names,
    fingerprint,
    judge,
    known_kinds,
    read,
)


def blob(kind: str, body: bytes = b"body") -> bytes:
    return struct.pack(">I", len(kind)) + kind.encode() + struct.pack(">I", len(body)) + body


ED, OTHER, RSA = blob("ssh-ed25519"), blob("ssh-ed25519", b"other"), blob("ssh-rsa")


def line(names: str, key: bytes = ED, marker: str = "") -> str:
    kind = key[4 : 4 + key[3]].decode()
    return f"{marker + ' ' if marker else ''}{names} {kind} {base64.b64encode(key).decode()} a comment\n"


def lines(tmp_path: Path, *texts: str) -> list[KnownHostsLine]:
    (tmp_path / "known_hosts").write_text("".join(texts))
    return read([str(tmp_path / "absent"), str(tmp_path / "known_hosts")])


@pytest.mark.parametrize(
    ("names", "host", "known"),
    [
        ("node-a", "node-a", True),
        ("Node-A", "node-a", True),
        ("node-a,10.0.0.1", "10.0.0.1", True),
        ("node-*", "node-b", True),
        ("node-?", "node-ab", False),
        ("node-*,!node-b", "node-b", False),
        ("[node-a]:22", "node-a", False),
        ("node-a1", "node-a", False),
    ],
)
def test_names_are_patterns(tmp_path: Path, names: str, host: str, known: bool) -> None:
    found = judge(lines(tmp_path, line(names)), entry_names(host, 22, ""), ED)
    assert found.verdict is (KeyVerdict.KNOWN if known else KeyVerdict.UNKNOWN)


def test_a_port_is_part_of_the_name_and_the_bare_name_may_vouch_for_it(tmp_path: Path) -> None:
    names = entry_names("Node-A", 2222, "")
    assert names == ("[node-a]:2222", "node-a")
    assert judge(lines(tmp_path, line("[node-a]:2222")), names, ED).verdict is KeyVerdict.KNOWN
    assert judge(lines(tmp_path, line("[node-a]:2223")), names, ED).verdict is KeyVerdict.UNKNOWN
    assert judge(lines(tmp_path, line("node-a")), names, ED).verdict is KeyVerdict.KNOWN
    assert judge(lines(tmp_path, line("node-a", OTHER)), names, ED).verdict is KeyVerdict.UNKNOWN
    assert entry_names("node-a", 2222, "Storage") == ("storage",)


def test_another_key_means_changed_and_names_the_line_of_its_type(tmp_path: Path) -> None:
    known = lines(tmp_path, "# comment\n", line("a", RSA), line("a", OTHER))
    found = judge(known, ("a",), ED)
    assert (found.verdict, found.line and found.line.number) == (KeyVerdict.CHANGED, 3)
    assert judge(lines(tmp_path, line("a", RSA)), ("a",), ED).verdict is KeyVerdict.CHANGED


def test_revoked_counts_before_known(tmp_path: Path) -> None:
    known = lines(tmp_path, line("a"), line("*", ED, "@revoked"))
    assert judge(known, ("a",), ED).verdict is KeyVerdict.REVOKED


def test_lines_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    known = lines(
        tmp_path, "a\n", "a ssh-ed25519\n", "a ssh-ed25519 not-base64!\n", "a ssh-rsa " + line("a").split()[2] + "\n",
        line("a", ED, "@cert-authority"), line("a", ED, "@unheard-of"), "|1|broken ssh-ed25519 AAAA\n", "\xff\n", "\n",
    )  # fmt: skip
    assert judge(known, ("a",), ED) == KeyJudgement(KeyVerdict.UNKNOWN)
    assert known_kinds(known, ("a",)) == []


def test_known_types_in_order_once(tmp_path: Path) -> None:
    known = lines(tmp_path, line("a", RSA), line("a"), line("a", OTHER), line("b", blob("ecdsa")))
    assert known_kinds(known, ("a",)) == ["ssh-rsa", "ssh-ed25519"]


@given(st.binary(max_size=400))
def test_no_file_makes_the_reader_fail(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    judge(read([str(path)]), ("a", "b"), ED)


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_added_is_found_again(tmp_path: Path, hashed: bool) -> None:
    file = str(tmp_path / "ssh" / "known_hosts")
    add(file, "[node-a]:2222", ED, hashed)
    add(file, "[node-a]:2222", OTHER, hashed)
    found = read([file])
    assert [(entry.number, entry.blob) for entry in found] == [(1, ED)]
    assert judge(found, ("[node-a]:2222",), ED).verdict is KeyVerdict.KNOWN


def test_fingerprints_look_like_ssh_keygens() -> None:
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
