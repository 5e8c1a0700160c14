"""A job under faults of hosts: lost power, cut and flapping links, a full disk, stopped processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, reference_values

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a run without faults."""
    return reference_values(tmp_path_factory.mktemp("undisturbed"), 120, workers=3)


@pytest.fixture
def job(make_hosts: Callable[..., Any], tmp_path: Path) -> JobOnHosts:
    """A job that trains on three hosts: a worker and a server on each."""
    made = JobOnHosts(make_hosts(3), tmp_path / "home")
    made.train()
    return made


def lasting(seconds: float, job: JobOnHosts) -> None:
    """Let a fault last for `seconds`."""
    time.sleep(seconds)
    assert not job.of("finished"), job.events[-1]


def test_a_host_without_power_costs_no_more_than_the_way_back_to_the_checkpoint(
    job: JobOnHosts, reference: dict[int, str]
) -> None:
    job.hosts.crash("h3")
    job.until(lambda: "worker/2" in job.lost(), "the host's loss", 60)
    job.wait_for_steps()
    job.wait_for_steps()
    assert not any(event["host"] == "h3" for event in job.of("worker-joined")[3:]), "it goes on elsewhere"
    job.stop_and_check(reference, but=("h3",))


def test_a_link_that_is_cut_for_3_s_costs_3_s(job: JobOnHosts, reference: dict[int, str]) -> None:
    for host in ("h3", "h1"):
        job.hosts.cut(host)
        lasting(3, job)
        job.hosts.heal(host)
        job.wait_for_steps()
    assert job.lost() == []
    job.stop_and_check(reference)


def test_an_outage_of_a_head_without_standby_costs_as_long_as_it_lasts(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """Of two hosts, none leads without the other's vote."""
    job = JobOnHosts(make_hosts(2), tmp_path / "home")
    job.train()
    job.hosts.cut("h1")
    lasting(4, job)
    job.hosts.heal("h1")
    job.wait_for_steps()
    assert job.lost() == []
    assert not job.of("restored")
    job.stop_and_check(reference_values(tmp_path / "undisturbed", 30, workers=2))


def test_an_outage_of_the_head_ends_a_job_that_may_not_wait(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    """The other hosts go on without it, and have too few slots."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1)
    job.train("--set", "restart.wait=0s")
    job.hosts.cut("h1")
    job.until(lambda: job.of("finished"), "the end", 90)
    last = job.of("finished")[-1]
    assert (last["status"], last["exit"]) == ("failed", 1)
    assert "HostLost" in last["failure"]["exception"], last
    assert sorted(job.lost()) == sorted(set(job.lost())), "one event for each loss"
    job.until(lambda: not job.hosts.leftovers("h2"), "the end of the processes there", 30)
    job.hosts.heal("h1")
    job.check_clean()


def test_a_host_that_was_cut_off_for_60_s_is_lost_and_does_no_harm_when_it_is_back(
    job: JobOnHosts, reference: dict[int, str]
) -> None:
    job.hosts.cut("h3")
    job.until(lambda: "worker/2" in job.lost(), "the host's loss", 60)
    lasting(60, job)
    left = [kind for kind in ("worker", "server") for host, _ in job.processes(kind) if host == "h3"]
    assert not left, "an agent that misses the coordinator for 15 s ends its processes"
    job.hosts.heal("h3")
    job.until(lambda: job.notices("h3 is back, and may be used again"), "the host's return", 60)
    job.wait_for_steps()
    job.stop_and_check(reference)


@pytest.mark.parametrize("host", ["h3", "h1"])
def test_a_job_waits_for_hosts_that_it_needs_and_goes_on_when_they_are_back(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str], host: str
) -> None:
    """All slots are in use. h1 is the head: the others go on without it."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1)
    job.train()
    job.hosts.cut(host)
    job.until(lambda: job.of("recovering") and job.lost(), "the wait", 90)
    lasting(20, job)
    (row,) = job.psctl.run("status", job.job, "-o", "json").document["jobs"]
    assert row["recovering"]["hosts"] == [host], row
    shown = job.psctl.run("status", job.job)
    assert f"is recovering: it waits for {host} since" in shown.out, shown
    job.hosts.heal(host)
    job.until(lambda: job.of("restored"), "the restart", 120)
    job.wait_for_steps()
    job.stop_and_check(reference)


def test_a_host_that_comes_back_when_it_was_just_given_up_is_refused(
    job: JobOnHosts, reference: dict[int, str]
) -> None:
    """Its processes still live: all that they say to servers, workers and the coordinator is of a dead incarnation."""
    job.hosts.cut("h3")
    job.until(lambda: "worker/2" in job.lost(), "the host's loss", 60)
    job.hosts.heal("h3")
    job.wait_for_steps()
    left = ("worker", "server")  # its agent is let in again, told to end these, and stays to the job's end
    job.until(lambda: not any(host == "h3" for kind in left for host, _ in job.processes(kind)), "the end of them")
    job.wait_for_steps()
    job.stop_and_check(reference)


def test_a_host_that_does_not_reach_another_one_is_named_and_replaced_after_the_stall(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    """Both reach the head, which has no server, so that they need each other."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    text = job.cluster.read_text()
    job.cluster.write_text(text.replace("name: h1, slots: 2}", "name: h1, slots: 2, roles: [worker]}"))
    job.train("--servers", "2", "--set", "timeouts.stall=30s")
    job.hosts.part("h2", "h3")
    job.until(lambda: job.notices("h2 and h3 do not reach each other, though h1 reaches both"), "the notice", 60)
    job.until(lambda: job.lost(), "one side's loss", 90)
    assert any("it did not reach each other" in event["reason"] for event in job.of("worker-lost")), job.lost()
    job.wait_for_steps()
    job.hosts.part("h2", "h3", apart=False)
    job.wait_for_steps()
    job.stop_and_check(reference)


def test_a_link_that_flaps_for_20_s(job: JobOnHosts, reference: dict[int, str]) -> None:
    for _ in range(10):
        job.hosts.cut("h2")
        lasting(1, job)
        job.hosts.heal("h2")
        lasting(1, job)
    job.wait_for_steps()
    assert job.lost() == []
    job.stop_and_check(reference)


def test_a_full_disk_on_the_head_costs_checkpoints_and_nothing_else(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    hosts = make_hosts(3)
    hosts.disk("h1", "/root/.psctl/host/checkpoints", "1m")
    job = JobOnHosts(hosts, tmp_path / "home")
    job.train("--set", "checkpoint.every=20 steps")
    job.until(lambda: job.of("checkpoint"), "a checkpoint that fits")
    hosts.exec("h1", ["sh", "-c", "cat /dev/zero > /root/.psctl/host/checkpoints/full"], check=False)
    (problem, *_) = job.until(lambda: job.notices("was not written"), "word of the full disk")
    assert "no space left" in problem, problem
    host, pid = job.processes("server")[0]
    job.signal(host, pid, "KILL")
    job.until(lambda: job.notices("takes part"), "another server")
    job.wait_for_steps()
    before = len(job.of("checkpoint"))
    hosts.exec("h1", ["rm", "/root/.psctl/host/checkpoints/full"])
    job.until(lambda: len(job.of("checkpoint")) > before, "a checkpoint when there is room again")
    hosts.exec("h1", ["sh", "-c", "cat /dev/zero > /root/.psctl/host/checkpoints/full"], check=False)
    stopped = job.psctl.run("stop", job.job, timeout=DEADLINE)
    assert stopped.code == 0, stopped
    last = job.of("finished")[-1]
    assert "no space left" in last["failure"]["exception"], last
    found = job.values()
    assert {epoch: found[epoch] for epoch in found.keys() & reference.keys()} == {
        epoch: reference[epoch] for epoch in found.keys() & reference.keys()
    }
    hosts.exec("h1", ["umount", "/root/.psctl/host/checkpoints"])
    job.check_clean()


def test_a_reader_that_stands_still_for_20_s_is_named_and_survives(job: JobOnHosts, reference: dict[int, str]) -> None:
    for kind, name, place in (("worker", "worker/2", -1), ("server", "server/0", 0)):  # both have something to do
        host, pid = job.processes(kind)[place]
        before = len(job.notices("waits for"))
        job.signal(host, pid, "STOP")
        lasting(20, job)
        job.signal(host, pid, "CONT")
        job.wait_for_steps()
        told = job.notices("waits for")[before:]
        assert any(name in text for text in told), f"{kind}: {told}"
    assert job.lost() == []
    job.stop_and_check(reference)


def test_a_rank_that_holds_the_interpreter_for_20_s_is_named_and_survives(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train(words_more=("--hold-at", "60"))
    job.until(lambda: any("worker/1" in text for text in job.notices("waits for")), "the late one's name")
    (named, *_) = [text for text in job.notices("waits for") if "worker/1" in text]
    assert " waits for worker/1 on h2 since " in named, named
    job.until(lambda: [text for text in job.notices("continues") if "worker/1" in text], "that it continues")
    job.wait_for_steps()
    assert job.lost() == []
    job.stop_and_check(reference)


@pytest.mark.parametrize("host", ["h1", "h3"])
def test_an_agent_is_killed(job: JobOnHosts, reference: dict[int, str], host: str) -> None:
    """It is its host's loss, also on the head."""
    job.until(lambda: job.standby, "the standby")
    found = [pid for where, pid in job.processes("agent") if where == host]
    job.signal(host, found[-1], "KILL")
    job.until(lambda: f"worker/{int(host[1:]) - 1}" in job.lost(), "the host's loss", 60)
    job.wait_for_steps()
    assert job.head == ("h2" if host == "h1" else "h1")
    job.stop_and_check(reference)


def test_the_heads_agent_is_killed_in_a_job_of_two_hosts(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    """It ends the job, in good order: no host may lead without the other's vote."""
    job = JobOnHosts(make_hosts(2), tmp_path / "home")
    job.train()
    found = [pid for where, pid in job.processes("agent") if where == "h1"]
    job.signal("h1", found[-1], "KILL")
    job.until(lambda: job.of("finished"), "the end", 60)
    last = job.of("finished")[-1]
    assert (last["status"], last["exit"]) == ("failed", 1)
    assert "agent" in last["failure"]["exception"], last
    job.check_clean()


def test_the_coordinator_is_killed_20_times(job: JobOnHosts, reference: dict[int, str]) -> None:
    """Each time it is started again; no process of the job is, and no value differs."""
    text = "a new one continues the job"
    for _ in range(20):
        before = len(job.notices(text))
        (found,) = [pid for where, pid in job.processes("coordinator") if where == "h1"]
        job.signal("h1", found, "KILL")
        job.until(lambda before=before: len(job.notices(text)) > before, "the successor", 30)
        lasting(6, job)  # one that is killed right after its start, three times in a row, ends the job
        job.wait_for_steps()
    assert job.lost() == []
    job.stop_and_check(reference)


def test_the_coordinator_is_killed_while_all_start_again(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    """At moments of a restart: while processes end, while they start, while they load their values."""
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train("--set", "restart.max=50", "--set", "replicas=0", "--set", "checkpoint.every=20 steps")
    text = "a new one continues the job"
    for delay in (0.2, 1.0, 2.0, 4.0):
        restored, before = len(job.of("restored")), len(job.notices(text))
        job.signal(*job.processes("server")[0], "KILL")
        lasting(delay, job)
        job.signal(*job.processes("coordinator")[-1], "KILL")
        job.until(lambda before=before: len(job.notices(text)) > before, "the successor", 30)
        job.until(lambda restored=restored: len(job.of("restored")) > restored, "training again")
        job.wait_for_steps()
    job.stop_and_check(reference)


def test_a_psctl_that_is_killed_is_not_missed(job: JobOnHosts, reference: dict[int, str]) -> None:
    with job.psctl.start("attach", job.job, "-o", "jsonl") as follower:
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.kill()
    job.wait_for_steps()
    job.stop_and_check(reference)
