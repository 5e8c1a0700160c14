"""The processes of one host: start, watch, end. All of it on the agent's main thread.

The main thread, because a child's death signal follows the thread that started it. Each child has its own session, so
its whole family can be told apart; when it ends, what it left behind in that session is ended too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from psctl.agent import supervisor
from psctl.agent.resource_usage import MemoryKills
from psctl.job.process_messages import HostSample
from psctl.process import lifeline


class AgentChild:
    """A process that the agent has started.

    `memory` tells, once it has ended in trouble, what speaks for the kernel having killed it or a process of its own
    for lack of memory; "" when nothing does, or when we killed it.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = popen.pid
        self.status: int | None = None
        self.memory = ""
        self._killed = False
        self._popen = popen

    def ended(self, status: int, memory: MemoryKills) -> None:
        """Take in how it ended: its exit status, or minus the signal's number."""
        self.status = self._popen.returncode = status
        if status and not self._killed:
            self.memory = memory.evidence()

    def signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        self._killed = self._killed or number == signal.SIGKILL
        if self.status is None:  # not reaped yet, so the number cannot be another's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Processes:
    """All children of an agent.

    Args:
        lifeline_end: reading end of the pipe that ends with the agent and its keeper.
    """

    def __init__(self, lifeline_end: int) -> None:
        self._lifeline = lifeline_end
        self._memory_kills = MemoryKills()
        self._children: dict[int, AgentChild] = {}
        self._ended: list[AgentChild] = []

    def start(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        descriptors: Sequence[int] = (),
        umask: int = -1,
    ) -> AgentChild:
        """Start a process that arms itself (process/lifeline.py).

        Args:
            name: for people.
            stdout, stderr: descriptors that it writes to; they stay the caller's.
            descriptors: further ones that it inherits.
            umask: its own; -1: the agent's.

        Raises:
            OSError: it cannot be started.
        """
        # A fresh description of the pipe for each child: whom the kernel ends at its end of file belongs to it.
        tie = os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            options: dict[str, Any] = {
                "start_new_session": True,
                "pass_fds": (tie, *descriptors),
                "stdin": subprocess.DEVNULL,
                "umask": umask,
            }
            popen = subprocess.Popen(
                list(argv), cwd=cwd, stdout=stdout, stderr=stderr,
                env={**environment, lifeline.ENVIRONMENT: f"{tie}:{os.getpid()}"}, **options,
            )  # fmt: skip
        finally:
            os.close(tie)
        child = AgentChild(name, popen)
        self._children[child.pid] = child
        return child

    def sample(self, host: str) -> HostSample:
        """Return how busy the host is; call it every few seconds."""
        self._memory_kills.update()
        return HostSample(host, psutil.cpu_percent() / 100, psutil.virtual_memory().percent / 100)

    @property
    def running(self) -> list[AgentChild]:
        """Children that have not ended."""
        return list(self._children.values())

    def reap(self) -> None:
        """Take in the ends of children, and of orphans that fell to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                child = self._children.pop(pid, None)
                if child is not None:
                    child.ended(os.waitstatus_to_exitcode(status), self._memory_kills)
                    self._ended.append(child)

    def ended(self) -> list[AgentChild]:
        """Return children that have ended since the last call."""
        self.reap()
        ended, self._ended = self._ended, []
        return ended

    def end_family(self, child: AgentChild) -> None:
        """End what a child that has ended left behind in its session."""
        supervisor.sweep(lambda process: _session(process) == child.pid, reap=self.reap)

    def signal_all(self, number: int, but: AgentChild | None = None) -> None:
        """Send a signal to all children that run, except one."""
        for child in self.running:
            if child is not but:
                child.signal(number)

    def end_all(self, but: AgentChild | None = None) -> None:
        """End all children and all that descends from them, except one child; wait until they are gone."""
        spared = {but.pid, *_family(but.pid)} if but is not None and but.status is None else set()
        self.signal_all(signal.SIGKILL, but)
        supervisor.sweep(lambda process: process.pid not in spared, reap=self.reap)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _family(pid: int) -> set[int]:
    return {each.pid for each in supervisor.descendants(pid)}
