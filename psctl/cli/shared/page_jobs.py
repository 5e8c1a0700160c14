"""Reads the event logs of jobs for a page."""

from __future__ import annotations

import contextlib
from functools import partial

from psctl import errors
from psctl.cli.shared.context import Context, head_of
from psctl.clock import SystemClock
from psctl.job.events import Finished
from psctl.launch import leader_search
from psctl.launch.home import JobRecord
from psctl.launch.jobs.event_stream import EventReader
from psctl.launch.jobs.step_times import StepReader
from psctl.page.board import Board
from psctl.page.history import JobHistory, steps_document
from psctl.remote.shell import Shell


def history_of(record: JobRecord) -> JobHistory:
    """Return the empty history of a job."""
    return JobHistory(record.job, record.cluster.name)


def follow_on(board: Board, context: Context, record: JobRecord, *, to_end: bool) -> None:
    """Add a job's events to a board, which shows the job.

    Args:
        board: the board.
        context: the call.
        record: the job.
        to_end: go on until the job has ended; else return when everything up to now was read.

    Raises:
        PsctlError: the host that leads the job cannot be reached, or the log there cannot be read.
    """
    with contextlib.ExitStack() as fleets:
        fleet, record = fleets.enter_context(context.head_fleet(record))

        def find_leader() -> JobRecord:
            nonlocal record
            record = leader_search.find(context.home, record, context.connect)
            return record

        def connect() -> Shell:
            chosen = context.cluster_of(record)
            return head_of(fleets.enter_context(context.connect(chosen, [record.head.name])), record)

        def on_connection(text: str) -> None:
            board.set_problem(record.job, "" if text.endswith(" is back") else text)

        recorded, shell = partial(context.home.job, record.job), head_of(fleet, record)
        reader = EventReader(record, connect, SystemClock(), on_connection, recorded, shell, find_leader)
        if not to_end:
            reader.measure_past()
        for event in reader.events():
            if event is not None:
                board.apply(record.job, event)
            if isinstance(event, Finished) or (reader.past_is_read and not to_end):
                return


def read_newest_steps(board: Board, context: Context, record: JobRecord) -> None:
    """Show on a board the times of a running job's newest steps.

    Raises:
        PsctlError: it does not run, has no steps, or a host was not reached.
    """
    with context.connect(context.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        found = StepReader(leader_search.on_fleet(fleet, record), fleet, SystemClock(), lambda _: None).read(None)
    board.set_steps(record.job, steps_document(found.spans, found.clocks, found.hosts))


def follow_in_thread(board: Board, context: Context, record: JobRecord) -> None:
    """Follow a job to its end; show on the board why that failed."""
    try:
        follow_on(board, context, record, to_end=True)
    except errors.PsctlError as error:
        board.set_problem(record.job, f"{error.message}. {error.hint}" if error.hint else error.message)
