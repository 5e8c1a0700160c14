"""Lets each host fetch the data that a job file names by a URL, with the job's Python and variables."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.launch.clusters import Progress
from psctl.launch.files.data_sets import DataSet
from psctl.launch.host_programs import URL_DATA, program_command, read_answer
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.remote_programs.url_data import DISK_FULL, NO_PACKAGE
from psctl.remote.shell import Shell, TransferMeter
from psctl.types import HostName
from psctl.units import format_bytes, hide_credentials

TURN = 1.0
"""Seconds between two looks at a URL that another psctl fetches there."""


class FetchAnswer(msgspec.Struct, frozen=True):
    """The set that a host has of a URL; `fetched`: bytes that came now."""

    busy: bool = False
    name: str = ""
    inner: str = ""
    files: int = 0
    bytes: int = 0
    fetched: int = 0


_ANSWER = msgspec.json.Decoder(FetchAnswer)


def fetch_urls(
    reached: ReachedCluster,
    sets: Sequence[DataSet],
    names: Sequence[str],
    variables: Mapping[str, str],
    progress: Progress,
) -> tuple[DataSet, ...]:
    """Have a job's hosts fetch the sets of URLs; return all sets, those of URLs with their names on hosts.

    Args:
        reached: the cluster, made ready.
        sets: the job's.
        names: its hosts.
        variables: of the job's processes, secrets included.
        progress: shows progress.

    Raises:
        PythonMissing: a package that the URL needs is missing on a host.
        CommandFailed: the place refused, or hosts got different contents.
        DiskFull: a host has no room for it.
    """
    return tuple(
        each if each.source is not None else _fetch(reached, each, names, variables, progress) for each in sets
    )


def _fetch(
    reached: ReachedCluster, data: DataSet, names: Sequence[str], variables: Mapping[str, str], progress: Progress
) -> DataSet:
    shown = hide_credentials(data.spec.source)
    jobs = sorted({job.folder for site in reached.sites.values() for job in site.jobs})
    given = json.dumps(dict(variables)).encode("ascii")

    def on_host(name: HostName, shell: Shell) -> FetchAnswer:
        question = {"workdir": reached.sites[name].workdir, "url": data.spec.source, "jobs": jobs}
        command = program_command(reached.python(name), URL_DATA, "fetch", question)
        waited = False
        while True:
            with contextlib.ExitStack() as stack:
                lines = _Lines(name, shell.meter, stack)
                result = shell.run(command, stdin=given, timeout=None, check=False, take=lines.add)
            if result.status:
                raise _error(shell.name, shown, result.status, result.stderr.decode(errors="replace").strip())
            answer = read_answer(shell.name, "url_data fetch", _ANSWER, lines.rest)
            if not answer.busy:
                return answer
            if not waited:
                progress(shell.name, f"another psctl fetches {shown}: waiting for it")
            waited = True
            time.sleep(TURN)

    progress("", f"{shown}: each host fetches it unless it has it")
    found: dict[str, FetchAnswer] = {}
    for name, outcome in reached.fleet.each(on_host, names=names).items():
        if outcome.error is not None:
            raise outcome.error
        found[name] = outcome.value
        if outcome.value.fetched:
            progress(name, f"fetched {format_bytes(outcome.value.fetched)} of {shown}")
    contents = grouped(((answer.name, answer.inner), name) for name, answer in found.items())
    if len(contents) > 1:
        listed = " differ from ".join(", ".join(hosts) for hosts in contents.values())
        raise errors.CommandFailed(
            names[0], f"fetch {shown}", 1, f"hosts got different contents: {listed}",
            "run it again when nothing changes the data there",
        )  # fmt: skip
    made, inner = next(iter(contents))
    if "/" in made + inner or not made.startswith("url-"):
        raise errors.CommandFailed(names[0], f"fetch {shown}", 0, f"an unexpected answer: {made}/{inner}")
    return msgspec.structs.replace(data, name=made, inner=inner)


def _error(host: str, url: str, status: int, text: str) -> errors.PsctlError:
    last = text.splitlines()[-1] if text else f"it ended with {status}"
    if status == NO_PACKAGE:
        return errors.PythonMissing(
            f"{host}: {url}: {last}", "add the package to runtime.requirements in the cluster file (or install it "
            "there, with environment: existing)", where=host,
        )  # fmt: skip
    if status == DISK_FULL:
        return errors.DiskFull(f"{host}: {url}: {last}", "free space there, or set runtime.workdir", where=host)
    return errors.CommandFailed(
        host, f"fetch {url}", status, last, "is the URL right, and are its credentials in env:?"
    )


class _Lines:
    """Takes the output of url_data: lines of progress, and the answer after them.

    Args:
        host: its name.
        meter: shows the progress.
        stack: ends what the meter shows.
    """

    def __init__(self, host: str, meter: TransferMeter | None, stack: contextlib.ExitStack) -> None:
        self._host, self._meter, self._stack = host, meter, stack
        self._count: Callable[[int], object] = lambda _: None
        self.rest = b""

    def add(self, data: bytes) -> None:
        """Add output."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            number = int(line[1:]) if line[1:].isdigit() and len(line) < 20 else 0
            if line.startswith(b"=") and self._meter is not None and number:
                self._count = self._stack.enter_context(self._meter.transfer(self._host, number))
            elif line.startswith(b"+"):
                self._count(number)
            elif not line.startswith(b"="):
                self.rest = line + b"\n" + self.rest
