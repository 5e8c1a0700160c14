"""Reads the log files of a job's processes on all its hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from psctl import errors
from psctl.launch import agent_calls
from psctl.launch.home import HostRecord, JobRecord
from psctl.launch.host_programs import HOST_STATE, program_command, read_answer
from psctl.launch.jobs.host_messages import SourcePaths
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_FILE = re.compile(r"(?P<role>[a-z]+)-(?P<rank>[0-9]+)\.(?P<stream>stdout|stderr)\.log")
_SELECTOR = re.compile(r"(?P<role>worker|server|reader|coordinator)(?::(?P<ranks>[0-9,-]+))?")


MOST_BYTES = 2_000_000_000
"""Bytes of logs that are read of one host; `--tail` and `--grep` ask for less."""

SHOWN = 20
"""Ranks that an error names."""

MOST_RANKS = 10_000
"""Ranks that one range of a selector may hold."""


class LogLine(NamedTuple):
    """A line that a process printed; `rank` is "worker/3"."""

    rank: str
    host: str
    stream: str
    text: str


class RemovedLines(NamedTuple):
    """How many first lines of a stream are not kept any more."""

    rank: str
    host: str
    stream: str
    lines: int


class RankSelector:
    """Selects processes: "worker:3", "worker:0-3,5", "server"; several with commas between; "" selects all.

    Raises:
        UsageError: it reads like none of these.
    """

    def __init__(self, text: str = "") -> None:
        self._wanted: dict[str, set[int] | None] = {}
        for part in re.split(r",(?=[a-z])", text) if text else []:
            match = _SELECTOR.fullmatch(part.strip())
            if match is None:
                raise errors.UsageError(
                    f'-r {text}: "{part}" is no role', hint="worker, server, worker:3, worker:0-3 or worker:1,5"
                )
            ranks = _ranks(match["ranks"], text) if match["ranks"] else None
            known = self._wanted.get(match["role"], set())
            self._wanted[match["role"]] = None if ranks is None or known is None else known | ranks

    @property
    def given(self) -> bool:
        """Whether anything was selected."""
        return bool(self._wanted)

    def takes(self, rank: str) -> bool:
        """Return whether "worker/3" is selected."""
        if not self._wanted:
            return True
        role, _, number = rank.partition("/")
        if role not in self._wanted:
            return False
        ranks = self._wanted[role]
        return ranks is None or (number.isdecimal() and int(number) in ranks)

    def absent(self, ranks: Iterable[str]) -> list[str]:
        """Return what is selected and not among these ranks: "worker/9", or "server" where there is no server."""
        known = set(ranks)
        roles = {rank.partition("/")[0] for rank in known}
        found = []
        for role, wanted in self._wanted.items():
            meant = [f"{role}/{rank}" for rank in sorted(wanted or ())] if role in roles else [role]
            found += [each for each in meant if each not in known]
        return found

    def prefixes(self) -> list[str]:
        """Return how the names of wanted log files begin."""
        if not self._wanted:
            return [""]
        return [
            prefix
            for role, ranks in self._wanted.items()
            for prefix in ([f"{role}-"] if ranks is None else [f"{role}-{rank}." for rank in sorted(ranks)])
        ]


def check(shell: Shell, record: JobRecord, selector: RankSelector) -> None:
    """Refuse a selector for ranks that the job does not have.

    Args:
        shell: of the job's head.

    Raises:
        UsageError: names the ranks that there are.
    """
    if not selector.given:
        return
    digest = agent_calls.digest(shell, record.head)
    started = digest.started.roles if digest.started else []
    ranks = sorted({*digest.ranks, *(f"{each.role}/{each.rank}" for each in started)}, key=_order)
    absent = selector.absent(ranks)
    if absent and ranks:
        shown = ", ".join(ranks[:SHOWN]) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
        raise errors.UsageError(
            f"{record.job} has no {', '.join(absent[:SHOWN])}", hint=f"there are {shown}", where=record.job
        )


def read_logs(
    record: JobRecord, fleet: Fleet, selector: RankSelector, tail: int | None, grep: str | None
) -> tuple[list[LogLine], list[RemovedLines], dict[str, errors.PsctlError]]:
    """Read the log files of every host, in parallel.

    Args:
        record, fleet: the job and connections to its hosts.
        selector: whose.
        tail: last lines of each file; None: all.
        grep: regular expression that lines must match (`pattern_of` has accepted it).

    Returns:
        lines, by rank and stream, each in the order it was printed; those removed; and the errors of missing hosts.
    """
    by_name = {host.name: host for host in record.hosts}
    question: dict[str, object] = {"prefixes": selector.prefixes(), "tail": tail, "grep": grep}

    def read(name: HostName, shell: Shell) -> tuple[list[LogLine], list[RemovedLines]]:
        return read_lines(shell, by_name[name], question)

    found = fleet.each(read, names=by_name)
    missing = {str(name): outcome.error for name, outcome in found.items() if outcome.error is not None}
    paths = SourcePaths(record)
    parts = [outcome.value for outcome in found.values() if outcome.ok]
    removed = [gap for part in parts for gap in part[1]]
    lines = [line._replace(text=paths.text(line.text)) for part in parts for line in part[0]]
    return sorted(lines, key=lambda line: _order(line.rank)), removed, missing


def pattern_of(grep: str) -> re.Pattern[str]:
    """Compile --grep. UsageError when it is no regular expression."""
    try:
        return re.compile(grep)
    except re.error as error:
        raise errors.UsageError(
            f"--grep {grep}: no regular expression: {error}", hint="a backslash takes a character as it is: \\["
        ) from error


_LINE: msgspec.json.Decoder[tuple[str, int | str]] = msgspec.json.Decoder(tuple[str, int | str])
"""A log file and a line of it, or the number of its removed lines."""


def read_lines(shell: Shell, host: HostRecord, question: dict[str, object]) -> tuple[list[LogLine], list[RemovedLines]]:
    """Return the lines of a job's log files on a host, and how many lines its limit has removed.

    Raises:
        CommandFailed: the host's answer has another form.
    """
    asked = {**question, "folder": host.job_dir}
    result = shell.run(
        program_command(host.python, HOST_STATE, "logs", asked),
        timeout=None,
        limit=MOST_BYTES,
    )
    lines, removed = [], []
    for raw in result.stdout.splitlines():
        name, text = read_answer(host.name, "host_state logs", _LINE, raw)
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        rank = f"{match['role']}/{match['rank']}"
        if isinstance(text, int):
            removed.append(RemovedLines(rank, host.name, match["stream"], text))
        else:
            lines.append(LogLine(rank, host.name, match["stream"], text))
    return lines, removed


def _order(rank: str) -> tuple[str, int]:
    role, _, number = rank.partition("/")
    return ({"worker": "0", "server": "1"}.get(role, "2") + role, int(number) if number.isdecimal() else 0)


def _ranks(text: str, whole: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise errors.UsageError(f'-r {whole}: "{part}" is no rank or range of ranks', hint="worker:0-3 or worker:5")
        if int(last or first) - int(first) >= MOST_RANKS:
            raise errors.UsageError(f'-r {whole}: "{part}" is too many ranks', hint=f"at most {MOST_RANKS} at once")
        found |= set(range(int(first), int(last or first) + 1))
    return found
