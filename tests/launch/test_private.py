"""What psctl writes is for its user alone, whatever the umask; folders that others may write are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl import errors
from psctl.checkpoint.disk import Disk
from psctl.launch.archive import pack_folder
from psctl.launch.home import Home, KnownCluster
from psctl.launch.host_programs import HOST_FILES, program_command
from psctl.launch.remote_programs.host_state import open_to_others
from psctl.remote.local import LocalShell
from tests.helpers.job_folders import begin_question

UMASKS = [0o000, 0o002, 0o027, 0o077, 0o177]


@pytest.fixture(params=UMASKS, ids=lambda mask: f"{mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mode & 0o777:o}"
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }


def there(verb: str, question: dict[str, Any], stdin: bytes = b"") -> Any:
    words = program_command(sys.executable, HOST_FILES, verb, question)
    return json.loads(subprocess.run(words, input=stdin, stdout=subprocess.PIPE, check=True).stdout)


def test_what_is_remembered_here_is_for_its_user_alone(tmp_path: Path, umask: int) -> None:
    os.mkdir(tmp_path / "above", 0o777)
    os.chmod(tmp_path / "above", 0o755)
    home = Home.of({"PSCTL_HOME": str(tmp_path / "above" / "psctl")})
    home.reserve_name("digits")
    home.save_cluster(KnownCluster("lab", "/lab.yaml", "name: lab", 1.0))
    home.set_current("lab")
    with home.start_lock():
        pass
    found = modes(tmp_path / "above")
    files = {"psctl/clusters/lab.json", "psctl/current", "psctl/starting"}
    assert files < set(found)
    assert found == {name: "600" if name in files else "700" for name in found}


def test_what_is_sent_to_a_host_is_for_its_user_alone(tmp_path: Path, umask: int) -> None:
    job = tmp_path / "job"
    for folder in (job, job / "inner"):
        folder.mkdir()
        folder.chmod(0o777)
    for name, mode in ((".env", 0o666), ("train.py", 0o644), ("inner/run.sh", 0o755)):
        (job / name).write_text(name)
        (job / name).chmod(mode)
    (job / "link").symlink_to("train.py")
    archive = pack_folder(job)
    question = {"folder": str(tmp_path / "w" / "code"), "hash": archive.hash, "keep": True}
    there("unpack", question, archive.data)
    folder, unpacked = tmp_path / "w" / "jobs" / "digits-1" / "a", tmp_path / "w" / "code" / archive.hash
    there("begin", begin_question(folder, code=unpacked), b"{}")
    found = modes(tmp_path / "w")
    code = f"code/{archive.hash}"
    runs = "jobs/digits-1/a/files"
    plain = {f"{code}/.env", f"{code}/train.py", f"{code}.tar.gz", f"{runs}/.env", f"{runs}/train.py"}
    assert plain < set(found)
    assert all(found[name] == "600" for name in plain)
    assert {mode for name, mode in found.items() if name not in plain and not name.endswith(".json")} == {"700"}
    assert found[f"{code}/inner/run.sh"] == "700", "its owner may still execute it"


def test_files_put_on_a_host_and_logs_are_for_their_user_alone(tmp_path: Path, umask: int) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w").chmod(0o755)
    shell = LocalShell("here", str(tmp_path))
    shell.put(b"{}", f"{tmp_path}/w/envs/ready.json")
    shell.start(["sh", "-c", "umask"], log=f"{tmp_path}/w/jobs/agent.log", cwd=str(tmp_path), env={})
    assert modes(tmp_path / "w") == {"envs": "700", "envs/ready.json": "600", "jobs": "700", "jobs/agent.log": "600"}
    log = tmp_path / "w" / "jobs" / "agent.log"
    shell.run(["sh", "-c", f"until [ -s {log} ]; do :; done"], timeout=10)
    assert int(log.read_text(), 8) == umask, "what is started keeps the login's umask"
    shell.close()


def test_checkpoints_are_for_their_user_alone(tmp_path: Path, umask: int) -> None:
    disk = Disk()
    disk.make_folder(tmp_path / "checkpoints" / "digits-1" / "0000000010")
    disk.put(tmp_path / "checkpoints" / "digits-1" / "0000000010" / "state", b"x")
    assert set(modes(tmp_path).values()) == {"700", "600"}
    assert modes(tmp_path)["checkpoints/digits-1/0000000010/state"] == "600"


def test_a_home_that_others_may_write_is_refused_with_the_cure(tmp_path: Path) -> None:
    for name, folder in (("itself", ""), ("records", "jobs"), ("clusters", "clusters")):
        root = tmp_path / name
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(0o770)
        with pytest.raises(errors.UsageError, match="others may write") as raised:
            Home.of({"PSCTL_HOME": str(root)})
        assert f"chmod go-w {(root / folder)}" in raised.value.hint
        (root / folder).chmod(0o750)
        Home.of({"PSCTL_HOME": str(root)})


Make = Callable[[Path], Path]


def open_parent(place: Path) -> Path:
    (place / "shared").mkdir()
    (place / "shared").chmod(0o777)
    return place / "shared" / "w"


def sticky_parent(place: Path) -> Path:
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    return place / "tmp" / "w"


def sticky_itself(place: Path) -> Path:
    return sticky_parent(place).parent


def through_a_link(place: Path) -> Path:
    (place / "link").symlink_to(open_parent(place))
    return place / "link" / "inner"


def a_strangers_link(place: Path) -> Path:
    (place / "real").mkdir()
    (place / "real").chmod(0o700)
    (place / "link").symlink_to(place / "real")
    os.lchown(place / "link", 12345, 12345)
    return place / "link" / "w"


def a_strangers_folder(place: Path) -> Path:
    (place / "w").mkdir()
    (place / "w").chmod(0o755)
    os.chown(place / "w", 12345, 12345)
    return place / "w"


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (open_parent, "others may write .*shared"), (sticky_parent, None), (sticky_itself, "others may write .*tmp"),
        (through_a_link, "others may write .*shared"), (a_strangers_link, "belongs to another user"),
        (a_strangers_folder, "belongs to another user"),
    ],
)  # fmt: skip
def test_a_folder_is_judged_by_itself_and_by_what_is_above_it(tmp_path: Path, make: Make, refused: str | None) -> None:
    if os.geteuid() != 0 and "stranger" in make.__name__:
        pytest.skip("only root can give files away")
    found = open_to_others(str(make(tmp_path)))
    if refused is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(refused, found["why"])


@given(mode=st.integers(0, 0o7777))
def test_whoever_else_may_write_is_noticed_for_every_mode(tmp_path_factory: pytest.TempPathFactory, mode: int) -> None:
    root = tmp_path_factory.getbasetemp() / "any-mode"
    root.mkdir(exist_ok=True)
    (root / "w").mkdir(exist_ok=True)
    (root / "w").chmod(mode | 0o700)
    root.chmod(mode | 0o700)
    writable, sticky = bool(mode & 0o022), bool(mode & 0o1000)
    assert (open_to_others(str(root)) is not None) == writable
    assert (open_to_others(str(root / "new")) is not None) == (writable and not sticky)
    root.chmod(0o700)
