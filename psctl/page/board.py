"""The jobs that a live page shows: threads add events, others wait for changes."""

from __future__ import annotations

import threading

from psctl.job.events import AnyEvent
from psctl.page.history import JobHistory
from psctl.types import Document


class Board:
    """Histories of jobs, safe for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._histories: dict[str, JobHistory] = {}
        self._problems: dict[str, str] = {}
        self._steps: dict[str, Document] = {}
        self._known: list[Document] = []

    def add(self, history: JobHistory) -> bool:
        """Show a job; return False when it is shown already."""
        with self._changed:
            if history.job in self._histories:
                return False
            self._histories[history.job] = history
            self._note_change()
            return True

    def apply(self, job: str, event: AnyEvent) -> None:
        """Add an event of a job."""
        with self._changed:
            self._histories[job].apply(event)
            self._note_change()

    def set_problem(self, job: str, text: str) -> None:
        """Show why nothing new of a job can be read; "" when it can be again."""
        with self._changed:
            if self._problems.get(job, "") != text:
                self._problems[job] = text
                self._note_change()

    def set_steps(self, job: str, steps: Document) -> None:
        """Show the times of a job's newest steps, as `page.history.steps_document` returns them."""
        with self._changed:
            self._steps[job] = steps
            self._note_change()

    def set_known(self, jobs: list[Document]) -> None:
        """Set the jobs that may be opened: `job` and `state` each."""
        with self._changed:
            if jobs != self._known:
                self._known = jobs
                self._note_change()

    def document(self) -> tuple[int, Document]:
        """Return the number of the newest change, and all that the page shows."""
        with self._changed:
            jobs = {}
            for name, history in self._histories.items():
                found = history.document()
                last, asked = found["steps"], self._steps.get(name)
                steps = (asked or last) if found["state"] == "running" else (last or asked)
                jobs[name] = {**found, "problem": self._problems.get(name, ""), "steps": steps}
            return self._version, {"jobs": jobs, "known": list(self._known)}

    def wait(self, seen: int, timeout: float) -> bool:
        """Wait for a change after number `seen`, for at most `timeout` seconds; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version > seen, timeout)

    def _note_change(self) -> None:
        self._version += 1
        self._changed.notify_all()
