"""A simulated world: one heap of happenings, one clock, one source of chance; processes that may die at any action.

Theory. Everything that happens is an entry of the heap, ordered by (time, when it was entered); all chance comes from
one generator seeded by the seed. So a seed is a whole run: it can be run again with every message written down.
A process acts when it sends or receives a message; a death is planned as "at its n-th action", so it can fall between
any two messages, also between two that one call produced.
A task is a generator: it yields Sleep or Until and goes on when the time has come or the condition holds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from psctl.types import Member

OFTEN = 4
"""Happenings between two looks at whether all is over."""

KILLED = -9
"""Status of a process that was killed."""


class Broken(AssertionError):
    """An invariant does not hold; `invariant` is its short name."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Died(BaseException):
    """Unwinds what a process was doing when it died."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """A task goes on after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Until:
    """A task goes on when `ready` holds; `what` says what it waits for, and `whom` for whom."""

    what: str
    ready: Callable[[], bool]
    whom: Callable[[], str] = lambda: ""


Task = Generator[Sleep | Until, None, None]


class World:
    """Time, chance, and what is going to happen."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.happened = 0
        self.trace: list[str] | None = [] if traced else None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        """Let `act(*args)` happen at `time`."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), act, args))

    def after(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Let `act(*args)` happen in `delay` seconds."""
        self.at(self.now + delay, act, *args)

    def say(self, text: Callable[[], str]) -> None:
        """Write a line of the trace, if one is wanted."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.6f}  {text()}")

    def run(self, until: Callable[[], bool], horizon: float) -> bool:
        """Let things happen until `until` holds (True) or the horizon is reached or nothing is left (False).

        `until` is asked now and then only: it may be dear.
        """
        heap, pop = self._heap, heapq.heappop
        while not until():
            for _ in range(OFTEN):
                if not heap or heap[0][0] > horizon:
                    return until()
                self.now, _, act, args = pop(heap)
                self.happened += 1
                try:
                    act(*args)
                except Died:
                    continue
        return True


@dataclass
class Waiting:
    """A task that waits."""

    task: Task
    until: Until | None = None
    since: float = 0.0
    due: bool = False  # its next turn is in the heap


@dataclass(eq=False)
class Process:
    """One process on a host.

    `dies_at` is the number of the action at which it dies, None for never. `ends` are its ends of connections.
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
    _tasks: list[Waiting] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.member}" + (f"+{self.member.incarnation}" if self.member.incarnation else "")

    def act(self) -> None:
        """Count one action; this may be the last one."""
        if not self.alive:
            raise Died
        self.actions += 1
        if self.actions == self.dies_at:
            self.end(KILLED)
            raise Died

    def end(self, status: int) -> None:
        """End the process: killed, or of itself."""
        if not self.alive:
            return
        self.world.say(lambda: f"{self} ends with status {status}")
        self.alive, self.status = False, status
        self._tasks.clear()
        for end in list(self.ends):
            end.died()
        self.ends.clear()
        if self.on_end is not None:
            self.on_end(self, status)

    def spawn(self, task: Task) -> None:
        """Begin a task now."""
        waiting = Waiting(task)
        self._tasks.append(waiting)
        self._schedule(waiting, 0.0)

    def poke(self) -> None:
        """Something changed: tasks whose condition holds go on soon."""
        for waiting in self._tasks:
            if waiting.until is not None and not waiting.due and waiting.until.ready():
                self._schedule(waiting, self.world.random.random() * 1e-3)

    def waits(self) -> list[str]:
        """Return what this process waits for, in words."""
        found = [waiting for waiting in self._tasks if waiting.until is not None]
        return [
            f"{self} waits for {one.until.what} since {one.since:.3f} s{one.until.whom()}"
            for one in found
            if one.until is not None
        ]

    def _schedule(self, waiting: Waiting, delay: float) -> None:
        waiting.due = True
        self.world.after(delay, self._turn, waiting)

    def _turn(self, waiting: Waiting) -> None:
        if not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, self._turn, waiting)
            return
        waiting.due = False
        if waiting.until is not None and not waiting.until.ready():
            return
        waiting.until = None
        try:
            wish = next(waiting.task)
        except StopIteration:
            if self.alive:
                self._tasks.remove(waiting)
            return
        if not self.alive:
            return
        if isinstance(wish, Sleep):
            self._schedule(waiting, wish.seconds)
            return
        waiting.until, waiting.since = wish, self.world.now
        if wish.ready():
            self._schedule(waiting, 0.0)
