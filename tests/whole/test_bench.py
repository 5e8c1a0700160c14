"""psctl bench, as a user runs it on this machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.running import Psctl, until

pytestmark = pytest.mark.whole

RECORD = {
    "operation", "strategy", "bytes", "world", "seconds", "algbw", "busbw", "predicted_seconds", "correct",
}  # fmt: skip


def test_allreduce_is_measured_checked_and_predicted(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    words = ["--workers", "2", "--sizes", "1KB,1MB", "--strategy", "native,ring,sharded"]
    run = psctl.run("bench", "allreduce", *words, "-o", "json")
    assert run.code == 0, run
    rows = run.document["results"]
    assert sorted((row["bytes"], row["strategy"]) for row in rows) == [
        (size, name) for size in (1_000, 1_000_000) for name in ("native", "ring", "sharded")
    ]
    for row in rows:
        assert set(row) == RECORD
        assert (row["operation"], row["world"], row["correct"]) == ("allreduce", 2, True)
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"] < 5
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"]["median"])
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (n-1)/n of two ranks
        assert row["predicted_seconds"] > 0
    assert [size["bytes"] for size in run.document["sizes"]] == [1_000, 1_000_000]
    for size in run.document["sizes"]:
        times = {row["strategy"]: row["seconds"]["median"] for row in rows if row["bytes"] == size["bytes"]}
        assert size["winner"] == min(times, key=lambda name: times[name])
    # a job like others, without checkpoints
    jobs = psctl.run("jobs", "-o", "json").document["jobs"]
    assert [(job["job"], job["state"]) for job in jobs] == [("bench-1", "done")]
    assert psctl.run("checkpoint", "list", "-o", "json").document == {"checkpoints": []}
    # what messages cost is kept, and plans use it
    [kept] = json.loads((tmp_path / ".psctl/measured/costs/local.json").read_text())["groups"]
    assert kept["ranks"] == {"local": 2}
    assert set(kept["engines"]) == {"gloo", "psctl"}
    assert kept["engines"]["psctl"]["after"] <= kept["engines"]["psctl"]["before"]


@pytest.mark.soak
def test_pushpull_goes_through_servers_and_people_get_a_table(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    run = psctl.run("bench", "pushpull", "--workers", "2", "--servers", "1", "--sizes", "4KB")
    assert run.code == 0, run
    head, row, sentence = run.out.splitlines()
    assert head.split()[:3] == ["size", "strategy", "median"]
    assert row.startswith("4 kB\tps *\t")
    assert row.endswith("\tright")
    assert sentence.startswith("4 kB: ps is the fastest")
    assert "predicted" in run.err
    roles = {rank["role"] for rank in psctl.run("status", "-o", "json").document["jobs"][0]["ranks"]}
    assert "server" in roles


def test_slots_are_held_and_an_interrupt_stops_it_and_prints_what_was_measured(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    words = ["bench", "allreduce", "--workers", "2", "--strategy", "ring", "-o", "json"]
    with psctl.start(*words, "--sizes", "1KB,256MB") as process:

        def running() -> bool:
            jobs = psctl.run("jobs", "-o", "json").document["jobs"]
            return any(rank["role"] == "worker" for job in jobs for rank in job["ranks"])

        until(running, 60)
        refused = psctl.run(*words, "--sizes", "1KB")
        assert refused.code == 7, refused
        assert refused.document["error"]["code"] == "job-running"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert {row["bytes"] for row in json.loads(out)["results"]} <= {1_000}
    assert [job["state"] for job in psctl.run("jobs", "-o", "json").document["jobs"]] == ["stopped"]
