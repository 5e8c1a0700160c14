"""`init`: a template's files and a cluster file, in a folder of the user's."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psctl
from psctl import errors
from psctl.spec.hosts import read_host_list, read_hostfile, write_cluster
from psctl.spec.nearest import did_you_mean
from psctl.spec.schema import cluster_schema, job_schema

SCHEMAS = ".psctl"
"""The folder of the schemas beside the files; it is not sent to hosts."""

SCHEMA_LINE = "# yaml-language-server: $schema={}\n"
"""The first line of a file, by which editors find its schema: they complete keys and mark mistakes."""

NOT_COPIED = ("__pycache__", ".pyc")


def shipped(kind: str) -> Path:
    """Return the folder of templates or clusters: in the installed package, else in the repository."""
    package = Path(psctl.__file__).resolve().parent
    inside = package / f"_{kind}"
    return inside if inside.is_dir() else package.parent / kind


def templates() -> list[str]:
    """Return the names of the job templates."""
    return sorted(path.parent.name for path in shipped("templates").glob("*/job.yaml"))


def cluster_text(hosts: str | None, hostfile: tuple[str, str] | None) -> str | None:
    """Return a cluster file for hosts that were named, or None.

    Args:
        hosts: --hosts a,b,c.
        hostfile: text and path of --from-hostfile.

    Raises:
        UsageError, InvalidFile: no hosts, or malformed names.
    """
    if hosts is not None and hostfile is not None:
        raise errors.UsageError("--hosts and --from-hostfile: both name the hosts", hint="leave one of them out")
    if hosts is not None:
        try:
            return write_cluster("mine", read_host_list(hosts))
        except ValueError as error:
            raise errors.UsageError(
                f"--hosts {error}", hint="such as --hosts node-a,node-b or --hosts node[1-4]"
            ) from None
    if hostfile is not None:
        return write_cluster("mine", read_hostfile(*hostfile))
    return None


def plan_files(folder: Path, template: str, cluster: str | None) -> dict[Path, bytes]:
    """Return every file that `init` writes, with its content.

    Args:
        folder: where to.
        template: name of a job template.
        cluster: text of the cluster file; None takes the one for this machine, and the job does not name it.

    Raises:
        UsageError: there is no such template.
    """
    source = shipped("templates") / template
    if not re.fullmatch(r"[\w-]+", template) or not (source / "job.yaml").is_file():
        known = templates()
        raise errors.UsageError(
            f"--template {template}: there is no such template{did_you_mean(template, known)}",
            hint=f"one of {', '.join(known)}",
        )
    files: dict[Path, bytes] = {}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and not any(part.endswith(NOT_COPIED) for part in name.parts):
            files[folder / name] = path.read_bytes()
    if cluster is not None:
        job = folder / "job.yaml"
        files[job] = _naming_cluster(files[job].decode()).encode()
    files[folder / "cluster.yaml"] = (
        cluster.encode() if cluster is not None else (shipped("clusters") / "local.yaml").read_bytes()
    )
    for kind, schema in (("job", job_schema()), ("cluster", cluster_schema())):
        schema_file = f"{SCHEMAS}/{kind}.schema.json"
        files[folder / schema_file] = json.dumps(schema, indent=1).encode() + b"\n"
        files[folder / f"{kind}.yaml"] = SCHEMA_LINE.format(schema_file).encode() + files[folder / f"{kind}.yaml"]
    return files


def write(files: dict[Path, bytes]) -> None:
    """Write files, making their folders."""
    for path, data in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise errors.UsageError(
                f"{path} cannot be written: {os.strerror(error.errno or 0)}", hint="name another folder"
            ) from error


def _naming_cluster(job: str) -> str:
    """Return a job file that names the cluster file in its folder."""
    if re.search(r"(?m)^cluster:", job):
        return re.sub(r"(?m)^cluster:.*$", "cluster: ./cluster.yaml", job)
    return re.sub(r"(?m)^(name:.*)$", r"\1\ncluster: ./cluster.yaml", job, count=1)
