"""psctl's state on this machine: the clusters that `up` has set up, the current one, and a record of each job.

    $PSCTL_HOME/clusters/lab.json       a copy of the cluster file and its path, so that a later command needs no file
    $PSCTL_HOME/measured/links/lab.json what was measured between its hosts; measured/reach/lab.json: their addresses
    $PSCTL_HOME/measured/costs/lab.json what messages cost there, as `up` or `bench` found
    $PSCTL_HOME/current                 the name of the current cluster: `up` and `use` write it, nothing else does
    $PSCTL_HOME/jobs/digits-3/          record.json; the folder itself is what reserves the name

Several psctl processes may run at once: a job's name is reserved by making its folder, which only one of them can do;
each file is written under another name and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.launch.remote_programs.host_files import make_private
from psctl.launch.remote_programs.host_state import open_to_others
from psctl.spec.cluster import ClusterSpec, load_cluster
from psctl.types import UNDECODABLE

MEASURED = ("links", "reach", "costs")
"""Kinds of measurements that are kept for a cluster."""

FOLDERS = ("clusters", "measured", "jobs")
"""Folders of a home that must not be open to other users, as the home itself."""

PLACING = "placing"
"""A file in a job's folder that is locked by the psctl which starts the job."""

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What flock answers on a file system without locks."""

READY, PARTIAL, NEW = "ready", "partial", "new"
"""States of a cluster as this machine left it: every host made ready, some of them, none yet."""

S = TypeVar("S", bound=msgspec.Struct)

_JOB = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{1,9})")


class KnownCluster(msgspec.Struct, frozen=True):
    """A cluster file as psctl last read it. `text` is empty for the embedded local cluster."""

    name: str
    source: str  # absolute path of the file
    text: str
    time: float
    state: str = READY
    found: list[str] | None = None  # hosts that the command of `hosts: {from: COMMAND}` printed, or Slurm's nodes
    allocation: str = ""  # of Slurm
    owned: bool = False  # psctl submitted the allocation
    racks: dict[str, str] = {}  # switch of each node, as Slurm's topology has it

    def spec(self) -> ClusterSpec:
        """Return the cluster as it was then; not for the embedded one.

        Raises:
            InvalidFile: another version of psctl read it.
        """
        return load_cluster(self.text, self.source, self.found, self.allocation, self.racks)

    def same(self, other: KnownCluster) -> bool:
        """Return whether both are the same file's same text with the same hosts, or both this machine."""
        return (self.name, self.text, self.found, self.allocation) == (
            other.name, other.text, other.found, other.allocation,
        )  # fmt: skip


class HostRecord(msgspec.Struct, frozen=True):
    """One host of a job: where its folder is and which process is its agent."""

    name: str
    workdir: str
    job_dir: str
    python: str
    code: str  # folder that holds psctl's package there
    pid: int = 0
    started: str = ""  # start-time token of the agent; "" when it was not started

    @property
    def files(self) -> str:
        """The folder there in which the job's workers run: the job's code, its data, and what the script writes."""
        return f"{self.job_dir}/files"

    def module(self, name: str, *words: str) -> list[str]:
        """Return the command that runs a module of psctl on the host."""
        return ["env", f"PYTHONPATH={self.code}", self.python, "-m", name, *words]


class DataLink(msgspec.Struct, frozen=True):
    """A job's data on its hosts: `to` in the job's folder is a link to `path` below the data folder of the workdir."""

    to: str
    path: str


class ReportedRank(msgspec.Struct, frozen=True):
    """The last state of one process of a job, as its host reported it."""

    role: str
    rank: int
    host: str = ""
    pid: int | None = None
    state: str = "starting"
    step: int = 0
    last_error: str | None = None
    cpu: int = 0  # percent of one core
    memory: int = 0  # bytes


class JobRecord(msgspec.Struct, frozen=True):
    """The record of a job that this machine submitted."""

    job: str
    name: str
    created: float
    cluster: KnownCluster
    hosts: list[HostRecord]  # the first is the head
    job_file: str
    job_source: str
    job_folder: str
    code_hash: str
    checkpoints: str  # folder of this job's checkpoints on the head
    state: str = "submitted"  # last one seen; done, failed and stopped are final
    limit: float = 120.0  # seconds from `created` in which its agents must be started
    reason: str = ""  # why it failed, where none of its ranks reported it
    exit: int | None = None
    step: int = 0
    size: int | None = None  # bytes of gradients, once the run has decided its plan
    compute: float | None = None  # seconds of compute of a step, as last reported to this machine
    ranks: list[ReportedRank] = []  # last known, once the job is over
    authority: str = ""  # certificate (PEM) of the job's authority, which signs its checkpoints; "": not known
    data: list[DataLink] = []
    leader: int = 0  # the host that leads; another one than the first if that was lost

    @property
    def head(self) -> HostRecord:
        """The host whose agent runs the coordinator."""
        return self.hosts[self.leader]

    def led_by(self, leader: int) -> JobRecord:
        """Return the record with another leading host."""
        if leader == self.leader:
            return self
        return msgspec.structs.replace(self, leader=leader, checkpoints=f"{self.hosts[leader].workdir}/checkpoints")

    @property
    def over(self) -> bool:
        """Whether the job was seen to end."""
        return self.state in ("done", "failed", "stopped")


def by_cluster(records: Sequence[JobRecord]) -> list[tuple[JobRecord, list[JobRecord]]]:
    """Return records grouped by their cluster, each group with its first."""
    groups = grouped(((record.cluster.name, record.cluster.text), record) for record in records)
    return [(group[0], group) for group in groups.values()]


def split_job(reference: str) -> tuple[str, int] | None:
    """Split "digits-3" into its name and number; None when it is no such name."""
    match = _JOB.fullmatch(reference)
    return (match["name"], int(match["number"])) if match else None


def folder_of(environment: Mapping[str, str]) -> Path:
    """Return the folder that PSCTL_HOME names, else ~/.psctl."""
    return Path(environment.get("PSCTL_HOME") or "~/.psctl").expanduser().absolute()


class Home:
    """The folder of psctl's state on this machine.

    Args:
        root: the folder; it is made when something is first written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Home:
        """Return the home that PSCTL_HOME names, else ~/.psctl.

        Raises:
            UsageError: another user may write there.
        """
        root = folder_of(environment)
        found = open_to_others(str(root), FOLDERS)
        if found is not None:
            raise errors.UsageError(
                f"PSCTL_HOME ({root}): {found['why']}; what psctl keeps there decides what it runs",
                hint=f"{found['cure']}, or set PSCTL_HOME to another folder",
            )
        return cls(root)

    @contextlib.contextmanager
    def start_lock(self) -> Iterator[None]:
        """Hold the lock under which a psctl looks for free slots and starts a job on them."""
        make_private(str(self.root))
        with _locked(self.root / "starting"):
            yield

    # ---- clusters ------------------------------------------------------------------------------------------------

    def save_cluster(self, cluster: KnownCluster) -> None:
        """Save a cluster, so that its name is known; the current one does not change."""
        write_atomic(self.root / "clusters" / f"{cluster.name}.json", msgspec.json.encode(cluster))

    def set_current(self, name: str) -> None:
        """Make a known cluster, or "local", the current one."""
        write_atomic(self.root / "current", name.encode() + b"\n")

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster, also as the current one."""
        for path in (self.root / "clusters" / f"{name}.json", *(self._measured(what, name) for what in MEASURED)):
            path.unlink(missing_ok=True)
        if self.current() == name:
            (self.root / "current").unlink(missing_ok=True)

    def current(self) -> str | None:
        """Return the name of the current cluster."""
        try:
            return (self.root / "current").read_text().strip() or None
        except FileNotFoundError:
            return None

    def clusters(self) -> list[str]:
        """Return the names of all clusters that `up` has seen."""
        return sorted(path.stem for path in (self.root / "clusters").glob("*.json"))

    def cluster(self, name: str) -> KnownCluster:
        """Return a cluster that `up` has seen.

        Raises:
            NoSuchCluster: it has seen none of that name; the user's fault.
        """
        try:
            data = (self.root / "clusters" / f"{name}.json").read_bytes()
        except (FileNotFoundError, OSError) as error:
            known = ", ".join(self.clusters()) or "none yet"
            raise errors.NoSuchCluster(
                f'no cluster is named "{name}"; `psctl up` has seen: {known}',
                hint=f"psctl up {name}.yaml, or give a path (it ends in .yaml or holds a slash)",
                where=name,
            ) from error
        return msgspec.json.decode(data, type=KnownCluster)

    def save_measurement(self, what: str, name: str, value: msgspec.Struct) -> None:
        """Save a measurement of a cluster; `what` is one of MEASURED."""
        write_atomic(self._measured(what, name), msgspec.json.encode(value))

    def load_measurement(self, what: str, name: str, kind: type[S]) -> S | None:
        """Return a saved measurement of a cluster; None when there is none, or it is damaged or of another version."""
        try:
            return msgspec.json.decode(self._measured(what, name).read_bytes(), type=kind)
        except (FileNotFoundError, *UNDECODABLE):
            return None

    def _measured(self, what: str, name: str) -> Path:
        return self.root / "measured" / what / f"{name}.json"

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def reserve_name(self, name: str, above: int = 0) -> str:
        """Reserve the next free job name "NAME-N"; N is above `above` and above every number used here."""
        folder = self.root / "jobs"
        make_private(str(folder))
        used = [split[1] for path in folder.iterdir() if (split := split_job(path.name)) and split[0] == name]
        number = max([above, *used]) + 1
        while True:
            try:
                (folder / f"{name}-{number}").mkdir()
            except FileExistsError:
                number += 1
            else:
                (folder / f"{name}-{number}").chmod(0o700)
                return f"{name}-{number}"

    def release_name(self, job: str) -> None:
        """Release a reserved name after a submission that left no files."""
        shutil.rmtree(self.root / "jobs" / job, ignore_errors=True)

    def save_record(self, record: JobRecord) -> None:
        """Write a job's record."""
        write_atomic(self.root / "jobs" / record.job / "record.json", msgspec.json.encode(record))

    def update_record(self, record: JobRecord) -> None:
        """Write a job's record again; a full disk is no error, because the job's event log has the same content."""
        try:
            self.save_record(record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def save_steps(self, job: str, steps: Iterable[int]) -> None:
        """Save the steps of a job's checkpoints, for completion of their names."""
        folder = self.root / "jobs" / job
        if folder.is_dir():
            write_atomic(folder / "steps.json", msgspec.json.encode(sorted(steps)))

    def steps(self, record: JobRecord) -> list[int]:
        """Return the steps of a job's checkpoints, newest first: those on this machine, else the saved ones."""
        here = Path(record.checkpoints) / record.job
        if not record.cluster.text and here.is_dir():
            return sorted((int(path.name) for path in here.iterdir() if path.name.isdecimal()), reverse=True)
        try:
            seen = msgspec.json.decode((self.root / "jobs" / record.job / "steps.json").read_bytes(), type=list[int])
        except (OSError, *UNDECODABLE):  # a hint for the shell, no more
            return []
        return sorted(seen, reverse=True)

    @contextlib.contextmanager
    def submission_lock(self, job: str) -> Iterator[None]:
        """Hold the lock that shows that this psctl starts a job."""
        path = self.root / "jobs" / job / PLACING
        with _locked(path):
            yield
            path.unlink(missing_ok=True)

    def is_being_submitted(self, job: str) -> bool:
        """Return whether a running psctl is starting this job."""
        path = self.root / "jobs" / job / PLACING
        try:
            with _locked(path, os.O_RDONLY, fcntl.LOCK_SH | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False

    def jobs(self) -> list[JobRecord]:
        """Return all records, oldest first."""
        return sorted(self._records(), key=lambda record: (record.created, record.job))

    def job(self, reference: str | None) -> JobRecord:
        """Return the job that a reference means: "digits-3", "digits" (its newest), None (the newest of all).

        Raises:
            NoSuchJob: there is none; the user's fault.
        """
        records = self.jobs()
        chosen = [r for r in records if reference in (None, r.job)] or [r for r in records if r.name == reference]
        if chosen:
            return chosen[-1]
        if reference is None:
            raise errors.NoSuchJob("no job was started from this machine yet", hint="psctl train JOB.yaml")
        known = ", ".join(record.job for record in records[-5:]) or "none yet"
        raise errors.NoSuchJob(f'no job is named "{reference}"; known: {known}', hint="psctl jobs", where=reference)

    def _records(self) -> Iterator[JobRecord]:
        for path in (self.root / "jobs").glob("*/record.json"):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=JobRecord)
            except FileNotFoundError:  # another psctl gave the name back meanwhile
                continue
            except UNDECODABLE as error:
                raise errors.InvalidFile(
                    f"{path}: the record is damaged: {error}", hint=f"remove {path.parent}", where=str(path)
                ) from error


@contextlib.contextmanager
def _locked(path: Path, flags: int = os.O_WRONLY | os.O_CREAT, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a file; it is given up with the file, also by a psctl that is killed.

    Where its file system has no locks (some of NFS and Lustre), a file of this machine is locked in its place: psctl
    on other machines with the same home is not held off then.
    """
    with contextlib.ExitStack() as held:
        file = held.enter_context(os.fdopen(os.open(path, flags | os.O_CLOEXEC, 0o600)))
        try:
            fcntl.flock(file, how)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
            here = Path(tempfile.gettempdir()) / f"psctl-{os.geteuid()}-{name}.lock"
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fcntl.flock(held.enter_context(os.fdopen(os.open(here, flags, 0o600))), how)
        yield


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable by this user only."""
    make_private(str(path.parent))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
