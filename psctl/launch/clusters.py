"""Chooses the cluster of a command: a path, a known name, the job's own, the current one, or this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from psctl import errors
from psctl.launch.cluster_hosts import Allocation, allocated_nodes, found_hosts
from psctl.launch.home import NEW, READY, Home, KnownCluster
from psctl.remote.fleet import Fleet
from psctl.spec import yaml_nodes
from psctl.spec.cluster import LOCAL, ClusterSpec, load_cluster, local_cluster
from psctl.spec.yaml_nodes import LARGEST
from psctl.units import format_bytes

MOST_BYTES = 4 * LARGEST
"""Bytes of a YAML file that are read: each of its characters takes four at most."""


Allocate = Callable[[ClusterSpec, str], Allocation]
"""Submits an allocation for a cluster; the second argument is its file, for messages."""


class ChosenCluster(msgspec.Struct, frozen=True):
    """A cluster, and this machine's record of it."""

    spec: ClusterSpec
    known: KnownCluster

    @property
    def embedded(self) -> bool:
        """Whether it is this machine, without a cluster file."""
        return not self.known.text

    @property
    def title(self) -> str:
        """How a command names its target: "lab (3 hosts)"."""
        count = len(self.spec.hosts)
        inside = "this machine" if self.embedded else f"{count} host{'s' if count > 1 else ''}"
        return f"{self.spec.name} ({inside})"

    def same(self, other: ChosenCluster) -> bool:
        """Return whether both are the same file's same text with the same hosts, or both this machine."""
        return self.known.same(other.known)


Connect = Callable[[ChosenCluster, Sequence[str] | None], Fleet]
"""Connects to all hosts of a cluster, or to those named; callers pass it in, so that options and tests decide."""


Progress = Callable[[str, str], None]
"""Shows the progress of a command: host ("" for all), sentence."""


class ClusterRow(msgspec.Struct, frozen=True):
    """A cluster in `psctl clusters`. `state`: ready, partial, new, changed (its file was) or file-missing."""

    name: str
    file: str | None
    current: bool
    hosts: list[str]
    state: str


def choose_cluster(
    home: Home,
    asked: str | None,
    *,
    job_cluster: str | None = None,
    job_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    allocate: Allocate | None = None,
) -> ChosenCluster:
    """Return the cluster that a command means.

    Args:
        home: the records of this machine.
        asked: --cluster, or CLUSTER on the command line.
        job_cluster: the job file's `cluster:`; a path in it is relative to `job_folder`.
        environment: for PSCTL_CLUSTER, and Slurm's variables.
        allocate: submits an allocation for a cluster of Slurm where psctl runs in none; None: that is an error.

    Raises:
        NoSuchCluster: there is none of that name, or no such file.
        InvalidFile: its file is wrong.
    """
    shell, here = environment or {}, Path.cwd()
    if asked:
        return _named(home, asked, here, shell, allocate)
    if job_cluster:
        return _named(home, job_cluster, job_folder or here, shell, allocate)
    current = shell.get("PSCTL_CLUSTER") or home.current()
    return _named(home, current, here, shell, allocate) if current else embedded_cluster(home)


def in_allocation(chosen: ChosenCluster, found: Allocation) -> ChosenCluster:
    """Return a cluster of Slurm with another allocation."""
    known = _in_allocation(chosen.known, found)
    return ChosenCluster(known.spec(), known)


def embedded_cluster(home: Home) -> ChosenCluster:
    """Return the embedded cluster: this machine, the Python that runs psctl, its folder under psctl's own."""
    spec = local_cluster()
    runtime = msgspec.structs.replace(spec.runtime, python=sys.executable, workdir=str(home.root / "host"))
    return ChosenCluster(msgspec.structs.replace(spec, runtime=runtime), KnownCluster(LOCAL, "", "", 0.0))


def recalled_cluster(home: Home, known: KnownCluster) -> ChosenCluster:
    """Return the cluster of a record, as it was when the record was written."""
    return ChosenCluster(known.spec(), known) if known.text else embedded_cluster(home)


def make_current(home: Home, chosen: ChosenCluster) -> None:
    """Make a cluster the current one; its name is known from then on."""
    name = chosen.known.name
    if not chosen.embedded:
        before = home.cluster(name) if name in home.clusters() else None
        if before is None or not before.same(chosen.known):
            home.save_cluster(msgspec.structs.replace(chosen.known, state=NEW))
    home.set_current(name)


def cluster_rows(home: Home) -> list[ClusterRow]:
    """Return every known cluster with its recorded state, `local` first; no host is contacted."""
    names = home.clusters()
    found = [] if LOCAL in names else [embedded_cluster(home)]
    found += [recalled_cluster(home, home.cluster(name)) for name in names]
    current = home.current() or LOCAL
    return [
        ClusterRow(each.known.name, each.known.source or None, each.known.name == current,
            [host.name for host in each.spec.hosts], _state(each))
        for each in found
    ]  # fmt: skip


def _state(chosen: ChosenCluster) -> str:
    """Return the recorded state, unless the cluster's file differs from the recorded text."""
    if chosen.embedded:
        return READY
    try:
        text = Path(chosen.known.source).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "file-missing"
    return chosen.known.state if text == chosen.known.text else "changed"


def train_command(home: Home, chosen: ChosenCluster, environment: Mapping[str, str]) -> str:
    """Return the command that trains on this cluster now: the job file that is near, and --cluster where it is needed.

    Without --cluster, the job file's own `cluster:`, PSCTL_CLUSTER and the current cluster decide, in this order.
    """
    folders = [Path.cwd()] if chosen.embedded else [Path.cwd(), Path(chosen.known.source).parent]
    job = next((folder / "job.yaml" for folder in folders if (folder / "job.yaml").is_file()), None)
    words = ["psctl", "train", "JOB.yaml" if job is None else shown_path(job)]
    try:
        folder = job.parent if job is not None else None
        plain = choose_cluster(home, None, job_cluster=_cluster_of(job), job_folder=folder, environment=environment)
    except errors.PsctlError:  # what would be taken is unknown or broken
        plain = None
    if plain is None or not plain.same(chosen):
        words += ["--cluster", reference(home, chosen)]
    return " ".join(words)


def reference(home: Home, chosen: ChosenCluster) -> str:
    """Return how a command line names a cluster: by its name where that means it, else by its file."""
    name = chosen.known.name
    known = home.cluster(name) if name in home.clusters() else None
    by_name = chosen.embedded if known is None else known.same(chosen.known)
    return name if by_name else shown_path(Path(chosen.known.source))


def shown_path(path: Path) -> str:
    """Return a path as a shell in this folder takes it: relative below the folder, quoted where needed."""
    short = os.path.relpath(path)
    if short.startswith(".."):
        short = str(path)
    return shlex.quote(short)


def _cluster_of(job: Path | None) -> str | None:
    """Return the `cluster:` of a job file; None where it has none or cannot be read."""
    if job is None:
        return None
    node = yaml_nodes.parse(read_text(job, "a job file"), str(job))
    found = node.get("cluster") if isinstance(node, yaml_nodes.Mapping) else None
    return found.text if isinstance(found, yaml_nodes.Scalar) and not found.null else None


def with_connect_timeout(chosen: ChosenCluster, seconds: float) -> ChosenCluster:
    """Return a cluster with another `connect_timeout` than its file has, in seconds."""
    ssh = msgspec.structs.replace(chosen.spec.ssh, connect_timeout=seconds)
    return msgspec.structs.replace(chosen, spec=msgspec.structs.replace(chosen.spec, ssh=ssh))


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that a user named, reading no more of it than a YAML document may have.

    Raises:
        InvalidFile: it cannot be read, is larger than that, or is no UTF-8; the user's fault.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            message = f"{path}: larger than {format_bytes(MOST_BYTES)}, the most that is read"
            raise errors.InvalidFile(message, hint="is it the right file?", where=str(path))
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.InvalidFile(f"{path}: no text: {error.reason}", hint="save it as UTF-8", where=str(path)) from None
    except OSError as error:
        raise errors.InvalidFile(
            f"{path}: {error.strerror or error}", hint=f"name {what} that is there", where=str(path)
        ) from None


def _named(
    home: Home, reference: str, folder: Path, environment: Mapping[str, str], allocate: Allocate | None
) -> ChosenCluster:
    if reference.endswith((".yaml", ".yml")) or "/" in reference:  # a path; else it is a name
        return _load(folder / Path(reference).expanduser(), environment, allocate)
    if reference == LOCAL and reference not in home.clusters():
        return embedded_cluster(home)
    recalled = recalled_cluster(home, home.cluster(reference))
    if recalled.spec.kind != "slurm":
        return recalled
    # the recorded allocation may have ended
    return recalled_cluster(home, _with_allocation(recalled.known, recalled.spec, environment, allocate))


def _load(path: Path, environment: Mapping[str, str], allocate: Allocate | None) -> ChosenCluster:
    if not path.exists():
        raise errors.NoSuchCluster(f"{path}: there is no such file", hint="psctl init writes one", where=str(path))
    text = read_text(path, "a cluster file")
    spec = load_cluster(text, str(path))
    known = KnownCluster(spec.name, str(path.resolve()), text, time.time())
    if spec.kind == "slurm":
        known = _with_allocation(known, spec, environment, allocate)
    elif spec.hosts_command:
        known = msgspec.structs.replace(known, found=found_hosts(spec.hosts_command, str(path)))
    return ChosenCluster(known.spec(), known)


def _with_allocation(
    known: KnownCluster, spec: ClusterSpec, environment: Mapping[str, str], allocate: Allocate | None
) -> KnownCluster:
    """Return a cluster of Slurm with the allocation that psctl runs in, else with a new one."""
    if allocate is not None and not environment.get("SLURM_JOB_ID"):
        found = allocate(spec, known.source)
    else:
        found = allocated_nodes(environment, known.source)
    return _in_allocation(known, found)


def _in_allocation(known: KnownCluster, found: Allocation) -> KnownCluster:
    return msgspec.structs.replace(
        known, allocation=found.number, found=found.nodes, owned=found.owned, racks=found.racks
    )
