"""A job whose head is lost: another host leads, training goes on with the same values, and psctl finds that host."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import JobOnHosts, reference_values
from tests.helpers.running import until

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a run without faults."""
    return reference_values(tmp_path_factory.mktemp("undisturbed"), 120, workers=3)


@pytest.fixture
def job(make_hosts: Callable[..., Any], tmp_path: Path) -> JobOnHosts:
    """A job that trains on three hosts, and whose coordinator has a standby."""
    made = JobOnHosts(make_hosts(3), tmp_path / "home")
    made.train("--set", "checkpoint.every=20 steps")
    made.until(lambda: made.standby, "the standby", 60)
    return made


@pytest.mark.soak
def test_the_head_loses_its_power_and_psctl_follows_the_job(job: JobOnHosts, reference: dict[int, str]) -> None:
    job.until(lambda: any(event["step"] >= 40 for event in job.of("checkpoint")), "two checkpoints")
    with job.psctl.start("attach", job.job, "-o", "jsonl") as follower:
        assert follower.stdout is not None
        seen: list[str] = []
        reader = threading.Thread(target=seen.extend, args=(follower.stdout,))
        reader.start()
        until(lambda: len(seen) > 10, 30)
        job.hosts.crash("h1")
        job.until(lambda: job.notices("h2 leads the job after"), "another leader", 60)
        job.until(lambda: "worker/0" in job.lost(), "the loss of the head's processes", 30)
        job.wait_for_steps()
        (row,) = job.psctl.run("status", job.job, "-o", "json").document["jobs"]
        assert (row["head"], row["state"]) == ("h2", "running"), row
        listed = job.psctl.run("checkpoint", "list", job.job, "-o", "json")
        assert {row["host"] for row in listed.document["checkpoints"]} == {"h2"}, listed
        assert job.psctl.run("logs", job.job, "--since", "10m").out.count("epoch 0 values") == 1
        job.stop_and_check(reference, but=("h1",))
        reader.join(120)
        assert follower.stderr is not None
        errors = follower.stderr.read()
    assert "h2 leads steady-1 now, in place of h1" in errors, errors
    kinds = ("progress", "worker-lost", "checkpoint", "restored", "finished")
    shown = [event for event in map(json.loads, seen) if event["event"] in kinds]
    assert [_without_paths(event) for event in shown] == [_without_paths(event) for event in job.of(*kinds)]


@pytest.mark.soak
def test_a_job_that_computes_before_its_steps_goes_on_after_ten_seconds(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """worker/0's state of a step is with the servers as soon as the next batch is asked for: at once in this job."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train(pause=0.0, words_more=("--compute", "0.2"))
    job.until(lambda: job.standby, "a standby")
    job.wait_for_steps(20)
    job.hosts.crash("h1")
    crashed = time.time()
    job.until(lambda: job.notices("h2 leads the job after"), "another leader", 60)
    job.wait_for_steps()
    trains = [event for event in job.of("notice") if "worker/0 on h2 trains again" in event["text"]]
    after = [*trains, *job.of("restored")][0]["time"] - crashed
    restarted = bool(job.of("restored"))  # the power went in the milliseconds before the state arrived
    job.report(f"trains after {after:.1f} s; all started again: {restarted}")
    assert after < (40 if restarted else 20), "ten seconds, on processors without other work"


def _without_paths(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what psctl adds or changes for a reader here."""
    return {key: event[key] for key in ("event", "time", "step", "rank", "status") if key in event}


@pytest.mark.soak  # tests/simulation has the returns
def test_a_head_that_was_cut_off_is_used_again(job: JobOnHosts, reference: dict[int, str]) -> None:
    job.hosts.cut("h1")
    job.until(lambda: job.notices("h2 leads the job after"), "another leader", 60)
    job.wait_for_steps()
    job.hosts.heal("h1")
    job.until(lambda: job.notices("h1 is back, and may be used again"), "the host's return", 60)
    job.until(lambda: job.standby in ("h1", "h3"), "another standby", 60)
    assert not [host for host, _ in job.processes("coordinator") if host != "h2"], "one coordinator"
    job.wait_for_steps()
    job.stop_and_check(reference)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_another_host_leads_20_times_in_one_training(job: JobOnHosts, reference: dict[int, str]) -> None:
    """Each time the head's link is cut until another host leads."""
    pauses = []
    for term in range(1, 21):
        job.until(lambda: job.standby, "the standby", 90)
        head = job.head
        job.hosts.cut(head)
        began = time.monotonic()
        job.until(lambda term=term: job.leadership["term"] == term, f"leader {term + 1}", 60)
        pauses.append(time.monotonic() - began)
        job.wait_for_steps()
        job.hosts.heal(head)
        job.until(
            lambda head=head: not [host for host, _ in job.processes("coordinator") if host == head],
            "the end of the former coordinator",
            60,
        )
    print(f"led after {sorted(pauses)[10]:.1f} s, at most {max(pauses):.1f} s")
    job.stop_and_check(reference)


@pytest.mark.soak  # tests/agent/test_elections.py has the votes
def test_a_job_whose_head_and_standby_are_lost_ends(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    """The third host cannot know whether they go on without it."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train("--set", "restart.wait=0s")
    job.until(lambda: job.standby, "the standby", 60)
    for host in ("h1", "h2"):
        job.hosts.crash(host)
    until(lambda: not job.hosts.leftovers("h3"), 60, name="the end of the processes there")
