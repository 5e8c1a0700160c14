"""psctl ui: serve a live page of jobs on the loopback address."""

from __future__ import annotations

import getpass
import platform
import threading
from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, print_json

KNOWN = 50
"""Newest jobs that the page offers to open."""

LOOK = 5.0
"""Seconds between two looks for new jobs."""


def ui(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="One job; without it all running jobs, else the newest.", autocompletion=completion.jobs),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="P", help="The port; 0: a free one.")] = 0,
) -> None:
    """Serve a live page of jobs for a browser.

    It is served until Ctrl-C. The page shows metrics, throughput, processes, plan, checkpoints, events and output of
    running and finished jobs, and follows those that run. It listens on 127.0.0.1 only, and answers only those that
    know the token in its address.

    \b
    Examples:
      psctl ui
      psctl ui digits-3 --port 8642
    """
    from psctl.errors import NoSuchJob

    own = Context.of(context)
    known = own.home.jobs()
    running = [record for record in known if not record.over]
    shown = [own.home.job(job)] if job is not None else running or known[-1:]
    if not shown:
        raise NoSuchJob("no job is known on this machine", hint="psctl train JOB.yaml starts one")
    _Page(own, port).show([record.job for record in shown])


class _Page:
    """The page: its server, a thread for each job on it, and one that looks for new jobs."""

    def __init__(self, context: Context, port: int) -> None:
        from psctl.page.board import Board
        from psctl.page.server import PageServer

        self._context = context
        self._board = Board()
        self._page = PageServer(self._board, port, self._open, self._show_steps)
        self._ended = threading.Event()

    def show(self, jobs: list[str]) -> None:
        """Serve these jobs until Ctrl-C or SIGTERM."""
        from psctl.cli.shared.signals import Terminated

        for job in jobs:
            self._open(job)
        self._announce(jobs)
        serving = threading.Thread(target=self._page.serve, name="psctl ui server", daemon=True)
        for each in (serving, threading.Thread(target=self._look, name="psctl ui jobs", daemon=True)):
            each.start()
        try:
            serving.join()
        except (KeyboardInterrupt, Terminated):
            self._context.tell("the page has ended")
        finally:
            self._ended.set()
            self._page.stop()

    def _announce(self, jobs: list[str]) -> None:
        server = self._page
        if self._context.options.machine:
            print_json({"url": server.url, "port": server.port, "jobs": jobs})
            return
        from psctl.view.console import say

        say(self._context.out, server.url)
        place = f"{getpass.getuser()}@{platform.node()}"
        self._context.tell(
            f"  from another machine: ssh -L {server.port}:127.0.0.1:{server.port} {place}",
            "  and open the same address there",
            "  Ctrl-C ends the page; jobs continue",
        )

    def _open(self, name: str) -> bool:
        """Follow a job on a thread of its own; return False when there is no such job."""
        from psctl.cli.shared.page_jobs import follow_in_thread, history_of

        record = next((each for each in self._context.home.jobs() if each.job == name), None)
        if record is None:
            return False
        if self._board.add(history_of(record)):
            follow = (self._board, self._context, record)
            threading.Thread(target=follow_in_thread, args=follow, name=f"psctl ui {name}", daemon=True).start()
        return True

    def _show_steps(self, name: str) -> str:
        """Show the newest steps of a job; return why that is not possible, or ""."""
        from psctl.cli.shared.page_jobs import read_newest_steps
        from psctl.errors import PsctlError

        try:
            read_newest_steps(self._board, self._context, self._context.home.job(name))
        except PsctlError as error:
            return error.message
        return ""

    def _look(self) -> None:
        """Look for new jobs, which the page offers to open."""
        while True:
            newest = self._context.home.jobs()[-KNOWN:]
            self._board.set_known([{"job": each.job, "state": each.state} for each in reversed(newest)])
            if self._ended.wait(LOOK):
                return
