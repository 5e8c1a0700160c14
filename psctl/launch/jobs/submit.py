"""Submits a job: makes its authority, issues certificates, sends orders, starts agents.

The head is first, because its agent starts the coordinator, which binds a port and reports it; all other hosts follow
in parallel. Orders are sent over standard input and wait in the host's memory (pending_orders.py); the authority's key
is sent to the head only. When a step fails, started processes are ended and written files are removed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from psctl import errors
from psctl.job.control_answers import HelloAnswer
from psctl.launch import agent_calls
from psctl.launch.archive import Archive
from psctl.launch.clusters import Progress
from psctl.launch.files.data_sets import DataSet
from psctl.launch.home import DataLink, HostRecord, JobRecord, split_job
from psctl.launch.host_programs import HOST_FILES, HOST_STATE, OBJECT, run_program
from psctl.launch.hosts.converge import ReachedCluster, send_archive
from psctl.launch.jobs.agent_start import SLOWEST, start_agent, write_orders
from psctl.launch.measure import calibration
from psctl.launch.placement.cluster_snapshot import machines_document
from psctl.launch.placement.roster import AgentKeys, JobHosts, Resumed, agent_orders, job_order
from psctl.orders import JobOrder
from psctl.remote.shell import Process, Shell
from psctl.spec.job import OWN_VARIABLES, JobSpec
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Address, HostName, Member

MOST_JOBS = 100_000_000
"""Limit of a job's number; psctl gives no higher one."""

HELLO = 30.0
"""Seconds until the head's agent must name the coordinator's address."""

_HELLO = msgspec.json.Decoder(HelloAnswer)


class JobRequest(msgspec.Struct, frozen=True):
    """A job to start. `archive` is None if hosts have `code` already (a restore); `folder` is None if the code comes
    from a host, not from a folder of this machine."""

    job: JobSpec
    text: str
    source: str
    folder: Path | None
    environment: dict[str, str]
    secrets: dict[str, str]
    code: str
    archive: Archive | None = None
    data: tuple[DataSet, ...] = ()

    @property
    def links(self) -> list[DataLink]:
        """The links to data in the job's folder."""
        return [each.link for each in self.data]


def variables(
    job: JobSpec, runtime: Mapping[str, str], given: Mapping[str, str | None], shell: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a job's processes: the cluster's, the job's, then those of --env.

    Raises:
        UsageError: a variable to be taken from the user's shell is not set there, or is reserved for psctl.
    """
    found = dict(runtime)
    for name, value in {**job.env, **given}.items():
        if name in OWN_VARIABLES:
            raise errors.UsageError(f"--env {name}: psctl sets this variable itself", hint="leave it out")
        if name in job.secrets:
            raise errors.UsageError(
                f"--env {name}: it is listed under secrets, and values of secrets must not be on a command line",
                hint=f"export {name}=... in your shell, and leave --env {name} out",
            )
        found[name] = _from_shell(name, shell, "env") if value is None else value
    return found


def secrets_of(job: JobSpec, shell: Mapping[str, str]) -> dict[str, str]:
    """Return the job's secrets from the user's shell.

    Raises:
        UsageError: a secret is not set there.
    """
    return {name: _from_shell(name, shell, "secrets") for name in job.secrets}


def submit(
    reached: ReachedCluster, request: JobRequest, job_hosts: JobHosts, resume: Resumed | None, progress: Progress
) -> JobRecord:
    """Start a job and return its record; when this returns, all agents were started.

    Args:
        reached: the cluster, made ready.
        request: what is to run.
        job_hosts: its hosts, and the workers of each.
        resume: the checkpoint to resume from; its folder is on the head.
        progress: shows progress.

    Raises:
        PsctlError: a host failed; nothing of the job is left anywhere.
    """
    _send_code(reached, request, job_hosts, progress)
    above = _highest(reached, request.job.name)
    while True:
        name = reached.home.reserve_name(request.job.name, above)
        launch = _Submission(reached, request, job_hosts, name, resume, progress)
        with reached.home.submission_lock(name):
            try:
                record = launch.run() if launch.claim_head() else None
            except BaseException:
                launch.undo()
                raise
        if record is not None:
            return record
        reached.home.release_name(name)
        split = split_job(name)
        assert split is not None
        above = split[1]


class _Submission:
    """One attempt to start a job, under one name."""

    def __init__(
        self,
        reached: ReachedCluster,
        request: JobRequest,
        job_hosts: JobHosts,
        name: str,
        resume: Resumed | None,
        progress: Progress,
    ) -> None:
        self.reached, self.request, self.job_hosts, self.name, self.progress = (
            reached,
            request,
            job_hosts,
            name,
            progress,
        )
        self.hosts = {host.name: reached.record(name, host.name) for host in job_hosts.hosts}
        self.order: JobOrder = job_order(
            name, reached.chosen.spec, request.job, job_hosts, code_hash=request.code, job_file=request.text,
            environment=request.environment, resume=resume,
            topology=machines_document(reached, job_hosts.names),
            costs=calibration.load(reached),
        )  # fmt: skip
        self.now = time.time()
        self.authority = make_authority(name, self.now)
        self.preauth_secret = new_secret()
        self.started: dict[str, Process] = {}
        self.orders: dict[str, str] = {}  # where they wait on each host

    @property
    def head(self) -> str:
        return self.job_hosts.hosts[0].name

    def claim_head(self) -> bool:
        """Write the head's orders, and reserve the job's name there; return False if it is in use.

        The record is written first: if psctl is killed from now on, `status` still lists the job.
        """
        self.reached.home.save_record(self._record("placing"))
        return self._write_orders(self.reached.fleet.shell(self.head), 0, None)

    def run(self) -> JobRecord:
        """Start all agents; the head's orders are there."""
        head = self.reached.fleet.shell(self.head)
        self._start_agent(head)
        self.reached.home.save_record(self._record("placing"))
        others = self.job_hosts.names[1:]
        if others:
            self.progress(self.head, "waiting for the coordinator's address")
            coordinator = self._wait_for_coordinator(head)
            index = {host.name: number for number, host in enumerate(self.job_hosts.hosts)}

            def start_on(name: HostName, shell: Shell) -> None:
                self._write_orders(shell, index[name], coordinator)
                self._start_agent(shell)

            self.progress("", f"starting {_count(len(others), 'more agent')}")
            for outcome in self.reached.fleet.each(start_on, names=others).values():
                if outcome.error is not None:
                    raise outcome.error
        record = self._record("submitted")
        self.reached.home.save_record(record)
        return record

    def undo(self) -> None:
        """End started processes and remove written files, on the hosts that can still be reached."""

        def clean(name: HostName, shell: Shell) -> None:
            host = self.hosts[name]
            process = self.started.get(name)
            if process is not None:
                shell.signal(process, signal.SIGTERM)
            question = {"folder": host.job_dir, "kill": True, "seconds": 10}
            run_program(shell, host.python, HOST_STATE, "sweep", question, OBJECT)
            discard = {"folder": host.job_dir}
            run_program(shell, host.python, HOST_FILES, "discard", discard, OBJECT)

        done = self.reached.fleet.each(clean, names=self.hosts)
        failed = [name for name, outcome in done.items() if outcome.error is not None]
        if failed:  # an interrupt closes the connections that were at work
            with self.reached.connect(self.reached.chosen, failed) as fleet:
                fleet.each(clean, names=[name for name in failed if name in fleet.shells])
        self.reached.home.release_name(self.name)

    def _write_orders(self, shell: Shell, index: int, coordinator: Address | None) -> bool:
        host = self.hosts[shell.name]
        pair = issue(self.authority, self.name, Member("agent", index), self.now)
        authority_key = self.authority.key_pem if index == 0 else ""
        keys = AgentKeys(
            self.authority.certificate_pem, pair.certificate_pem, pair.key_pem, self.preauth_secret, authority_key
        )
        orders = agent_orders(self.order, index, host, keys, coordinator, self.request.secrets)
        limit = max(self.request.job.timeouts.start, SLOWEST)
        answer = write_orders(shell, host, orders, self.request.code, self.request.links, claim=index == 0, limit=limit)
        if answer.taken:
            return False
        self.orders[shell.name] = answer.orders
        if answer.disk:
            self.progress(
                shell.name, "it has no file system in memory: keys and secrets are on its disk until the agent starts"
            )
        return True

    def _start_agent(self, shell: Shell) -> None:
        host = self.hosts[shell.name]
        variables = self.reached.chosen.spec.runtime.env
        self.started[shell.name] = start_agent(shell, host, self.orders[shell.name], variables)

    def _wait_for_coordinator(self, shell: Shell) -> Address:
        """Wait until the coordinator listens; return its address."""
        host = self._with_process(self.hosts[shell.name])
        deadline = time.monotonic() + HELLO
        while time.monotonic() < deadline:
            answer = agent_calls.call(shell, host, "hello", _HELLO)
            if answer is not None and answer.coordinator is not None:
                return answer.coordinator
            if not shell.alive(self.started[shell.name]):
                raise agent_calls.why_gone(shell, host, self.name)
            time.sleep(0.02)
        raise errors.TimedOut(
            f"{shell.name}: the agent of {self.name} reported no coordinator within {HELLO:.0f} s",
            hint=f"its log is {host.job_dir}/agent.log there",
            where=shell.name,
        )

    def _with_process(self, host: HostRecord) -> HostRecord:
        process = self.started.get(host.name)
        return msgspec.structs.replace(host, pid=process.pid, started=process.started) if process else host

    def _record(self, state: str) -> JobRecord:
        request = self.request
        hosts = [self._with_process(host) for host in self.hosts.values()]
        return JobRecord(
            job=self.name, name=request.job.name, created=self.now, cluster=self.reached.chosen.known, hosts=hosts,
            job_file=request.text, job_source=request.source, job_folder=str(request.folder or ""),
            code_hash=request.code, checkpoints=f"{hosts[0].workdir}/checkpoints", state=state,
            limit=max(request.job.timeouts.start, SLOWEST), authority=self.authority.certificate_pem,
            data=request.links,
        )  # fmt: skip


def _send_code(reached: ReachedCluster, request: JobRequest, job_hosts: JobHosts, progress: Progress) -> None:
    """Send the job's folder to every host that lacks it, in parallel."""
    lacking = [name for name in job_hosts.names if not reached.sites[name].codes.get(request.code)]
    archive = request.archive
    if not lacking:
        return
    assert archive is not None, "a restore brings the archive that a host lacks"
    progress("", f"sending the job's folder ({_count(len(archive.files), 'file')}) to {_count(len(lacking), 'host')}")

    def send(name: HostName, shell: Shell) -> None:
        site = reached.sites[name]
        send_archive(shell, site.executable, f"{site.workdir}/code", archive, keep=True)

    for outcome in reached.fleet.each(send, names=lacking).values():
        if outcome.error is not None:
            raise outcome.error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _highest(reached: ReachedCluster, name: str) -> int:
    """Return the highest number that a job of this name has on any host, from any machine."""
    splits = [split_job(found) for site in reached.sites.values() for found in site.names]
    numbers = [split[1] for split in splits if split and split[0] == name]
    return max((number for number in numbers if number < MOST_JOBS), default=0)


def _from_shell(name: str, shell: Mapping[str, str], key: str) -> str:
    if name not in shell:
        raise errors.UsageError(
            f"{key}: {name} is taken from your shell, but it is not set there",
            hint=f"export {name}=..., or give it a value" if key == "env" else f"export {name}=...",
        )
    return shell[name]
