"""`psctl down`: removes from hosts what `up` put there; refuses while jobs run, unless they may be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.launch.clusters import ChosenCluster, Progress
from psctl.launch.home import Home
from psctl.launch.host_programs import HOST_FILES, HOST_STATE, OBJECT, run_program
from psctl.launch.hosts.converge import HostOutcome
from psctl.launch.hosts.site import HostSite, RunningJob
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_REMOVED: msgspec.json.Decoder[dict[str, list[str]]] = msgspec.json.Decoder(dict[str, list[str]])


def running_jobs(sites: Mapping[str, HostSite]) -> dict[str, list[RunningJob]]:
    """Return the running jobs of each host that has any."""
    return {name: site.jobs for name, site in sites.items() if site.jobs}


def listed(running: Mapping[str, Sequence[RunningJob]]) -> str:
    """Return running jobs as a sentence names them: "digits-3 on h1, h2; mlp-1 on h1"."""
    hosts = grouped((job.job, name) for name, jobs in running.items() for job in jobs)
    return "; ".join(f"{job} on {', '.join(names)}" for job, names in hosts.items())


def tear_down(
    home: Home,
    chosen: ChosenCluster,
    fleet: Fleet,
    sites: Mapping[str, HostSite],
    failed: dict[str, errors.PsctlError],
    *,
    purge: bool,
    force: bool,
    progress: Progress,
) -> list[HostOutcome]:
    """Remove code and environments from every host; with `purge` logs and checkpoints too.

    Args:
        home: whose records of stopped jobs are brought up to date.
        chosen, fleet: the cluster, and connections to its hosts.
        sites, failed: what was found on the hosts that answered, and why the others did not; failures are added.
        force: running jobs are ended first; without it they are a reason to refuse.
        progress: shows progress.

    Returns:
        one row a host, as `up` prints them.

    Raises:
        JobRunning: a job runs on one of the hosts; nothing was removed.
    """
    running = running_jobs(sites)
    if running and not force:
        raise _refusal(running)
    rows: dict[str, list[str]] = {}

    def clear(name: HostName, shell: Shell) -> None:
        site = sites[name]
        done = []
        for job in running.get(name, []):
            progress(name, f"stopping {job.job}")
            question = {"folder": job.folder, "kill": True, "seconds": 10}
            run_program(shell, site.executable, HOST_STATE, "sweep", question, OBJECT)
            done.append(f"stop {job.job}")
        progress(name, f"clearing {site.workdir}")
        question = {"workdir": site.workdir, "all": purge}
        answer = run_program(shell, site.executable, HOST_FILES, "remove", question, _REMOVED)
        rows[name] = done + [f"remove {path}" for path in answer["removed"]]

    for name, outcome in fleet.each(clear, names=sites).items():
        if outcome.error is not None:
            failed[name] = outcome.error
    _settle(home, running, failed)
    return [
        HostOutcome.of(host.name, "updated" if rows.get(host.name) else "unchanged", rows.get(host.name, []), failed)
        for host in chosen.spec.hosts
    ]


def _refusal(running: dict[str, list[RunningJob]]) -> errors.JobRunning:
    first = next(iter(running.values()))[0].job
    return errors.JobRunning(
        f"running jobs are in the way: {listed(running)}",
        hint=f"psctl stop {first}, or psctl down --force",
        where=first,
    )


def _settle(home: Home, running: dict[str, list[RunningJob]], failed: dict[str, errors.PsctlError]) -> None:
    """Record that this machine's own jobs were stopped."""
    stopped = {job.job for name, jobs in running.items() if name not in failed for job in jobs}
    for record in home.jobs():
        if record.job in stopped and not record.over:
            home.save_record(msgspec.structs.replace(record, state="stopped", exit=1))
