"""The packages that are installed on hosts: tested versions with hashes, and no arguments of pip in the open."""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from psctl import errors
from psctl.launch import pins
from psctl.launch.hosts.actions import HostNeeds, Install, decide
from psctl.launch.hosts.installing import PipRun, install, runs_of
from psctl.launch.hosts.site import NEEDED
from psctl.remote.local import LocalShell
from psctl.spec.cluster import load_cluster
from psctl.units import hide_credentials
from tests.launch.test_actions import WANTS, site

ROOT = Path(__file__).resolve().parents[2]
TESTED = msgspec.structs.replace(WANTS, managed=True, torch=pins.torch(), pins=pins.hashed())


def packages(wants: HostNeeds) -> tuple[str, ...]:
    [found] = [action for action in decide(site(), wants) if isinstance(action, Install)]
    return found.packages


def test_the_versions_that_are_needed_are_those_of_the_package_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}
    assert {name: f">={oldest}" for name, oldest in NEEDED.items()} == {name: str(ranges[name]) for name in NEEDED}
    assert "46.0.7" not in ranges["cryptography"], "AESGCM.encrypt_into is there from 47 on"


def test_hosts_are_given_what_is_tested_with_hashes_of_all_that_comes_along() -> None:
    constraints = dict(
        line.split("==") for line in (ROOT / "psctl" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    found = pins.hashed()
    assert set(found) == {*NEEDED, *(each for names in pins.BRINGS.values() for each in names)} - {"torch"}
    for name, line in found.items():
        assert pins.version_of(line) == constraints[name]
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line)) >= 2
    for name in found:
        asked = [Requirement(text) for text in requires(name) or []]
        brought = {each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})}
        assert brought <= {*found}, f"pip wants hashes of all that {name} brings"


def test_managed_takes_the_tested_versions_and_leaves_the_users_own_alone() -> None:
    wanted = packages(msgspec.structs.replace(TESTED, requirements=("numpy<2", "pandas")))
    assert f"msgspec=={version('msgspec')}" in wanted
    own, engine, theirs = runs_of(wanted, TESTED.pins, "/w/constraints.txt")
    assert own.options == ("--require-hashes",)
    assert {line.split("==")[0] for line in own.lines} == set(TESTED.pins)
    assert engine == PipRun((f"torch=={pins.torch()}",), ("-c", "/w/constraints.txt"))
    assert theirs.options == ()
    assert theirs.lines[:3] == ("numpy<2", "pandas", f"torch=={pins.torch()}")
    assert f"cryptography>={NEEDED['cryptography']}" in theirs.lines, "what psctl works with still holds"


def test_another_torch_than_the_tested_one_brings_its_own_dependencies() -> None:
    wanted = packages(msgspec.structs.replace(TESTED, torch="2.5.1+cpu"))
    assert runs_of(wanted, TESTED.pins, "/c")[1] == PipRun(("torch==2.5.1+cpu",))
    wanted = packages(msgspec.structs.replace(TESTED, torch=f"{pins.torch()}+cpu"))
    assert runs_of(wanted, TESTED.pins, "/c")[1].options == ("-c", "/c")


def test_only_what_an_existing_python_lacks_is_installed_with_what_that_brings() -> None:
    lacking = {**site().modules, "cryptography": "46.0.7"}
    wants = msgspec.structs.replace(TESTED, managed=False, torch="2.5.1")
    [found] = [action for action in decide(site(modules=lacking), wants) if isinstance(action, Install)]
    assert found.packages == (f"cryptography=={version('cryptography')}",)
    [run] = runs_of(found.packages, wants.pins, "/c")
    assert [line.split("==")[0] for line in run.lines] == ["cryptography", "cffi", "pycparser"]


def test_from_a_wheelhouse_all_comes_as_it_lies_there() -> None:
    wants = msgspec.structs.replace(TESTED, pins={}, wheels="w", wheels_pip=True, requirements=("pandas",))
    wanted = packages(wants)
    assert "msgspec>=0.21" in wanted
    assert runs_of(wanted, {}, "/c") == [PipRun(wanted)]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("https://user:pa55@host/simple", "https://***@host/simple"), ("https://tok3n@host", "https://***@host"),
        ("git+https://tok3n@host/a@v1 and http://x:y@h", "git+https://***@host/a@v1 and http://***@h"),
        ("https://host/a@v1 user@host", "https://host/a@v1 user@host"),
    ],
)  # fmt: skip
def test_credentials_of_urls_are_not_shown(text: str, seen: str) -> None:
    assert hide_credentials(text) == seen


def test_a_wrong_index_is_reported_without_its_password() -> None:
    text = "version: 1\nname: lab\nruntime: {index: 'htps://robot:pa55word@host/simple'}\nhosts: [a]\n"
    with pytest.raises(errors.InvalidFile) as raised:
        load_cluster(text, "lab.yaml")
    assert "htps://***@host/simple" in raised.value.message


def test_requirements_with_a_password_are_not_printed() -> None:
    wants = msgspec.structs.replace(TESTED, requirements=("git+https://tok3n@host/a",))
    assert not [action for action in decide(site(), wants) if "tok3n" in str(action)]


class Index(http.server.ThreadingHTTPServer):
    """A package index on loopback that wants a password and has one package, `little`."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "little-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as file:
            file.writestr("little.py", "")
            file.writestr("little-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n")
            file.writestr(
                "little-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr("little-1.0.dist-info/RECORD", "")
        self.hash = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.commands: list[str] = []
        super().__init__(("127.0.0.1", 0), Page)

    @property
    def url(self) -> str:
        return f"http://robot:pa55word@127.0.0.1:{self.server_port}/simple"


class Page(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.commands += command_lines()
        expected = "Basic " + base64.b64encode(b"robot:pa55word").decode()
        if self.headers.get("Authorization") != expected:
            self.answer(401, b"", ("WWW-Authenticate", "Basic"))
        elif self.path == "/simple/little/":
            self.answer(200, b'<a href="/little-1.0-py3-none-any.whl">little-1.0-py3-none-any.whl</a>')
        elif self.path.endswith(".whl"):
            self.answer(200, self.server.wheel.read_bytes(), ("Content-Type", "application/zip"))
        else:
            self.answer(404, b"")

    def answer(self, status: int, data: bytes, header: tuple[str, str] = ("Content-Type", "text/html")) -> None:
        self.send_response(status)
        self.send_header(*header)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Index(tmp_path)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def little(index: Index, folder: Path, line: str) -> None:
    shell = LocalShell("here", str(folder))
    pip = [sys.executable, "-m", "pip"]
    options = ["--target", str(folder / "there"), "--no-cache-dir", "--no-deps"]
    try:
        install(shell, pip, options, [PipRun((line,), ("--require-hashes",))], index.url)
    finally:
        shell.close()


def test_the_password_of_an_index_is_on_no_command_line(index: Index, tmp_path: Path) -> None:
    little(index, tmp_path, f"little==1.0 --hash=sha256:{index.hash}")
    assert (tmp_path / "there" / "little.py").exists()
    assert any("--require-hashes" in each for each in index.commands), "pip was seen at work"
    assert not [each for each in index.commands if "pa55word" in each]


def test_an_index_that_serves_another_file_is_refused_without_its_password(index: Index, tmp_path: Path) -> None:
    with pytest.raises(
        errors.PythonMissing, match=r"little==1\.0 .* is another file than psctl is tested with"
    ) as raised:
        little(index, tmp_path, f"little==1.0 --hash=sha256:{'0' * 64}")
    assert not (tmp_path / "there" / "little.py").exists()
    shown = [str(raised.value), raised.value.hint, str(raised.value.__cause__), raised.value.__cause__.tail]  # type: ignore[union-attr]
    assert not [each for each in shown if "pa55word" in each or "robot" in each]


def test_an_error_of_an_index_does_not_show_its_password(index: Index, tmp_path: Path) -> None:
    with pytest.raises(errors.PythonMissing, match="could not be installed") as raised:
        little(index, tmp_path, f"missing==1.0 --hash=sha256:{'0' * 64}")
    assert "pa55word" not in f"{raised.value} {raised.value.__cause__}"
