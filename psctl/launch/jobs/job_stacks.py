"""`psctl stacks`: the stacks of a running job's processes, from the agents of all its hosts."""

from __future__ import annotations

import msgspec

from psctl import errors
from psctl.job.control_answers import StacksAnswer
from psctl.launch import agent_calls
from psctl.launch.home import JobRecord
from psctl.launch.jobs.job_logs import RankSelector
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_ANSWER = msgspec.json.Decoder(StacksAnswer)


class ProcessStacks(msgspec.Struct, frozen=True):
    """The stacks of one process, frames outermost first; `problem`: the reason why they are not known, or ""."""

    rank: str
    host: str
    main: list[str]
    threads: list[list[str]]
    problem: str


def gather(
    record: JobRecord, fleet: Fleet, selector: RankSelector
) -> tuple[list[ProcessStacks], dict[str, errors.PsctlError]]:
    """Ask the agents of all hosts for the stacks of their processes, in parallel.

    Args:
        record, fleet: the job and connections to its hosts.
        selector: the processes.

    Returns:
        the stacks by rank, and the errors of hosts that were not reached.

    Raises:
        NoSuchJob: no agent of the job runs.
        UsageError: a selected process does not run.
    """
    by_name = {host.name: host for host in record.hosts}

    def ask(name: HostName, shell: Shell) -> StacksAnswer | None:
        return agent_calls.call(shell, by_name[name], "stacks", _ANSWER)

    found = fleet.each(ask, names=by_name)
    missing = {str(name): outcome.error for name, outcome in found.items() if outcome.error is not None}
    answers = {str(name): outcome.value for name, outcome in found.items() if outcome.ok}
    if not missing and all(answer is None for answer in answers.values()):
        raise errors.NoSuchJob(
            f"{record.job} does not run: no agent of it answers", hint=f"psctl status {record.job}", where=record.job
        )
    processes = [
        ProcessStacks(str(each.member), host, list(each.main), [list(frames) for frames in each.others], each.problem)
        for host, answer in answers.items()
        if answer is not None  # the agent there has just ended, or does not listen yet
        for each in sorted(answer.processes, key=lambda each: each.member)
    ]
    absent = selector.absent(process.rank for process in processes)
    if absent and not missing:
        raise errors.UsageError(
            f"{', '.join(absent)}: no such process of {record.job} runs now",
            hint=f"psctl status {record.job}",
            where=record.job,
        )
    chosen = [process for process in processes if selector.takes(process.rank)]
    return sorted(chosen, key=_order), missing


def _order(process: ProcessStacks) -> tuple[bool, str, int]:
    """Sort workers first, then by rank."""
    role, _, rank = process.rank.partition("/")
    return role != "worker", role, int(rank) if rank.isdecimal() else 0
