"""Tickets: what a store gives for work that goes on, and the order in which work may begin.

Execute-after-finished (Li and others, OSDI 2014): a task begins when the tasks that it was given as `after` have
finished, and, under a bounded delay of tau, when all tasks before t - tau have: tau 0 is sequential, None eventual. So
at most tau + 1 tasks are under way. The delay may change at any time; it holds for what has not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Ticket:
    """One push, pull or call that goes on; made by a store.

    What people get wrong: a callback runs on the thread that heard of the end. It may push and call; it must not wait.
    """

    __slots__ = ("_callbacks", "_done", "_result", "_wait", "_what", "number")

    def __init__(self, number: int, what: str | tuple[str, Any], wait: Callable[[Ticket, float | None], Any]) -> None:
        self.number = number
        self._what = what
        self._wait = wait
        self._done = False
        self._result: Any = None
        self._callbacks: list[Callable[[Any], Any]] | None = None

    @property
    def what(self) -> str:
        """What is done, in words, for messages."""
        return self._what if isinstance(self._what, str) else f"{self._what[0]} {self._what[1]!r}"

    def __repr__(self) -> str:
        return f"Ticket({self.number}, {self.what}, {'done' if self._done else 'under way'})"

    @property
    def done(self) -> bool:
        """Has it finished?"""
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it has finished; returns what was pulled, None for a push or call.

        Args:
            timeout: seconds; None: as long as servers answer.

        Raises:
            TimedOut: `timeout` passed; names who is waited for.
            PsctlError: as `Store.wait`.
        """
        return self._result if self._done else self._wait(self, timeout)

    def then(self, callback: Callable[[Any], Any]) -> Ticket:
        """Have `callback` called with the result once it has finished; at once if it has. Returns the ticket."""
        if self._done:
            callback(self._result)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)
        return self

    def finish(self, result: Any) -> list[Callable[[], Any]]:
        """Note the end; return the callbacks, to be called by whoever holds no lock."""
        self._result, self._done = result, True  # in this order: who finds it done takes the result, without a lock
        if self._callbacks is None:
            return []
        found, self._callbacks = self._callbacks, None
        return [lambda each=each: each(result) for each in found]  # type: ignore[misc]

    @property
    def result(self) -> Any:
        """What was pulled, once it has finished."""
        return self._result


class Tasks:
    """Tickets that have not finished, and those whose work has not begun."""

    def __init__(self) -> None:
        self.delay: int | None = None
        """tau; None: eventual."""
        self._open: dict[int, Ticket] = {}
        self._waiting: list[tuple[Ticket, Sequence[Ticket], Callable[[], None]]] = []

    def add(self, ticket: Ticket, after: Sequence[Ticket], begin: Callable[[], None]) -> None:
        """Take a task on; it begins in `run`."""
        self.open(ticket)
        self._waiting.append((ticket, after, begin))

    def open(self, ticket: Ticket) -> None:
        """Take a task on that has begun."""
        self._open[ticket.number] = ticket

    def finished(self, number: int) -> Ticket | None:
        """Take a ticket out that has finished."""
        return self._open.pop(number, None)

    def get(self, number: int) -> Ticket | None:
        """Return a ticket that has not finished."""
        return self._open.get(number)

    @property
    def begun(self) -> bool:
        """Has the work of all tickets begun?"""
        return not self._waiting

    @property
    def oldest(self) -> Ticket | None:
        """The oldest that has not finished."""
        return next(iter(self._open.values()), None)

    def run(self) -> None:
        """Begin whatever may begin now."""
        moved = True
        while moved and self._waiting:
            moved = False
            for task in list(self._waiting):
                ticket, after, begin = task
                if task in self._waiting and all(each.done for each in after) and self._in_turn(ticket):
                    self._waiting.remove(task)
                    begin()
                    moved = True

    def _in_turn(self, ticket: Ticket) -> bool:
        oldest = self.oldest
        assert oldest is not None, "the ticket itself has not finished"
        return self.delay is None or oldest.number >= ticket.number - self.delay
