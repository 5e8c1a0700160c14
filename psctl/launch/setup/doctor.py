"""`psctl doctor`: checks every host in parallel, each check with a cure; it changes nothing.

The order is from the network to the host: the name resolves, sshd's port answers, its key is known, the login works (or
the command of `kind: command` starts another one there), then Python, GPUs, disk and clock, then whether hosts reach
each other. A host that fails early has fewer rows.
"""

from __future__ import annotations

import shlex
import socket
import threading
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.launch.clusters import ChosenCluster, Connect
from psctl.launch.home import Home
from psctl.launch.hosts.actions import missing, torch_of
from psctl.launch.hosts.converge import ReachedCluster, inspect
from psctl.launch.hosts.site import ENDS_JOBS, KEEP_JOBS, HostSite
from psctl.launch.measure import reach
from psctl.launch.measure.measurement_servers import REACHED, ProbeSettings, serving
from psctl.launch.placement import ports
from psctl.launch.placement.cluster_snapshot import machines_of
from psctl.launch.placement.job_planning import any_job
from psctl.launch.placement.roster import Machine, assign_workers, idle
from psctl.remote.fleet import Fleet, target_of
from psctl.remote.shell import Shell
from psctl.remote.ssh import SshShell
from psctl.spec.cluster import ClusterSpec, HostSpec
from psctl.types import HostName
from psctl.units import format_bytes, format_count, format_seconds

SKEW = 2.0
"""Seconds that a host's clock may differ from this machine's."""

LITTLE = 2_000_000_000
"""Bytes below which a disk is called full: checkpoints and logs grow."""

FEW = 10_000
"""Files that can still be made, below which a disk is called full."""

DRIVERS = {"11": 450, "12": 525, "13": 580}
"""The first branch of the driver for each major version of CUDA, as NVIDIA's notes on compatibility list them."""

REACH = 6.0
"""Seconds after which an address that does not answer is not reached."""

SERVING = 60.0
"""Seconds after which the servers of the reach test end by themselves."""


_WAYS = {"ssh": "ssh", "command": "exec", "slurm": "slurm"}
"""The row of the way to a host, by the cluster's kind."""


class HostCheck(msgspec.Struct, frozen=True):
    """One row of `doctor`; `cure` is the remedy when it is not ok."""

    check: str
    ok: bool
    detail: str
    cure: str = ""


class HostReport(msgspec.Struct):
    """The checks of one host, and the error that its first failed one amounts to."""

    name: str
    checks: list[HostCheck] = []
    error: errors.PsctlError | None = None

    def good(self, check: str, detail: str) -> None:
        """Add a row that is right."""
        self.checks.append(HostCheck(check, True, detail))

    def bad(self, check: str, error: errors.PsctlError) -> None:
        """Add a row that is wrong."""
        self.checks.append(HostCheck(check, False, error.message, error.hint))
        self.error = self.error or error


def examine(home: Home, chosen: ChosenCluster, connect: Connect) -> list[HostReport]:
    """Check every host of a cluster and return one report a host, in the file's order; `home` is only read."""
    reports = {host.name: HostReport(host.name) for host in chosen.spec.hosts}
    if chosen.spec.kind == "ssh":
        _check_names_and_ports(chosen.spec, reports)
    with inspect(home, chosen, connect) as reached:
        fleet = reached.fleet
        for host, error in fleet.failed.items():
            _note_refusal(reports[host], error, chosen.spec)
        for host in fleet.shells:
            _note_login(reports[host], chosen.spec.host(host), chosen.spec)
        for name, site in reached.sites.items():
            _check_host(reports[name], site, reached)
        for host in fleet.shells:
            if host not in reached.sites:
                reports[host].bad("python", reached.failed[host])
        _versions(reports, reached)
        reach.find(reached, lambda *_: None, keep=False)
        _network(reached, reports)
        _sessions(fleet, reports)
    return list(reports.values())


def _sessions(fleet: Fleet, reports: Mapping[str, HostReport]) -> None:
    """Run a command while another one runs: sshd may allow one session a connection."""

    def two(_: HostName, shell: Shell) -> int:
        with shell.tail("/dev/null"):
            shell.run(["true"])
        return shell.logins if isinstance(shell, SshShell) else 1

    for host, outcome in fleet.each(two, names=list(fleet.shells)).items():
        if outcome.error is not None:
            reports[host].bad("sessions", outcome.error)
        elif outcome.value > 1:
            short = f"sshd allows few sessions on a connection (MaxSessions): psctl logged in {outcome.value} times"
            reports[host].good("sessions", f"{short}; a larger value in sshd_config saves time")


def _check_names_and_ports(cluster: ClusterSpec, reports: Mapping[str, HostReport]) -> None:
    """Name and port of each host's first sshd, in parallel."""
    threads = [
        threading.Thread(target=_check_first_sshd, args=(cluster, host, reports[host.name]), daemon=True)
        for host in cluster.hosts
        if not host.local
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _check_first_sshd(cluster: ClusterSpec, host: HostSpec, report: HostReport) -> None:
    try:
        target = target_of(cluster, host)
    except errors.PsctlError as error:
        report.bad("resolve", error)
        return
    first = target.first
    if first.proxy_command:
        report.good("resolve", f"through `{first.proxy_command}`")
        return
    via = f" (jump host of {host.name})" if target.jumps else ""
    try:
        found = socket.getaddrinfo(first.address, first.port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"{first.address}{via}: {error.strerror or error}"
        report.bad("resolve", errors.HostUnreachable(why, "check the name, or write its address"))
        return
    report.good("resolve", f"{first.given} is {found[0][4][0]}{via}")
    try:
        with socket.create_connection((first.address, first.port), timeout=cluster.ssh.connect_timeout):
            report.good("tcp", f"port {first.port} answers")
    except OSError as error:
        why = f"{first.address} port {first.port}{via}: {error.strerror or error}"
        cure = "is the machine on, sshd running, and no firewall between?"
        report.bad("tcp", errors.HostUnreachable(why, cure))


def _note_refusal(report: HostReport, error: errors.PsctlError, cluster: ClusterSpec) -> None:
    """Say at which step the connection was refused."""
    if report.error is not None:
        return
    if cluster.kind != "ssh":
        report.bad(_WAYS[cluster.kind], error)
    elif isinstance(error, (errors.HostKeyUnknown, errors.HostKeyChanged)):
        report.bad("host key", error)
    elif isinstance(error, errors.AuthFailed):
        report.good("host key", "known")
        report.bad("auth", error)
    elif isinstance(error, errors.LoginShellFailed):
        report.good("host key", "known")
        report.good("auth", "logged in")
        report.bad("login shell", error)
    else:
        report.bad("ssh", error)


def _note_login(report: HostReport, host: HostSpec | None, cluster: ClusterSpec) -> None:
    if host is not None and host.local:
        report.good(_WAYS[cluster.kind], "this machine, without SSH")
        return
    if cluster.kind == "command":
        report.good("exec", f"`{shlex.split(cluster.exec or '')[0]}` starts commands there")
        return
    if cluster.kind == "slurm":
        report.good("slurm", f"allocation {cluster.allocation} starts steps there")
        return
    report.good("host key", "known")
    report.good("auth", "logged in")


def _check_host(report: HostReport, site: HostSite, reached: ReachedCluster) -> None:
    report.good("python", f"{site.version} ({site.executable})")
    lacking = missing(site, reached.needs)
    if not lacking:
        report.good("packages", "all there")
    elif site.name in reached.failed:
        report.bad("packages", reached.failed[site.name])
    else:
        report.good("packages", f"`psctl up` installs {', '.join(lacking)}")
    torch = site.modules.get("torch")
    report.good("torch", torch or "none yet")
    check_gpus(report, site)
    check_disk(report, site, reached.failed.get(site.name))
    check_logout(report, site)
    detail = f"{format_seconds(abs(site.skew))} {'ahead' if site.skew > 0 else 'behind'}" if site.skew else "as here"
    if abs(site.skew) > SKEW:
        report.bad("clock", errors.VersionMismatch(detail, "run a time service there (chrony, systemd-timesyncd)"))
    else:
        report.good("clock", detail)


def check_disk(report: HostReport, site: HostSite, refused: errors.PsctlError | None) -> None:
    """Add the check of a host's disk to its report; `refused`: why psctl's files there cannot be used."""
    if site.free < LITTLE:
        report.bad("disk", errors.DiskFull(f"{format_bytes(site.free)} left at {site.workdir}", "free space there"))
    elif site.inodes is not None and site.inodes < FEW:
        left = f"{format_bytes(site.free)} but only {site.inodes} more files (inodes) left at {site.workdir}"
        report.bad("disk", errors.DiskFull(left, "remove files there (df -i shows it)"))
    elif site.open is not None and refused is not None:
        report.bad("disk", refused)
    elif not site.writable:
        report.bad("disk", errors.DiskFull(f"{site.workdir} cannot be written", "set runtime.workdir"))
    else:
        files = "" if site.inodes is None else f", {format_count(site.inodes)} files"
        report.good("disk", f"{format_bytes(site.free)}{files} left")


def check_logout(report: HostReport, site: HostSite) -> None:
    """Add a row to a host's report if its jobs would end when psctl's login session does."""
    if site.logout_kills:
        report.bad("logout", errors.VersionMismatch(ENDS_JOBS, KEEP_JOBS))


def check_gpus(report: HostReport, site: HostSite) -> None:
    """Add the checks of a host's GPUs, their driver and torch's CUDA to its report."""
    for finding in site.facts.findings:
        report.bad("gpu", errors.VersionMismatch(finding.what, finding.cure))
    gpus = site.facts.gpus
    if not gpus:
        report.good("cuda", "no GPU")
        return
    report.good("driver", f"{gpus[0].driver}, {len(gpus)} GPUs ({gpus[0].name})")
    if site.modules.get("torch") and site.cuda is None:
        cure = "install a CUDA build of torch, or runtime: {environment: managed}"
        report.bad("cuda", errors.VersionMismatch(f"torch {site.modules['torch']} is a CPU build, the GPUs idle", cure))
    elif needed := newer_driver(gpus[0].driver, site.cuda):
        what = f"torch is built for CUDA {site.cuda}, which needs driver {needed} or newer: it sees no GPU"
        cure = f"install driver {needed}, or set runtime: {{torch: ...}} to a build for what {gpus[0].driver} can do"
        report.bad("cuda", errors.VersionMismatch(what, cure))
    else:
        report.good("cuda", f"torch is built for {site.cuda}" if site.cuda else "torch comes with `psctl up`")


def newer_driver(driver: str, cuda: str | None) -> int | None:
    """Return the first branch of NVIDIA's driver that runs a CUDA version, when this driver is of an older one.

    Within a major version of CUDA every driver that runs its first minor version runs all.
    """
    needed = DRIVERS.get((cuda or "").partition(".")[0])
    branch = driver.partition(".")[0]
    return needed if needed is not None and branch.isdigit() and int(branch) < needed else None


def _versions(reports: Mapping[str, HostReport], reached: ReachedCluster) -> None:
    """Python's minor version and torch must be the same everywhere: the odd ones out are wrong."""
    sites = list(reached.sites.values())
    for what, of in (
        ("Python", lambda site: site.minor),
        ("torch", lambda site: torch_of(site, reached.needs)),
    ):
        versions = {site.name: of(site) for site in sites}
        usual = max(versions.values(), key=list(versions.values()).count, default="")
        for name, version in versions.items():
            if version != usual:
                cure = f"install the same {what} everywhere, or runtime: {{environment: managed}}"
                message = f"{what} {version or 'missing'} here, {usual} on most hosts"
                reports[name].bad("same versions", errors.VersionMismatch(message, cure))


def _network(reached: ReachedCluster, reports: Mapping[str, HostReport]) -> None:
    try:
        machines = machines_of(reached)
    except errors.PsctlError as error:
        if error.where in reports:
            reports[error.where].bad("interface", error)
        return
    for name, machine in machines.items():
        at = f"{machine.interface} {machine.address}" if machine.interface else machine.address
        why = f"{machine.reason}; psctl's own traffic is sealed, Gloo's and NCCL's is not"
        reports[name].good("interface", f"{at}: {why}")
    span = reached.chosen.spec.network.ports
    if span is not None:
        _ports(span, reached, machines, reports)
    if len(machines) > 1:
        _reach(reached, machines, reports)


def _ports(
    span: tuple[int, int],
    reached: ReachedCluster,
    machines: Mapping[str, Machine],
    reports: Mapping[str, HostReport],
) -> None:
    """Compare free ports with the needs of a job with all defaults, on hosts where no job holds ports."""
    at = {name: machine.address for name, machine in machines.items()}
    chosen, seen = reached.chosen, ports.look(span, reached, at)
    needs = ports.needed(any_job(), assign_workers(chosen.spec, idle(machines), any_job()))
    total = span[1] - span[0] + 1
    for name, answer in seen.items():
        if isinstance(answer, errors.PsctlError):
            reports[name].bad("ports", answer)
            continue
        wanted = sum(needs.get(name, {}).values())
        short = ports.lacking(span, {name: needs.get(name, {})}, {name: answer}, at, chosen.known.source)
        if short is not None and not reached.sites[name].jobs:
            reports[name].bad("ports", short)
        else:
            detail = f"{answer.free} of {total} free in {span[0]}-{span[1]}; a job needs about {wanted} here"
            reports[name].good("ports", detail)


def _reach(reached: ReachedCluster, machines: Mapping[str, Machine], reports: Mapping[str, HostReport]) -> None:
    """Every host connects to every other at the address where it would listen."""
    at = {name: machine.address for name, machine in machines.items()}
    names = [HostName(name) for name in machines]
    all_hosts = Fleet(reached.fleet.shells, reached.fleet.failed, len(names))  # all connect at once
    settings = ProbeSettings.of(reached)
    with serving(all_hosts, settings, {name: [address] for name, address in at.items()}, SERVING) as servers:

        def connect_to_others(name: HostName, shell: Shell) -> dict[str, str]:
            others = [other for other in names if other != name]
            to = {other: [at[other], port] for other in others for port in servers.ports.get(other, {}).values()}
            question = {"to": to, "seconds": REACH, "pings": 1}
            answers = settings.ask(shell, "reach", question, REACHED, servers.token, REACH + SERVING)
            silent: dict[str, str] = {
                other: servers.failed.get(other, "it does not listen") for other in others if other not in to
            }
            return {other: answer.error for other, answer in answers.items()} | silent

        answered = all_hosts.each(connect_to_others, names=names)
    for name, outcome in answered.items():
        if outcome.error is not None:
            error = errors.HostUnreachable(outcome.error.message, outcome.error.hint, name)
            reports[name].bad("reach", error)
            continue
        failed = {other: why for other, why in outcome.value.items() if why}
        if not failed:
            count = len(outcome.value)
            reports[name].good("reach", f"{count} other host{' answers' if count == 1 else 's answer'}")
        for other, why in failed.items():
            what = f"{name} does not reach {other} at {at[other]}: {why}"
            cure = "open the firewall between them, or set network.interface or internal_address"
            reports[name].bad("reach", errors.HostUnreachable(what, cure, name))


def document(reports: Sequence[HostReport]) -> dict[str, object]:
    """Return the document of `doctor -o json`."""
    return {"hosts": [{"name": each.name, "checks": msgspec.to_builtins(each.checks)} for each in reports]}
