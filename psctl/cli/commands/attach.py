"""psctl attach: follow a job again."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context, head_of
from psctl.cli.shared.parameters import JobArgument, OnInterruptOption


def attach(context: typer.Context, job: JobArgument = None, on_interrupt: OnInterruptOption = None) -> int:
    """Follow a job again, from its first event. Exit with the job's own exit code.

    \b
    Examples:
      psctl attach
      psctl attach digits-3
    """
    from psctl.cli.shared.following import SignalQueue, check_on_interrupt, follow
    from psctl.launch import agent_calls

    own = Context.of(context)
    check_on_interrupt(on_interrupt)
    record = own.home.job(job)
    with SignalQueue() as signals, own.head_fleet(record) as (fleet, record):
        runs = agent_calls.alive(head_of(fleet, record), record.head)
        return follow(own, record, signals, on_interrupt, fleet, runs=runs)
