"""Ctrl-C pressed on a real terminal, and SIGTERM, while a training job is followed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from tests.helpers.running import ROOT, Psctl, next_event, set_args

pytestmark = pytest.mark.whole

STEADY = str(ROOT / "tests" / "whole" / "steady" / "job.yaml")
SEATED = (
    "import fcntl, os, sys, termios\n"
    "os.setsid()\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
"""Makes the terminal at standard input the controlling one, as a login does, and becomes the program."""


class Terminal:
    """psctl at a terminal of its own: keys go in, a screen comes out."""

    def __init__(self, psctl: Psctl, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self.screen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SEATED, *psctl.program, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**psctl.whole_environment(), "TERM": "xterm"}, cwd=psctl.home,
        )  # fmt: skip
        os.close(theirs)

    def ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def read(self, seconds: float) -> bool:
        """Take in what comes within so many seconds; False when psctl is gone and all is read."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            text = os.read(self._ours, 65536).decode(errors="replace")
        except OSError:  # nobody has it open any more
            return False
        self.screen += text
        return True

    def await_text(self, pattern: str, seconds: float = 60) -> None:
        """Wait until something like this was drawn; colours and cursor movements do not count."""
        end = time.monotonic() + seconds
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.screen)):
            assert self.read(0.2) and time.monotonic() < end, f"{pattern!r} never came\n{self.screen}"

    def end(self, seconds: float = 60) -> int:
        """Wait for its end; return the exit code."""
        end = time.monotonic() + seconds
        while self.read(0.2):
            assert time.monotonic() < end, f"psctl did not end\n{self.screen}"
        return self.process.wait(10)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


def left(home: Path) -> list[str]:
    """Processes of jobs under this home."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        environment = process.info["environ"] or {}
        line = " ".join(process.info["cmdline"] or [])
        if f"{home}/.psctl" in line or (environment.get("HOME") == str(home) and "PSCTL_JOB" in environment):
            found.append(line)
    return found


@pytest.fixture
def psctl(tmp_path: Path) -> Iterator[Psctl]:
    yield Psctl(tmp_path)
    for process in psutil.process_iter(["cmdline"]):
        if f"{tmp_path}/.psctl" in " ".join(process.info["cmdline"] or []):
            process.kill()


def states(psctl: Psctl) -> list[tuple[str, str]]:
    return [(job["job"], job["state"]) for job in psctl.run("jobs", "-o", "json").document["jobs"]]


def newest(psctl: Psctl) -> Any:
    return max(each["step"] for each in psctl.run("checkpoint", "list", "-o", "json").document["checkpoints"])


@pytest.mark.soak  # tests/cli/test_jobs_here.py presses it too
def test_ctrl_c_detaches_and_pressed_again_it_saves_and_stops(psctl: Psctl) -> None:
    slow = set_args("--epochs", "400", "--pause", "0.05")
    rare = ("--set", "checkpoint.every=100000 steps", "--set", "checkpoint.on_stop=false")
    with Terminal(psctl, "train", STEADY, *slow, *rare) as terminal:
        terminal.await_text(r"loss +[0-9]")
        terminal.ctrl_c()
        assert terminal.end() == 0, terminal.screen
    for needle in ("psctl attach steady-1", "psctl stop steady-1"):
        assert needle in terminal.screen
    assert terminal.screen.rindex("\x1b[?25h") > terminal.screen.rindex("\x1b[?25l"), "the cursor is shown again"
    assert states(psctl) == [("steady-1", "running")]

    with Terminal(psctl, "attach") as terminal:
        terminal.await_text(r"loss +[0-9]")
        terminal.ctrl_c()
        terminal.await_text("press Ctrl-C again")
        terminal.ctrl_c()
        assert terminal.end() == 130, terminal.screen
    assert states(psctl) == [("steady-1", "stopped")]
    assert left(psctl.home) == []
    finished = json.loads(psctl.run("attach", "-o", "jsonl").out.splitlines()[-1])
    assert (finished["status"], finished["exit"]) == ("stopped", 130)
    assert newest(psctl) == finished["steps"] > 0


@pytest.mark.soak
def test_a_third_ctrl_c_kills(psctl: Psctl) -> None:
    with Terminal(psctl, "train", STEADY, *set_args("--pause", "60")) as terminal:
        terminal.await_text(r"step +1 ")
        for needle in ("press Ctrl-C again", "once more kills", "killing"):
            terminal.ctrl_c()
            terminal.await_text(needle)
        begin = time.monotonic()
        assert terminal.end() == 130, terminal.screen
        assert time.monotonic() - begin < 15
        terminal.await_text("steady-1 stopped: 1 step")
    assert left(psctl.home) == []
    assert states(psctl) == [("steady-1", "stopped")]
    [job] = (psctl.home / ".psctl/host/jobs").glob("*/local")
    assert not {"private", "agent.sock", "agent.pid"} & {path.name for path in job.iterdir()}


@pytest.mark.soak
def test_on_interrupt_stop_at_a_terminal_and_sigterm_away_from_one(psctl: Psctl) -> None:
    slow = ["--workers", "1", "--servers", "1", *set_args("--epochs", "400", "--pause", "0.05")]
    with Terminal(psctl, "train", STEADY, "--on-interrupt", "stop", *slow) as terminal:
        terminal.await_text(r"loss +[0-9]")
        terminal.ctrl_c()
        assert terminal.end() == 130, terminal.screen
    assert left(psctl.home) == []
    with psctl.start("train", STEADY, "-o", "jsonl", *slow) as process:
        next_event(process, "checkpoint")
        with psctl.start("attach", "-o", "jsonl") as other:
            next_event(other, "checkpoint")
            process.send_signal(signal.SIGTERM)
            assert next_event(other, "finished")["exit"] == other.wait(30) == 1, "stopped by another"
        finished = next_event(process, "finished")
        assert process.wait(30) == finished["exit"] == 143
    assert finished["status"] == "stopped"
    assert left(psctl.home) == []
    assert newest(psctl) == finished["steps"] > 10, "on_stop: a checkpoint of the step it stopped at"
    assert states(psctl) == [("steady-1", "stopped"), ("steady-2", "stopped")]
