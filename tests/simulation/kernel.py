"""A discrete-event simulation: a queue of events, a clock, one random generator, and processes that can be killed.

Events run in the order (time, order of entry), and every random number comes from one generator with the run's seed.
So a seed determines a run, and a run can be repeated with a trace of its messages. An action of a process is a message
sent or received. A kill is planned for the n-th action, so it can fall between any two messages, also between two
messages of one call. A task is a generator that yields Sleep or Until.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from psctl.types import Member

EVENTS_PER_CHECK = 4
"""Events between two checks whether the run is over."""

KILLED = -9
"""Exit status of a process that was killed."""


class Violation(AssertionError):
    """An invariant does not hold. `invariant` is its short name."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class ProcessDied(BaseException):
    """Ends the call in which a process was killed."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The task continues after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Until:
    """The task continues when `ready` returns True. The report of a hang contains `description` and `details()`."""

    description: str
    ready: Callable[[], bool]
    details: Callable[[], str] = lambda: ""


Task = Generator[Sleep | Until, None, None]


class World:
    """The simulated time, the random generator and the queue of events."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.event_count = 0
        self.trace: list[str] | None = [] if traced else None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at `time`, in simulated seconds."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action, args))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` after `delay` seconds."""
        self.at(self.now + delay, action, *args)

    def log(self, text: Callable[[], str]) -> None:
        """Add a line to the trace, if the run is traced."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.6f}  {text()}")

    def run(self, until: Callable[[], bool], time_limit: float) -> bool:
        """Run events; return whether `until` held before the queue was empty or `time_limit` was reached.

        `until` is called once in EVENTS_PER_CHECK events, because it may be slow.
        """
        heap, pop = self._heap, heapq.heappop
        while not until():
            for _ in range(EVENTS_PER_CHECK):
                if not heap or heap[0][0] > time_limit:
                    return until()
                self.now, _, action, args = pop(heap)
                self.event_count += 1
                try:
                    action(*args)
                except ProcessDied:
                    continue
        return True


@dataclass
class WaitingTask:
    """A task and the condition that it waits for."""

    task: Task
    until: Until | None = None
    since: float = 0.0
    due: bool = False  # an event that resumes it is in the queue


@dataclass(eq=False)
class Process:
    """One process on a host.

    `dies_at` is the number of the action at which it is killed, or None. `ends` are its ends of connections.
    """

    world: World
    member: Member
    host: int
    dies_at: int | None = None
    alive: bool = True
    status: int | None = None  # exit status, once it has ended
    actions: int = 0
    paused_until: float = 0.0
    ends: dict[Any, None] = field(default_factory=dict)
    on_end: Callable[[Process, int], None] | None = None
    _tasks: list[WaitingTask] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.member}" + (f"+{self.member.incarnation}" if self.member.incarnation else "")

    def count_action(self) -> None:
        """Count an action, and kill the process if it is number `dies_at`."""
        if not self.alive:
            raise ProcessDied
        self.actions += 1
        if self.actions == self.dies_at:
            self.end(KILLED)
            raise ProcessDied

    def end(self, status: int) -> None:
        """End the process with an exit status; a negative status is a signal."""
        if not self.alive:
            return
        self.world.log(lambda: f"{self} ends with status {status}")
        self.alive, self.status = False, status
        self._tasks.clear()
        for end in list(self.ends):
            end.on_process_end()
        self.ends.clear()
        if self.on_end is not None:
            self.on_end(self, status)

    def spawn(self, task: Task) -> None:
        """Start a task."""
        waiting = WaitingTask(task)
        self._tasks.append(waiting)
        self._schedule(waiting, 0.0)

    def wake_tasks(self) -> None:
        """Schedule the tasks whose condition holds now."""
        for waiting in self._tasks:
            if waiting.until is not None and not waiting.due and waiting.until.ready():
                self._schedule(waiting, self.world.random.random() * 1e-3)

    def describe_waits(self) -> list[str]:
        """Return a line for each task that waits."""
        return [
            f"{self} has waited for {waiting.until.description} since {waiting.since:.3f} s{waiting.until.details()}"
            for waiting in self._tasks
            if waiting.until is not None
        ]

    def _schedule(self, waiting: WaitingTask, delay: float) -> None:
        waiting.due = True
        self.world.after(delay, self._resume, waiting)

    def _resume(self, waiting: WaitingTask) -> None:
        if not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, self._resume, waiting)
            return
        waiting.due = False
        if waiting.until is not None and not waiting.until.ready():
            return
        waiting.until = None
        try:
            request = next(waiting.task)
        except StopIteration:
            if self.alive:
                self._tasks.remove(waiting)
            return
        if not self.alive:
            return
        if isinstance(request, Sleep):
            self._schedule(waiting, request.seconds)
            return
        waiting.until, waiting.since = request, self.world.now
        if request.ready():
            self._schedule(waiting, 0.0)
