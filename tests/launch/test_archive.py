"""The same files give the same archive; what .gitignore and exclude name stays here."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from psctl import errors
from psctl.launch.archive import pack_folder, pack_psctl, pack_wheels, prove
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import KnownCluster
from psctl.launch.hosts.converge import needs_of
from psctl.spec.cluster import local_cluster


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(archive_data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive_data))) as tar:
        return tar.getnames()


def test_the_same_files_give_the_same_bytes_whatever_their_times_and_order(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", {"train.py": "print()", "data/a.txt": "a", "lib/b.py": "b"})
    two = fill(tmp_path / "two", {"lib/b.py": "b", "data/a.txt": "a", "train.py": "print()"})
    os.utime(two / "train.py", (1, 1))
    (two / "lib" / "b.py").chmod(0o600)
    assert pack_folder(one).data == pack_folder(two).data
    assert pack_folder(one).hash == pack_folder(two).hash


def test_a_changed_byte_or_an_executable_bit_changes_the_name(tmp_path: Path) -> None:
    folder = fill(tmp_path, {"train.py": "print(1)", "run.sh": "true"})
    first = pack_folder(folder).hash
    (folder / "train.py").write_text("print(2)")
    second = pack_folder(folder).hash
    (folder / "run.sh").chmod(0o755)
    assert len({first, second, pack_folder(folder).hash}) == 3


def test_gitignore_is_honoured_nested_and_negated_and_exclude_adds_to_it(tmp_path: Path) -> None:
    folder = fill(
        tmp_path,
        {
            ".gitignore": "*.log\n/build/\nruns\n!keep.log\n",
            "train.py": "", "a.log": "", "keep.log": "", "build/x": "", "lib/build/y": "", "lib/runs/z": "",
            "lib/.gitignore": "secret.txt\n!a.log\n", "lib/secret.txt": "", "lib/a.log": "", "secret.txt": "",
            "data/big.bin": "", "__pycache__/c.pyc": "", ".git/config": "",
        },
    )  # fmt: skip
    files = [name for name in names(pack_folder(folder, ["data/"]).data) if "." in name or name.endswith("y")]
    assert files == [
        ".gitignore", "keep.log", "lib/.gitignore", "lib/a.log", "lib/build/y", "secret.txt", "train.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rules",
    [
        (
            "# a comment\n/a.txt\ndoc/*.txt\nx/**/file\nfoo/bar\ntemp?\nout/*\n!out/keep/\nname with space  \n\\#hash\n"
            "ab[cd].o\n[!a]yz.o\n**/er\n"
        ),
        "[!a]*\n!/**\n",
        "x/**\n!x/y\nout/**\n!out/keep/**\n",
        "?oo/**/\n*/*.txt\n![!a]*/\n",
    ],
)
def test_gitignore_means_what_git_takes_it_to_mean(tmp_path: Path, rules: str) -> None:
    """Every pattern that git has a rule for, against git itself."""
    files = [
        "a.txt", "b.txt", "doc/a.txt", "doc/b/a.txt", "x/y/z/file", "foo/bar", "deep/foo/bar", "foobar", "temp1",
        "temp22", "out/keep/me", "out/drop", "name with space", "#hash", "[odd]", "abc.o", "abd.o", "xyz.o",
        "deep/er/abc.o",
    ]  # fmt: skip
    folder = fill(tmp_path / "work", dict.fromkeys(files, "content"))
    (folder / ".gitignore").write_text(rules)
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    sent = [name for name in names(pack_folder(folder).data) if (folder / name).is_file()]
    assert sent == sorted(name for name in listed if name)


def test_rules_of_the_repository_above_count_too(tmp_path: Path) -> None:
    fill(tmp_path, {".git/HEAD": "", ".gitignore": "*.bin\njobs/mnist/tmp/\n", "jobs/mnist/train.py": ""})
    fill(tmp_path, {"jobs/mnist/x.bin": "", "jobs/mnist/tmp/y": "", "jobs/mnist/tmp2/z": ""})
    assert names(pack_folder(tmp_path / "jobs" / "mnist").data) == ["tmp2", "tmp2/z", "train.py"]


def test_a_folder_that_its_repository_ignores_is_sent_all_the_same(tmp_path: Path) -> None:
    fill(tmp_path, {".git/HEAD": "", ".gitignore": "scratch/\n", "scratch/train.py": ""})
    assert names(pack_folder(tmp_path / "scratch").data) == ["train.py"]


def test_links_inside_travel_as_links_and_links_outside_are_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "job", {"train.py": "", "lib/util.py": ""})
    (folder / "lib" / "again.py").symlink_to("../train.py")
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(pack_folder(folder).data))) as tar:
        assert tar.getmember("lib/again.py").linkname == "../train.py"
    (folder / "outside").symlink_to("../elsewhere")
    with pytest.raises(errors.InvalidFile, match="outside the job's folder"):
        pack_folder(folder)
    pack_folder(folder, ["outside"])


def test_a_folder_that_is_not_there_is_the_users_fault(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidFile, match="no folder"):
        pack_folder(tmp_path / "nowhere")


def test_psctl_travels_whole_and_without_its_caches() -> None:
    archive = pack_psctl()
    assert "psctl/agent/main.py" in archive.files
    others = [name for name in archive.files if "." in name and not name.endswith(".py")]
    assert others == ["psctl/constraints.txt"], "the tested versions, for pip there"
    assert archive.hash == pack_psctl().hash


def test_a_wheelhouse_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidFile, match="holds no wheels"):
        pack_wheels(tmp_path)
    (tmp_path / "x-1.0-py3-none-any.whl").write_bytes(b"wheel")
    assert pack_wheels(tmp_path).files == ["x-1.0-py3-none-any.whl"]


def test_an_archive_that_all_hosts_have_is_not_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compress = gzip.compress

    def counted(data: bytes, level: int, *, mtime: int) -> bytes:
        calls.append(level)
        return compress(data, level, mtime=mtime)

    monkeypatch.setattr("psctl.launch.archive.gzip.compress", counted)
    (tmp_path / "x-1.0-py3-none-any.whl").write_bytes(b"wheel")
    wheels, code = pack_wheels(tmp_path), pack_psctl()
    chosen = ChosenCluster(local_cluster(), KnownCluster("lab", "", "", 0.0))
    has = SimpleNamespace(codes={code.hash: True, wheels.hash: True})
    needs = needs_of(chosen, code, wheels, {"a": has, "b": has})  # type: ignore[dict-item]
    assert (calls, needs.code_size, needs.wheels_size) == ([], 0, 0)
    needs = needs_of(chosen, code, wheels, {"a": has, "b": SimpleNamespace(codes={})})  # type: ignore[dict-item]
    assert (needs.code_size, needs.wheels_size) == (len(code.data), len(wheels.data))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: code.data, range(8))) == {code.data}
    assert sorted(calls) == [1, 6], "once each, however many hosts it is sent to"
    prove(code.data, code.hash)
