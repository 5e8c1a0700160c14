"""A call of psctl, as its command sees it: the options, the user's streams, this machine's records, the hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from psctl.cli.shared.global_options import GlobalOptions
from psctl.errors import PsctlError, UsageError
from psctl.types import Document

if TYPE_CHECKING:
    from psctl.launch.clusters import ChosenCluster
    from psctl.launch.home import Home, JobRecord
    from psctl.remote.fleet import Fleet
    from psctl.remote.shell import Shell
    from psctl.spec.cluster import ClusterSpec
    from psctl.view.console import Console
    from psctl.view.transfer_bar import TransferBar


class ReportedError(Exception):
    """Ends a command that failed in part, after its results and the error among them were printed.

    Args:
        error: the error that the exit code follows from.
    """

    def __init__(self, error: PsctlError) -> None:
        super().__init__(error.message)
        self.error = error


class Context:
    """One call of psctl.

    Args:
        options: the global options.
        environment: the process's environment.
        arguments: the command line, without the program's name.
        at_end: takes what is to be done when the call ends.
    """

    def __init__(
        self, options: GlobalOptions, environment: Mapping[str, str], arguments: Sequence[str] = (),
        at_end: Callable[[Callable[[], None]], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._at_end = at_end
        self.options = options
        self.environment = environment
        self.arguments = arguments

    @classmethod
    def of(cls, context: typer.Context) -> Context:
        """Return the call that typer has parsed.

        Raises:
            UsageError: a global option is invalid.
        """
        return cls(GlobalOptions.of(context), os.environ, context.obj or (), context.call_on_close)

    @cached_property
    def home(self) -> Home:
        """The records of this machine."""
        from psctl.launch.home import Home

        return Home.of(self.environment)

    @cached_property
    def out(self) -> Console:
        """stdout, for results."""
        from psctl.view.console import make_console

        return make_console(sys.stdout, no_color=self.options.no_color)

    @cached_property
    def err(self) -> Console:
        """stderr, for progress, questions, warnings and errors."""
        from psctl.view.console import make_console

        return make_console(sys.stderr, no_color=self.options.no_color)

    @cached_property
    def bar(self) -> TransferBar | None:
        """The line of files that are transferred and of work that lasts, in the output for people."""
        from psctl.view.transfer_bar import TransferBar

        return None if self.options.quiet or self.options.machine else TransferBar(self.err)

    # ---- output --------------------------------------------------------------------------------------------------

    def print_result(self, document: Document, draw: Callable[[Console, Document], None]) -> None:
        """Print a result: drawn for people, else as one JSON document."""
        if self.options.machine:
            print_json(document)
        else:
            draw(self.out, document)

    def print_results(
        self,
        document: Document,
        draw: Callable[[Console, Document], None],
        error: PsctlError | None,
    ) -> None:
        """Print a result of many hosts.

        Raises:
            ReportedError: `error` was given; it is part of the document.
        """
        self.print_result({**document, **error.document()} if error else document, draw)
        if error is not None:
            raise ReportedError(error)

    def tell(self, *lines: str) -> None:
        """Print lines about progress or the next command on stderr; not with -q, nor with -o json or jsonl."""
        if not (self.options.quiet or self.options.machine):
            from psctl.view.console import say

            if self.bar is not None:
                self.bar.erase()
            say(self.err, *lines)

    def detail(self, *lines: str) -> None:
        """Print, with -v, a decision that psctl made by itself."""
        if self.options.verbose:
            self.tell(*lines)

    def warn(self, line: str) -> None:
        """Print a warning on stderr, with -o json too."""
        if not self.options.quiet:
            from psctl.view.console import say
            from psctl.view.text import one_line

            say(self.err, f"warning: {one_line(line)}")

    def warn_of_problems(self, rows: Sequence[Document]) -> None:
        """Print a warning for each job whose row has a `problem`."""
        for row in rows:
            if row.get("problem"):
                self.warn(f"{row['job']}: {row['problem']}")

    def progress(self, host: str, sentence: str) -> None:
        """Print an action on a host ("": on all)."""
        self.tell(f"{host}: {sentence}" if host else sentence)

    @contextlib.contextmanager
    def working(self, sentence: str) -> Iterator[None]:
        """Print an action that lasts, and show its time until the context ends."""
        self.progress("", sentence)
        with self.bar.work("", sentence) if self.bar is not None else contextlib.nullcontext():
            yield

    # ---- questions -----------------------------------------------------------------------------------------------

    def confirm(self, question: str) -> None:
        """Ask before something is removed or ended; --yes is an answer.

        Args:
            question: the action, without the question mark.

        Raises:
            UsageError: the user declined, or stdin is no terminal.
        """
        if self.options.yes:
            return
        given = self.arguments
        words = ["--yes", *given] if "--" in given else [*given, "--yes"]
        if not self.ask(question, note=", so nothing was done", hint=shlex.join(["psctl", *words])):
            raise UsageError("nothing was done", hint="--yes confirms without a question")

    def ask(self, question: str, *, hint: str, note: str = "") -> bool:
        """Ask a question that --yes does not answer; return the answer.

        Raises:
            UsageError: stdin is no terminal, or --no-input; with `note` and `hint`.
        """
        if self.options.no_input or not sys.stdin.isatty():
            why = "--no-input forbids it" if self.options.no_input else "standard input is no terminal"
            raise UsageError(f"{question}: not asked, because {why}{note}", hint=hint)
        sys.stderr.write(f"{question}? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # ---- clusters and jobs ---------------------------------------------------------------------------------------

    def cluster(
        self,
        asked: str | None,
        job_cluster: str | None = None,
        job_folder: Path | None = None,
        *,
        submits: bool = False,
        lent: bool = False,
    ) -> ChosenCluster:
        """Return the cluster that this call works on, and print its name.

        Args:
            asked, job_cluster, job_folder: as for `choose_cluster`.
            submits: an allocation of Slurm is submitted where psctl runs in none.
            lent: as `submits`, and it is cancelled when this call ends.
        """
        from psctl.launch import cluster_hosts
        from psctl.launch.clusters import choose_cluster

        def allocate(spec: ClusterSpec, source: str) -> cluster_hosts.Allocation:
            found = cluster_hosts.submit(spec, source, self.progress)
            if lent:
                self._at_end(lambda: cluster_hosts.release(found.number))
            return found

        chosen = choose_cluster(
            self.home, asked, job_cluster=job_cluster, job_folder=job_folder, environment=self.environment,
            allocate=allocate if submits or lent else None,
        )  # fmt: skip
        return self._with_timeout(self._announced(chosen))

    def cluster_of(self, record: JobRecord, *, acts: bool = False) -> ChosenCluster:
        """Return the cluster that a job runs on; a command that `acts` on the job prints its name."""
        from psctl.launch.clusters import recalled_cluster

        chosen = recalled_cluster(self.home, record.cluster)
        return self._with_timeout(self._announced(chosen) if acts else chosen)

    def _announced(self, chosen: ChosenCluster) -> ChosenCluster:
        """Print which cluster a command works on."""
        self.tell(f"cluster: {chosen.title}")
        self.detail(f"cluster file: {chosen.known.source or 'none, this machine alone'}")
        return chosen

    def _with_timeout(self, chosen: ChosenCluster) -> ChosenCluster:
        """Return the cluster with --timeout in place of its own `connect_timeout`."""
        from psctl.launch.clusters import with_connect_timeout

        return chosen if self.options.timeout is None else with_connect_timeout(chosen, self.options.timeout)

    def train_command(self, chosen: ChosenCluster) -> str:
        """Return the command that trains on a cluster from here."""
        from psctl.launch.clusters import train_command

        return train_command(self.home, chosen, self.environment)

    def connect(self, chosen: ChosenCluster, names: Sequence[str] | None = None) -> Fleet:
        """Connect to a cluster's hosts, all or these."""
        from psctl.remote.fleet import Fleet

        before = time.monotonic()
        fleet = Fleet.connect(chosen.spec, self.options.forks, self.options.timeout, names=names, meter=self.bar)
        took = time.monotonic() - before
        self.detail(*(f"{name}: connected after {took:.2f} s at most" for name in fleet.shells))
        self.detail(*(f"{name}: {error.message}" for name, error in fleet.failed.items()))
        return fleet

    @contextlib.contextmanager
    def head_fleet(self, record: JobRecord, *, acts: bool = False) -> Iterator[tuple[Fleet, JobRecord]]:
        """Give a connection to the host that leads a job, and the record, which names that host."""
        from psctl.launch import leader_search

        chosen = self.cluster_of(record, acts=acts)
        with self.connect(chosen, [record.head.name]) as fleet:
            if not leader_search.has_moved(fleet, record):
                yield fleet, record
                return
        record = leader_search.find(self.home, record, self.connect)
        with self.connect(chosen, [record.head.name]) as fleet:
            yield fleet, record

    @contextlib.contextmanager
    def head_shell(self, record: JobRecord, *, acts: bool = False) -> Iterator[tuple[Shell, JobRecord]]:
        """Give a shell on the host that leads a job, and the record, which names that host.

        Raises:
            PsctlError: the head was not reached.
        """
        with self.head_fleet(record, acts=acts) as (fleet, found):
            yield head_of(fleet, found), found

    def read_file(self, reference: str, what: str) -> tuple[str, str]:
        """Return the text and the absolute path of a file that the command line names; of a folder, its job.yaml."""
        from psctl.launch.clusters import read_text

        path = Path(reference).expanduser()
        if path.is_dir() and (path / "job.yaml").is_file():
            path = path / "job.yaml"
        return read_text(path, what), str(Path(os.path.abspath(path)))


def head_of(fleet: Fleet, record: JobRecord) -> Shell:
    """Return the shell on a job's head. Raises the error of the connection when it failed."""
    return fleet.shell(record.head.name)


def print_json(document: object) -> None:
    """Print one JSON document as one line, and flush it."""
    sys.stdout.write(json.dumps(_finite(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: object) -> object:
    """Return a value that JSON can hold: null in place of nan and of the infinities."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """Exit without an error when the reader of stdout closes it (`| head`); the rest of the output is dropped."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open until the process ends
