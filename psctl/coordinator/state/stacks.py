"""The Python stacks of ranks that keep the others waiting: asked of their agents, told to people, kept for the end."""

from __future__ import annotations

from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.process_messages import Stacks, StacksWanted
from psctl.types import Member

OTHER_THREAD = "another thread: "
"""How a frame begins, in the record of a failure, that is not of a process's main thread."""

WAIT = 4.0
"""Seconds that the end of a job that stands still waits for stacks; agents give their processes 2."""


def ask(job: JobState, ranks: list[Rank]) -> None:
    """Ask the agents of these ranks for their stacks."""
    for agent in job.agents:
        there = [rank.member for rank in ranks if rank.host == agent.rank and not rank.ended]
        if there:
            job.tell(agent, StacksWanted(there))


def gathered(job: JobState, ranks: list[Rank]) -> bool:
    """Ask for the stacks of these ranks, once; return whether all are there, or are waited for no longer."""
    if job.stacks_asked is None:
        job.stacks_asked = job.now
        job.stacks.clear()
        ask(job, ranks)
    missing = [rank for rank in ranks if rank.member not in job.stacks and not rank.ended]
    return not missing or job.now - job.stacks_asked >= WAIT


def heard(job: JobState, rank: Rank, message: Stacks) -> None:
    """An agent told a rank's stacks: they are shown, unless the job ends and its failure holds them."""
    job.stacks[rank.member] = message
    if job.stacks_asked is None and job.ending is None:
        text = " | ".join(message.main) or message.problem
        job.say(f"stack of {job.where(rank)}, innermost call last: {text}")


def frames(job: JobState, member: Member) -> list[str]:
    """Return the user's own frames of a rank's main thread, outermost first; none when they are not known."""
    found = job.stacks.get(member)
    return list(found.main) if found is not None else []


def problem(job: JobState, member: Member) -> str:
    """Return why the stack of a rank that was asked for it is not known; "" when it is."""
    found = job.stacks.get(member)
    return "its agent did not answer" if found is None else found.problem


def document(job: JobState) -> dict[str, list[str]]:
    """Return what is known of all stacks, by rank, for the record of a failure; the main thread's frames come first."""
    found: dict[str, list[str]] = {}
    for member, each in sorted(job.stacks.items()):
        others = [f"{OTHER_THREAD}{line}" for thread in each.others for line in thread]
        found[str(member)] = [*each.main, *others] if each.main else [each.problem]
    return found
