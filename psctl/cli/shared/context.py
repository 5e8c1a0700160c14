"""What a verb has at hand: the options, the user's streams, this machine's memory, and connections to hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psctl.cli.shared.global_options import Options
from psctl.errors import PsctlError, UsageError

Console = Any
"""A stream that can be drawn on; what it is, is view's own affair."""

if TYPE_CHECKING:
    from psctl.launch.clusters import Chosen
    from psctl.launch.home import Home, JobRecord
    from psctl.remote.fleet import Fleet


class Told(Exception):
    """A command failed in part, and its results were printed, the error among them.

    Args:
        error: what the command ends with.
    """

    def __init__(self, error: PsctlError) -> None:
        super().__init__(error.message)
        self.error = error


class Context:
    """One call of psctl.

    Args:
        options: the global options.
        environment: the process's.
        words: the command line, without the program's name.
    """

    def __init__(self, options: Options, environment: Mapping[str, str], words: Sequence[str] = ()) -> None:
        self.options, self.environment, self.words = options, environment, words

    @cached_property
    def home(self) -> Home:
        """What is remembered on this machine."""
        from psctl.launch.home import Home

        return Home.of(self.environment)

    @cached_property
    def out(self) -> Console:
        """Where results go."""
        from psctl.view.console import make_console

        return make_console(sys.stdout, no_color=self.options.no_color)

    @cached_property
    def err(self) -> Console:
        """Where progress, prompts, warnings and errors go."""
        from psctl.view.console import make_console

        return make_console(sys.stderr, no_color=self.options.no_color)

    # ---- saying things -------------------------------------------------------------------------------------------

    def result(self, document: Mapping[str, Any], draw: Callable[[Console, Mapping[str, Any]], None]) -> None:
        """Print a result: drawn for people, else as one JSON document."""
        if self.options.machine:
            print_json(document)
        else:
            draw(self.out, document)

    def results(
        self,
        document: Mapping[str, Any],
        draw: Callable[[Console, Mapping[str, Any]], None],
        error: PsctlError | None,
    ) -> None:
        """Print a result over many hosts; when some failed, the error stands in the document and ends the command."""
        self.result({**document, **error.document()} if error else document, draw)
        if error is not None:
            raise Told(error)

    def tell(self, *lines: str) -> None:
        """Say what goes on or what to do next, on stderr; not with -q, and not to programs."""
        if not (self.options.quiet or self.options.machine):
            from psctl.view.console import say

            say(self.err, *lines)

    def detail(self, *lines: str) -> None:
        """Say with -v what psctl decided or found by itself."""
        if self.options.verbose:
            self.tell(*lines)

    def warn(self, line: str) -> None:
        """Say something that must not be missed, on stderr."""
        if not self.options.quiet:
            from psctl.view.console import say
            from psctl.view.text import one_line

            say(self.err, f"warning: {one_line(line)}")

    def progress(self, host: str, sentence: str) -> None:
        """Say what is being done on a host ("": on all)."""
        self.tell(f"{host}: {sentence}" if host else sentence)

    def confirm(self, question: str) -> None:
        """Ask before something is lost.

        Args:
            question: what would be lost, without the question mark.

        Raises:
            UsageError: it was declined, or nobody is there to ask.
        """
        if self.options.yes:
            return
        if self.options.no_input or not sys.stdin.isatty():
            words = ["--yes", *self.words] if "--" in self.words else [*self.words, "--yes"]
            raise UsageError(
                f"{question}: nobody is there to be asked, so nothing was done", hint=shlex.join(["psctl", *words])
            )
        sys.stderr.write(f"{question}? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UsageError("nothing was done", hint="--yes says yes without asking")

    def agreed(self, question: str, *, hint: str) -> bool:
        """Ask what --yes does not answer; return the answer.

        Raises:
            UsageError: nobody is there to ask; `hint` says what to do instead.
        """
        if self.options.no_input or not sys.stdin.isatty():
            raise UsageError(f"{question}: nobody is there to be asked", hint=hint)
        sys.stderr.write(f"{question}? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # ---- clusters and jobs ---------------------------------------------------------------------------------------

    def cluster(self, asked: str | None, job_cluster: str | None = None, job_folder: Path | None = None) -> Chosen:
        """Return the cluster that this call means."""
        from psctl.launch.clusters import choose

        chosen = choose(self.home, asked, job_cluster=job_cluster, job_folder=job_folder, environment=self.environment)
        return self._in_time(self._named(chosen))

    def cluster_of(self, record: JobRecord, *, acts: bool = False) -> Chosen:
        """Return the cluster that a job runs on; a command that `acts` on the job names it."""
        from psctl.launch.clusters import recall

        chosen = recall(self.home, record.cluster)
        return self._in_time(self._named(chosen) if acts else chosen)

    def _named(self, chosen: Chosen) -> Chosen:
        """Say which cluster a command works on."""
        self.tell(f"cluster: {chosen.title}")
        self.detail(f"cluster file: {chosen.known.source or 'none, this machine alone'}")
        return chosen

    def train_command(self, chosen: Chosen) -> str:
        """Return the command that trains on a cluster from here."""
        from psctl.launch.clusters import train_command

        return train_command(self.home, chosen, self.environment)

    def _in_time(self, chosen: Chosen) -> Chosen:
        """Return the cluster with --timeout in place of its own `connect_timeout`."""
        from psctl.launch.clusters import waiting

        return chosen if self.options.timeout is None else waiting(chosen, self.options.timeout)

    def connect(self, chosen: Chosen, names: Sequence[str] | None = None) -> Fleet:
        """Connect to a cluster's hosts, all or these."""
        from psctl.remote.fleet import Fleet
        from psctl.types import HostName

        wanted = None if names is None else [HostName(name) for name in names]
        before = time.monotonic()
        fleet = Fleet.connect(chosen.spec, self.options.forks, self.options.timeout, names=wanted)
        took = time.monotonic() - before
        self.detail(*(f"{name}: connected after {took:.2f} s at most" for name in fleet.shells))
        self.detail(*(f"{name}: {error.message}" for name, error in fleet.failed.items()))
        return fleet

    def cwd_file(self, reference: str, what: str) -> tuple[str, str]:
        """Return the text and the absolute path of a file that the command line names."""
        from psctl.launch.clusters import read_text

        path = Path(reference).expanduser()
        if path.is_dir() and (path / "job.yaml").is_file():
            path = path / "job.yaml"
        return read_text(path, what), str(Path(os.path.abspath(path)))


def print_json(document: Any) -> None:
    """Print one JSON document as one line, at once."""
    sys.stdout.write(json.dumps(_plain(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: no number that is none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def duration_ago(text: str, option: str) -> float:
    """Return the moment that lies a duration back, in seconds since the epoch. UsageError when it is none."""
    from psctl.units import parse_duration

    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}", hint=f"such as {option} 5m") from None


@contextlib.contextmanager
def quiet_pipe() -> Any:
    """A reader that goes away (`| head`) is no error: stdout is turned to nowhere, so that the exit is quiet too."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lives until the process ends
