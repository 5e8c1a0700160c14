"""Prepares the submission of a job file: connects to the hosts, makes them ready, assigns workers to hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import msgspec

from psctl import errors
from psctl.launch.archive import Archive, pack_folder, walk
from psctl.launch.checkpoints import checkpoint_actions, checkpoint_listing, target_actions
from psctl.launch.clusters import ChosenCluster, Connect, Progress, recalled_cluster
from psctl.launch.files import data_sets, data_transfer, output_pull, url_fetch
from psctl.launch.home import Home, JobRecord
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.jobs import script_entry
from psctl.launch.jobs.submit import JobRequest, secrets_of, submit, variables
from psctl.launch.measure import link_measurement
from psctl.launch.measure import reach as reach_each_other
from psctl.launch.placement import ports
from psctl.launch.placement.cluster_snapshot import machines_of
from psctl.launch.placement.job_planning import order_for_plan, plan_of
from psctl.launch.placement.roster import JobHosts, Resumed, assign_workers
from psctl.launch.setup import cluster_setup
from psctl.orders import JobOrder
from psctl.plan.choose import Plan, planner_for_job
from psctl.remote.shell import Shell, TransferMeter
from psctl.spec.job import JobSpec
from psctl.spec.job_file import load_job
from psctl.spec.noted_options import split_notes, with_notes
from psctl.types import JsonObject
from psctl.units import format_bytes, hide_credentials

Warn = Callable[[str], None]

Resumable: TypeAlias = checkpoint_actions.LocatedCheckpoint | target_actions.TargetCheckpoint
"""A checkpoint that a job resumes from: on a host, or at a URL."""

LARGE = 20_000_000
"""Bytes of a folder that takes so long to pack that it is said."""


class RequestedJob(msgspec.Struct, frozen=True):
    """A job file with the options of the command line. `env` holds --env; None takes a value from the shell."""

    job: JobSpec
    text: str
    source: str
    env: dict[str, str | None] = {}

    @property
    def folder(self) -> Path:
        """Return the job's folder: `workdir:`, relative to the job file."""
        return (Path(self.source).parent / Path(self.job.workdir).expanduser()).resolve()


def request_of(
    wanted: RequestedJob, chosen: ChosenCluster, shell: Mapping[str, str], progress: Progress, code: str | None = None
) -> JobRequest:
    """Pack the job's folder and collect its variables.

    Args:
        wanted, chosen: the job and the cluster.
        shell: the variables of the user's shell.
        progress: shows progress.
        code: hash of code that hosts have, as a checkpoint's manifest names it; None packs the job's folder.

    Raises:
        InvalidFile: the script or the folder does not exist, or cannot be sent; the user's fault.
        UsageError: a variable is not set in the user's shell.
    """
    job, archive = wanted.job, None
    if code is None:
        archive = _pack(wanted, progress)
        code = archive.hash
        if archive.warning:
            progress("", archive.warning + "; `data:` sends large files once, `exclude:` leaves them out")
    return JobRequest(
        job=job, text=wanted.text, source=wanted.source, folder=wanted.folder if archive else None, code=code,
        archive=archive, environment=variables(job, chosen.spec.runtime.env, wanted.env, shell),
        secrets=secrets_of(job, shell),
    )  # fmt: skip


def with_data(request: JobRequest, chosen: ChosenCluster, home: Home, meter: TransferMeter | None) -> JobRequest:
    """Return a request with the data that its job file names, hashed where a host needs a copy.

    Raises:
        InvalidFile: a path does not exist, or holds what cannot be sent; the user's fault.
    """
    job = request.job
    hashed = not all(host.local for host in chosen.spec.hosts)
    text = split_notes(request.text)[0]
    sent = set(request.archive.files) if request.archive is not None else set()
    for index, spec in enumerate(job.data):
        above = [str(each) for each in PurePosixPath(spec.place).parents]
        files = [name for name in above if name in sent and not _is_folder(request, name)]
        if spec.place in sent or files:
            raise errors.InvalidFile(
                f"data[{index}].to: {[spec.place, *files][-1]} is in the job's folder too, which is sent",
                hint="name another place, or leave that out with `exclude:`",
                where=data_sets.position(text, job.source, index),
            )
    return msgspec.structs.replace(request, data=data_sets.data_sets(job, text, home, meter, hashed=hashed))


def _is_folder(request: JobRequest, name: str) -> bool:
    path = (request.folder or Path()) / name
    return path.is_dir() and not path.is_symlink()


def _pack(wanted: RequestedJob, progress: Progress) -> Archive:
    job, scripts = wanted.job, script_entry.scripts_of(wanted.job, wanted.text)
    for each in scripts:
        if error := script_entry.missing(each, wanted.folder):
            raise error
    exclude = [
        *job.exclude, *data_sets.excluded(job, wanted.folder), *output_pull.excluded(job.source, wanted.folder)
    ]  # fmt: skip
    size = sum(path.lstat().st_size for _, path in walk(wanted.folder, exclude))
    if size >= LARGE:
        progress("", f"packing the job's folder ({format_bytes(size)})")
    archive = pack_folder(wanted.folder, exclude)
    for key, script, where in scripts:
        if script not in archive.files:
            raise errors.InvalidFile(
                f"{key}: {script} is left out by .gitignore or `exclude:`, so it is not sent to hosts",
                hint="exclude: ['!" + script + "'] lets it in",
                where=where,
            )
    return archive


@contextlib.contextmanager
def reach(
    home: Home, chosen: ChosenCluster, connect: Connect, codes: list[str], progress: Progress
) -> Iterator[ReachedCluster]:
    """Connect to every host and inspect it; find the addresses by which hosts reach each other.

    Raises:
        PsctlError: the first host's error if a host cannot be used; no host has been changed then.
    """
    with cluster_setup.inspect(home, chosen, connect, codes) as reached:
        for error in reached.failed.values():
            raise _of_all(reached.failed, error)
        reach_each_other.find(reached, progress)
        link_measurement.load(reached)
        yield reached


def make_ready(reached: ReachedCluster, progress: Progress, warn: Warn) -> None:
    """Make the hosts ready that are not, as `up` does; raise the first host's error."""
    for warning in cluster_setup.carry_out(reached, progress):
        warn(warning)
    for error in reached.failed.values():
        raise _of_all(reached.failed, error)


def job_hosts_of(reached: ReachedCluster, job: JobSpec) -> JobHosts:
    """Assign workers to hosts; raises InvalidFile or JobRunning when there are too few slots."""
    return assign_workers(reached.chosen.spec, machines_of(reached), job)


def _checked(reached: ReachedCluster, request: JobRequest, progress: Progress, warn: Warn) -> JobHosts:
    """Make the hosts ready for a job; return its hosts."""
    job_hosts = job_hosts_of(reached, request.job)  # too few slots or ports are refused before anything is touched
    ports.check(reached, job_hosts, request.job)
    planner_for_job(order_for_plan(reached, request.job.name, request.job, job_hosts, request.code)).check()
    make_ready(reached, progress, warn)
    job_hosts = job_hosts_of(reached, request.job)  # the links' rates may have been measured since
    if "://" in (request.job.checkpoint.to or ""):
        _check_target(reached, job_hosts, request.job)
    return job_hosts


def hosts_for_data(reached: ReachedCluster, request: JobRequest, progress: Progress, warn: Warn) -> list[str]:
    """Return the job's hosts, made ready, if one of them lacks data of the job; else an empty list."""
    if not request.data:
        return []
    names = _checked(reached, request, progress, warn).names
    unknown = any(not each.name for each in request.data)
    return names if unknown or data_transfer.hosts_that_lack(reached, request.data, names) else []


def place_data(reached: ReachedCluster, request: JobRequest, names: list[str], progress: Progress) -> JobRequest:
    """Send a job's data to its hosts, and have them fetch the URLs; return the request with their names there."""
    data_transfer.send_data(reached, request.data, names, progress)
    variables = {**request.environment, **request.secrets}
    data = url_fetch.fetch_urls(reached, request.data, names, variables, progress)
    return msgspec.structs.replace(request, data=data)


def run(
    reached: ReachedCluster,
    request: JobRequest,
    resume: Resumable | None,
    progress: Progress,
    warn: Warn,
) -> JobRecord:
    """Make the hosts ready and start the job.

    Args:
        reached: a cluster that was reached.
        request: the job.
        resume: the checkpoint that it resumes from; it is copied to the new head if that lacks it.
        progress, warn: show progress, and warnings about the hosts' links.
    """
    job_hosts = _checked(reached, request, progress, warn)
    resumed = None
    if isinstance(resume, target_actions.TargetCheckpoint):
        request = _with_recorded_code(reached, request, resume)
        resumed = Resumed(_bring_from_target(reached, job_hosts, resume, progress), resume.id)
    elif resume is not None:
        with source_of(reached, resume.record, resume.host.name) as source:
            if request.archive is None:
                archive = checkpoint_actions.bring_code(source, resume.host, resume.id, reached.sites, request.code)
                request = msgspec.structs.replace(request, archive=archive)
            resumed = Resumed(_bring(reached, job_hosts, source, resume, progress), resume.id)
    return submit(reached, request, job_hosts, resumed, progress)


def _check_target(reached: ReachedCluster, job_hosts: JobHosts, job: JobSpec) -> None:
    """Refuse a `checkpoint.to` for which the head lacks a package: it would be seen at the first checkpoint only."""
    head = job_hosts.hosts[0].name
    body = {"to": job.checkpoint.to}
    checkpoint_listing.question(reached.fleet.shell(head), reached.record(job.name, head), "target", body, dict)


@contextlib.contextmanager
def source_of(reached: ReachedCluster, record: JobRecord, name: str) -> Iterator[Shell]:
    """Return a connection to a host of an earlier job; an open one if it leads to the same host."""
    if _same_cluster(reached, record) and name in reached.fleet.shells:
        yield reached.fleet.shell(name)
        return
    with reached.connect(recalled_cluster(reached.home, record.cluster), [name]) as fleet:
        yield fleet.shell(name)


def dry_run(reached: ReachedCluster, request: JobRequest, size: int | None) -> JsonObject:
    """Return what `train --dry-run` prints: processes, hosts, ports, files and the plan."""
    job_hosts = job_hosts_of(reached, request.job)
    ports.check(reached, job_hosts, request.job)
    order = order_for_plan(reached, request.job.name, request.job, job_hosts, request.code)
    plan, document = plan_of(order, size)
    lacking = data_transfer.hosts_that_lack(reached, request.data, job_hosts.names)
    span = order.ports
    return {
        "job": request.job.name,
        "cluster": reached.chosen.spec.name,
        "processes": _processes(order, plan),
        "hosts": [
            {
                "name": host.name, "address": host.address, "interface": host.interface,
                "actions": [
                    *map(str, reached.plans[host.name]), *_sends(reached, request, host.name),
                    *(f"{_verb(reached, host.name)} {each.spec.source} to data/{each.name[:12]}"
                      for each in lacking.get(host.name, [])),
                    *(f"fetch {hide_credentials(each.spec.source)}, unless it is there"
                      for each in request.data if each.source is None),
                ],
            }
            for host in job_hosts.hosts
        ],
        "ports": f"{span[0]}-{span[1]}" if span else "any free port of each host's address",
        "prometheus": str(order.exports.prometheus) if order.exports.prometheus else None,
        "files": _files(request),
        "data": data_sets.described(request.data),
        "plan": document,
    }  # fmt: skip


def _verb(reached: ReachedCluster, name: str) -> str:
    """Return how a host gets data: one that is this machine gets a link."""
    return "link" if any(host.local for host in reached.chosen.spec.hosts if host.name == name) else "send"


def load_requested_job(text: str, source: str, overrides: list[str], env: list[str]) -> RequestedJob:
    """Read a job file, with the options of the command line in place of its values.

    The options are appended as comments to the text that checkpoints store, so that a restored job is the same. The
    numbers of workers and servers are not, because a checkpoint can be restored onto any.

    Args:
        overrides: `key=value` of --set and its short forms.
        env: `K=V` of --env; a bare `K` takes the value from the shell.
    """
    text, kept, kept_env = split_notes(text)
    overrides, env = [*kept, *overrides], [*kept_env, *env]
    given: dict[str, str | None] = {}
    for item in env:
        name, equals, value = item.partition("=")
        if not name.isidentifier():
            raise errors.UsageError(
                f"--env {item}: no variable of that name can be set",
                hint="--env NAME=VALUE, or --env NAME to take it from your shell",
            )
        given[name] = value if equals else None
    kept = [each for each in overrides if each.partition("=")[0].strip() not in ("workers", "servers")]
    whole = with_notes(text, kept, env)
    return RequestedJob(load_job(text, source, overrides), whole, source, given)


def _bring(
    reached: ReachedCluster,
    job_hosts: JobHosts,
    source: Shell,
    resume: checkpoint_actions.LocatedCheckpoint,
    progress: Progress,
) -> str:
    head = job_hosts.hosts[0].name
    host = reached.record(resume.record.job, head)
    same = _same_cluster(reached, resume.record) and resume.host.name == head
    if same and host.workdir == resume.host.workdir:
        return resume.folder
    progress(head, f"carrying {resume.id} over from {resume.host.name}")
    return checkpoint_actions.bring(source, resume, reached.fleet.shell(head), host)


def _bring_from_target(
    reached: ReachedCluster, job_hosts: JobHosts, resume: target_actions.TargetCheckpoint, progress: Progress
) -> str:
    head = job_hosts.hosts[0].name
    progress(head, f"carrying {resume.id} over from {hide_credentials(resume.target.target)}")
    host = reached.record(resume.manifest.job, head)
    return target_actions.bring(resume, reached.fleet.shell(head), host)


def _with_recorded_code(
    reached: ReachedCluster, request: JobRequest, resume: target_actions.TargetCheckpoint
) -> JobRequest:
    """Return a request with its code: a URL has none, so it is on the hosts, or comes from the checkpoint's job."""
    if request.archive is not None or all(site.codes.get(request.code) for site in reached.sites.values()):
        return request
    assert resume.record is not None, "without a record a job file of this machine is required, which is packed"
    host = resume.record.head
    try:
        with source_of(reached, resume.record, host.name) as source:
            archive = checkpoint_actions.bring_code(source, host, resume.id, reached.sites, request.code)
    except errors.HostUnreachable as error:
        raise errors.HostUnreachable(
            f"{resume.id}: its code is on {host.name} only, which is not reached: {error.message}",
            hint=checkpoint_actions.OTHER_JOB_FILE,
            where=host.name,
        ) from error
    return msgspec.structs.replace(request, archive=archive)


def _same_cluster(reached: ReachedCluster, record: JobRecord) -> bool:
    """Return whether a job ran on the same hosts: it had the same cluster file."""
    known = reached.chosen.known
    return (known.name, known.text) == (record.cluster.name, record.cluster.text)


def _of_all(failed: Mapping[str, errors.PsctlError], first: errors.PsctlError) -> errors.PsctlError:
    """Return the first host's error, with the names of the others."""
    if len(failed) > 1:
        others = ", ".join(list(failed)[1:])
        first.message = f"{first.message} (and {len(failed) - 1} more hosts failed: {others})"
    return first


def _processes(order: JobOrder, plan: Plan) -> list[JsonObject]:
    names = [host.name for host in order.hosts]
    by_role = {
        "coordinator": names[:1], "agent": names, "server": [names[at] for at in plan.servers],
        "worker": [host.name for host in order.hosts for _ in range(host.workers)],
        "reader": [names[each.host] for each in order.readers],
    }  # fmt: skip
    return [
        {"role": role, "rank": rank, "host": host} for role, found in by_role.items() for rank, host in enumerate(found)
    ]


def _sends(reached: ReachedCluster, request: JobRequest, name: str) -> list[str]:
    there = reached.sites[name].codes.get(request.code)
    return [] if there else [f"send the job's folder to code/{request.code[:12]}"]


def _files(request: JobRequest) -> list[JsonObject]:
    if request.archive is None or request.folder is None:
        return []
    found = []
    for name in request.archive.files:
        path = request.folder / name
        if path.is_file() and not path.is_symlink():
            found.append({"path": name, "bytes": path.stat().st_size})
    return found
