"""The effect of Ctrl-C and SIGTERM while a job is followed, as a table.

at a terminal    1st Ctrl-C: detach, unless a 2nd comes within 3 s, which checkpoints and stops; a 3rd kills
elsewhere        1st Ctrl-C: stop; 2nd: kill
everywhere       SIGTERM: stop; a second one: kill
"""

from __future__ import annotations

from typing import Literal

FollowState = Literal["following", "leaving", "stopping", "killed", "left"]
Input = Literal["interrupt", "terminate", "time"]
Action = Literal["announce", "leave", "save", "stop", "kill"]

LINGER = 3.0
"""Seconds in which a second Ctrl-C counts as following the first."""

_TABLE: dict[tuple[FollowState, Input], tuple[FollowState, Action]] = {
    ("following", "terminate"): ("stopping", "stop"),
    ("leaving", "interrupt"): ("stopping", "save"),
    ("leaving", "terminate"): ("stopping", "stop"),
    ("leaving", "time"): ("left", "leave"),
    ("stopping", "interrupt"): ("killed", "kill"),
    ("stopping", "terminate"): ("killed", "kill"),
}

_FIRST: dict[tuple[str, bool], tuple[FollowState, Action]] = {
    ("detach", True): ("leaving", "announce"),
    ("detach", False): ("left", "leave"),
    ("stop", True): ("stopping", "stop"),
    ("stop", False): ("stopping", "stop"),
}
"""The first Ctrl-C, by --on-interrupt and whether psctl runs at a terminal."""


class InterruptPolicy:
    """Decides the action on a signal from the signals before it.

    Args:
        terminal: whether psctl runs at a terminal.
        on_interrupt: --on-interrupt; None: detach at a terminal, else stop.
    """

    def __init__(self, terminal: bool, on_interrupt: str | None = None) -> None:
        self.state: FollowState = "following"
        self.by: str = ""  # the signal that stopped the job, for the exit code and the event log
        self._first = _FIRST[on_interrupt or ("detach" if terminal else "stop"), terminal]
        self._since = 0.0

    def next_action(self, received: Input, now: float) -> Action | None:
        """Return the action on a signal, or on the passing of time; None when nothing is to be done."""
        if received == "time" and now - self._since < LINGER:
            return None
        if (self.state, received) == ("following", "interrupt"):
            self.state, action = self._first
        elif (self.state, received) in _TABLE:
            self.state, action = _TABLE[self.state, received]
        else:
            return None
        self._since = now
        if action in ("stop", "save", "kill"):
            self.by = "SIGTERM" if received == "terminate" else "Ctrl-C"
        return action

    @property
    def exit(self) -> int:
        """The exit code of a job that this process stopped."""
        return 143 if self.by == "SIGTERM" else 130
