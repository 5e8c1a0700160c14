"""A job that trains on test hosts while faults are injected: its event log, and its values.

The job `steady` prints a digest of rank 0's values after every epoch. Under any faults the digest after each epoch must
equal that of a run without faults (`reference_values`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.running import STEADY, Psctl, set_args, until

KINDS = {
    "agent": "psctl.agent.main",
    "coordinator": "psctl.coordinator.main",
    "server": "psctl.server.main",
    "worker": "bootstrap.py train.py",
}

DEADLINE = 240.0
"""Seconds to wait for an event of a job, also on a busy machine."""

_VALUES = re.compile(r"epoch (\d+) values (\w+)")


def values_of(lines: list[str]) -> dict[int, str]:
    """Return the digest after each epoch from lines of a log; a repeated epoch must have the same digest."""
    found: dict[int, str] = {}
    for text in lines:
        match = _VALUES.fullmatch(text)
        if match:
            epoch, digest = int(match[1]), match[2]
            assert found.setdefault(epoch, digest) == digest, f"epoch {epoch} has two digests"
    return found


def reference_values(folder: Path, epochs: int, workers: int, strategy: str = "ps") -> dict[int, str]:
    """Train on this machine without faults; return the digest after each epoch."""
    folder.mkdir(exist_ok=True)
    cluster = folder / "alone.yaml"
    cluster.write_text(
        f"version: 1\nname: alone\nruntime: {{python: {sys.executable}, environment: existing}}\n"
        f"hosts: [{{address: local, slots: {workers}}}]\n"
    )
    run = Psctl(folder).run(
        "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", str(workers), "--servers",
        "1" if strategy == "ps" else "0", "--strategy", strategy, *steady_args(epochs, 0.0), "--set",
        "checkpoint.every=100000 steps", timeout=DEADLINE,
    )  # fmt: skip
    assert run.code == 0, run
    return values_of([event["text"] for event in run.of("log") if event["rank"] == "worker/0"])


def steady_args(epochs: int, pause: float, *more: str) -> list[str]:
    """Return the options of `psctl train` for `steady`."""
    return set_args("--epochs", str(epochs), "--pause", str(pause), "--gamma", "0.99", "--values", *more)


class JobOnHosts:
    """A job on test hosts, with one worker and one server on each.

    Args:
        hosts: test hosts.
        folder: of psctl's home on the user's machine.
        more: lines of the cluster file.
        slots: of each host.
        first: so many of the hosts are in the cluster file at first.
    """

    job = "steady-1"

    def __init__(self, hosts: Any, folder: Path, more: str = "", slots: int = 2, first: int | None = None) -> None:
        self.hosts, self._more, self._slots = hosts, more, slots
        home = hosts.make_home(folder)
        self.psctl = Psctl(home.path, environment=home.env)
        self.cluster = home.path / "cluster.yaml"
        self.write_cluster(first)

    def write_cluster(self, first: int | None = None) -> None:
        """Write the cluster file, with the first so many hosts."""
        names = list(self.hosts)[:first]
        rows = "".join(f"  - {{address: {name}, name: {name}, slots: {self._slots}}}\n" for name in names)
        text: str = self.hosts.cluster_text(names[:1], more=self._more)
        self.cluster.write_text(text[: text.index("hosts:")] + "hosts:\n" + rows)
        self._in_file = len(names)

    @property
    def leadership(self) -> dict[str, Any]:
        """The newest that any host knows of the leader; {} at first."""
        found: list[dict[str, Any]] = []
        for name in self.hosts:
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(self._file(name, "leader.json").read_text()))
        return max(found, key=lambda each: each["term"], default={})

    @property
    def head(self) -> str:
        """The host that leads the job."""
        return list(self.hosts)[self.leadership.get("host", 0)]

    @property
    def standby(self) -> str:
        """The host that leads when that is lost; "" while there is none."""
        index = self.leadership.get("standby")
        return "" if index is None else list(self.hosts)[index]

    @property
    def log(self) -> Path:
        """The event log on the head."""
        return self._file(self.head, "events.jsonl")

    def _file(self, host: str, name: str) -> Path:
        path: Path = self.hosts.path(host, f"/root/.psctl/host/jobs/{self.job}/{host}/{name}")
        return path

    def train(self, *more: str, pause: float = 0.2, words_more: tuple[str, ...] = ()) -> None:
        """Start the job; it trains until it is stopped."""
        count = self._in_file
        done = self.psctl.run(
            "train", str(STEADY), "-d", "--cluster", str(self.cluster), "--servers", str(count), "--set",
            "workers={per_host: 1}", *steady_args(100_000, pause, *words_more), "--set", "replicas=1", "--set",
            "restart.max=1000", "--set", "checkpoint.every=200 steps", *more, timeout=DEADLINE,
        )  # fmt: skip
        assert done.code == 0, done
        self.wait_for_steps()

    # ---- the event log --------------------------------------------------------------------------------------------

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event log so far."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of some kinds."""
        return [event for event in self.events if event["event"] in kinds]

    @property
    def step(self) -> int:
        """The step that all workers have done."""
        return max((event["step"] for event in self.of("progress")), default=0)

    def values(self) -> dict[int, str]:
        """The digest after each epoch."""
        return values_of([event["text"] for event in self.of("log") if event["rank"] == "worker/0"])

    def notices(self, text: str) -> list[str]:
        """The notices that contain a text."""
        return [event["text"] for event in self.of("notice") if text in event["text"]]

    def until(self, what: Callable[[], Any], name: str, seconds: float = DEADLINE) -> Any:
        """Wait for a true result of `what`; an error has the last events."""
        try:
            return until(what, seconds, every=0.1, name=name)
        except AssertionError as error:
            last = "\n".join(str(event)[:300] for event in self.events[-25:])
            raise AssertionError(f"{error}\n{last}") from None

    def wait_for_steps(self, steps: int = 25) -> None:
        """Wait until `steps` more steps are done, or the job was restored."""
        before = len(self.of("restored")), self.step
        self.until(
            lambda: self.of("finished") or self.step >= before[1] + steps or len(self.of("restored")) > before[0],
            f"{steps} more steps",
        )
        assert not self.of("finished"), self.events[-1]

    def is_recovered(self) -> bool:
        """Whether every shard is on two servers and every lost worker and server is replaced."""
        begin = max((at for at, event in enumerate(self.events) if event["event"] == "restored"), default=0)
        since = self.events[begin:]
        notices = [event["text"] for event in since if event["event"] == "notice"]
        copies = [text for text in notices if "servers again" in text or "on one server only" in text]
        missing: set[str] = set()
        for event in since:
            if event["event"] in ("worker-lost", "server-lost"):
                missing.add(f"{event['event'][:6]}/{event['rank']}")
            elif event["event"] == "notice" and ("trains again" in event["text"] or "takes part" in event["text"]):
                missing.discard(event["text"].split()[0])  # "server/1 on h2 takes part"
        return (not copies or "again" in copies[-1]) and not missing

    def lost(self) -> list[str]:
        """The lost processes so far: "worker/1", "server/0" ..."""
        return [f"{event['event'][:6]}/{event['rank']}" for event in self.of("worker-lost", "server-lost")]

    # ---- faults --------------------------------------------------------------------------------------

    def processes(self, kind: str) -> list[tuple[str, int]]:
        """Return (host, process id there) of a kind of process."""
        return [(host, pid) for host in self.hosts for pid, line in self.hosts.processes(host) if KINDS[kind] in line]

    def signal(self, host: str, pid: int, name: str) -> None:
        """Send a signal to a process of a host."""
        self.hosts.exec(host, ["kill", f"-{name}", str(pid)], check=False)

    # ---- the end ---------------------------------------------------------------------------------------------

    def stop_and_check(self, reference: Mapping[int, str], but: tuple[str, ...] = ()) -> int:
        """Stop the job, compare its values, and check that nothing is left; return the number of compared epochs."""
        compared = self.stop_and_compare(reference, but)
        self.check_clean(but)
        return compared

    def stop_and_compare(self, reference: Mapping[int, str], but: tuple[str, ...] = ()) -> int:
        """Stop the job, and compare the digest of every epoch; return the number of compared epochs.

        Args:
            reference: the digest after each epoch without faults.
            but: hosts without power, which cannot be stopped.
        """
        stopped = self.psctl.run("stop", self.job, timeout=DEADLINE)
        assert stopped.code in ((0, 10) if but else (0,)), stopped  # 10: a host cannot be reached
        last = self.of("finished")[-1]
        assert last["status"] == "stopped", last
        assert last["failure"] is None, last
        found = self.values()
        both = sorted(found.keys() & reference.keys())
        assert both, "no epoch to compare"
        wrong = [epoch for epoch in both if found[epoch] != reference[epoch]]
        assert not wrong, f"epochs {wrong} of {both[-1]} have other values than without faults"
        return len(both)

    def check_clean(self, but: tuple[str, ...] = ()) -> None:
        """Check that nothing of the job is left on any host: no process, port, shared memory or mount."""
        for name in self.hosts:
            if name not in but:
                until(
                    lambda name=name: not self.hosts.leftovers(name), 60, name=f"{name}: {self.hosts.leftovers(name)}"
                )
                mounts = Path(f"/proc/{self.hosts[name].init}/mounts").read_text()
                assert "psctl/host" not in mounts, mounts

    def report(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.job} on {len(list(self.hosts))} hosts, pid {os.getpid()}] {text}")
