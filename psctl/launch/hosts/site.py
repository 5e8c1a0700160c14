"""Inspects a host in one round trip: the machine, its Python, and psctl's files there."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from psctl import errors
from psctl.launch.host_programs import HOST_STATE, program_source, read_answer
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell, expand
from psctl.spec.cluster import ClusterSpec
from psctl.topology.facts import HostFacts
from psctl.topology.readers.probe import PROBE, parse_probe

OLDEST = (3, 11)
"""The oldest Python that psctl runs on."""

NEEDED = {
    "msgspec": "0.19", "cryptography": "47", "psutil": "5.9", "numpy": "1.26", "torch": "2.4",
}  # fmt: skip
"""Modules that psctl needs on a host, with the oldest version of each that will do."""

_MARK = "@@psctl-python"

_SCRIPT = f"""
( {{PROBE}}
) </dev/null
printf '\\n{_MARK}\\n'
"$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))' 2>&1 || exit 0
exec "$1" -P -c "$2" probe "$3"
"""


class RunningJob(msgspec.Struct, frozen=True):
    """A job whose agent runs on a host. `folder` is the job's folder there, `workers` how many it has there."""

    job: str
    folder: str
    workers: int


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """A host's answer to an inspection. A module's version is None when it cannot be imported."""

    executable: str
    version: str
    paths: list[str]  # where its packages lie
    modules: dict[str, str | None]
    cuda: str | None  # what its torch was built for
    workdir: str
    home: str
    free: int
    writable: bool
    open: dict[str, str] | None  # why others may change what lies in the workdir, and the cure
    codes: dict[str, bool]
    environments: dict[str, dict[str, Any] | None]
    ready: dict[str, Any] | None
    jobs: list[RunningJob]
    names: list[str]  # of jobs and checkpoints that lie there
    hostname: str
    cores: int
    inodes: int | None = None  # files that can still be made there; None: no limit
    machine: str = ""  # a hash of its installation's id and its network cards
    clock: float = 0.0  # its time


class HostSite(HostState, frozen=True, kw_only=True):
    """A host as inspected."""

    name: str
    facts: HostFacts
    skew: float  # seconds by which its clock is surely ahead of ours (behind: below 0); the round trip hides less

    @property
    def identity(self) -> str:
        """Return what identifies this machine among others of the same name; reboots do not change it."""
        facts = self.facts
        cards = sorted((nic.name, nic.driver, nic.speed) for nic in facts.nics if nic.kind == "physical")
        parts = (self.machine, facts.machine, facts.cpu, facts.sockets, [gpu.name for gpu in facts.gpus], cards)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def minor(self) -> str:
        """Python's version as far as it matters to packages: "3.11"."""
        return ".".join(self.version.split(".")[:2])


_STATE = msgspec.json.Decoder(HostState)


def look(shell: Shell, cluster: ClusterSpec, codes: Sequence[str]) -> HostSite:
    """Look at a host.

    Args:
        shell: the host.
        cluster: whose `runtime:` says which Python and folder to look at.
        codes: hashes of archives; the answer says which of them are there.

    Raises:
        PythonMissing: no Python there, or one that is too old; whoever set up the host, or wrote runtime.python.
        CommandFailed, TimedOut, HostUnreachable: as `Shell.run`.
    """
    python = interpreter(shell, cluster)
    question = {
        "workdir": expand(cluster.runtime.workdir, shell.home),
        "codes": list(codes),
        "modules": [*NEEDED, "pip", "ensurepip"],
    }
    script = _SCRIPT.replace("{PROBE}", PROBE)
    before = time.time()
    result = shell.run(["sh", "-c", script, "sh", python, program_source(HOST_STATE), json.dumps(question)])
    after = time.time()
    machine, _, rest = result.stdout.decode(errors="replace").partition(f"\n{_MARK}\n")
    first, _, answer = rest.partition("\n")
    if not answer.startswith("{"):
        raise _python_missing(shell.name, python, first.strip() or result.stderr.decode(errors="replace").strip())
    found = read_answer(shell.name, "host_state probe", _STATE, answer)
    skew = max(0.0, found.clock - after) or min(0.0, found.clock - before)
    return HostSite(**msgspec.structs.asdict(found), name=shell.name, facts=parse_probe(machine), skew=skew)


def look_at_hosts(
    cluster: ClusterSpec, fleet: Fleet, codes: Sequence[str] = ()
) -> tuple[dict[str, HostSite], dict[str, errors.PsctlError]]:
    """Look at every host that was reached, in parallel; nothing is changed.

    Returns:
        what was found on the hosts that answered, and why the others did not.
    """
    failed = {str(name): error for name, error in fleet.failed.items()}
    sites: dict[str, HostSite] = {}
    for name, outcome in fleet.each(lambda _, shell: look(shell, cluster, codes), names=list(fleet.shells)).items():
        if outcome.error is None:
            sites[name] = outcome.value
        else:
            failed[name] = outcome.error
    return sites, failed


def interpreter(shell: Shell, cluster: ClusterSpec) -> str:
    """Return the interpreter that the cluster file names, `~` replaced by the home there."""
    return expand(cluster.runtime.python, shell.home)


def _python_missing(host: str, python: str, output: str) -> errors.PythonMissing:
    oldest = ".".join(map(str, OLDEST))
    if output[:1].isdigit():
        return errors.PythonMissing(
            f"{host}: {python} is Python {output}, psctl needs {oldest} or newer",
            hint=f"install Python {oldest} there, or name another one: runtime: {{python: /path/to/python3}}",
            where=host,
        )
    return errors.PythonMissing(
        f"{host}: no Python runs as `{python}` there ({output or 'no output'})",
        hint="install python3 there, or say where it is: runtime: {python: /path/to/python3}",
        where=host,
    )
