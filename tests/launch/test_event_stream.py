"""Following across lost connections, to the last line, or to the last line that had to be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl import errors
from psctl.job.events import Finished, Log, Started, to_line
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs.event_stream import RECONNECT, EventReader, LineSplitter
from psctl.remote.shell import CommandResult
from tests.helpers.fake_shell import FakeShell, FakeTail
from tests.helpers.manual_clock import ManualClock

FOLDER = "/w/jobs/digits-1/node-a"
LOG = f"{FOLDER}/events.jsonl"

STARTED = Started(time=1.0, job="digits-1", hosts=["node-a"], roles=[])
LINE = Log(time=2.0, rank="worker/0", stream="stdout", text="hello")
DONE = Finished(time=3.0, status="done", exit=0, steps=4, seconds=2.0, metrics={"loss": 0.5})


def record(pid: int = 0, started: str = "", state: str = "submitted") -> JobRecord:
    host = HostRecord("node-a", "/w", FOLDER, "python3", "/w/code/x", pid, started)
    return JobRecord(
        job="digits-1", name="digits", created=0.0, cluster=KnownCluster("lab", "", "", 0.0), hosts=[host],
        job_file="", job_source="", job_folder="", code_hash="", checkpoints="", state=state,
    )  # fmt: skip


class MovingClock(ManualClock):
    """A clock on which a moment passes whenever it is looked at."""

    def now(self) -> float:
        self.advance(0.25)
        return super().now()


def follow(
    shell: FakeShell,
    job: JobRecord,
    connect: Callable[[], FakeShell] | None = None,
    told: list[str] | None = None,
    recorded: JobRecord | None = None,
) -> list[object]:
    notice = (told if told is not None else []).append
    follower = EventReader(job, connect or (lambda: shell), MovingClock(), notice, lambda: recorded or job, shell)
    return [event for event in follower.events() if event is not None]


def with_agent(shell: FakeShell) -> JobRecord:
    shell.on_start("agent", lambda process: None)
    process = shell.start(["agent"], log="/tmp/agent.log", cwd="/tmp", env={})
    return record(process.pid, process.started)


def test_events_come_in_order_and_end_with_finished() -> None:
    shell = FakeShell("node-a")
    shell.append(LOG, to_line(STARTED) + to_line(LINE) + to_line(DONE) + b"never read\n")
    assert follow(shell, record()) == [STARTED, LINE, DONE]


def sized(shell: FakeShell) -> FakeShell:
    """Have the log's size answered."""

    def answer(argv: Sequence[str], stdin: bytes) -> CommandResult:
        there = LOG in shell.files
        return (
            CommandResult(0, b"%d\n" % len(shell.files[LOG]), b"") if there else CommandResult(1, b"", b"no such file")
        )

    shell.on("stat", answer)
    return shell


class FarShell(FakeShell):
    """A host whose first bytes of a file take longer than a reader waits for them."""

    def tail(self, path: str, offset: int = 0) -> FakeTail:
        """Follow a file, in silence at first."""
        return SlowTail(self, path, offset)


class SlowTail(FakeTail):
    """Follows a file of a FarShell."""

    silences = 2

    def read(self, timeout: float | None = None) -> bytes | None:
        """Return the next bytes, after some silence."""
        self.silences -= 1
        return b"" if self.silences >= 0 else super().read(timeout)


def test_the_past_is_read_when_all_of_it_came_and_not_at_the_first_silence() -> None:
    """A host that is far away is silent at first."""
    shell = sized(FarShell("node-a"))
    past = [STARTED, *[LINE] * 3]
    shell.append(LOG, b"".join(map(to_line, past)))
    reader = EventReader(record(), lambda: shell, ManualClock(), print, record, shell)
    reader.measure_past()
    shell.append(LOG, to_line(DONE))
    found = []
    for event in reader.events():
        found.append(event)
        if reader.past_is_read:
            break
    assert found == [None, None, *past], "what came later is none of the past"


def test_a_log_that_is_not_there_yet_has_no_past() -> None:
    shell = sized(FakeShell("node-a"))
    reader = EventReader(record(), lambda: shell, ManualClock(), print, record)
    reader.measure_past()
    assert reader.past_is_read


def test_a_lost_connection_is_made_anew_and_no_event_comes_twice() -> None:
    first, second = FakeShell("node-a"), FakeShell("node-a")
    whole = to_line(STARTED) + to_line(LINE) + to_line(DONE)
    first.append(LOG, whole[: len(to_line(STARTED)) + 9])
    job = with_agent(first)
    second.append(LOG, whole)
    told: list[str] = []
    events = []
    follower = EventReader(job, lambda: second, MovingClock(), told.append, lambda: job, first)
    for event in follower.events():
        if event == STARTED:
            first.vanish()
        if event is not None:
            events.append(event)
    assert events == [STARTED, LINE, DONE]
    assert told[0].endswith("the job continues without it, connecting again")
    assert told[1] == "node-a is back"


def test_a_host_that_stays_away_is_given_up_with_the_command_that_comes_back() -> None:
    shell = FakeShell("node-a")
    shell.vanish()
    with pytest.raises(errors.HostUnreachable, match=f"not reached for {RECONNECT:.0f} s") as raised:
        follow(shell, record())
    assert raised.value.hint == "psctl attach digits-1"


def test_an_agent_that_ended_without_a_report_ends_the_job_as_failed() -> None:
    shell = FakeShell("node-a")
    job = with_agent(shell)
    shell.append(LOG, to_line(STARTED))
    shell.processes[job.head.pid].end()
    shell.on("tail", lambda argv, stdin: CommandResult(0, b"no space\n", b""))
    last = follow(shell, job)[-1]
    assert isinstance(last, Finished)
    assert (last.status, last.exit) == ("failed", 1)
    assert "no space" in str(last.failure)


def test_a_job_that_was_stopped_by_force_ends_as_stopped() -> None:
    shell = FakeShell("node-a")
    shell.append(LOG, to_line(STARTED))
    shell.on("tail", lambda argv, stdin: CommandResult(0, b"", b""))
    job = with_agent(shell)
    shell.processes[job.head.pid].end()
    stopped = msgspec.structs.replace(job, state="stopped", step=7)  # by another psctl, while this one follows
    last = follow(shell, job, recorded=stopped)[-1]
    assert isinstance(last, Finished)
    assert (last.status, last.exit, last.steps) == ("stopped", 1, 7)


def test_a_line_that_is_no_event_is_reported_with_its_position() -> None:
    shell = FakeShell("node-a")
    shell.append(LOG, to_line(STARTED) + b"{}\n")
    with pytest.raises(errors.ProtocolError, match=r"events.jsonl on node-a has no valid event"):
        follow(shell, record())


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_come_out_whole_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    text = b"".join(line + b"\n" for line in lines)
    reader, found = LineSplitter(), []
    while text:
        cut = data.draw(st.integers(1, len(text)))
        found += reader.feed(text[:cut])
        text = text[cut:]
    assert found == lines
    assert reader.offset == sum(len(line) + 1 for line in lines)
