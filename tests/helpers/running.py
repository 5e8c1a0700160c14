"""Running psctl as a user does: a process, its two streams, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
STEADY = ROOT / "tests" / "whole" / "steady" / "job.yaml"


@dataclass
class Ended:
    """A finished run of psctl."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def __str__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass
class Psctl:
    """psctl with a HOME of its own.

    Args:
        home: its HOME and working directory.
        program: the command that runs psctl.
        environment: variables in addition to those of this process.
    """

    home: Path
    program: tuple[str, ...] = (sys.executable, "-m", "psctl")
    environment: Mapping[str, str] = field(default_factory=dict)

    def whole_environment(self) -> dict[str, str]:
        """Return the environment in which psctl runs."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PSCTL_")}
        paths = {"PYTHONPATH": str(ROOT)} if self.program[0] == sys.executable else {}
        return {**inherited, "HOME": str(self.home), **paths, **self.environment}

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start psctl in a session of its own; both streams are pipes."""
        return subprocess.Popen(
            [*self.program, *arguments], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.whole_environment(),
            cwd=cwd or self.home, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, cwd: Path | None = None, timeout: float = 240) -> Ended:
        """Run psctl to its end."""
        with self.start(*arguments, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"psctl {' '.join(arguments)} did not end in {timeout} s\n{out}\n{err}") from None
        return Ended(process.returncode, out, err)


def until(what: Callable[[], Any], seconds: float = 30, every: float = 0.02, name: str = "") -> Any:
    """Wait until `what` is true and return what it returned; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {name or what}"
        time.sleep(every)


def processes(home: Path, role: str) -> list[int]:
    """Return the process ids of a role's processes under a HOME, oldest first.

    Only root may read the environment of a process that hides its memory, as servers do; their command line has a mark.
    """
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "pid", "create_time"]):
        environment, line = process.info["environ"] or {}, " ".join(process.info["cmdline"] or [])
        named = environment.get("HOME") == str(home) and environment.get("PSCTL_ROLE") == role
        if named or (f"psctl.{role}.main" in line and f"PSCTL_ORDERS={home}/" in line):
            found.append((process.info["create_time"], process.info["pid"]))
    return [pid for _, pid in sorted(found)]


def next_event(process: subprocess.Popen[str], kind: str) -> dict[str, Any]:
    """Read a running psctl's JSON lines up to the next event of a kind."""
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == kind:
            return event
    raise AssertionError(f"psctl ended before a {kind} event; stderr: {process.stderr and process.stderr.read()}")


def rest_of(process: subprocess.Popen[str], timeout: float = 60) -> tuple[str, str]:
    """Return what a running psctl still prints on its two streams, to its end.

    `communicate` loses the lines that were read together with the one that `next_event` returned.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream.read) for stream in (process.stdout, process.stderr)]
        try:
            process.wait(timeout)
        finally:
            process.kill()  # if it has not ended: else the streams have no end
        out, err = (stream.result() for stream in streams)
    return out, err


def set_args(*words: str) -> list[str]:
    """Return the options of `train` that give its script these arguments."""
    return ["--set", "args=[" + ", ".join(f'"{word}"' for word in words) + "]"]


def assert_clean(hosts: Any) -> None:
    """Wait until nothing of psctl is left on any test host."""
    for name in hosts:
        until(lambda name=name: not hosts.leftovers(name), 20, name=f"{name}: {hosts.leftovers(name)}")
