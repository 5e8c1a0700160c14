"""Brings what a job's script wrote to this machine, from all its hosts.

A host's names and sizes are checked before anything is written. A file arrives under PARTIAL, named by what it is on
its host, and gets its name once its hash is right; so an interrupted transfer continues, and a file that changed there
meanwhile begins anew. What came is recorded with the job: an unchanged file is not fetched again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from psctl import errors
from psctl.launch.files.output_names import (
    PARTIAL,
    OutputFile,
    colliding,
    fault,
    local_names,
    selected,
)
from psctl.launch.home import Home, HostRecord, JobRecord, write_atomic
from psctl.launch.host_programs import OUTPUT_FILES, program_command, run_program
from psctl.launch.remote_programs.output_files import MOST
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName, JsonObject
from psctl.units import format_bytes

SPARE = 1_000_000
"""Bytes that must stay free here."""

MARK = "*\n"
"""The .gitignore of the folder of outputs: they are not sent with the job's folder."""

BLOCK = 1 << 20

LINE = 100_000
"""Bytes of a line between two files at most."""


class OutputsAnswer(msgspec.Struct, frozen=True):
    """The files that a script wrote on a host."""

    files: list[tuple[str, int, int, int]]
    more: bool


class HashesAnswer(msgspec.Struct, frozen=True):
    """The hashes of files, in the order of the question."""

    hashes: list[str]


_LIST = msgspec.json.Decoder(OutputsAnswer)
_HASHES = msgspec.json.Decoder(HashesAnswer)


class HostOutputs(msgspec.Struct, frozen=True):
    """What a host had for a pull."""

    name: str
    files: int = 0
    bytes: int = 0
    error: dict[str, object] | None = None


class Pulled(msgspec.Struct, frozen=True):
    """The result of a pull."""

    job: str
    to: str
    files: list[JsonObject]  # {"path", "host", "bytes", "fetched"}
    bytes: int
    fetched_bytes: int
    hosts: list[HostOutputs]

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        if not self.files:
            return "no files"
        fetched = sum(bool(each["fetched"]) for each in self.files)
        count = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''} ({format_bytes(self.bytes)}) in {self.to}"
        return count if fetched == len(self.files) else f"{count}; {fetched} of them are new"


def folder_for(record: JobRecord) -> Path:
    """Return the folder that the outputs of a job come to unless another one is named: `outputs/JOB` by its job file.

    Where the job file's folder is gone, it is in the working folder.
    """
    beside = Path(record.job_source).parent
    return (beside if record.job_source and beside.is_dir() else Path.cwd()) / "outputs" / record.job


def excluded(job_source: str, folder: Path) -> list[str]:
    """Return patterns that leave the outputs of earlier jobs out of the job's folder."""
    outputs = Path(job_source).parent.resolve() / "outputs"
    try:
        ours = (outputs / ".gitignore").read_text() == MARK
    except OSError:
        return []
    return [f"/{outputs.relative_to(folder).as_posix()}/"] if ours and outputs.is_relative_to(folder) else []


def list_outputs(fleet: Fleet, record: JobRecord) -> tuple[list[OutputFile], dict[str, errors.PsctlError]]:
    """Return the files that a job's script wrote on the hosts of a fleet, and the errors of hosts that failed."""
    hosts = {host.name: host for host in record.hosts}

    def ask(name: HostName, shell: Shell) -> list[OutputFile]:
        question = question_of(hosts[name], record)
        answer = run_program(shell, hosts[name].python, OUTPUT_FILES, "list", question, _LIST, timeout=600)
        found = [OutputFile(name, *each) for each in answer.files]
        wrong = next((f"{file.name!r}: {why}" for file in found if (why := fault(file))), "")
        if answer.more:
            wrong = f"the script wrote more than {MOST} files"
        if wrong:
            hint = f"psctl ssh {record.job} shows them; no file of this host was fetched"
            raise errors.CommandFailed(name, "list the files of the job", 0, wrong, hint)
        return found

    files: list[OutputFile] = []
    failed: dict[str, errors.PsctlError] = {}
    names = [name for name in hosts if name in fleet.shells or name in fleet.failed]
    for name, outcome in fleet.each(ask, names=names).items():
        if outcome.error is not None:
            failed[name] = outcome.error
        else:
            files += outcome.value
    return files, failed


def question_of(host: HostRecord, record: JobRecord) -> dict[str, object]:
    """Return what the program on a host is asked about."""
    return {"files": host.files, "code": f"{host.workdir}/code/{record.code_hash}"}


def pull(
    home: Home,
    fleet: Fleet,
    record: JobRecord,
    patterns: Sequence[str],
    to: Path,
    count: Callable[[int], object] | None = None,
) -> tuple[Pulled, dict[str, errors.PsctlError]]:
    """Bring files that a job's script wrote to a folder of this machine.

    Args:
        home: keeps what came before.
        fleet: connections to the job's hosts.
        record: the job.
        patterns: of the names, as in .gitignore; none: all that it wrote.
        to: the folder; made when it is missing.
        count: called with each number of bytes that came; None: the connections' meter shows it.

    Returns:
        what came, and the errors of hosts that failed; the files of the others are here.

    Raises:
        UsageError: a file of that name is here, and did not come from this job. Nothing was fetched.
        DiskFull: there is too little room here.
    """
    files, failed = list_outputs(fleet, record)
    files = [file for file in files if selected(file.name, patterns)]
    return _Pull(home, fleet, record, to, count, failed).run(files)


class _Pull:
    """One pull of a job's files."""

    def __init__(
        self,
        home: Home,
        fleet: Fleet,
        record: JobRecord,
        to: Path,
        count: Callable[[int], object] | None,
        failed: dict[str, errors.PsctlError],
    ) -> None:
        self._fleet, self._record, self._to, self._count = fleet, record, to, count
        self.failed = failed
        self._came = _Arrivals(home.root / "jobs" / record.job / "pulled.json", to)

    def run(self, files: Sequence[OutputFile]) -> tuple[Pulled, dict[str, errors.PsctlError]]:
        """Fetch the files."""
        contents = self._contents(files)
        files = [file for file in files if file.host not in self.failed]
        named = local_names(files, contents, self._folders())
        wanted = {path: equal[0] for path, equal in named.items() if not self._came.has(path, equal)}
        self._check(wanted)
        arrived = self._fetch(wanted) if wanted else set()
        rows: list[JsonObject] = []
        for path, equal in named.items():
            if path not in wanted or path in arrived:
                self._came.note(path, equal)
                rows.append({
                    "path": path, "host": equal[0].host, "bytes": equal[0].size, "fetched": path in wanted,
                })  # fmt: skip
        self._came.save()
        hosts = [self._row(host.name, files) for host in self._record.hosts]
        fetched = sum(wanted[path].size for path in arrived)
        total = sum(equal[0].size for path, equal in named.items() if path not in wanted or path in arrived)
        return Pulled(self._record.job, str(self._to), rows, total, fetched, hosts), self.failed

    def _row(self, name: str, files: Sequence[OutputFile]) -> HostOutputs:
        mine = [file.size for file in files if file.host == name]
        error = self.failed.get(name)
        return HostOutputs(name, len(mine), sum(mine), dict(error.document()["error"]) if error else None)

    def _folders(self) -> dict[str, str]:
        """Return the folder of each host for names that several have: that of its first worker."""
        found = {host.name: host.name for host in self._record.hosts}
        for rank in sorted(self._record.ranks, key=lambda each: -each.rank):
            if rank.role == "worker" and rank.host in found:
                found[rank.host] = f"worker-{rank.rank}"
        return found

    def _contents(self, files: Sequence[OutputFile]) -> dict[OutputFile, str]:
        """Return the hashes of the files of equal size whose names several hosts have."""
        hosts = {host.name: host for host in self._record.hosts}
        wanted: dict[str, list[OutputFile]] = {}
        for several in colliding(files).values():
            sizes = [file.size for file in several]
            for file in several:
                if sizes.count(file.size) > 1:
                    wanted.setdefault(file.host, []).append(file)
        found: dict[OutputFile, str] = {}

        def ask(name: HostName, shell: Shell) -> HashesAnswer:
            question = question_of(hosts[name], self._record)
            names = json.dumps([file.name for file in wanted[name]]).encode("ascii")
            return run_program(
                shell, hosts[name].python, OUTPUT_FILES, "hashes", question, _HASHES, stdin=names, timeout=None
            )

        for name, outcome in (self._fleet.each(ask, names=wanted) if wanted else {}).items():
            if outcome.error is not None:
                self.failed[name] = outcome.error
                continue
            found |= dict(zip(wanted[name], outcome.value.hashes, strict=False))
        return found

    def _check(self, wanted: dict[str, OutputFile]) -> None:
        """Refuse to overwrite what is not the job's, and to fill the disk."""
        for path in wanted:
            place = self._to / path
            above = next((each for each in place.parents if each.is_relative_to(self._to) and each.is_file()), None)
            if place.is_dir() or above is not None or (os.path.lexists(place) and not self._came.ours(path)):
                raise errors.UsageError(
                    f"{above or place} is here already, and did not come from {self._record.job}",
                    hint="move it away, or name another folder: --to DIR",
                )
        if not wanted:
            return
        self._to.mkdir(parents=True, exist_ok=True)
        (self._to / PARTIAL).mkdir(mode=0o700, exist_ok=True)
        begun = sum((self._to / PARTIAL / _partial_name(file)).stat().st_size for file in wanted.values()
                    if (self._to / PARTIAL / _partial_name(file)).exists())  # fmt: skip
        needed, free = sum(file.size for file in wanted.values()) - begun, shutil.disk_usage(self._to).free
        if free < needed + SPARE:
            raise errors.DiskFull(
                f"{self._to}: the files have {format_bytes(needed)}, and {format_bytes(free)} are free",
                hint="free space, name another folder (--to DIR), or a pattern that matches fewer files",
            )

    def _fetch(self, wanted: dict[str, OutputFile]) -> set[str]:
        """Fetch the files, hosts in parallel; return those that arrived."""
        hosts = {host.name: host for host in self._record.hosts}
        by_host: dict[str, list[tuple[str, OutputFile]]] = {}
        for path, file in wanted.items():
            by_host.setdefault(file.host, []).append((path, file))
        arrived: set[str] = set()

        def fetch(name: HostName, shell: Shell) -> None:
            receiver = _Receiver(name, self._to, by_host[name], arrived)
            try:
                size = receiver.begin()
                about = question_of(hosts[name], self._record)
                question = program_command(hosts[name].python, OUTPUT_FILES, "send", about)
                meter = shell.meter if self._count is None else None
                if meter is not None and size:
                    with meter.transfer(name, size) as counted:
                        shell.run(question, stdin=receiver.question, timeout=None, take=receiver.counting(counted))
                else:
                    take = receiver.counting(self._count or (lambda _: None))
                    shell.run(question, stdin=receiver.question, timeout=None, take=take)
                receiver.end()
            except OSError as error:
                raise _disk_error(self._to, error) from error
            finally:
                receiver.close()

        for name, outcome in self._fleet.each(fetch, names=by_host).items():
            if outcome.error is not None:
                self.failed[name] = outcome.error
        if len(arrived) == len(wanted):
            shutil.rmtree(self._to / PARTIAL, ignore_errors=True)
        return arrived


def _disk_error(folder: Path, error: OSError) -> errors.PsctlError:
    kind = errors.DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else errors.UsageError
    return kind(f"{error.filename or folder}: {error.strerror}", hint="--to DIR names another folder")


def _partial_name(file: OutputFile) -> str:
    """Return the name under which a file arrives: another one once the file on the host is another."""
    return hashlib.sha256(json.dumps(file).encode("ascii")).hexdigest()[:40]


class _Receiver:
    """Reads the files of one host from the stream of `output_files send`.

    Args:
        host: its name.
        to: the folder here.
        files: (name here, file) in the order in which they are asked for.
        arrived: gets the names of those that arrived.
    """

    def __init__(self, host: str, to: Path, files: Sequence[tuple[str, OutputFile]], arrived: set[str]) -> None:
        self._host, self._to, self._files, self._arrived = host, to, files, arrived
        self._offsets: list[int] = []
        self._at = -1  # the file that arrives
        self._left: int | None = None  # bytes of it; None: a line is next
        self._head = b""
        self._opened: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._problems: list[str] = []
        self.question = b""

    def begin(self) -> int:
        """Look at what arrived before; return the bytes that are to come."""
        rows = []
        for _, file in self._files:
            partial = self._to / PARTIAL / _partial_name(file)
            offset = partial.stat().st_size if partial.exists() else 0
            self._offsets.append(offset if offset <= file.size else 0)
            rows.append((file.name, file.size, self._offsets[-1]))
        self.question = json.dumps(rows).encode("ascii")
        return sum(size - offset for _, size, offset in rows)

    def counting(self, count: Callable[[int], object]) -> Callable[[bytes], None]:
        """Return what takes the stream."""

        def take(data: bytes) -> None:
            self._take(data)
            count(len(data))

        return take

    def _take(self, data: bytes) -> None:
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                assert self._opened is not None, "a body follows its head"
                self._opened.write(piece)
                self._digest.update(piece)
                self._left -= len(piece)
                continue
            line, newline, data = (self._head + data).partition(b"\n")
            if not newline:
                self._head = line
                if len(line) > LINE:
                    raise self._unexpected()
                return
            self._head = b""
            self._on_line(line)

    def _on_line(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            raise self._unexpected() from None
        if self._left is None:
            self._at += 1
            if self._at >= len(self._files):
                raise self._unexpected()
            if said is True:
                self._open()
            else:
                self._problems.append(f"{self._files[self._at][1].name}: {said}")
            return
        self._close_file(str(said))

    def _open(self) -> None:
        file, offset = self._files[self._at][1], self._offsets[self._at]
        partial = self._to / PARTIAL / _partial_name(file)
        self._digest = hashlib.sha256()
        if offset:
            with partial.open("rb") as known:
                while block := known.read(BLOCK):
                    self._digest.update(block)
        self._opened = partial.open("ab" if offset else "wb")
        self._left = file.size - offset

    def _close_file(self, digest: str) -> None:
        path, file = self._files[self._at]
        self.close()
        self._left = None
        partial, place = self._to / PARTIAL / _partial_name(file), self._to / path
        if digest != self._digest.hexdigest():
            partial.unlink()
            self._problems.append(f"{file.name} changed while it was sent")
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        os.utime(partial, ns=(file.mtime, file.mtime))
        os.replace(partial, place)
        self._arrived.add(path)

    def end(self) -> None:
        """Raise CommandFailed unless all files arrived."""
        if self._at + 1 < len(self._files) or self._left is not None:
            raise self._unexpected()
        if self._problems:
            more = f" (and {len(self._problems) - 1} more)" if len(self._problems) > 1 else ""
            raise errors.CommandFailed(
                self._host, "send the files of the job", 1, self._problems[0] + more, "psctl pull fetches the rest"
            )

    def close(self) -> None:
        """Close the file that arrives; what arrived of it stays."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _unexpected(self) -> errors.CommandFailed:
        why = f"an unexpected answer after {max(0, self._at)} of {len(self._files)} files"
        return errors.CommandFailed(self._host, "send the files of the job", 1, why)


class _Arrivals:
    """What came to a folder in earlier pulls, as it was on its hosts and as it is here.

    Args:
        path: the file that keeps it, of the job.
        to: the folder.
    """

    def __init__(self, path: Path, to: Path) -> None:
        self._path, self._to = path, to
        try:
            self._all = json.loads(path.read_text(encoding="ascii"))
            self._known: dict[str, list[object]] = self._all.setdefault(str(to), {})
        except (OSError, ValueError, AttributeError):
            self._all = {}
            self._known = self._all.setdefault(str(to), {})

    def has(self, path: str, equal: Sequence[OutputFile]) -> bool:
        """Return whether a name here holds one of these files as it is on its host now."""
        known = self._known.get(path)
        return known is not None and self.ours(path) and known[0] in [list(file) for file in equal]

    def ours(self, path: str) -> bool:
        """Return whether a file here is as it came."""
        known = self._known.get(path)
        try:
            found = os.lstat(self._to / path)
        except OSError:
            return False
        return known is not None and known[1] == [found.st_size, found.st_mtime_ns, found.st_ino]

    def note(self, path: str, equal: Sequence[OutputFile]) -> None:
        """Record a file that is here."""
        found = os.lstat(self._to / path)
        known = self._known.get(path)
        source = known[0] if known is not None and known[0] in [list(each) for each in equal] else list(equal[0])
        self._known[path] = [source, [found.st_size, found.st_mtime_ns, found.st_ino]]

    def save(self) -> None:
        """Write the record, where the job has one."""
        if self._path.parent.is_dir():
            write_atomic(self._path, json.dumps(self._all).encode("ascii"))
