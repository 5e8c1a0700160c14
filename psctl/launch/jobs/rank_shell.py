"""The command that opens a shell beside a process of a job; the terminal belongs to it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from psctl import errors
from psctl.launch.agent_calls import digest
from psctl.launch.home import HostRecord, JobRecord, ReportedRank
from psctl.launch.host_programs import program_source
from psctl.remote import slurm
from psctl.remote.shell import Shell
from psctl.remote.target import config_of_home
from psctl.spec.cluster import ClusterSpec, HostSpec
from psctl.spec.exec_template import ExecTemplate

RANK_SHELL = "rank_shell"


class RankPlace(NamedTuple):
    """Where a process of a job runs, or ran."""

    host: HostRecord
    pid: int  # 0: unknown


def find(record: JobRecord, shell: Shell | None, role: str, rank: int) -> RankPlace:
    """Return the place of a process.

    Args:
        record: the job.
        shell: on its head; None where that is not reached.
        role, rank: the process.

    Raises:
        UsageError: the job has no such process; names those that it has.
    """
    ranks: Sequence[ReportedRank] = record.ranks
    if shell is not None and not record.over:
        ranks = list(digest(shell, record.head).ranks.values()) or ranks
    known = {(each.role, each.rank): each for each in ranks}
    found = known.get((role, rank))
    hosts = {host.name: host for host in record.hosts}
    if found is None or found.host not in hosts:
        names = ", ".join(f"{each.role}:{each.rank}" for each in ranks if each.role in ("worker", "server"))
        raise errors.UsageError(f"{record.job} has no {role}:{rank}", hint=f"it has {names or 'no processes yet'}")
    return RankPlace(hosts[found.host], found.pid or 0)


def command(spec: ClusterSpec, job: str, place: RankPlace, words: Sequence[str], *, terminal: bool) -> list[str]:
    """Return the command of this machine that opens the shell.

    Args:
        spec: the job's cluster.
        job: the job's name.
        place: of the process.
        words: a command to run in place of a shell.
        terminal: this psctl has one.
    """
    there = [
        place.host.python, "-c", program_source(RANK_SHELL), job, str(place.pid), place.host.files, *words
    ]  # fmt: skip
    host = next(each for each in spec.hosts if each.name == place.host.name)
    if host.local:
        return [os.path.expanduser(there[0]), *there[1:]]
    if spec.kind == "command":
        return list(ExecTemplate.parse(spec.exec or "").argv(host.address, there))
    if spec.kind == "slurm":
        step = ("srun", f"--jobid={spec.allocation}", "--nodelist={host}", *slurm.STEP, "{command}")
        return [*ExecTemplate(step).argv(host.address, there)]
    return [*_ssh(spec, host, terminal=terminal), shlex.join(there)]


def _ssh(spec: ClusterSpec, host: HostSpec, *, terminal: bool) -> list[str]:
    """Return the ssh command for a host; what the cluster file leaves open is in the user's SSH configuration."""
    ssh = spec.ssh
    found = ["ssh", "-t" if terminal else "-T"]
    config = config_of_home()
    found += ["-F", str(config)] if config is not None else []
    user, port = host.user or ssh.user, host.port or ssh.port
    found += ["-l", user] if user else []
    found += ["-p", str(port)] if port else []
    found += ["-i", os.path.expanduser(ssh.identity_file)] if ssh.identity_file else []
    found += ["-J", ssh.proxy_jump] if ssh.proxy_jump else []
    found += ["-o", f"ConnectTimeout={max(1, round(ssh.connect_timeout))}"]
    found += ["-o", f"StrictHostKeyChecking={'yes' if ssh.host_key_policy == 'strict' else 'accept-new'}"]
    return [*found, "--", host.address]


def replace_process(words: Sequence[str]) -> None:
    """Become a command; returns never.

    Raises:
        UsageError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(words[0], list(words))  # noqa: S606  the terminal belongs to the command from here on
    except OSError as error:
        raise errors.UsageError(f"{words[0]} cannot be started: {error.strerror}", hint="is it installed?") from error
