"""What is written down of a job's end and shown of its steps, from what its host answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl import errors
from psctl.launch.agent_calls import JobDigest
from psctl.launch.clusters import ChosenCluster, embedded_cluster
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster, ReportedRank
from psctl.launch.jobs import job_status
from psctl.launch.jobs.job_end import SWEEP, kill, settle
from psctl.remote.fleet import Fleet, Outcome
from psctl.remote.shell import CommandResult
from psctl.types import HostName
from tests.helpers.fake_shell import FakeShell

RECORD = JobRecord(
    job="digits-1", name="digits", created=1.0, cluster=KnownCluster("lab", "", "", 0.0),
    hosts=[HostRecord("a", "/w", "/w/jobs/digits-1/a", "python3", "/w/code/1")], job_file="", job_source="",
    job_folder="", code_hash="", checkpoints="", step=3,
)  # fmt: skip
WORKER = {"role": "worker", "rank": 0, "host": "a", "pid": 7, "state": "running", "step": 5}
AT_509 = {**WORKER, "step": 509}  # it went on from a checkpoint at step 500
SERVER = {"role": "server", "rank": 0, "host": "a", "pid": 8, "state": "running", "step": 0}


def digested(found: dict[str, Any]) -> JobDigest:
    """Return a digest as a host answers it."""
    return msgspec.convert({"alive": False, "ranks": {}, **found}, JobDigest)


@pytest.mark.parametrize(
    ("digest", "forced", "ended"),
    [
        ({"finished": {"status": "done", "exit": 0, "steps": 9}}, False, ("done", 0, 9)),
        ({"finished": {"status": "done", "exit": 0, "steps": 9}, "ranks": {"w": AT_509}}, False, ("done", 0, 509)),
        ({"alive": False, "progress": {"step": 400}, "ranks": {"w": AT_509}}, False, ("failed", 1, 509)),
        ({"alive": True, "progress": {"step": 7}}, True, ("stopped", 1, 7)),
        ({"alive": False, "progress": {"step": 7}}, False, ("failed", 1, 7)),
        ({"alive": False}, False, ("failed", 1, 3)),
        ({"alive": True, "progress": {"step": 7}}, False, ("submitted", None, 3)),
    ],
)
def test_a_jobs_end_keeps_its_last_step(
    tmp_path: Path, digest: dict[str, Any], forced: bool, ended: tuple[str, int | None, int]
) -> None:
    settled = settle(Home(tmp_path), RECORD, digested(digest), forced=forced)
    assert (settled.state, settled.exit, settled.step) == ended


def test_a_worker_is_not_shown_behind_the_job(tmp_path: Path) -> None:
    ranks = {"w": WORKER, "s": SERVER}
    digest = {"alive": True, "state": "running", "plan": {"size": 8}, "progress": {"step": 24}, "ranks": ranks}
    shown = job_status.job_document(Home(tmp_path), RECORD, digested(digest), None)
    assert shown["step"] == 24
    assert [(rank["role"], rank["step"]) for rank in shown["ranks"]] == [("worker", 24), ("server", 0)]


def test_a_job_that_is_over_shows_what_was_written_down(tmp_path: Path) -> None:
    over = msgspec.structs.replace(RECORD, state="done", exit=0, ranks=[msgspec.convert(WORKER, ReportedRank)])
    assert job_status.job_document(Home(tmp_path), over, None, None)["ranks"][0]["step"] == 5


def test_a_jobs_step_is_its_workers_when_they_report_rarely(tmp_path: Path) -> None:
    ranks = {"w": {**WORKER, "step": 180}, "c": {"role": "coordinator", "rank": 0, "state": "running", "step": 0}}
    digest = {"alive": True, "state": "running", "plan": {"size": 8}, "progress": {"step": 100}, "ranks": ranks}
    assert job_status.job_document(Home(tmp_path), RECORD, digested(digest), None)["step"] == 180


def test_a_job_whose_script_never_calls_prepare_has_no_step(tmp_path: Path) -> None:
    digest: dict[str, Any] = {"alive": True, "state": "running", "ranks": {"w": {**WORKER, "step": 0}}}
    assert job_status.job_document(Home(tmp_path), RECORD, digested(digest), None)["step"] is None
    digest = {**digest, "alive": False, "finished": {"status": "done", "exit": 0, "steps": 0}}
    assert job_status.job_document(Home(tmp_path), RECORD, digested(digest), None)["step"] is None


def test_a_job_that_ended_has_no_running_ranks(tmp_path: Path) -> None:
    digest = {"alive": False, "ranks": {"w": WORKER, "s": {**SERVER, "state": "failed"}}}
    shown = job_status.job_document(Home(tmp_path), RECORD, digested(digest), None)
    assert (shown["state"], [rank["state"] for rank in shown["ranks"]]) == ("failed", ["lost", "failed"])


def test_a_job_whose_head_is_not_reached_is_unknown(tmp_path: Path) -> None:
    class Unreached:
        """A fleet that reaches no host."""

        def __enter__(self) -> Unreached:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def each(self, _: object, names: list[str]) -> dict[str, Outcome[Any]]:
            return {name: Outcome(None, errors.HostUnreachable(f"{name}: no route to host")) for name in names}

    (shown,) = job_status.refresh(Home(tmp_path), [RECORD], lambda *_: Unreached())  # type: ignore[arg-type,return-value]
    assert (shown["state"], shown["step"], shown["head"]) == ("unknown", None, "a")
    assert shown["problem"] == "its head a is not reached: no route to host"


def test_status_connects_once_to_each_host_of_the_cluster(tmp_path: Path) -> None:
    home, asked = Home(tmp_path), list[Any]()
    chosen = embedded_cluster(home)
    here = HostRecord("local", str(tmp_path), str(tmp_path / "jobs/digits-1/local"), sys.executable, "/w/code/1")
    records = [msgspec.structs.replace(RECORD, cluster=chosen.known, hosts=[here])]

    def connect(cluster: ChosenCluster, names: Sequence[str] | None) -> Fleet:
        asked.append((cluster.known.name, names))
        if cluster.known.name == "other":
            return Fleet({}, {HostName("local"): errors.HostUnreachable("no route to host")})
        return Fleet.connect(cluster.spec, names=names)

    jobs, hosts = job_status.overview(home, records, chosen, connect)
    assert asked == [("local", None)]
    assert [job["state"] for job in jobs] == ["failed"], "its folder is not there"
    assert [(host["name"], host["problems"]) for host in hosts] == [("local", [])]
    elsewhere = msgspec.structs.replace(records[0], cluster=KnownCluster("other", "", "name: other\nhosts: [h]", 0.0))
    jobs, _ = job_status.overview(home, [elsewhere], chosen, connect)
    assert (asked[2:], jobs[0]["state"]) == ([("other", ["local"])], "unknown"), (
        "a job of another cluster is asked there"
    )


def test_the_head_is_killed_first(tmp_path: Path) -> None:
    """Else its coordinator would write that another host is lost."""
    asked: list[tuple[str, object, object]] = []

    def host(name: str) -> FakeShell:
        def answer(argv: Sequence[str], stdin: bytes) -> CommandResult:
            question = msgspec.json.decode(argv[-1])
            asked.append((name, question["kill"], question["seconds"]))
            return CommandResult(0, b'{"left": []}', b"")

        shell = FakeShell(name)
        shell.on("python3", answer)
        return shell

    hosts = [HostRecord(name, "/w", f"/w/jobs/digits-1/{name}", "python3", "/w/code/1") for name in ("a", "b", "c")]
    fleet = Fleet({HostName(name): host(name) for name in ("a", "b", "c")}, {})
    assert kill(fleet, msgspec.structs.replace(RECORD, hosts=hosts, leader=1)) == []
    assert asked[0] == ("b", True, 0)
    assert sorted(asked[1:]) == [("a", True, SWEEP), ("b", True, SWEEP), ("c", True, SWEEP)]


def test_a_job_whose_psctl_was_killed_is_placing_until_its_host_gives_it_up(tmp_path: Path) -> None:
    home = Home(tmp_path)
    placing = msgspec.structs.replace(RECORD, state="placing", created=time.time())
    home.save_record(placing)
    with home.submission_lock(RECORD.job):
        assert settle(home, placing, digested({"alive": False})).state == "placing", "psctl is at it"
    assert settle(home, placing, digested({"alive": False, "waiting": True})).state == "placing", "the host waits"
    gone = settle(home, placing, digested({"alive": False, "waiting": False}))
    assert (gone.state, gone.exit) == ("failed", 1)
    shown = job_status.job_document(home, gone, None, None)
    assert shown["problem"] == "psctl ended before it had started the job's agents"
    rebooted = msgspec.structs.replace(placing, created=time.time() - 1000)
    assert settle(home, rebooted, digested({"alive": False, "waiting": True})).state == "failed"
    told = {"status": "failed", "exit": 5, "steps": 0, "failure": {"exception": "no word from h2"}}
    assert settle(home, placing, digested({"alive": False, "finished": told})).reason == "no word from h2"
