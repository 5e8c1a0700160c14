"""Data on its way to hosts, and faults: a killed psctl, a cut link, a full disk, a file that is written meanwhile."""

from __future__ import annotations

import fcntl
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from psctl.launch.files.data_sets import data_sets
from psctl.launch.home import Home
from psctl.spec.job_file import load_job
from tests.helpers.running import assert_clean, until

pytestmark = [pytest.mark.whole, pytest.mark.soak]

SCRIPT = "import os; print('corpus', [(n, os.path.getsize('data/' + n)) for n in sorted(os.listdir('data'))])\n"
SIZE = 60_000_000


def make_job(folder: Path, source: str = "corpus") -> Path:
    """Write a job folder with a corpus; return the job file."""
    (folder / "corpus").mkdir(parents=True)
    (folder / "corpus" / "a.bin").write_bytes(random.Random(1).randbytes(SIZE))
    (folder / "train.py").write_text(SCRIPT)
    job = folder / "job.yaml"
    job.write_text(
        f"version: 1\nname: corpus\nscript: train.py\nworkers: {{per_host: 1}}\ndata: [{{from: {source}, to: data}}]\n"
        "checkpoint: {every: null}\n"
    )
    return job


def arrived(hosts: Any, name: str) -> int:
    """Return the bytes of the begun files on a host."""
    root = hosts.path(name, "/root/.psctl/host/data")
    return sum(path.stat().st_size for path in root.glob("*.part/parts/*"))


def test_a_killed_psctl_and_a_cut_link_leave_what_arrived(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    assert psctl.run("up", str(cluster)).code == 0
    job = make_job(tmp_path / "mine")
    for name in ("h1", "h2"):
        hosts.rate(name, "50mbit")
    with psctl.start("train", str(job), "--cluster", str(cluster)) as begun:
        until(lambda: min(arrived(hosts, "h1"), arrived(hosts, "h2")) > 5_000_000, 120)
        begun.send_signal(signal.SIGKILL)
    assert_clean(hosts)
    first = {name: arrived(hosts, name) for name in ("h1", "h2")}

    with psctl.start("train", str(job), "--cluster", str(cluster)) as begun:
        until(lambda: arrived(hosts, "h2") > first["h2"] + 2_000_000, 120)
        hosts.cut("h2")
        _, said = begun.communicate(timeout=180)
    assert begun.returncode == 3, said
    assert "of it are there" in said
    hosts.heal("h2")
    assert arrived(hosts, "h2") > first["h2"]

    for name in ("h1", "h2"):
        hosts.rate(name, "500mbit")
    done = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert done.code == 0, done
    assert {event["text"] for event in done.of("log")} == {f"corpus [('a.bin', {SIZE})]"}
    assert_clean(hosts)


def test_a_full_disk_is_named_before_anything_is_sent(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    hosts.disk("h2", "/root/.psctl", "40m")
    job = make_job(tmp_path / "mine")
    full = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "json")
    assert full.code == 4, full
    error = full.document["error"]
    assert (error["code"], error["where"]) == ("disk-full", "h2")
    assert "needs 80000000 bytes" in error["message"]
    assert arrived(hosts, "h2") == 0
    assert_clean(hosts)


def test_a_file_that_is_written_while_it_is_sent_is_named(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1"]))
    assert psctl.run("up", str(cluster)).code == 0
    job = make_job(tmp_path / "mine")
    hosts.rate("h1", "50mbit")
    with psctl.start("train", str(job), "--cluster", str(cluster)) as begun:
        until(lambda: arrived(hosts, "h1") > 2_000_000, 120)
        with (job.parent / "corpus" / "a.bin").open("r+b") as file:
            file.write(b"x")
        _, said = begun.communicate(timeout=180)
    assert begun.returncode == 2, said
    assert "a.bin changed while it was read" in said
    assert_clean(hosts)


def test_a_set_that_another_psctl_sends_is_waited_for_and_a_url_is_fetched_once(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    assert psctl.run("up", str(cluster)).code == 0
    job = make_job(tmp_path / "mine")
    [data] = data_sets(load_job(job.read_text(), str(job)), job.read_text(), Home(tmp_path / "index"), None)
    store = hosts.path("h1", "/root/.psctl/host/data")
    store.mkdir()
    with (store / f"{data.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as one that sends holds it
        with psctl.start("train", str(job), "--cluster", str(cluster)) as waiting:
            assert waiting.stderr is not None
            while "h1: another psctl sends corpus: waiting for it" not in (line := waiting.stderr.readline()):
                assert line
            fcntl.flock(lock, fcntl.LOCK_UN)
            said = waiting.communicate(timeout=240)[1]
    assert waiting.returncode == 0, said
    assert_clean(hosts)

    # a URL: each host fetches it, once
    place = "/root/shelf"
    for name in ("h1", "h2"):
        hosts.exec(
            name, ["sh", "-c", f"mkdir -p {place} && echo of the shelf >{place}/a.txt && touch -d @1 {place}/a.txt"]
        )
    shelf = make_job(tmp_path / "shelf", f"file://{place}")
    done = psctl.run("train", str(shelf), "--cluster", str(cluster), "-o", "jsonl")
    assert done.code == 0, done
    assert {event["text"] for event in done.of("log")} == {"corpus [('a.txt', 13)]"}
    again = psctl.run("train", str(shelf), "--cluster", str(cluster))
    assert again.code == 0, again
    assert "fetched" not in again.err
    hosts.exec("h2", ["sh", "-c", f"echo of another shelf >{place}/a.txt"])
    differs = psctl.run("train", str(shelf), "--cluster", str(cluster), "-o", "json")
    assert "hosts got different contents: h1 differ from h2" in differs.document["error"]["message"]
    lacking = make_job(tmp_path / "lacking", "gs://bucket/key")  # a package that no test installs
    refused = psctl.run("train", str(lacking), "--cluster", str(cluster), "-o", "json")
    assert refused.code == 4, refused
    assert "runtime.requirements" in refused.document["error"]["hint"]
    assert_clean(hosts)
