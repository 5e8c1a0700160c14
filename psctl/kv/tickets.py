"""Tickets of a store's asynchronous calls, and the order in which the calls start.

Execute-after-finished (Li and others, OSDI 2014): task t starts when the tasks in its `after` have finished and, under
a bounded delay of tau, all tasks before t - tau have finished: tau 0 is sequential, None eventual. At most tau + 1
tasks are in flight. The delay may change at any time; a change applies to tasks that have not started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Result: TypeAlias = Any
"""The value that a pull returns; None for a push or a call. Any: the form of the key decides between a tensor, a pair
and a dict, and a script uses the one that it asked for."""

Callback: TypeAlias = Callable[[Result], object]
"""Called with the result of a ticket: the pulled value, or None."""


class Ticket:
    """One push, pull or call in flight; `Store.push`, `Store.fetch` and `Store.call` return it.

    A callback runs on the thread that received the last answer. It may start pushes and calls; it must not wait.
    """

    __slots__ = ("_callbacks", "_done", "_result", "_wait", "_what", "number")

    def __init__(
        self, number: int, what: str | tuple[str, str | int], wait: Callable[[Ticket, float | None], Result]
    ) -> None:
        self.number = number
        self._what = what
        self._wait = wait
        self._done = False
        self._result: Result = None
        self._callbacks: list[Callback] | None = None

    @property
    def what(self) -> str:
        """A description of the task, for error messages."""
        return self._what if isinstance(self._what, str) else f"{self._what[0]} {self._what[1]!r}"

    def __repr__(self) -> str:
        return f"Ticket({self.number}, {self.what}, {'done' if self._done else 'under way'})"

    @property
    def done(self) -> bool:
        """Whether the task has finished."""
        return self._done

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the task has finished and return its result.

        Args:
            timeout: seconds; None: no limit while the servers answer.

        Returns:
            The pulled value; None for a push or a call.

        Raises:
            TimedOut: `timeout` passed; the message names the servers that have not answered.
            PsctlError: as `Store.wait`.
        """
        return self._result if self._done else self._wait(self, timeout)

    def then(self, callback: Callback) -> Ticket:
        """Call `callback` with the result when the task finishes, or now if it has finished; return this ticket."""
        if self._done:
            callback(self._result)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)
        return self

    def finish(self, result: Result) -> list[Callable[[], object]]:
        """Set the result and return the callbacks; the caller runs them without holding a lock."""
        self._result = result
        self._done = True  # last: a thread that finds the ticket done reads the result without a lock
        if self._callbacks is None:
            return []
        found, self._callbacks = self._callbacks, None
        return [lambda each=each: each(result) for each in found]  # type: ignore[misc]

    @property
    def result(self) -> Result:
        """The pulled value, once the task has finished."""
        return self._result


class Tasks:
    """The tasks of a store that have not finished, and the order in which they start."""

    def __init__(self) -> None:
        self.delay: int | None = None
        """tau; None: eventual."""
        self._open: dict[int, Ticket] = {}
        self._waiting: list[tuple[Ticket, Sequence[Ticket], Callable[[], None]]] = []

    def add(self, ticket: Ticket, after: Sequence[Ticket], start: Callable[[], None]) -> None:
        """Add a task, which `start_ready` starts."""
        self.add_started(ticket)
        self._waiting.append((ticket, after, start))

    def add_started(self, ticket: Ticket) -> None:
        """Add a task that has started."""
        self._open[ticket.number] = ticket

    def remove(self, number: int) -> Ticket | None:
        """Remove and return the ticket of a finished task."""
        return self._open.pop(number, None)

    @property
    def all_started(self) -> bool:
        """Whether all tasks have started."""
        return not self._waiting

    @property
    def oldest(self) -> Ticket | None:
        """The oldest ticket that has not finished."""
        return next(iter(self._open.values()), None)

    def start_ready(self) -> None:
        """Start all tasks that the delay permits and that have no unfinished dependencies."""
        started = True
        while started and self._waiting:
            started = False
            for task in list(self._waiting):
                ticket, after, start = task
                if task in self._waiting and all(each.done for each in after) and self._is_in_order(ticket):
                    self._waiting.remove(task)
                    start()
                    started = True

    def _is_in_order(self, ticket: Ticket) -> bool:
        oldest = self.oldest
        assert oldest is not None, "the ticket itself has not finished"
        return self.delay is None or oldest.number >= ticket.number - self.delay
