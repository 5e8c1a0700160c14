"""Inspects a host in one round trip: the machine, its Python, and psctl's files there."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence

import msgspec

from psctl import errors
from psctl.launch.host_programs import HOST_STATE, program_source, read_answer
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell, expand
from psctl.spec.cluster import HOST_PLACE, ClusterSpec
from psctl.topology.facts import HostFacts
from psctl.topology.readers.probe import PROBE, parse_probe
from psctl.types import JsonObject

OLDEST = (3, 11)
"""The oldest Python that psctl runs on."""

SYSTEM = "linux"
"""The system, as Python names it, that psctl's processes run on; psctl itself also runs on macOS."""

NEEDED = {
    "msgspec": "0.21", "cryptography": "47", "psutil": "5.9", "numpy": "1.26", "torch": "2.4",
}  # fmt: skip
"""Modules that psctl needs on a host, with the oldest supported version of each."""

ENDS_JOBS = "systemd-logind ends what a login started when that login ends (KillUserProcesses), so jobs end too"
KEEP_JOBS = "set KillUserProcesses=no in logind.conf there, or add your user to KillExcludeUsers"
"""What is wrong with a host whose `logout_kills` is true, and the cure."""

_MARK = "@@psctl-python"

_SCRIPT = f"""
( {{PROBE}}
) </dev/null
unset PYTHONPATH  # as agents are started, so that a module counts as there only where they find it
printf '\\n{_MARK}\\n'
"$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))' 2>&1 || exit 0
exec "$1" -P -c "$2" probe "$3"
"""


class RunningJob(msgspec.Struct, frozen=True):
    """A job whose agent runs on a host. `folder` is the job's folder, `workers` its number of workers on that host."""

    job: str
    folder: str
    workers: int


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """A host's answer to an inspection. The version of a module is None when the module is not installed."""

    executable: str
    version: str
    paths: list[str]  # the folders of its packages
    modules: dict[str, str | None]
    cuda: str | None  # the CUDA version that its torch was built for
    workdir: str
    free: int
    writable: bool
    open: dict[str, str] | None  # why other users can change files in the workdir ("why"), and the remedy ("cure")
    codes: dict[str, bool]
    environments: dict[str, JsonObject | None]
    ready: JsonObject | None
    jobs: list[RunningJob]
    names: list[str]  # of jobs and checkpoints in the workdir
    cores: int
    inodes: int | None = None  # free inodes of the workdir's file system; None: no limit
    machine: str = ""  # a hash of the id of its installation and of its network cards
    clock: float = 0.0  # its time in seconds since 1970
    logout_kills: bool = False  # processes end with the login session that started them
    system: str = SYSTEM  # of its operating system, as Python names it


class HostSite(HostState, frozen=True, kw_only=True):
    """A host as inspected."""

    name: str
    facts: HostFacts
    skew: float  # seconds by which its clock is at least ahead of ours (negative: behind); 0 within the round trip

    @property
    def identity(self) -> str:
        """Return a hash that distinguishes this machine from another one of the same name; it survives reboots."""
        facts = self.facts
        cards = sorted((nic.name, nic.driver, nic.speed) for nic in facts.nics if nic.kind == "physical")
        parts = (self.machine, facts.machine, facts.cpu, facts.sockets, [gpu.name for gpu in facts.gpus], cards)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def minor(self) -> str:
        """Return the major and minor version of Python: "3.11"."""
        return ".".join(self.version.split(".")[:2])


_STATE = msgspec.json.Decoder(HostState)


def inspect_host(shell: Shell, cluster: ClusterSpec, codes: Sequence[str]) -> HostSite:
    """Inspect a host.

    Args:
        shell: the host.
        cluster: its `runtime:` names the Python and the workdir to inspect.
        codes: hashes of archives; the answer has those that the host has.

    Raises:
        PythonMissing: the host has no Python, one that is too old, or another system than Linux.
        CommandFailed, TimedOut, HostUnreachable: as `Shell.run`.
    """
    python = interpreter(shell, cluster)
    question = {
        "workdir": expand(cluster.runtime.workdir.replace(HOST_PLACE, shell.name), shell.home),
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
    if found.system != SYSTEM:
        raise errors.PythonMissing(
            f"{shell.name}: its system is {found.system}, and psctl's processes run on Linux only",
            hint="give hosts with Linux in the cluster file (`psctl init` writes one); jobs may be started from macOS",
            where=shell.name,
        )
    skew = max(0.0, found.clock - after) or min(0.0, found.clock - before)
    return HostSite(**msgspec.structs.asdict(found), name=shell.name, facts=parse_probe(machine), skew=skew)


def inspect_hosts(
    cluster: ClusterSpec, fleet: Fleet, codes: Sequence[str] = ()
) -> tuple[dict[str, HostSite], dict[str, errors.PsctlError]]:
    """Inspect every host that was reached, in parallel; no host is changed.

    Returns:
        The inspected hosts, and the errors of the others, by name.
    """
    failed = {str(name): error for name, error in fleet.failed.items()}
    sites: dict[str, HostSite] = {}
    for name, outcome in fleet.each(
        lambda _, shell: inspect_host(shell, cluster, codes), names=list(fleet.shells)
    ).items():
        if outcome.error is None:
            sites[name] = outcome.value
        else:
            failed[name] = outcome.error
    return sites, failed


def interpreter(shell: Shell, cluster: ClusterSpec) -> str:
    """Return the interpreter that the cluster file names, with `~` replaced by the host's home folder."""
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
