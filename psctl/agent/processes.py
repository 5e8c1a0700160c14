"""The processes of a job on one host: start, monitor, end. Called on the agent's main thread only.

The kernel sends a child its death signal when the thread that started it ends; the main thread ends with the agent.
Each child has its own session, which identifies its descendants; when the child ends, processes that remain in its
session are ended too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import psutil

from psctl.agent import supervisor
from psctl.agent.resource_usage import MemoryKills
from psctl.process import end_signal, lifeline


class AgentChild:
    """A process that the agent has started.

    `memory` is set when it ends with a failure: the evidence that the kernel killed it or one of its children for lack
    of memory; "" when there is none, or when the agent killed it.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self.status: int | None = None
        self.memory = ""
        self._killed = False
        self._popen = popen

    def ended(self, status: int, memory: MemoryKills) -> None:
        """Record the exit status, or minus the number of the signal that ended the process."""
        self.status = self._popen.returncode = status
        if status and not self._killed:
            self.memory = memory.evidence()

    def signal(self, number: int) -> None:
        """Send the process a signal; does nothing when it has ended."""
        self._killed = self._killed or number == signal.SIGKILL
        if self.status is None:  # not reaped yet, so the id is not reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def ask_to_end(self) -> None:
        """Send the process SIGTERM, and confirm it where the process ignores it otherwise (process/end_signal.py)."""
        self.signal(signal.SIGTERM)
        if self.status is None and end_signal.armed(self.pid):
            self.signal(end_signal.NUMBER)


class Processes:
    """All children of an agent.

    Args:
        lifeline_end: reading end of the pipe that ends with the agent and its supervisor.
    """

    def __init__(self, lifeline_end: int) -> None:
        self._lifeline = lifeline_end
        self._memory_kills = MemoryKills()
        self._children: dict[int, AgentChild] = {}
        self._ended: list[AgentChild] = []

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdout: int, stderr: int,
        descriptors: Sequence[int] = (), umask: int = -1,
    ) -> AgentChild:  # fmt: skip
        """Start a process, which ties itself to the agent (process/lifeline.py).

        Args:
            stdout, stderr: descriptors that it writes to; the caller closes them.
            descriptors: further descriptors that it inherits.
            umask: its umask; -1: the agent's.

        Raises:
            OSError: it cannot be started.
        """
        # A new open file description for each child: the signal at end of file is set for one description.
        tie = os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            popen = subprocess.Popen(
                list(argv), cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**environment, lifeline.ENVIRONMENT: f"{tie}:{os.getpid()}"},
                pass_fds=(tie, *descriptors), start_new_session=True, umask=umask,
            )  # fmt: skip
        finally:
            os.close(tie)
        child = AgentChild(popen)
        self._children[child.pid] = child
        return child

    def update_memory_kills(self) -> None:
        """Note the processes that the kernel killed for memory; call it every few seconds."""
        self._memory_kills.update()

    @property
    def running(self) -> list[AgentChild]:
        """Children that have not ended."""
        return list(self._children.values())

    def reap(self) -> None:
        """Reap children that have ended, and orphans that the agent inherited."""
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
        """End the processes that remain in the session of a child that has ended."""
        supervisor.sweep(lambda process: _session(process) == child.pid, reap=self.reap)

    def ask_all_to_end(self, but: Sequence[AgentChild] = ()) -> None:
        """Send SIGTERM to all children that run, except some."""
        for child in self.running:
            if child not in but:
                child.ask_to_end()

    def end_all(self, but: Sequence[AgentChild] = ()) -> None:
        """End all children and their descendants, except those of some children; wait until they have ended."""
        spared = {pid for child in but if child.status is None for pid in (child.pid, *_family(child.pid))}
        for child in self.running:
            if child not in but:
                child.signal(signal.SIGKILL)
        supervisor.sweep(lambda process: process.pid not in spared, reap=self.reap)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _family(pid: int) -> set[int]:
    return {each.pid for each in supervisor.descendants(pid)}
