"""Stacks as text."""

from __future__ import annotations

import io

from psctl.view.console import make_console
from psctl.view.stacks import draw_stacks

OWN = ["train.py:9 in <module>: main()", "train.py:4 in main: lock.acquire()"]
LIBRARY = ["/usr/lib/python3/threading.py:1 in wait"]


def process(rank, host="a", main=OWN, threads=(), problem=""):
    return {"rank": rank, "host": host, "main": main, "threads": list(threads), "problem": problem}


def drawn(*processes, every=False):
    stream = io.StringIO()
    draw_stacks(make_console(stream, environment={}), {"job": "j-1", "processes": list(processes)}, every=every)
    return stream.getvalue().splitlines()


def test_processes_with_equal_stacks_are_joined():
    lines = drawn(process("worker/0"), process("worker/1", main=OWN[:1]), process("worker/2", "b"))
    assert lines == [
        "worker/0, worker/2 on 2 hosts: 2 processes", *(f"  {frame}" for frame in OWN), "",
        "worker/1 on a", f"  {OWN[0]}",
    ]  # fmt: skip


def test_threads_of_libraries_are_counted_and_shown_when_asked_for():
    one = process("worker/0", threads=[LIBRARY, LIBRARY, OWN[:1]])
    assert drawn(one)[3:] == ["  another thread:", f"    {OWN[0]}", "  and 2 threads of libraries"]
    assert drawn(one, every=True)[3:] == [
        "  2 other threads:", f"    {LIBRARY[0]}", "  another thread:", f"    {OWN[0]}",
    ]  # fmt: skip


def test_the_folders_of_psctl_and_of_packages_are_left_out():
    code = "/home/a/.psctl/code/" + "0f" * 20
    frames = [f"{code}/psctl/server/main.py:4 in run", "/usr/lib/python3.11/threading.py:3 in wait",
              "/v/lib/python3.11/site-packages/torch/x.py:2 in f", "/opt/own.py:1 in g"]  # fmt: skip
    assert drawn(process("server/0", main=frames))[1:] == [
        "  psctl/server/main.py:4 in run", "  python3.11/threading.py:3 in wait", "  torch/x.py:2 in f",
        "  /opt/own.py:1 in g",
    ]  # fmt: skip


def test_the_reason_of_a_missing_stack_is_shown():
    assert drawn(process("worker/1", main=[], problem="the process is stopped")) == [
        "worker/1 on a", "  the process is stopped",
    ]  # fmt: skip
    assert drawn() == ["no process runs now"]


def test_a_frame_cannot_write_to_the_terminal():
    text = "".join(drawn(process("worker/0", main=["train.py:1 in f: \x1b]0;evil\x07x\x1b[2J"])))
    assert "\x1b" not in text and "\x07" not in text
