"""A child of an agent gets shared memory through what it inherits, and nothing of it stays when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from psctl.agent.shm_broker import OFF, SegmentBroker
from psctl.transport.shared_memory import inherited
from psctl.types import Member

CHILD = """
import sys
from psctl.transport.shared_memory import inherited
from psctl.types import Member
mine = inherited(Member("worker", 0), int(sys.argv[1])).make(4096)
mine.memory[:5] = b"hello"
print(mine.number, flush=True)
sys.stdin.read()
"""


def test_a_killed_child_leaves_nothing() -> None:
    segments = SegmentBroker()
    worker, server = Member("worker", 0), Member("server", 0)
    with segments.opened(worker) as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    with segments.opened(server) as descriptor:
        reader = inherited(server, os.dup(descriptor))
    assert child.stdin is not None and child.stdout is not None
    number = int(child.stdout.readline())
    found = reader.get(worker, number)
    assert found is not None and bytes(found.part(0, 5)) == b"hello"
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    segments.ended(worker)
    assert reader.get(worker, number) is None
    assert bytes(found.part(0, 5)) == b"hello", "until we let go"
    with segments.opened(Member("worker", 0, incarnation=1)):
        assert reader.get(Member("worker", 0, incarnation=1), 0) is None, "a replacement has its own, when it asks"
    segments.ended(Member("worker", 0, incarnation=1))
    reader.close()
    segments.ended(server)
    segments.ended(server)
    child.stdin.close()
    child.stdout.close()


def test_a_process_that_requests_no_shared_memory_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF, "off")
    segments, worker = SegmentBroker(), Member("worker", 0)
    with segments.opened(worker) as descriptor:
        child = inherited(worker, os.dup(descriptor))
    assert child.make(4096) is None
    child.close()
    segments.ended(worker)
