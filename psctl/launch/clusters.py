"""Which cluster a command means: a path, a name that `up` has seen, the job's own, the current one, or this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from psctl import errors
from psctl.launch.home import Home, KnownCluster
from psctl.spec.cluster import LOCAL, ClusterSpec, load_cluster, local_cluster


class Chosen(msgspec.Struct, frozen=True):
    """A cluster, and what is remembered of it. `embedded`: this machine, without a file."""

    spec: ClusterSpec
    known: KnownCluster

    @property
    def embedded(self) -> bool:
        """Whether no file stands behind it."""
        return not self.known.text


def is_path(reference: str) -> bool:
    """Tell whether a CLUSTER on a command line is a path; else it is a name."""
    return reference.endswith((".yaml", ".yml")) or "/" in reference


def choose(
    home: Home,
    asked: str | None,
    *,
    job_cluster: str | None = None,
    job_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Chosen:
    """Return the cluster that a command means.

    Args:
        home: what is remembered on this machine.
        asked: --cluster, or CLUSTER on the command line.
        job_cluster: the job file's `cluster:`; a path in it is relative to `job_folder`.
        environment: for PSCTL_CLUSTER.

    Raises:
        NoSuchCluster: there is none of that name, or no such file.
        InvalidFile, NotInThisVersion: its file is wrong.
    """
    if asked:
        return _named(home, asked, Path.cwd())
    if job_cluster:
        return _named(home, job_cluster, job_folder or Path.cwd())
    from_environment = (environment or {}).get("PSCTL_CLUSTER")
    if from_environment:
        return _named(home, from_environment, Path.cwd())
    current = home.current()
    return _named(home, current, Path.cwd()) if current else embedded(home)


def embedded(home: Home) -> Chosen:
    """Return the embedded cluster: this machine, the Python that runs psctl, its folder under psctl's own."""
    spec = local_cluster()
    runtime = msgspec.structs.replace(spec.runtime, python=sys.executable, workdir=str(home.root / "host"))
    return Chosen(msgspec.structs.replace(spec, runtime=runtime), KnownCluster(LOCAL, "", "", 0.0))


def recall(home: Home, known: KnownCluster) -> Chosen:
    """Return the cluster of a record, as it was when the record was written."""
    return Chosen(load_cluster(known.text, known.source), known) if known.text else embedded(home)


def waiting(chosen: Chosen, seconds: float) -> Chosen:
    """Return a cluster whose hosts are waited for this long at most, whatever its file says."""
    ssh = msgspec.structs.replace(chosen.spec.ssh, connect_timeout=seconds)
    return msgspec.structs.replace(chosen, spec=msgspec.structs.replace(chosen.spec, ssh=ssh))


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that a user named; InvalidFile says what is wrong with it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise errors.InvalidFile(f"{path}: no text: {error.reason}", hint="save it as UTF-8", where=str(path)) from None
    except OSError as error:
        raise errors.InvalidFile(
            f"{path}: {error.strerror or error}", hint=f"name {what} that is there", where=str(path)
        ) from None


def _named(home: Home, reference: str, folder: Path) -> Chosen:
    if is_path(reference):
        return _load(folder / Path(reference).expanduser())
    if reference == LOCAL and reference not in home.clusters():
        return embedded(home)
    return recall(home, home.cluster(reference))


def _load(path: Path) -> Chosen:
    if not path.exists():
        raise errors.NoSuchCluster(f"{path}: there is no such file", hint="psctl init writes one", where=str(path))
    text = read_text(path, "a cluster file")
    spec = load_cluster(text, str(path))
    return Chosen(spec, KnownCluster(spec.name, str(path.resolve()), text, time.time()))
