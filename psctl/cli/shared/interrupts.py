"""What Ctrl-C and SIGTERM mean while a job is followed: one small table.

at a terminal    1st Ctrl-C: detach, unless a 2nd comes within 3 s, which checkpoints and stops; a 3rd kills
elsewhere        1st Ctrl-C: stop; 2nd: kill
everywhere       SIGTERM: stop; a second one: kill
"""

from __future__ import annotations

from typing import Literal

State = Literal["following", "leaving", "stopping", "killed", "left"]
Press = Literal["interrupt", "terminate", "time"]
Act = Literal["announce", "leave", "save", "stop", "kill"]

LINGER = 3.0
"""Seconds in which a second Ctrl-C is taken for one that follows the first."""

_TABLE: dict[tuple[State, Press], tuple[State, Act]] = {
    ("following", "terminate"): ("stopping", "stop"),
    ("leaving", "interrupt"): ("stopping", "save"),
    ("leaving", "terminate"): ("stopping", "stop"),
    ("leaving", "time"): ("left", "leave"),
    ("stopping", "interrupt"): ("killed", "kill"),
    ("stopping", "terminate"): ("killed", "kill"),
}

_FIRST: dict[tuple[str, bool], tuple[State, Act]] = {
    ("detach", True): ("leaving", "announce"),
    ("detach", False): ("left", "leave"),
    ("stop", True): ("stopping", "stop"),
    ("stop", False): ("stopping", "stop"),
}
"""The first Ctrl-C, by --on-interrupt and whether somebody sits at a terminal."""


class Ladder:
    """Counts presses and says what to do.

    Args:
        terminal: whether somebody sits there.
        on_interrupt: --on-interrupt; None: detach at a terminal, else stop.
    """

    def __init__(self, terminal: bool, on_interrupt: str | None = None) -> None:
        self.state: State = "following"
        self.by: str = ""  # who stopped the job, for the exit code and the event log
        self._first = _FIRST[on_interrupt or ("detach" if terminal else "stop"), terminal]
        self._since = 0.0

    def press(self, press: Press, now: float) -> Act | None:
        """Take in a press, or that time has passed; return what to do."""
        if press == "time" and now - self._since < LINGER:
            return None
        if (self.state, press) == ("following", "interrupt"):
            self.state, act = self._first
        elif (self.state, press) in _TABLE:
            self.state, act = _TABLE[self.state, press]
        else:
            return None
        self._since = now
        if act in ("stop", "save", "kill"):
            self.by = "SIGTERM" if press == "terminate" else "Ctrl-C"
        return act

    @property
    def exit(self) -> int:
        """The exit code of a job that was stopped from here."""
        return 143 if self.by == "SIGTERM" else 130
