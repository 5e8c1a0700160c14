"""cluster.yaml: the hosts, how they are reached, the network of training, and Python on the hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from psctl.errors import InvalidFile
from psctl.spec import hosts as host_lists
from psctl.spec import yaml_nodes
from psctl.spec.decode import Decoder, raise_all
from psctl.spec.exec_template import EXAMPLE, ExecTemplate
from psctl.spec.fields import (
    Doc,
    Instead,
    Internal,
    KeyPattern,
    Notation,
    Section,
    ShortForm,
    choice,
    duration,
    rate,
    text,
    truth,
    whole,
)
from psctl.spec.nearest import did_you_mean
from psctl.types import RACK

LOCAL = "local"
"""The address that stands for this machine, reached without SSH."""

HOST_PLACE = "{host}"
"""Stands for the host's name in `runtime.workdir`."""

OF_SLURM = ("nodes", "partition", "account", "gpus_per_node", "time", "extra")
"""Keys of `kind: slurm`: they describe the allocation that psctl submits."""

SLURM_WORKDIR = f"~/.psctl/nodes/{HOST_PLACE}"
"""The default of `runtime.workdir` under `kind: slurm`: its nodes share the home folder."""

VARIABLE = KeyPattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable (letters, digits and _)")
"""Names of environment variables."""

_ADDRESS = msgspec.structs.replace(
    text("a host name or an address", host_lists.ADDRESS),
    schema={"type": "string", "minLength": 1},  # a range is allowed in the file
)
_WORD = text("one word without blanks", r"[^\s-]\S*")
_PATH = text("a path", r"(?!-).+")


class SshSpec(Section, frozen=True):
    """Access to the hosts. Keys that are null come from ~/.ssh/config, as `ssh -G HOST` resolves it."""

    user: Annotated[str | None, _WORD, Doc("Name to log in with.")] = None
    port: Annotated[int | None, whole(1, 65535), Doc("Port that sshd listens on.")] = None
    identity_file: Annotated[str | None, _PATH, Doc("Private key to log in with; ~ is your home.")] = None
    proxy_jump: Annotated[str | None, _WORD, Doc("Jump host or hosts, as ssh -J takes them: user@host:port,...")] = None
    host_key_policy: Annotated[
        Literal["strict", "accept-new"],
        Doc("strict: a host whose key is not in known_hosts is refused. accept-new: an unknown key is stored."),
    ] = "strict"
    connect_timeout: Annotated[
        float, duration(3600, 0.1), Doc("Longest wait for a host's sshd to answer, in seconds.")
    ] = 10.0


def _ports() -> Notation:
    def parse(scalar: yaml_nodes.Scalar) -> tuple[int, int]:
        first, dash, last = scalar.text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and len(scalar.text) < 12):
            raise ValueError
        if not 1024 <= int(first) <= int(last) <= 65535:
            raise ValueError(f"expected a rising range within 1024..65535, got {scalar.written()}")
        return int(first), int(last)

    return Notation("a range of ports such as 29400-29499", parse, {"type": "string", "pattern": "^[0-9]+-[0-9]+$"})


class NetworkSpec(Section, frozen=True):
    """The network that gradients travel over."""

    interface: Annotated[
        str, _WORD, Doc("Interface to bind on every host; auto: the fastest by which all hosts reach each other.")
    ] = "auto"
    ports: Annotated[
        tuple[int, int] | None, _ports(), Doc("Range (first-last) that every listener keeps to; null: any free port.")
    ] = None
    congestion: Annotated[
        Literal["auto", "reno", "cubic", "bbr"],
        Doc("TCP congestion control of data connections; auto: the system's, on near links reno in place of BBR."),
    ] = "auto"
    encryption: Annotated[
        Literal["on", "off"],
        Doc(
            "on: psctl's connections are encrypted. off: those of gradients, values and stores are authenticated when "
            "they are made, and then open; for networks that nobody else reaches."
        ),
    ] = "on"
    measure_messages: Annotated[
        bool, truth(), Doc("psctl up measures the cost of messages in a job on all hosts; false: plans assume it.")
    ] = True
    require_encryption: Annotated[
        bool,
        truth(),
        Doc("Exclude strategies whose bytes cross between hosts unencrypted: those of the engine (Gloo, NCCL)."),
    ] = False


class RuntimeSpec(Section, frozen=True):
    """Python and its packages on the hosts."""

    python: Annotated[str, _PATH, Doc("Interpreter on the host: a name on its PATH, or a path.")] = "python3"
    environment: Annotated[
        Literal["existing", "managed"],
        Doc("managed: psctl makes a venv under workdir. existing: nothing in your Python is changed."),
    ] = "managed"
    workdir: Annotated[
        str,
        _PATH,
        Doc(
            "Folder on the host that holds all that psctl keeps there; hosts that share their disk need one each: "
            "{host} is the host's name. Default under kind: slurm: ~/.psctl/nodes/{host}."
        ),
    ] = "~/.psctl/host"
    torch: Annotated[
        str,
        text("auto, none or a version such as 2.5.1", r"auto|none|[0-9][A-Za-z0-9.+!_-]*"),
        Doc(
            "torch to install: auto (this machine's version), a version, or none; existing: only where it is missing. "
            "`index:` or `wheelhouse:` determines the build (CPU, CUDA)."
        ),
    ] = "auto"
    requirements: Annotated[
        tuple[str, ...],
        text("a package such as numpy>=1.26", r"[A-Za-z0-9].*"),
        Doc("managed only: further packages, as pip takes them."),
    ] = ()
    wheelhouse: Annotated[
        str | None, _PATH, Doc("Folder of wheels on this machine to install from; no index is used.")
    ] = None
    index: Annotated[
        str | None,
        text("the URL of a package index", r"(https?|file)://\S+"),
        Doc("Package index to install from, which determines torch's build; null: that of pip on the host."),
    ] = None
    env: Annotated[
        dict[str, str], VARIABLE, text(), Doc("Variables of every process that psctl starts on the hosts.")
    ] = msgspec.field(default_factory=dict)


class HostSpec(Section, frozen=True):
    """One machine."""

    address: Annotated[
        str,
        _ADDRESS,
        Doc("Name, address or alias in ~/.ssh/config; local: this machine, without SSH. A range makes several hosts."),
    ]
    name: Annotated[
        str,
        text("a name of letters, digits, . _ - (no blank)", host_lists.ADDRESS),
        Doc("Name in psctl; default: the address."),
    ] = ""
    user: Annotated[str | None, _WORD, Doc("Name to log in with, in place of ssh.user.")] = None
    port: Annotated[int | None, whole(1, 65535), Doc("Port of its sshd, in place of ssh.port.")] = None
    internal_address: Annotated[
        str | None, text("an IP address", r"[0-9A-Fa-f.:]+"), Doc("Address at which the other hosts reach it.")
    ] = None
    slots: Annotated[int | None, whole(1, 4096), Doc("Number of workers; null: one a GPU, else one.")] = None
    roles: Annotated[
        tuple[str, ...], choice("worker", "server"), Doc("Roles of processes on the host: worker, server or both.")
    ] = ("worker", "server")
    labels: Annotated[
        dict[str, str],
        KeyPattern(r"[^\s=]+", "a label's name without blanks"),
        text(),
        Doc("Labels of your choice, such as rack: r1."),
    ] = msgspec.field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether it is this machine, reached without SSH."""
        return self.address == LOCAL


class HostsFrom(Section, frozen=True):
    """Hosts that a command prints, in place of a list."""

    command: Annotated[
        str,
        text("a command"),
        Doc(
            "Command of this machine that prints one host a line (pod/name counts as name); no shell reads it. "
            "It runs when the file is read; later commands by the cluster's name use what `up` found."
        ),
    ] = msgspec.field(name="from")


class LinkSpec(Section, frozen=True):
    """A link between two hosts or groups of hosts that probes cannot see."""

    between: Annotated[
        tuple[str, ...], text("a host's name or a label's value"), Doc("The two ends: hosts, or values of a label.")
    ]
    bandwidth: Annotated[float, rate(), Doc("Payload rate in each direction.")]
    latency: Annotated[float | None, duration(60), Doc("Time of a byte in one direction; null: as probed.")] = None


class ClusterSpec(Section, frozen=True):
    """A cluster: its hosts and their settings."""

    name: Annotated[
        str,
        text(
            "a name of letters, digits, . _ - that does not end in .yaml",
            r"(?!.*\.ya?ml$)[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        ),
        Doc("Name of the cluster, by which `up` stores it."),
    ]
    hosts: Annotated[
        tuple[HostSpec, ...],
        ShortForm("a name, an address, or a range such as node[02-16]"),
        Instead(HostsFrom),
        Doc("The machines; the first of those in a job is its head. Left out under kind: slurm, which has its nodes."),
    ]
    version: Annotated[int, whole(1, 1), Doc("Version of this file's format.")] = 1
    kind: Annotated[
        Literal["ssh", "command", "slurm"],
        Doc(
            "How hosts are reached. ssh: by SSH. command: by the command in exec:, such as kubectl or docker. slurm: "
            "the nodes of the Slurm allocation that psctl runs in, or that `train` submits, by srun."
        ),
    ] = "ssh"
    exec: Annotated[
        str | None,
        text("a command with {command} in it", r"(?s).*\S.*"),
        Doc(
            "kind: command only: starts a command on a host. {host}: its address; {command}: what psctl runs, several "
            "words; {line}: the same as one word, for tools that pass it to a shell."
        ),
    ] = None
    steps: Annotated[
        bool,
        truth(),
        Doc(
            "kind: command only: whether exec: ends all processes of a command with it, as batch systems do (blaunch, "
            "qrsh -inherit, flux); each of psctl's agents then keeps its exec: running."
        ),
    ] = False
    nodes: Annotated[
        int, whole(1, host_lists.MOST), Doc("kind: slurm: number of nodes of the allocation that `train` submits.")
    ] = 1
    partition: Annotated[str | None, _WORD, Doc("kind: slurm: its partition; null: Slurm's default.")] = None
    account: Annotated[str | None, _WORD, Doc("kind: slurm: its account; null: Slurm's default.")] = None
    gpus_per_node: Annotated[int | None, whole(1, 4096), Doc("kind: slurm: GPUs of each of its nodes.")] = None
    time: Annotated[
        float | None, duration(366 * 86400, 60), Doc("kind: slurm: its longest time; null: the partition's.")
    ] = None
    extra: Annotated[
        tuple[str, ...],
        text("an option of sbatch such as --qos=high", r"-\S.*"),
        Doc("kind: slurm: further options of sbatch for it."),
    ] = ()
    ssh: Annotated[SshSpec, Doc("Access to the hosts; keys that are left out come from ~/.ssh/config.")] = SshSpec()
    network: Annotated[NetworkSpec, Doc("The network that gradients travel over.")] = NetworkSpec()
    runtime: Annotated[RuntimeSpec, Doc("Python and its packages on the hosts.")] = RuntimeSpec()
    links: Annotated[
        tuple[LinkSpec, ...],
        Doc("Links that probes cannot see, such as a trunk between racks; they replace measured rates."),
    ] = ()
    source: Annotated[str, Internal()] = ""
    hosts_command: Annotated[str, Internal()] = ""  # of hosts: {from: COMMAND}; without its result there are no hosts
    allocation: Annotated[str, Internal()] = ""  # kind: slurm: number of the allocation

    def host(self, name: str) -> HostSpec | None:
        """Return the host of this name, or None."""
        return next((host for host in self.hosts if host.name == name), None)


def load_cluster(
    text: str, source: str, found: Sequence[str] | None = None, allocation: str = "",
    racks: Mapping[str, str] | None = None,
) -> ClusterSpec:  # fmt: skip
    """Read a cluster file.

    Args:
        text: the text of the file.
        source: its name, for messages.
        found: the hosts that the command of `hosts: {from: COMMAND}` printed, or the nodes of the allocation; None: not
            known, so there are none.
        allocation: number of the Slurm allocation, under `kind: slurm`.
        racks: the switch of each of its nodes, which becomes the label `rack`.

    Raises:
        InvalidFile: malformed or contradictory; the user's fault, with file:line:column.
    """
    from psctl.spec.job import JobSpec  # which itself needs this module

    decoder = Decoder({"job file": JobSpec})
    node = yaml_nodes.parse(text, source, decoder.problems)
    command, slurm = "", _is_slurm(node)
    given = [entry.key for entry in node.entries] if isinstance(node, yaml_nodes.Mapping) else []
    if isinstance(node, yaml_nodes.Mapping):
        hosts = node.get("hosts")
        if isinstance(hosts, yaml_nodes.Mapping):
            command = host_lists.command_of(hosts, decoder.problems)
        if isinstance(hosts, yaml_nodes.Mapping) or (slurm and hosts is None):
            hosts = host_lists.listed(found or (), node.where if hosts is None else hosts.where)
        if hosts is not None:
            node = node.put("hosts", host_lists.expand_hosts(hosts, decoder.problems), hosts.where)
    whole = not decoder.problems
    spec = decoder.make(node, ClusterSpec)
    if racks and decoder.sound("hosts"):
        hosts_of = tuple(msgspec.structs.replace(one, labels=_racked(one, racks)) for one in spec.hosts)
        spec = msgspec.structs.replace(spec, hosts=hosts_of)
    if whole and decoder.sound("hosts") and not ((command or slurm) and found is None):
        _check_hosts(spec, decoder, node)
    if decoder.sound("kind", "exec", *OF_SLURM):
        _check_kind(spec, decoder, node, given, several=bool(command) or len(_entries(node)) > 1)
    if whole and decoder.sound("hosts", "links"):
        _check_links(spec, decoder)
    if decoder.sound("runtime"):
        _check_runtime(spec, decoder)
    if spec.network.require_encryption and spec.network.encryption == "off" and decoder.sound("network"):
        text = "off cannot be combined with require_encryption: true"
        decoder.refuse("network.encryption", text, "leave one of them out")
    raise_all(decoder.problems)
    if slurm and "runtime.workdir" not in decoder.places:
        runtime = msgspec.structs.replace(spec.runtime, workdir=SLURM_WORKDIR)
        spec = msgspec.structs.replace(spec, runtime=runtime)
    return msgspec.structs.replace(spec, source=source, hosts_command=command, allocation=allocation)


def _racked(host: HostSpec, racks: Mapping[str, str]) -> dict[str, str]:
    return {**host.labels, RACK: racks[host.name]} if host.name in racks else host.labels


def _is_slurm(node: yaml_nodes.Node) -> bool:
    kind = node.get("kind") if isinstance(node, yaml_nodes.Mapping) else None
    return isinstance(kind, yaml_nodes.Scalar) and kind.text == "slurm"


def local_cluster(cores: int | None = None) -> ClusterSpec:
    """Return the embedded cluster `local`: this machine, no SSH, its own Python.

    Args:
        cores: number of slots; None: the cores that this process may use.
    """
    if cores is None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    here = HostSpec(address=LOCAL, name=LOCAL, slots=cores)
    return ClusterSpec(
        name=LOCAL, hosts=(here,), runtime=RuntimeSpec(environment="existing"), source="the embedded local cluster"
    )


def _check_kind(
    spec: ClusterSpec, decoder: Decoder, node: yaml_nodes.Node, given: Sequence[str], several: bool
) -> None:
    """Refuse keys that do not belong to the way in which hosts are reached, and a command that cannot reach them."""
    if spec.kind != "command" and spec.exec is not None:
        decoder.refuse("exec", f"kind: {spec.kind} reaches hosts without it", "write kind: command, or leave it out")
    if spec.kind != "command" and "steps" in given:
        decoder.refuse("steps", f"kind: {spec.kind} knows it without", "leave it out")
    for key in [key for key in OF_SLURM if key in given] if spec.kind != "slurm" else ():
        decoder.refuse(key, f"an allocation of Slurm has it, and kind: {spec.kind} has none", "leave it out")
    if spec.kind == "ssh":
        return
    if spec.kind == "command":
        _check_exec(spec, decoder, several)
    cure = "leave it out" if spec.kind == "slurm" else "leave it out, or put it into exec:"
    ssh = node.get("ssh") if isinstance(node, yaml_nodes.Mapping) else None
    for key in [entry.key for entry in ssh.entries] if isinstance(ssh, yaml_nodes.Mapping) else ():
        decoder.refuse(f"ssh.{key}", f"kind: {spec.kind} uses no SSH", cure)
    if spec.kind == "slurm" and "hosts" in given:
        decoder.refuse("hosts", "kind: slurm uses the nodes of the allocation that psctl runs in", cure)
        return
    for host, entry in zip(spec.hosts, _entries(node), strict=True) if decoder.sound("hosts") else ():
        for key in ("user", "port"):
            if getattr(host, key) is not None and not host.local:
                decoder.refuse(f"{entry.path}.{key}", "kind: command logs in by exec: alone", cure)


def _check_exec(spec: ClusterSpec, decoder: Decoder, several: bool) -> None:
    """Refuse a command that cannot reach the hosts."""
    if spec.exec is None:
        decoder.refuse("kind", "command, but exec: is missing", f'write exec: "{EXAMPLE}"')
        return
    try:
        template = ExecTemplate.parse(spec.exec)
    except ValueError as error:
        decoder.refuse("exec", str(error), f'such as exec: "{EXAMPLE}"')
        return
    if several and not template.names_host:
        message = "without {host} every command would reach the same place, and there are several hosts"
        decoder.refuse("exec", message, f'such as exec: "{EXAMPLE}"')


def _check_runtime(spec: ClusterSpec, decoder: Decoder) -> None:
    """Refuse packages that would not be installed, and two sources of packages."""
    if spec.runtime.environment == "existing" and spec.runtime.requirements:
        message = "to an existing environment only psctl's own dependencies are added"
        decoder.refuse(
            "runtime.requirements", message, "install them on the hosts yourself, or write environment: managed"
        )
    if spec.runtime.wheelhouse is not None and spec.runtime.index is not None:
        decoder.refuse("runtime.index", "wheelhouse: is given too, and packages come from it alone", "keep one")


def _check_hosts(spec: ClusterSpec, decoder: Decoder, node: yaml_nodes.Node) -> None:
    """Refuse hosts that contradict each other."""
    if not spec.hosts:
        decoder.refuse("hosts", "no host", "write at least one, or leave out --cluster for this machine alone")
    entries = _entries(node)
    seen: dict[str, str] = {}
    found = decoder.problems
    for host, entry in zip(spec.hosts, entries, strict=True):
        if host.name in seen:
            message = f'{entry.path}.name: duplicate name "{host.name}", first at {seen[host.name]}'
            found.append(InvalidFile(message, "give each host a name of its own", _name_place(entry)))
        seen.setdefault(host.name, _name_place(entry))
        if not host.roles:
            found.append(
                InvalidFile(f"{entry.path}.roles: a host without a role", "worker, server or both", entry.where)
            )
        if host.local and (host.user or host.port):
            key = "user" if host.user else "port"
            message = f"{entry.path}.{key}: `local` is reached without SSH"
            found.append(InvalidFile(message, "leave it out", entry.where))
    if sum(host.local for host in spec.hosts) > 1:
        decoder.refuse("hosts", "this machine (address: local) is listed twice", "keep one")


def _check_links(spec: ClusterSpec, decoder: Decoder) -> None:
    """Refuse links with unknown ends, and two links with the same ends."""
    values = dict.fromkeys(value for host in spec.hosts for value in host.labels.values())
    known = [*(host.name for host in spec.hosts), *values]
    seen: dict[frozenset[str], int] = {}
    for number, link in enumerate(spec.links):
        path = f"links[{number}].between"
        for index, end in enumerate(link.between):
            if end not in known:
                message = f'"{end}" is neither a host nor a value of a label{did_you_mean(end, known)}'
                decoder.refuse(f"{path}[{index}]", message, f"valid ends: {', '.join(known)}")
        ends = frozenset(link.between)
        if len(link.between) != 2 or len(ends) != 2:
            decoder.refuse(path, "a link has two different ends", "such as between: [r1, r2]")
        elif ends in seen:
            decoder.refuse(path, f"the same two ends as links[{seen[ends]}]", "keep one of them")
        if not link.bandwidth:
            decoder.refuse(f"links[{number}].bandwidth", "a link with a bandwidth of 0", "leave it out")
        seen.setdefault(ends, number)


def _entries(node: yaml_nodes.Node) -> tuple[yaml_nodes.Node, ...]:
    """Return the items of the list under `hosts:`."""
    listed = node.get("hosts") if isinstance(node, yaml_nodes.Mapping) else None
    return listed.items if isinstance(listed, yaml_nodes.Sequence) else ()


def _name_place(entry: yaml_nodes.Node) -> str:
    name = entry.get("name") if isinstance(entry, yaml_nodes.Mapping) else None
    return name.where if name is not None else entry.where
