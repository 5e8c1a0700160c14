"""Sends the data of a job to the hosts that lack it, once a disk; hosts that are this machine get a link to it.

A host answers with the contents that it lacks, and gets those. After an interruption it is asked again, and gets the
rest. Hosts that share a disk have the same store id: one of them gets the data, and the others are asked again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.launch.clusters import Progress
from psctl.launch.files.content_index import FileStamp, changed
from psctl.launch.files.data_sets import DataFile, DataSet
from psctl.launch.host_programs import DATA_FILES, OBJECT, run_program
from psctl.launch.hosts.converge import ReachedCluster
from psctl.remote.shell import InputStream, Shell
from psctl.types import HostName
from psctl.units import format_bytes

T = TypeVar("T")

BLOCK = 1 << 18

ROUNDS = 3
"""Times that a host is sent contents that arrive as others, before that is an error."""

TURN = 1.0
"""Seconds between two looks at a set that another psctl sends."""


class CheckAnswer(msgspec.Struct, frozen=True):
    """Which sets a host has; `store` is the id of its disk, "" for none yet."""

    store: str
    whole: dict[str, bool]


class NeedAnswer(msgspec.Struct, frozen=True):
    """What a host lacks of a set: digests, and how many bytes of each are there."""

    busy: bool = False
    whole: bool = False
    lacking: list[tuple[str, int]] = []
    removed: list[str] = []
    store: str = ""


class ReceiveAnswer(msgspec.Struct, frozen=True):
    """How a host received contents."""

    busy: bool = False
    wrong: list[str] = []


class FinishAnswer(msgspec.Struct, frozen=True):
    """Whether a host has all of a set."""

    busy: bool = False
    whole: bool = False


_CHECK = msgspec.json.Decoder(CheckAnswer)
_NEED = msgspec.json.Decoder(NeedAnswer)
_RECEIVE = msgspec.json.Decoder(ReceiveAnswer)
_FINISH = msgspec.json.Decoder(FinishAnswer)


def hosts_that_lack(reached: ReachedCluster, sets: Sequence[DataSet], names: Sequence[str]) -> dict[str, list[DataSet]]:
    """Return which of a job's sets each host lacks; hosts that lack none are left out.

    Args:
        reached: the cluster.
        sets: those of this machine; a set of a URL is not looked at.
        names: the job's hosts.

    Raises:
        PsctlError: a host could not be asked.
    """
    return _lacking(reached, [each for each in sets if each.source is not None], names)[0]


def _lacking(
    reached: ReachedCluster, sets: Sequence[DataSet], names: Sequence[str], *, makes: bool = False
) -> tuple[dict[str, list[DataSet]], dict[str, str]]:
    """Return the sets that each host lacks, and the id of each host's disk; `makes`: a disk without one gets one."""
    if not sets:
        return {}, {}

    def ask(name: HostName, shell: Shell) -> CheckAnswer:
        site = reached.sites[name]
        question = {"workdir": site.workdir, "names": [each.name for each in sets], "makes": makes}
        return run_program(shell, site.executable, DATA_FILES, "check", question, _CHECK, timeout=600)

    found: dict[str, list[DataSet]] = {}
    stores: dict[str, str] = {}
    for name, outcome in reached.fleet.each(ask, names=names).items():
        if outcome.error is not None:
            raise outcome.error
        stores[name] = outcome.value.store
        lacking = [each for each in sets if not outcome.value.whole.get(each.name)]
        if lacking:
            found[name] = lacking
    return found, stores


def send_data(reached: ReachedCluster, sets: Sequence[DataSet], names: Sequence[str], progress: Progress) -> None:
    """Send a job's data to the hosts that lack it.

    Args:
        reached: the cluster; the hosts' workdirs exist.
        sets: those of this machine; a set of a URL is not looked at.
        names: the job's hosts.
        progress: shows progress.

    Raises:
        DiskFull: a host has no room for it; the data that was there already stays.
        InvalidFile: a file changed while it was sent.
        PsctlError: a host failed. What arrived stays, and the next call continues.
    """
    sets = [each for each in sets if each.source is not None]
    lacking, stores = _lacking(reached, sets, names, makes=True)
    local = {host.name for host in reached.chosen.spec.hosts if host.local}
    for name in [name for name in lacking if name in local]:
        for each in lacking.pop(name):
            _link(reached, name, each)
    first = {members[0] for members in grouped((stores[name], name) for name in lacking).values()}
    for round_hosts in (sorted(first, key=list(lacking).index), [name for name in lacking if name not in first]):
        if not round_hosts:
            continue
        if round_hosts[0] not in first:
            lacking = _lacking(reached, sets, round_hosts)[0]
        _send_to(reached, {name: lacking[name] for name in round_hosts if name in lacking}, progress)


def _send_to(reached: ReachedCluster, lacking: Mapping[str, list[DataSet]], progress: Progress) -> None:
    if not lacking:
        return
    jobs = sorted({job.folder for site in reached.sites.values() for job in site.jobs})

    def send(name: HostName, shell: Shell) -> None:
        for each in lacking[name]:
            _Sender(reached, shell, each, jobs, progress).send()

    for outcome in reached.fleet.each(send, names=lacking).values():
        if outcome.error is not None:
            raise outcome.error


def _link(reached: ReachedCluster, name: str, data: DataSet) -> None:
    """Make a set on a host that is this machine: a link to the data itself."""
    site = reached.sites[name]
    assert data.source is not None, "a URL is fetched"
    path = data.source.parent if data.inner else data.source
    question = {"workdir": site.workdir, "name": data.name, "path": str(path)}
    run_program(reached.fleet.shell(name), site.executable, DATA_FILES, "link", question, OBJECT)


class _Sender:
    """Sends one set to one host."""

    def __init__(
        self, reached: ReachedCluster, shell: Shell, data: DataSet, jobs: Sequence[str], progress: Progress
    ) -> None:
        self._shell, self._data, self._progress = shell, data, progress
        self._site = reached.sites[shell.name]
        self._question = {"workdir": self._site.workdir, "name": data.name, "jobs": list(jobs)}
        self._files = {file.digest: file for file in data.files}
        self._waited = False

    def send(self) -> None:
        """Send what the host lacks until it has all."""
        for _ in range(ROUNDS):
            need = self._need()
            for name in need.removed:
                self._progress(self._shell.name, f"removed data that no job uses, data/{name[:12]}, to make room")
            if need.whole or (self._transfer(need) and self._finish()):
                return
        raise errors.CommandFailed(
            self._shell.name, f"receive {self._data.spec.source}", 1,
            f"contents arrived as others {ROUNDS} times", "look at the host's memory and disk, and at the network",
        )  # fmt: skip

    def _need(self) -> NeedAnswer:
        while True:
            answer = self._ask("need", _NEED, self._data.manifest)
            if not answer.busy:
                return answer
            self._wait()

    def _finish(self) -> bool:
        while (answer := self._ask("finish", _FINISH, b"")).busy:
            self._wait()
        return answer.whole

    def _wait(self) -> None:
        if not self._waited:
            self._progress(self._shell.name, f"another psctl sends {self._data.spec.source}: waiting for it")
        self._waited = True
        time.sleep(TURN)

    def _transfer(self, need: NeedAnswer) -> bool:
        """Send the contents that a host lacks; return whether all of them arrived as they are."""
        wanted = []
        for digest, offset in need.lacking:
            file = self._files.get(digest)
            if file is None or not 0 <= offset <= file.stamp.size:
                raise errors.CommandFailed(self._shell.name, "data_files need", 0, "an unexpected answer: no such file")
            wanted.append((file, offset))
        if not wanted:
            return True
        size = sum(file.stamp.size - offset for file, offset in wanted)
        begun = sum(offset for _, offset in wanted)
        more = f", {format_bytes(begun)} of it are there" if begun else ""
        self._progress(
            self._shell.name,
            f"sending {self._data.spec.source} ({format_bytes(size)} in {len(wanted)} files{more})",
        )
        stream = InputStream(size + sum(map(len, map(_header, wanted))), lambda: frames_of(wanted))
        answer = self._ask("receive", _RECEIVE, stream)
        if answer.busy:
            self._wait()
        return not answer.busy and not answer.wrong

    def _ask(self, verb: str, answer: msgspec.json.Decoder[T], stdin: bytes | InputStream) -> T:
        return run_program(
            self._shell, self._site.executable, DATA_FILES, verb, self._question, answer, stdin=stdin, timeout=None
        )


def _header(wanted: tuple[DataFile, int]) -> bytes:
    file, offset = wanted
    return json.dumps([file.digest, file.stamp.size, offset, file.executable]).encode() + b"\n"


def frames_of(wanted: Sequence[tuple[DataFile, int]]) -> Iterator[bytes]:
    """Yield each file's header, then its bytes.

    Raises:
        InvalidFile: a file is not what was hashed.
    """
    for file, offset in wanted:
        yield _header((file, offset))
        try:
            with file.path.open("rb") as opened:
                if FileStamp.of(os.fstat(opened.fileno())) != file.stamp:
                    raise changed(file.path)
                opened.seek(offset)
                left = file.stamp.size - offset
                while left:
                    block = opened.read(min(BLOCK, left))
                    if not block:
                        raise changed(file.path)
                    left -= len(block)
                    yield block
                if FileStamp.of(os.fstat(opened.fileno())) != file.stamp:
                    raise changed(file.path)
        except OSError as error:
            raise errors.InvalidFile(f"{file.path}: {error.strerror}", where=str(file.path)) from error
