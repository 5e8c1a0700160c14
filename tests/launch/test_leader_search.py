"""Which host leads a job: the newest answer of its hosts; and following its log on another host than before."""

from __future__ import annotations

import msgspec
import pytest

from psctl.errors import HostUnreachable
from psctl.job.events import Finished, Log, Started, to_line
from psctl.launch import leader_search
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs.event_stream import EventReader
from psctl.remote.fleet import Fleet
from psctl.remote.shell import CommandResult
from psctl.types import HostName
from tests.helpers.fake_shell import FakeShell
from tests.helpers.manual_clock import ManualClock

HOSTS = ("a", "b", "c")


class SimulatedHosts:
    """Three hosts of a job, on each of which its agent runs."""

    def __init__(self, count: int = 3) -> None:
        self.shells = {name: FakeShell(name) for name in HOSTS[:count]}
        hosts = []
        for name, shell in self.shells.items():
            shell.on_start("agent", lambda process: None)
            process = shell.start(["agent"], log="/tmp/log", cwd="/tmp", env={})
            folder = f"/w/jobs/digits-1/{name}"
            hosts.append(HostRecord(name, f"/{name}", folder, "python3", "/code", process.pid, process.started))
        self.record = JobRecord(
            job="digits-1", name="digits", created=0.0, cluster=KnownCluster("lab", "", "", 0.0), hosts=hosts,
            job_file="", job_source="", job_folder="", code_hash="", checkpoints="/a/checkpoints",
        )  # fmt: skip

    def say(self, name: str, text: str) -> None:
        self.shells[name].files[f"/w/jobs/digits-1/{name}/leader.json"] = text.encode()

    def end_agent(self, name: str) -> None:
        for process in self.shells[name].processes.values():
            process.end()

    def fleet(self, *lost: str) -> Fleet:
        shells = {HostName(name): shell for name, shell in self.shells.items() if name not in lost}
        return Fleet(shells, {HostName(name): HostUnreachable(f"{name}: no route") for name in lost})


def leader(term: int, host: int, standby: int | None = None) -> str:
    return msgspec.json.encode({"term": term, "host": host, "standby": standby, "coordinator": None}).decode()


def test_the_newest_answer_names_the_head_and_its_checkpoints() -> None:
    hosts = SimulatedHosts()
    hosts.say("a", leader(0, 0, 1))
    hosts.say("b", leader(2, 2))
    hosts.say("c", leader(1, 1))
    found = leader_search.on_fleet(hosts.fleet("a"), hosts.record)
    assert (found.head.name, found.checkpoints) == ("c", "/c/checkpoints")


@pytest.mark.parametrize("text", ["", "{}", "[]", leader(3, 3), leader(3, -1), "\x00"])
def test_an_answer_that_cannot_be_true_is_none(text: str) -> None:
    hosts = SimulatedHosts()
    hosts.say("b", text)
    assert leader_search.on_fleet(hosts.fleet(), hosts.record) == hosts.record


def test_other_hosts_are_asked_when_the_head_is_lost_or_leads_no_more() -> None:
    hosts = SimulatedHosts()
    assert not leader_search.has_moved(hosts.fleet(), hosts.record)
    assert leader_search.has_moved(hosts.fleet("a"), hosts.record)
    hosts.say("a", leader(1, 2))
    assert leader_search.has_moved(hosts.fleet(), hosts.record)
    hosts.say("a", leader(0, 0, 1))
    hosts.end_agent("a")
    assert leader_search.has_moved(hosts.fleet(), hosts.record)
    assert not leader_search.has_moved(hosts.fleet(), msgspec.structs.replace(hosts.record, state="done"))
    few = SimulatedHosts(2)
    assert not leader_search.has_moved(few.fleet("a"), few.record), "of two hosts the other one never leads"


def test_a_stop_does_not_wait_for_a_leader_that_cannot_come() -> None:
    hosts = SimulatedHosts()
    hosts.say("a", leader(0, 0, 1))
    for name in HOSTS:
        hosts.end_agent(name)
    assert leader_search.await_leader(hosts.fleet(), hosts.record) == hosts.record


def test_a_stop_waits_for_the_next_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = SimulatedHosts()
    hosts.say("a", leader(0, 0, 1))
    hosts.end_agent("a")
    monkeypatch.setattr(leader_search.time, "sleep", lambda seconds: hosts.say("b", leader(1, 1)))
    assert leader_search.await_leader(hosts.fleet(), hosts.record).head.name == "b"


STARTED = Started(time=1.0, job="digits-1", hosts=[*HOSTS], roles=[])
FIRST, SECOND, THIRD = (Log(time=2.0 + n, rank="worker/0", stream="stdout", text=f"line {n}") for n in range(3))
DONE = Finished(time=9.0, status="done", exit=0, steps=4, seconds=2.0, metrics={})


@pytest.mark.parametrize("copied", ["the same", "one line less", "other lines before"])
def test_events_go_on_in_the_log_of_the_new_head(copied: str) -> None:
    """It has the same bytes as that of the old one, or nearly."""
    hosts = SimulatedHosts()
    old = hosts.shells["a"]
    old.append("/w/jobs/digits-1/a/events.jsonl", b"".join(map(to_line, (STARTED, FIRST, SECOND))))
    before = {
        "the same": [STARTED, FIRST, SECOND],
        "one line less": [STARTED, FIRST],
        "other lines before": [STARTED, THIRD, FIRST, SECOND],
    }[copied]
    log = b"".join(map(to_line, [*before, THIRD, DONE]))
    new = hosts.shells["b"]
    new.append("/w/jobs/digits-1/b/events.jsonl", log)
    last = to_line(SECOND)[:-1]
    size = len(b"".join(map(to_line, (STARTED, FIRST))))
    new.on("sh", CommandResult(0, log[size : size + len(last)], b""))
    at = log.find(last)
    new.on("grep", CommandResult(0, f"{at}:".encode() + last + b"\n", b"") if at >= 0 else CommandResult(1, b"", b""))
    new.on("stat", CommandResult(0, str(len(b"".join(map(to_line, before)))).encode(), b""))
    notices: list[str] = []
    reader = EventReader(
        hosts.record, lambda: new, ManualClock(), notices.append, lambda: hosts.record, old,
        lambda: hosts.record.led_by(1),
    )  # fmt: skip
    events = []
    for event in reader.events():
        if event is None:
            old.vanish("no route")
        else:
            events.append(event)
    assert events == [STARTED, FIRST, SECOND, THIRD, DONE]
    assert "b leads digits-1 now, in place of a" in notices
