"""What scripts write on hosts: fetched at the end of a job and by `psctl pull`, without what came before."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import assert_clean, until

pytestmark = pytest.mark.whole

SCRIPT = """
import os, pathlib
rank = os.environ["RANK"]
out = pathlib.Path("out")
out.mkdir()
(out / f"rank-{rank}.txt").write_text(rank)
(out / "same.txt").write_text("the same on all")
(out / "log.txt").write_text(f"of rank {rank}")
(out / "link").symlink_to("/etc/passwd")
(out / "inner").symlink_to("same.txt")
pathlib.Path("plot.png").write_bytes(b"png" * int(rank))
pathlib.Path("notes.md").write_text("not asked for")
"""


def make_job(folder: Path, outputs: str) -> Path:
    """Write a job folder whose script writes files; return the job file."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    job = folder / "job.yaml"
    job.write_text(
        f"version: 1\nname: writer\nscript: train.py\nworkers: {{per_host: 1}}\noutputs: {outputs}\n"
        "checkpoint: {every: null}\n"
    )
    return job


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_outputs_come_home_from_all_hosts(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1", "h2"]))
    job = make_job(tmp_path / "mine", "[out/, '*.png']")
    done = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert done.code == 0, done
    home = job.parent / "outputs" / "writer-1"
    expected = {
        "out/rank-0.txt": b"0", "out/rank-1.txt": b"1", "out/same.txt": b"the same on all",
        "out/inner": b"the same on all", "worker-0/out/log.txt": b"of rank 0", "worker-1/out/log.txt": b"of rank 1",
        "worker-0/plot.png": b"", "worker-1/plot.png": b"png",
    }  # fmt: skip
    assert files(home) == expected
    outputs = done.events[-2]
    assert (outputs["event"], outputs["to"], len(outputs["files"])) == ("outputs", str(home), len(expected))
    assert done.events[-1]["event"] == "finished"

    # nothing changed: nothing is fetched; what is missing here comes again
    (home / "out" / "rank-1.txt").unlink()
    again = psctl.run("pull", "writer", "-o", str(home), "--output", "json")
    assert again.code == 0, again
    assert [each["path"] for each in again.document["files"] if each["fetched"]] == ["out/rank-1.txt"]
    assert files(home) == expected
    assert [(each["name"], each["error"]) for each in again.document["hosts"]] == [("h1", None), ("h2", None)]

    # a pattern, another folder; a file there that did not come from the job is not overwritten
    other = tmp_path / "other"
    notes = psctl.run("pull", "writer-1", "*.md", "--to", str(other))
    assert notes.code == 0, notes
    assert files(other) == {"notes.md": b"not asked for"}
    (other / "notes.md").write_text("mine")
    refused = psctl.run("pull", "writer-1", "*.md", "--to", str(other))
    assert refused.code == 2, refused
    assert "did not come from writer-1" in refused.err
    assert psctl.run("pull", "writer-1", "../x").code == 2

    # a host that is away: the others' files come, exit 10
    hosts.cut("h2")
    partial = psctl.run("--timeout", "3s", "pull", "writer-1", "out/", "--to", str(tmp_path / "third"))
    assert partial.code == 10, partial
    assert set(files(tmp_path / "third")) == {"out/rank-0.txt", "out/same.txt", "out/inner", "out/log.txt"}
    hosts.heal("h2")

    # the next job has a folder of its own, and the outputs of this one are not sent with it
    job.write_text(job.read_text().replace("outputs: [out/, '*.png']\n", ""))
    plain = psctl.run("train", str(job), "--cluster", str(cluster))
    assert plain.code == 0, plain
    assert "psctl pull writer-2" in plain.err
    assert "jobs/writer-2/h2/files" in plain.err
    assert not (job.parent / "outputs" / "writer-2").exists()
    assert_clean(hosts)


LARGE = """
import hashlib, pathlib, random
data = random.Random(0).randbytes(20_000_000)
pathlib.Path("large.bin").write_bytes(data)
print("wrote", hashlib.sha256(data).hexdigest(), flush=True)
"""


def test_a_pull_that_was_killed_continues_after_what_arrived(lab: Any, tmp_path: Path) -> None:
    psctl, hosts, cluster = lab
    cluster.write_text(hosts.cluster_text(["h1"]))
    job = make_job(tmp_path / "mine", "[]")
    (job.parent / "train.py").write_text(LARGE)
    done = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert done.code == 0, done
    (digest,) = [event["text"].split()[1] for event in done.of("log") if event["text"].startswith("wrote ")]
    to = tmp_path / "to"

    def arrived() -> int:
        return sum(path.stat().st_size for path in to.rglob("*") if path.is_file())

    hosts.rate("h1", "50mbit")
    with psctl.start("pull", "writer-1", "large.bin", "--to", str(to)) as first:
        until(lambda: arrived() > 3_000_000, 60)
        first.send_signal(signal.SIGKILL)
    there = arrived()
    assert 3_000_000 < there < 20_000_000
    assert not (to / "large.bin").exists()
    sizes = []
    with psctl.start("pull", "writer-1", "large.bin", "--to", str(to), "--output", "json") as second:
        until(lambda: sizes.append(arrived()) or sizes[-1] > there + 1_000_000, 60)  # type: ignore[func-returns-value]
        hosts.rate("h1", "1gbit")
        said, _ = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert min(sizes) >= there, "it does not begin again"
    assert hashlib.sha256((to / "large.bin").read_bytes()).hexdigest() == digest
    assert_clean(hosts)
