"""A process that ignores SIGTERM from outside, and ends at once when its agent ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from psctl.process import end_signal
from tests.helpers.running import until

BEGIN = "import ctypes, os, signal, subprocess, sys, time\nfrom psctl.process import end_signal\nend_signal.arm()\n"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def start(started: list[subprocess.Popen[str]], code: str) -> subprocess.Popen[str]:
    made = subprocess.Popen([sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, text=True)
    started.append(made)
    assert made.stdout is not None
    assert made.stdout.readline() == "up\n"
    return made


@pytest.mark.parametrize("wait", ["time.sleep(60)", "ctypes.CDLL(None).pause()"])
def test_sigterm_alone_does_nothing_and_both_end_it_at_once(started: list[subprocess.Popen[str]], wait: str) -> None:
    code = "print('up', flush=True)\nsys.stdin.close()\n" + (wait + "\n") * 3
    process = start(started, code)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert end_signal.armed(process.pid)
    os.kill(process.pid, end_signal.NUMBER)
    assert process.wait(10) == -signal.SIGTERM


def test_a_scripts_own_handler_has_the_word(started: list[subprocess.Popen[str]]) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('up', flush=True)\ntime.sleep(60)"
    process = start(started, code)
    os.kill(process.pid, end_signal.NUMBER)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 7


@pytest.mark.parametrize(
    "child",
    [
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid",
        "os.fork() or time.sleep(60) or os._exit(0)",
    ],
)
def test_children_end_by_sigterm_as_always(started: list[subprocess.Popen[str]], child: str) -> None:
    lines = (
        f"child = {child}",
        "print('up')",
        "print(child, flush=True)",
        "print(os.waitpid(child, 0)[1], flush=True)",
    )
    code = "\n".join(lines)
    process = start(started, code)
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGTERM)
    assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"


def test_a_process_that_is_not_armed_is_known(started: list[subprocess.Popen[str]]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        until(lambda: not end_signal.armed(other.pid), name="the start of sleep")
        other.kill()
    assert not end_signal.armed(other.pid)
