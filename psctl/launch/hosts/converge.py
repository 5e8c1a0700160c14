"""Makes all hosts of a cluster ready (`psctl up`): inspects them, decides the actions, prints or carries them out.

A second run finds nothing to do. The decision (`actions.decide`) is pure; --dry-run prints the same list that is
carried out. A running job is never changed: code and environments are stored under the hash of their content, next to
those in use.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from psctl import errors
from psctl.launch.archive import Archive, pack_psctl, pack_wheels
from psctl.launch.bytecode import Bytecode, psctl_bytecode
from psctl.launch.clusters import ChosenCluster, Connect, Progress
from psctl.launch.home import Home, HostRecord
from psctl.launch.host_programs import HOST_FILES, OBJECT, run_program
from psctl.launch.hosts.actions import (
    AnyAction,
    FindNetwork,
    HostNeeds,
    Install,
    MakeEnvironment,
    MeasureLinks,
    MeasureMessages,
    SendCode,
    SendWheels,
    WriteReady,
    decide,
    python_of,
    torch_of,
    torch_to_ask_for,
)
from psctl.launch.hosts.installing import install, runs_of
from psctl.launch.hosts.site import HostSite, inspect_hosts
from psctl.launch.pins import CONSTRAINTS, hashed
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell, working
from psctl.topology.network.addresses import ChosenAddress as Address
from psctl.units import hide_credentials

PRIVATE_UMASK = ("sh", "-c", 'umask 077; exec "$@"', "sh")
"""Prefix of a command whose files only this user may read, whatever the umask of the login."""


class HostOutcome(msgspec.Struct, frozen=True):
    """The result of `up` on one host, as `up -o json` prints it."""

    name: str
    state: str  # created | updated | unchanged | failed
    actions: list[str]
    error: dict[str, object] | None = None

    @classmethod
    def of(cls, name: str, state: str, actions: list[str], failed: Mapping[str, errors.PsctlError]) -> HostOutcome:
        """Return the row of a host; one that failed has that state and its error."""
        error = failed.get(name)
        return cls(name, "failed" if error else state, actions, dict(error.document()["error"]) if error else None)


class ReachedCluster(msgspec.Struct):
    """A cluster whose hosts are connected and inspected: their states, planned actions and errors, by host."""

    home: Home
    chosen: ChosenCluster
    connect: Connect
    fleet: Fleet
    needs: HostNeeds
    archives: dict[str, Archive]
    sites: dict[str, HostSite]
    plans: dict[str, list[AnyAction]]
    failed: dict[str, errors.PsctlError]
    addresses: dict[str, Address] = {}  # the addresses that a probe chose; {}: those of the inspection
    rates: dict[str, float] = {}  # payload bytes/s of each host's port, if measured

    def python(self, name: str) -> str:
        """Return the interpreter that jobs use on a host."""
        ready = next((a for a in reversed(self.plans[name]) if isinstance(a, WriteReady)), None)
        return ready.python if ready else str((self.sites[name].ready or {})["python"])

    def record(self, job: str, name: str) -> HostRecord:
        """Return a job's folders on a host."""
        workdir = self.sites[name].workdir
        code = f"{workdir}/code/{self.needs.code}"
        return HostRecord(name, workdir, f"{workdir}/jobs/{job}/{name}", self.python(name), code)


def needs_of(chosen: ChosenCluster, code: Archive, wheels: Archive | None, sites: Mapping[str, HostSite]) -> HostNeeds:
    """Return the requirements of a cluster's hosts.

    Args:
        chosen: the cluster.
        code: psctl.
        wheels: its wheelhouse.
        sites: the hosts that were inspected; an archive that none of them lacks is not compressed, and its size is 0.
    """

    def size(archive: Archive) -> int:
        return len(archive.data) if any(not site.codes.get(archive.hash) for site in sites.values()) else 0

    runtime = chosen.spec.runtime
    source = wheels is not None or runtime.index is not None
    torch = (
        None if runtime.torch == "none"
        else _torch_here() if runtime.torch == "auto"
        else torch_to_ask_for(runtime.torch, source=source)
    )  # fmt: skip
    return HostNeeds(
        code=code.hash, code_size=size(code), managed=runtime.environment == "managed", torch=torch,
        requirements=runtime.requirements, index=runtime.index, wheels=wheels.hash if wheels else "",
        wheels_size=size(wheels) if wheels else 0,
        wheels_pip=any(name.startswith("pip-") for name in wheels.files) if wheels else False,
        pins={} if wheels else hashed(),
    )  # fmt: skip


@contextlib.contextmanager
def inspect(home: Home, chosen: ChosenCluster, connect: Connect, codes: Sequence[str] = ()) -> Iterator[ReachedCluster]:
    """Connect to every host, inspect the reached ones and decide their actions; no host is changed.

    Args:
        home: the records of this machine.
        chosen: the cluster.
        connect: connects to hosts.
        codes: hashes of further archives to look for, such as a job's folder.

    Raises:
        InvalidFile: the wheelhouse does not exist; the user's fault.
    """
    with connect(chosen, None) as fleet:
        code, folder = pack_psctl(), chosen.spec.runtime.wheelhouse
        wheels = pack_wheels(_resolve(chosen, folder)) if folder else None
        archives = {each.hash: each for each in (code, wheels) if each is not None}
        sites, failed = inspect_hosts(chosen.spec, fleet, [*archives, *codes])
        needs = needs_of(chosen, code, wheels, sites)
        reached = ReachedCluster(home, chosen, connect, fleet, needs, archives, sites, {}, failed)
        for name, site in sites.items():
            try:
                reached.plans[name] = decide(site, needs)
            except errors.PsctlError as error:
                failed[name] = error
        yield reached


def check_versions(reached: ReachedCluster) -> None:
    """Refuse hosts whose versions of Python or torch differ.

    Raises:
        VersionMismatch: versions differ; the message names the hosts.
    """
    sites = [reached.sites[name] for name in reached.plans]
    for what, versions in (
        ("Python", {site.name: site.minor for site in sites}),
        ("torch", {site.name: torch_of(site, reached.needs) for site in sites}),
    ):
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{name} has {version or 'none'}" for name, version in versions.items())
            raise errors.VersionMismatch(
                f"the hosts have different versions of {what}: {listed}",
                hint=f"install the same {what} everywhere, or let psctl: runtime: {{environment: managed}}",
                where=", ".join(versions),
            )


def carry_out(reached: ReachedCluster, progress: Progress) -> None:
    """Carry out each host's own actions, hosts in parallel; a host that fails moves from `plans` to `failed`."""
    busy = [name for name, actions in reached.plans.items() if actions]
    done = reached.fleet.each(lambda _, shell: _carry_out_host(reached, shell, progress), names=busy) if busy else {}
    for name, outcome in done.items():
        if outcome.error is not None:
            reached.failed[name] = outcome.error


def outcomes(reached: ReachedCluster) -> list[HostOutcome]:
    """Return one row per host, in the order of the cluster file."""
    rows = []
    for name in (host.name for host in reached.chosen.spec.hosts):
        actions = [str(action) for action in reached.plans.get(name, [])]
        fresh = name in reached.sites and reached.sites[name].ready is None
        state = "unchanged" if not actions else "created" if fresh else "updated"
        rows.append(HostOutcome.of(name, state, actions, reached.failed))
    return rows


def verdict(failed: Mapping[str, errors.PsctlError], total: int, what: str = "ready") -> errors.PsctlError | None:
    """Return the error with which a command over many hosts ends; None when it succeeded on all.

    If it succeeded on some, the error is Partial; if on none, it is the first host's error, with the number of others.
    """
    if not failed:
        return None
    name, first = next(iter(failed.items()))
    messages = ((host, error.message) for host, error in failed.items())
    listed = "; ".join(text if host in text else f"{host}: {text}" for host, text in messages)
    if len(failed) < total:
        return errors.Partial(f"{total - len(failed)} of {total} hosts are {what}; {listed}", first.hint, name)
    if len(failed) == 1:
        return first
    several = errors.PsctlError(f"no host is {what}; {listed}", first.hint, name)
    several.code, several.exit = first.code, first.exit
    return several


def _carry_out_host(reached: ReachedCluster, shell: Shell, progress: Progress) -> None:
    site = reached.sites[shell.name]
    for action in reached.plans[shell.name]:
        if isinstance(action, (FindNetwork, MeasureLinks, MeasureMessages)):
            continue  # carried out for all hosts together, by `link_measurement.carry_out` and the command `up`
        progress(shell.name, str(action))
        with working(shell, shell.name, str(action)):
            _carry_out_action(reached, shell, site, action)


def _carry_out_action(reached: ReachedCluster, shell: Shell, site: HostSite, action: AnyAction) -> None:
    match action:
        case SendCode(hash=name):
            archive = reached.archives[name]
            bytecode = psctl_bytecode(tuple(archive.files))
            send_archive(shell, site.executable, f"{site.workdir}/code", archive, bytecode)
        case SendWheels(hash=name):
            send_archive(shell, site.executable, f"{site.workdir}/wheels", reached.archives[name])
        case MakeEnvironment():
            _make_environment(shell, site, action)
        case Install():
            _install(reached, shell, site, action)
        case WriteReady():
            shell.put(msgspec.json.encode(action), f"{site.workdir}/ready.json")


def send_archive(
    shell: Shell, python: str, folder: str, archive: Archive, bytecode: Bytecode | None = None, *, keep: bool = False
) -> None:
    """Unpack an archive on a host as `folder`/HASH, unless it exists.

    Args:
        shell: the host.
        python: its interpreter.
        folder: the parent folder there.
        archive: what to send.
        bytecode: of its modules, which the host takes if it sees these files.
        keep: keep the packed archive next to it, from which other hosts can fetch it.
    """
    question = {"folder": folder, "hash": archive.hash, "keep": keep, "bytecode": msgspec.to_builtins(bytecode)}
    run_program(shell, python, HOST_FILES, "unpack", question, OBJECT, stdin=archive.data, timeout=None)


def _make_environment(shell: Shell, site: HostSite, action: MakeEnvironment) -> None:
    path = f"{site.workdir}/envs/{action.key}"
    pip = action.pip and site.modules.get("ensurepip") is not None
    flags = ["--clear"] if pip else ["--clear", "--without-pip"]
    shell.run([*PRIVATE_UMASK, action.python, "-m", "venv", *flags, path], timeout=300)
    if action.sees:
        lines = "".join(f"{folder}\n" for folder in action.sees)
        shell.put(lines.encode(), f"{path}/lib/python{action.minor}/site-packages/psctl-sees.pth")


def _install(reached: ReachedCluster, shell: Shell, site: HostSite, action: Install) -> None:
    python = python_of(site, action.key)
    options = [*action.options]
    if action.wheels:
        options += ["--find-links", f"{site.workdir}/wheels/{action.wheels}"]
    constraints = f"{site.workdir}/code/{reached.needs.code}/psctl/{CONSTRAINTS}"
    runs = runs_of(action.packages, reached.needs.pins, constraints)
    install(shell, _pip(reached, site, action, python), options, runs, None if action.wheels else reached.needs.index)
    note = msgspec.json.encode({"packages": [hide_credentials(each) for each in action.packages], "python": python})
    shell.put(note, f"{site.workdir}/envs/{action.key}/psctl-ready.json")


def _pip(reached: ReachedCluster, site: HostSite, action: Install, python: str) -> list[str]:
    """Return the command of pip for an environment: its own pip, the wheelhouse's, or the host's with --python."""
    made = next(a for a in reached.plans[site.name] if isinstance(a, MakeEnvironment))
    if (made.pip and site.modules.get("ensurepip") is not None) or (made.sees and site.modules.get("pip")):
        return [python, "-m", "pip"]
    wheel = (
        next((n for n in reached.archives[action.wheels].files if n.startswith("pip-")), "") if action.wheels else ""
    )
    if wheel:
        return [python, f"{site.workdir}/wheels/{action.wheels}/{wheel}/pip"]
    return [site.executable, "-m", "pip", "--python", python]


def _resolve(chosen: ChosenCluster, path: str) -> Path:
    """Return a path that the cluster file names; a relative one starts at that file's folder."""
    return Path(chosen.known.source).parent / Path(path).expanduser()


def _torch_here() -> str:
    """Return this machine's version of torch without its build, which the index or wheelhouse decides."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
