"""Data of job files on hosts: sent once, by content, continued after an interruption, and seen by every rank."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import assert_clean

pytestmark = pytest.mark.whole

SCRIPT = """
import hashlib, os, pathlib
found = {}
for path in sorted(p for p in pathlib.Path("data/corpus").rglob("*") if p.is_file()):
    found[os.fsencode(path.relative_to("data/corpus")).hex()] = hashlib.sha256(path.read_bytes()).hexdigest()
print("corpus", hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest(), len(found))
"""


def make_job(folder: Path, size: int) -> Path:
    """Write a job folder with a corpus of many names and one large file; return the job file."""
    corpus = folder / "corpus"
    (corpus / "deep" / "er").mkdir(parents=True)
    (corpus / "empty").mkdir()
    generator = random.Random(0)
    (corpus / "large.bin").write_bytes(generator.randbytes(size))
    (corpus / "deep" / "er" / "a b'\"\n$x.txt").write_text("odd")
    with open(os.fsencode(corpus / "deep") + b"/\xff\xfe.bin", "wb") as file:
        file.write(b"no UTF-8")
    (corpus / "same.txt").write_text("odd")
    (corpus / "none").write_bytes(b"")
    (corpus / "run.sh").write_text("exit 0")
    (corpus / "run.sh").chmod(0o755)
    (corpus / "link").symlink_to("deep/er")
    (folder / "train.py").write_text(SCRIPT)
    job = folder / "job.yaml"
    job.write_text(
        "version: 1\nname: corpus\nscript: train.py\nworkers: {per_host: 1}\n"
        "data: [{from: corpus, to: data/corpus}]\ncheckpoint: {every: null}\n"
    )
    return job


def lines(ended: Any) -> list[str]:
    """Return what the ranks printed about the corpus."""
    return [event["text"] for event in ended.of("log") if event["text"].startswith("corpus ")]


@pytest.mark.soak
def test_data_is_on_every_host_once_and_only_what_changed_is_sent(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    job = make_job(tmp_path / "mine", 8_000_000)
    dry = psctl.run("train", str(job), "--cluster", str(cluster), "--dry-run", "-o", "json")
    assert dry.code == 0, dry
    assert [(each["to"], each["files"]) for each in dry.document["data"]] == [("data/corpus", 7)]
    assert all(any("send corpus" in line for line in host["actions"]) for host in dry.document["hosts"])

    first = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert first.code == 0, first
    assert len(lines(first)) == 3
    assert len(set(lines(first))) == 1
    index = next((psctl.home / ".psctl" / "data").glob("*.json"))
    hashed = index.stat().st_mtime_ns
    before = stores(hosts)

    # nothing changed: nothing is hashed or sent; a dry run has nothing to do
    again = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert again.code == 0, again
    assert set(lines(again)) == set(lines(first))
    assert stores(hosts) == before
    assert index.stat().st_mtime_ns == hashed
    dry = psctl.run("train", str(job), "--cluster", str(cluster), "--dry-run", "-o", "json")
    assert not any("corpus" in line for host in dry.document["hosts"] for line in host["actions"])

    # a byte changed on a host, a file changed here: those are sent, other files are linked
    place = next(Path(path) for path in before["h2"] if path.endswith("large.bin"))
    with hosts.path("h2", str(place)).open("r+b") as file:
        file.write(b"!")
    (job.parent / "corpus" / "same.txt").write_text("another")
    third = psctl.run("train", str(job), "--cluster", str(cluster))
    assert third.code == 0, third
    assert "h1: sending corpus (7 B in 1 files)" in third.err
    assert "h2: sending corpus (8 MB in 2 files)" in third.err
    inodes = {inode for path, inode in stores(hosts)["h1"].items() if path.endswith("large.bin")}
    assert len(inodes) == 1, "the unchanged file of the new set is the old one's"
    assert_clean(hosts)

    gone = psctl.run("down", str(cluster), "--purge", "-y")
    assert gone.code == 0, gone
    assert not any(stores(hosts).values())


def stores(hosts: Any) -> dict[str, dict[str, int]]:
    """Return the inode of every file in the data folder of each host, by path there."""
    found: dict[str, dict[str, int]] = {}
    for name in hosts:
        root = hosts.path(name, "/root/.psctl/host/data")
        files = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
        found[name] = {
            "/root/.psctl/host/data/" + os.fsdecode(os.path.relpath(path, root)): path.stat().st_ino for path in files
        }
    return found
