"""What the kernel killed for lack of memory is called that, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.agent.processes import AgentChild
from psctl.agent.resource_usage import (
    FRESH,
    CpuUsage,
    MemoryKills,
    NetworkUsage,
    counter_files,
    first_counter,
    interface_counters,
    memory_bytes,
)
from psctl.agent.spawn import Files, account
from psctl.process.secret_masking import Secrets
from psctl.types import Member
from tests.helpers.manual_clock import ManualClock

ROOT = Path(__file__).parents[2]
W1 = Member("worker", 1)
ROSE = "oom_kill in /x rose from 0 to 1"


class Counter:
    """A counter as a test wants it."""

    def __init__(self) -> None:
        self.found: tuple[str, int] | None = ("/sys/fs/cgroup/x/memory.events", 3)
        self.clock = ManualClock()
        self.kills = MemoryKills(lambda: self.found, self.clock.now)

    def rises(self, by: int = 1) -> None:
        assert self.found is not None
        self.found = (self.found[0], self.found[1] + by)


def test_a_counter_that_has_just_risen_is_evidence_for_every_process_that_ended_now() -> None:
    counter = Counter()
    assert counter.kills.evidence() == ""
    counter.rises(2)
    text = "oom_kill in /sys/fs/cgroup/x/memory.events rose from 3 to 5"
    assert [counter.kills.evidence(), counter.kills.evidence()] == [text, text]
    counter.clock.advance(FRESH + 1)
    assert counter.kills.evidence() == ""  # a later kill is somebody else's


def test_a_counter_that_rose_long_ago_or_cannot_be_read_is_no_evidence() -> None:
    counter = Counter()
    counter.rises()
    counter.kills.update()
    counter.clock.advance(FRESH + 1)
    assert counter.kills.evidence() == ""
    counter.found = ("/proc/vmstat", 70)  # another counter took its place
    assert counter.kills.evidence() == ""
    counter.found = None
    assert counter.kills.evidence() == ""


@pytest.mark.parametrize(
    ("groups", "held", "found"),
    [
        ("0::/user.slice/a:b", {"sys/fs/cgroup/user.slice/a:b/memory.events": "oom 1\noom_kill 2\n"}, 2),
        ("4:cpu,memory:/x\n0::/", {"sys/fs/cgroup/memory/x/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        ("0::/", {"proc/vmstat": "pgfault 9\noom_kill 7\n"}, 7),  # the root group keeps no counter
        ("0::/", {"proc/vmstat": "pgfault 9\n"}, None),
        ("", {}, None),
    ],
)
def test_the_control_groups_own_counter_is_read_before_the_machines(
    tmp_path: Path, groups: str, held: dict[str, str], found: int | None
) -> None:
    for name, text in {"proc/vmstat": "oom_kill 100\n", "proc/self/cgroup": groups, **held}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if not groups:
        (tmp_path / "proc/vmstat").unlink()
    counter = first_counter(counter_files(tmp_path))
    assert (counter[1] if counter else None) == found


class Orders:
    """As much of an agent's orders as its files need."""

    def __init__(self, folder: Path) -> None:
        self.job_dir = str(folder)


@pytest.mark.parametrize(
    ("status", "memory", "exception", "hinted"),
    [
        (-9, ROSE, f"OutOfMemory: the kernel killed it for lack of memory: {ROSE}", True),
        (-9, "", "killed by signal 9 (SIGKILL)", False),
        (1, ROSE, "ended with status 1", True),  # its data loader was killed
    ],
)
def test_the_account_of_a_kill_for_lack_of_memory_names_the_evidence(
    tmp_path: Path, status: int, memory: str, exception: str, hinted: bool
) -> None:
    with subprocess.Popen(["true"]) as ended:
        child = AgentChild(ended)
    child.status, child.memory = status, memory
    failure = account(Files(Orders(tmp_path)), W1, "h1", child, [], Secrets([]))  # type: ignore[arg-type]
    assert failure.exception == exception
    assert ("smaller batches" in failure.hint, "rose from 0 to 1" in failure.hint) == (hinted, hinted and status == 1)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB, where this machine lets us make one."""
    at = next((path.parent for path in counter_files()[:-1] if path.is_file()), None)
    group = (at or Path("/nowhere")) / f"psctl-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if at and (at / "memory.limit_in_bytes").exists() else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made: {error}")
    yield group
    group.rmdir()


AGENT = """
import os, sys
from psctl.agent.resource_usage import MemoryKills
from psctl.agent.processes import Processes
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
processes = Processes(os.pipe()[0])
greedy = "held = [bytes([1]) * (1 << 20) for _ in range(400)]"
for program in (greedy, "import os; os.kill(os.getpid(), 9)"):
    child = processes.start([sys.executable, "-c", program], dict(os.environ), "/", 1, 2)
    while child.status is None:
        processes.reap()
    print(child.status, child.memory)
    processes._memory_kills = MemoryKills()  # as a minute later
"""


def test_a_process_killed_for_memory_is_distinguished_from_one_killed_by_a_signal(small_group: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGENT, str(small_group)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("-9 oom_kill in "), done.stderr
    assert first.endswith("rose from 0 to 1")
    assert second == "-9 "


BUSY = "import sys\nheld = bytearray(60_000_000)\nprint('held', flush=True)\nwhile True: pass\n"


def test_the_processor_and_memory_of_a_session_are_those_of_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            usage = CpuUsage()
            assert usage.busy_sessions([child.pid]) == {child.pid}
            assert usage.percent == {}, "it was not known before"
            until = time.monotonic() + 0.5  # long beside the clock's tick
            while time.monotonic() < until:
                pass
            assert usage.busy_sessions([child.pid]) == {child.pid}
            assert 0 < usage.percent[child.pid] <= 115, "one thread"
            assert 60_000_000 < memory_bytes({child.pid})[child.pid] < 200_000_000
        finally:
            child.kill()
    assert memory_bytes({child.pid}) == {child.pid: 0}


COUNTERS = """Inter-| Receive | Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 1000 10 0 0 0 0 0 0 1000 10 0 0 0 0 0 0
  eth0:{0} 20 0 0 0 0 0 0 {1} 30 0 0 0 0 0 0
  eth1: 500 20 0 0 0 0 0 0 700 30 0 0 0 0 0 0
"""


def test_the_counters_of_an_interface_become_rates() -> None:
    clock, moved = ManualClock(), [2000, 3000]
    one = NetworkUsage("eth0", lambda: COUNTERS.format(*moved), clock.now)
    every = NetworkUsage("", lambda: COUNTERS.format(*moved), clock.now)
    assert one.rates() == (0.0, 0.0), "no time has passed"
    moved[:] = [6000, 3500]
    clock.advance(2.0)
    assert one.rates() == every.rates() == (250.0, 2000.0)
    moved[:] = [0, 0]
    clock.advance(1.0)
    assert one.rates() == (0.0, 0.0), "the counters began again"


def test_an_interface_that_is_not_there_has_no_rate() -> None:
    clock = ManualClock()
    gone = NetworkUsage("eth7", lambda: COUNTERS.format(1, 2), clock.now)
    clock.advance(1.0)
    assert gone.rates() == (0.0, 0.0)
    assert interface_counters(COUNTERS.format(1, 2)) == {"lo": (1000, 1000), "eth0": (2, 1), "eth1": (700, 500)}


def test_this_machines_counters_are_read() -> None:
    assert "lo" in interface_counters(Path("/proc/net/dev").read_text())
