"""Orders wait for their agent in memory, and do not stay when no agent comes."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl.launch import host_programs
from psctl.launch.host_programs import HOST_FILES, HOST_STATE, OBJECT, program_source, run_program
from psctl.launch.remote_programs import pending_orders
from psctl.remote.local import LocalShell
from tests.helpers.job_folders import begin_question

ORDERS = b'{"key": "secret"}'


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[LocalShell]:
    (tmp_path / "home").mkdir()
    opened = LocalShell("here", str(tmp_path / "home"))
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A job's folder on a host."""
    made = tmp_path / "w" / "jobs" / "digits-1" / "a"
    yield made
    pending_orders.discard_orders(str(made))


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in memory for this test alone, for other tests' orders would count as old too."""
    if not pending_orders.memories():
        pytest.skip("this machine has no file system in memory")
    made = tempfile.mkdtemp(dir=pending_orders.memories()[-1])
    yield made
    shutil.rmtree(made)


def there(shell: LocalShell, program: str, verb: str, question: dict[str, Any], stdin: bytes = b"") -> Any:
    return run_program(shell, sys.executable, program, verb, question, OBJECT, stdin=stdin)


def begin(shell: LocalShell, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = there(shell, HOST_FILES, "begin", begin_question(folder), ORDERS)
    return found


def test_orders_are_kept_in_memory_for_their_owner_alone_and_a_name_in_use_is_reported(
    shell: LocalShell, folder: Path
) -> None:
    if not pending_orders.memories():
        pytest.skip("this machine has no file system in memory")
    first = begin(shell, folder)
    path = Path(first["orders"])
    assert (first["taken"], first["disk"]) == (False, False)
    assert path.read_bytes() == ORDERS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pending_orders.file_system(str(path)) in pending_orders.IN_MEMORY
    assert [path.name for path in folder.iterdir()] == ["files"], "nothing of them is in the job's folder"
    assert begin(shell, folder) == {"taken": True}
    there(shell, HOST_FILES, "discard", {"folder": str(folder)})
    assert not path.exists()
    assert not folder.parent.exists()


def test_without_memory_they_wait_in_the_jobs_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_orders, "memories", list)
    folder.mkdir(parents=True)
    path, disk = pending_orders.keep_orders(str(folder), ORDERS)
    assert disk
    assert Path(path).parent == folder
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    pending_orders.discard_orders(str(folder))
    assert list(folder.iterdir()) == []


def test_a_runtime_folder_is_used_only_if_it_is_ours_and_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {place for place in pending_orders.memories() if place != os.environ.get("XDG_RUNTIME_DIR")}
    real = pending_orders.file_system
    monkeypatch.setattr(
        pending_orders,
        "file_system",
        lambda path: "tmpfs" if "/runtime" in path.removeprefix(str(tmp_path)) else real(path),
    )
    for name, mode, used in (("runtime", 0o700, True), ("runtime-open", 0o777, False), ("on-disk", 0o700, False)):
        place = tmp_path / name
        place.mkdir()
        place.chmod(mode)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        assert set(pending_orders.memories()) - shared == ({str(place)} if used else set()), name
    if os.geteuid() == 0:
        os.chown(tmp_path / "runtime", 12345, 12345)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
        assert set(pending_orders.memories()) == shared


def renamed(path: str, **words: str) -> Path:
    """Let orders look as if written on another host, boot, or at another time."""
    names = ["key", "host", "boot", "since", "random"]
    found = dict(zip(names, Path(path).name.removeprefix(pending_orders.ORDERS).split("-"), strict=True))
    return Path(path).rename(Path(path).with_name(pending_orders.ORDERS + "-".join({**found, **words}.values())))


ELSEWHERE = {"boot": "0a0b0c0d", "host": "01234567"}
LATER = {"UNREAD": -1}
"""Every order has waited too long, also on a machine that was started a minute ago."""


@pytest.mark.parametrize(
    ("words", "old", "kept"),
    [
        ({}, False, True), (LATER, False, False), ({"boot": "0a0b0c0d"}, False, False),
        (ELSEWHERE, False, True), (ELSEWHERE, True, False),
    ],
    ids=["now", "long ago", "before this boot", "of a host that shares the disk", "of another host, long ago"],
)  # fmt: skip
@pytest.mark.parametrize("on_disk", [False, True])
def test_orders_that_no_agent_will_read_are_removed(
    folder: Path, memory: str, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], old: bool, kept: bool,
    on_disk: bool,
) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(pending_orders, "memories", lambda: [] if on_disk else [memory])
        if words is LATER:
            patched.setattr(pending_orders, "UNREAD", LATER["UNREAD"])
        path = renamed(pending_orders.keep_orders(str(folder), ORDERS)[0], **({} if words is LATER else words))
        if old:
            os.utime(path, (1e9, 1e9))
        pending_orders.sweep_unread(str(folder.parents[2]))
    assert path.exists() == kept


QUESTIONS = {
    "up": ("probe", lambda folder: {"workdir": str(folder.parents[2]), "codes": [], "modules": []}),
    "status": ("digest", lambda folder: {"jobs": [{"folder": str(folder), "pid": 0, "started": ""}]}),
    "stop": ("sweep", lambda folder: {"folder": str(folder), "seconds": 0}),
}


@pytest.mark.parametrize("command", QUESTIONS)
def test_every_inspection_of_a_host_removes_them(
    shell: LocalShell, folder: Path, command: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, question = QUESTIONS[command]
    changes = {f"UNREAD = {pending_orders.UNREAD}\n": f"UNREAD = {LATER['UNREAD']}\n", '"/dev/shm"': repr(memory)}

    texts = {program: program_source(program) for program in (HOST_FILES, HOST_STATE)}
    for old, new in changes.items():
        assert all(old in text for text in texts.values())
        texts = {program: text.replace(old, new) for program, text in texts.items()}
    monkeypatch.setattr(host_programs, "program_source", texts.__getitem__)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    path = Path(begin(shell, folder)["orders"])
    assert str(path.parent) == memory
    there(shell, HOST_STATE, verb, question(folder))
    assert not path.exists()
