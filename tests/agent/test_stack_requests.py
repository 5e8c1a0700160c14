"""An agent reads its children's stacks, whatever holds them up; a process that is not ready for the signal lives."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.agent.processes import AgentChild
from psctl.agent.stack_requests import StackDumps
from psctl.job.process_messages import Stacks
from psctl.process.secret_masking import Secrets
from psctl.types import Member

ROOT = Path(__file__).resolve().parents[2]
W0 = Member("worker", 0)

SCRIPT = """
import ctypes, sys, threading, time
from psctl.process import stack_dump

def load():
    time.sleep(100)

def hold():
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock
    library.pthread_mutex_lock(mutex)
    print("here", flush=True)
    library.pthread_mutex_lock(mutex)  # for ever; not "s3cret"

if sys.argv[1] != "0":
    stack_dump.arm(int(sys.argv[1]))
threading.Thread(target=load, daemon=True).start()
hold()
"""


class Scene:
    """A child that holds the interpreter lock, and its agent's side."""

    def __init__(self, folder: Path, *, armed: bool) -> None:
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self.stacks = StackDumps(str(folder), Secrets(["s3cret"]))
        with self.stacks.opened(W0) as descriptor:
            self.popen = subprocess.Popen(
                [sys.executable, str(script), str(descriptor if armed else 0)],
                pass_fds=[descriptor], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == b"here\n"

    def ask(self) -> Stacks:
        answers: queue.Queue[Stacks] = queue.Queue()
        self.stacks.ask([(AgentChild(self.popen), W0)], answers.put)
        return answers.get(timeout=20)

    def end(self) -> None:
        self.stacks.ended(W0)
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(tmp_path, armed=request.param)
    yield made
    made.end()


@pytest.mark.parametrize("scene", [True], indirect=True)
def test_stacks_come_while_the_interpreter_lock_is_held_and_again(scene: Scene) -> None:
    for _ in range(2):
        while "print" in (found := scene.ask()).main[-1]:
            pass  # it is not at the lock yet
        assert found.problem == ""
        assert found.main[0] == "train.py:17 in <module>: hold()"
        assert found.main[1].startswith("train.py:12 in hold: library.pthread_mutex_lock(mutex)")
        assert "s3cret" not in found.main[1]
        assert [thread[-1] for thread in found.others] == ["train.py:6 in load: time.sleep(100)"]


@pytest.mark.parametrize("scene", [True], indirect=True)
def test_a_stopped_process_is_reported_as_stopped(scene: Scene) -> None:
    os.kill(scene.popen.pid, signal.SIGSTOP)
    found = scene.ask()
    assert found.main == ()
    assert "SIGSTOP" in found.problem


@pytest.mark.parametrize("scene", [False], indirect=True)
def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(scene: Scene) -> None:
    found = scene.ask()
    assert (found.main, found.problem != "") == ((), True)
    assert scene.popen.poll() is None
