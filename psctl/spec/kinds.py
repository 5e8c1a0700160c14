"""Whether a file is a cluster file or a job file, by its keys."""

from __future__ import annotations

from typing import Literal

from psctl.errors import InvalidFile
from psctl.spec import yaml_nodes
from psctl.spec.cluster import ClusterSpec, load_cluster
from psctl.spec.decode import fields_of
from psctl.spec.job import JobSpec
from psctl.spec.job_file import load_job
from psctl.spec.nearest import nearest

Kind = Literal["cluster", "job"]


def kind_of(text: str, source: str) -> Kind:
    """Return the kind of a file: the kind that has more of its keys, misspelt ones included.

    Raises:
        InvalidFile: no YAML, or keys of neither.
    """
    node = yaml_nodes.parse(text, source, [])  # load_cluster and load_job report smaller mistakes
    keys = [entry.key for entry in node.entries] if isinstance(node, yaml_nodes.Mapping) else []
    cluster, job = ({field.name for field in fields_of(spec)} for spec in (ClusterSpec, JobSpec))
    only_cluster, only_job = cluster - job, job - cluster
    for near in (False, True):
        of_cluster, of_job = (_count(keys, names, near) for names in (only_cluster, only_job))
        if of_cluster != of_job:
            return "cluster" if of_cluster > of_job else "job"
    if "hosts" in keys:
        return "cluster"
    hint = "a cluster file has hosts:, a job file has script: or module:"
    raise InvalidFile("neither a cluster file nor a job file", hint, node.where)


def load(text: str, source: str) -> ClusterSpec | JobSpec:
    """Read a cluster file or a job file.

    Raises:
        InvalidFile: as load_cluster and load_job do.
    """
    return load_cluster(text, source) if kind_of(text, source) == "cluster" else load_job(text, source)


def _count(keys: list[str], names: set[str], near: bool) -> int:
    return sum(key in names or (near and nearest(key, names) is not None) for key in keys)
