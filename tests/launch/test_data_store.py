"""The data of jobs on a host, as the programs that psctl sends there keep it; run on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psctl.errors import CommandFailed, DiskFull, InvalidFile
from psctl.launch.files.data_sets import DataSet, data_sets, excluded
from psctl.launch.files.data_transfer import frames_of
from psctl.launch.home import Home
from psctl.launch.host_programs import DATA_FILES, OBJECT, run_program
from psctl.remote.local import LocalShell
from psctl.spec.job import JobSpec
from psctl.spec.job_file import load_job


@pytest.fixture
def shell() -> LocalShell:
    return LocalShell("here")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "deep" / "b.txt").write_text("two")
    (folder / "deep" / "again.txt").write_text("one")
    return folder


def job_of(corpus: Path) -> tuple[JobSpec, str]:
    text = "name: d\nscript: t.py\ndata:\n  - {from: corpus, to: data}\n"
    return load_job(text, str(corpus.parent / "job.yaml")), text


def scan(corpus: Path, tmp_path: Path) -> DataSet:
    job, text = job_of(corpus)
    return data_sets(job, text, Home(tmp_path / "home"), None)[0]


class Host:
    """A host's data folder."""

    def __init__(self, shell: LocalShell, workdir: Path) -> None:
        self.shell, self.workdir = shell, workdir

    def ask(self, verb: str, stdin: bytes = b"", **question: Any) -> Any:
        question = {"workdir": str(self.workdir), **question}
        return run_program(self.shell, sys.executable, DATA_FILES, verb, question, OBJECT, stdin=stdin)

    def send(self, data: DataSet) -> list[str]:
        """Send what the host lacks; return the digests that it lacked."""
        lacking = self.ask("need", data.manifest, name=data.name)["lacking"]
        files = {file.digest: file for file in data.files}
        frames = b"".join(frames_of([(files[digest], offset) for digest, offset in lacking]))
        assert self.ask("receive", frames, name=data.name) == {"wrong": []}
        assert self.ask("finish", name=data.name) == {"whole": True}
        return [digest for digest, _ in lacking]


@pytest.fixture
def host(shell: LocalShell, tmp_path: Path) -> Host:
    return Host(shell, tmp_path / "w")


def test_equal_contents_are_sent_once_and_a_new_state_sends_what_changed(
    host: Host, corpus: Path, tmp_path: Path
) -> None:
    data = scan(corpus, tmp_path)
    assert len(host.send(data)) == 2, "two of the three files are equal"
    tree = host.workdir / "data" / data.name
    assert (tree / "deep" / "again.txt").read_text() == "one"
    assert host.ask("check", names=[data.name, "other"])["whole"] == {data.name: True, "other": False}
    (corpus / "a.txt").write_text("three")
    new = scan(corpus, tmp_path)
    assert host.send(new) == [hashlib.sha256(b"three").hexdigest()]
    assert (host.workdir / "data" / new.name / "deep" / "b.txt").stat().st_ino == (tree / "deep/b.txt").stat().st_ino


def test_a_changed_file_on_the_host_is_sent_again(host: Host, corpus: Path, tmp_path: Path) -> None:
    data = scan(corpus, tmp_path)
    host.send(data)
    place = host.workdir / "data" / data.name / "deep" / "b.txt"
    place.chmod(0o600)
    place.write_text("TWO")
    assert host.ask("check", names=[data.name])["whole"] == {data.name: False}
    assert host.send(data) == [hashlib.sha256(b"two").hexdigest()]
    assert place.read_text() == "two"


def test_what_arrived_in_part_is_continued_and_wrong_contents_are_dropped(
    host: Host, corpus: Path, tmp_path: Path
) -> None:
    (corpus / "a.txt").write_bytes(os.urandom(100_000))
    data = scan(corpus, tmp_path)
    digest = data.files[0].digest
    host.ask("need", data.manifest, name=data.name)
    content = (corpus / "a.txt").read_bytes()
    head = json.dumps([digest, 100_000, 0, False]).encode() + b"\n"
    with pytest.raises(CommandFailed, match="did not arrive"):
        host.ask("receive", head + content[:40_000], name=data.name)
    lacking = dict(host.ask("need", data.manifest, name=data.name)["lacking"])
    assert lacking[digest] == 40_000
    rest = json.dumps([digest, 100_000, 40_000, False]).encode() + b"\n"
    assert host.ask("receive", rest + bytes(60_000), name=data.name) == {"wrong": [digest]}
    assert dict(host.ask("need", data.manifest, name=data.name)["lacking"])[digest] == 0
    host.send(data)


def test_a_set_without_room_is_refused_with_what_is_required(host: Host, corpus: Path, tmp_path: Path) -> None:
    data = scan(corpus, tmp_path)
    files = [["huge", 1 << 60, "0" * 64, False]]
    manifest = json.dumps({"files": files, "folders": [], "label": "x"}).encode()
    with pytest.raises(DiskFull, match=r"the data needs 11529215\d+ bytes where .* is, and \d+ are free"):
        host.ask("need", manifest, name="f" * 40)
    host.send(data)


def test_names_that_lead_out_are_refused(host: Host) -> None:
    host.ask("need", b'{"files": [], "folders": ["../up"], "label": "x"}', name="e" * 40)
    with pytest.raises(CommandFailed, match="no path inside a folder"):
        host.ask("finish", name="e" * 40)
    for name in ("", "../x", ".hidden", "a/b"):
        with pytest.raises(CommandFailed, match="names no set"):
            host.ask("check", names=[name])


def test_old_states_go_unless_a_running_job_uses_them(host: Host, corpus: Path, tmp_path: Path) -> None:
    states = []
    for text in ("1", "2", "3"):
        (corpus / "a.txt").write_text(text)
        states.append(scan(corpus, tmp_path))
        jobs = []
        if len(states) == 3:
            for old in states[:2]:
                os.utime(host.workdir / "data" / f"{old.name}.json", (1, 1))
            job = tmp_path / "job"
            job.mkdir()
            (job / "data.json").write_text(json.dumps([states[0].link.path]))
            jobs = [str(job)]
        lacking = host.ask("need", states[-1].manifest, name=states[-1].name)["lacking"]
        files = {file.digest: file for file in states[-1].files}
        frames = b"".join(frames_of([(files[digest], offset) for digest, offset in lacking]))
        host.ask("receive", frames, name=states[-1].name)
        host.ask("finish", name=states[-1].name, jobs=jobs)
    left = {path.stem for path in (host.workdir / "data").glob("*.json")}
    assert left == {states[0].name, states[2].name}


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in corpus.rglob("*"):
        os.utime(path, (time.time() - 10, time.time() - 10.5))
    before = time.time() + 60
    monkeypatch.setattr("psctl.launch.files.content_index.time.time", lambda: before)  # the files have long settled
    first = scan(corpus, tmp_path)
    monkeypatch.setattr("psctl.launch.files.content_index.ContentIndex.read", None)
    assert scan(corpus, tmp_path).name == first.name
    monkeypatch.undo()
    (corpus / "a.txt").write_text("two")
    assert scan(corpus, tmp_path).name != first.name


def test_what_cannot_be_sent_is_refused_with_its_place(corpus: Path, tmp_path: Path) -> None:
    (corpus / "loop").symlink_to("..")
    with pytest.raises(InvalidFile, match="a link to a folder that holds it") as caught:
        scan(corpus, tmp_path)
    (corpus / "loop").unlink()
    (corpus / "gone").symlink_to("nowhere")
    with pytest.raises(InvalidFile, match="a link to nowhere, which is not there") as caught:
        scan(corpus, tmp_path)
    assert caught.value.where.endswith("job.yaml:4:12")
    (corpus / "gone").unlink()
    os.mkfifo(corpus / "pipe")
    with pytest.raises(InvalidFile, match="neither a file nor a folder"):
        scan(corpus, tmp_path)


def test_data_inside_the_jobs_folder_is_left_out_of_its_code(corpus: Path) -> None:
    job, _ = job_of(corpus)
    assert excluded(job, corpus.parent) == ["/corpus"]
    assert excluded(job, corpus) == []
