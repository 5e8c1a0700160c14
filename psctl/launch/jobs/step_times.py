"""`psctl trace`: the times of steps of a running job's workers, from the agents of all its hosts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from psctl import errors
from psctl.clock import Clock
from psctl.job.control_answers import SpansAnswer
from psctl.launch import agent_calls
from psctl.launch.home import JobRecord
from psctl.launch.jobs.step_trace import SECOND, Span
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_ANSWER = msgspec.json.Decoder(SpansAnswer)

NEWEST = 10
"""Steps that are taken where none are named."""

MOST = 1000
"""Steps that may be asked for at once."""

LOOK = 1.0
"""Seconds between two looks at a job that has not reached the last wanted step."""


class StepTimes(msgspec.Struct, frozen=True):
    """The times of steps, on the coordinator's clock; `clocks`: by host, the most by which its clock is wrong, in
    seconds; None: it is not known."""

    first: int
    last: int
    spans: list[Span]
    hosts: dict[int, str]
    clocks: dict[str, float | None]


class StepReader:
    """Asks the agents of a job's hosts.

    Args:
        record: the job.
        fleet: connections to its hosts.
        clock: waits.
        tell: shows a sentence.
    """

    def __init__(self, record: JobRecord, fleet: Fleet, clock: Clock, tell: Callable[[str], None]) -> None:
        self._record, self._fleet, self._clock, self._tell = record, fleet, clock, tell
        self._by_name = {host.name: host for host in record.hosts}

    def read(self, steps: tuple[int, int] | None) -> StepTimes:
        """Return the times of these steps, first and last; None: of the newest ones. Waits for steps that come.

        Raises:
            UsageError: the steps are over and no longer held, or the script makes no steps.
            NoSuchJob: the job does not run, or ends before it reaches them.
            PsctlError: a host was not reached.
        """
        reached, held = self._reached()
        if steps is None:
            if not reached:
                raise errors.UsageError(
                    f"{self._record.job} has finished no step yet",
                    hint="try again when it trains; a script that does not call run.prepare has no steps",
                    where=self._record.job,
                )
            steps = max(held, reached - NEWEST + 1), reached
        first, last = steps
        if first < held:
            raise errors.UsageError(
                f"the times of step {first} of {self._record.job} are no longer held: step {held} is the oldest",
                hint=f"--steps {held}:{held + last - first}",
                where=self._record.job,
            )
        if reached < last:
            self._tell(f"waiting for step {last:,}; {self._record.job} has finished {reached:,}")
        while reached < last:
            self._clock.sleep(LOOK)
            reached, _ = self._reached()
        return self._gather(first, last)

    def _reached(self) -> tuple[int, int]:
        """Return the last step that all workers have finished, and the oldest one whose times all of them hold."""
        workers = [worker for answer in self._ask(1, 0, clock=False).values() for worker in answer.workers]
        return min((worker.last for worker in workers), default=0), max((worker.first for worker in workers), default=0)

    def _gather(self, first: int, last: int) -> StepTimes:
        answers = self._ask(first, last, clock=True)
        spans, hosts = [], {}
        for host, answer in answers.items():
            for worker in answer.workers:
                hosts[worker.rank] = host
                for kind, step, begin, end in worker.spans:
                    spans.append(Span(worker.rank, kind, step, begin + answer.offset, end + answer.offset))
        clocks = {
            host: None if each.clock_error is None else each.clock_error / SECOND for host, each in answers.items()
        }
        spans.sort(key=lambda span: (span.begin, span.rank))
        return StepTimes(first, last, spans, hosts, clocks)

    def _ask(self, first: int, last: int, *, clock: bool) -> dict[str, SpansAnswer]:
        def ask(name: HostName, shell: Shell) -> SpansAnswer | None:
            given = {"first": first, "last": last, "clock": clock}
            return agent_calls.call(shell, self._by_name[name], "spans", _ANSWER, given)

        found = self._fleet.each(ask, names=self._by_name)
        for outcome in found.values():
            if outcome.error is not None:
                raise outcome.error
        answers = {str(name): outcome.value for name, outcome in found.items() if outcome.value is not None}
        if not any(answer.workers for answer in answers.values()):
            raise errors.NoSuchJob(
                f"{self._record.job} does not run: no worker of it answers",
                hint=f"psctl report {self._record.job} shows what its event log holds",
                where=self._record.job,
            )
        return answers


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of "100:110"; of "100", that step.

    Raises:
        UsageError: it is something else, or too many steps.
    """
    first, colon, last = text.partition(":")
    wrong = f"--steps {text}: expected FIRST:LAST, such as 100:110"
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise errors.UsageError(wrong, hint="steps count from 1")
    found = int(first), int(last if colon else first)
    if not 1 <= found[0] <= found[1]:
        raise errors.UsageError(wrong, hint="steps count from 1, and the first is not after the last")
    if found[1] - found[0] >= MOST:
        raise errors.UsageError(
            f"--steps {text}: more than {MOST} steps", hint=f"--steps {first}:{found[0] + MOST - 1}"
        )
    return found
