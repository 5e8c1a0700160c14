"""Writes and reads the documents of `psctl topo -o json`.

Each document that is written can be read back. A document may also be written by hand: a host needs its devices (`id`,
`kind`) and links (`a`, `b`, `type`), an edge also its bandwidth. An error names the path to the wrong value. Unknown
keys are ignored, so that documents of later versions can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict, TypeVar, get_args

import msgspec

from psctl.errors import InvalidFile
from psctl.topology.facts import HostFacts
from psctl.topology.findings import Finding
from psctl.topology.graph import (
    EDGE_TYPES,
    Between,
    ClusterGraph,
    Device,
    DeviceKind,
    HostGraph,
    HostNode,
    Link,
    Name,
    Suggestion,
    bonded,
)
from psctl.topology.host import nvlinks
from psctl.topology.host.inventory import MOST_GPUS
from psctl.topology.host.paths import Router
from psctl.types import JsonObject

ROLES = HostNode.__struct_defaults__[-1]
"""Roles of a host whose document names none."""

MOST_HOSTS = 4096
"""Hosts of one document."""

MOST_DEVICES = 2048
"""Devices of one host, switches and processors included."""

MOST_LINKS = 32_768
"""Links of one host, or between the hosts; the pairs of 128 GPUs are 8,128."""

One = TypeVar("One")

_HINT = (
    f"compare with what `psctl topo -o json` prints; kinds are {', '.join(get_args(DeviceKind))}; roles are "
    f"{', '.join(ROLES)}"
)


class _HostDocument(msgspec.Struct):
    """An entry of `hosts`."""

    devices: list[Device]
    links: list[Link]
    name: Name = "host"
    labels: dict[str, str | int | float | bool] | None = None
    problems: list[Finding] | None = None
    error: object = None  # why the host could not be probed
    roles: list[Literal["worker", "server"]] | None = None


class ClusterDocument(TypedDict):
    """The document of `topo -o json`."""

    hosts: list[JsonObject]
    between: list[JsonObject]
    strategy: JsonObject | None


class _ClusterDocument(msgspec.Struct):
    """A whole document."""

    hosts: list[_HostDocument]
    between: list[Between] | None = None


_LEARNT = msgspec.json.Decoder(_ClusterDocument)
"""Made at import: threads in which msgspec examines a type at the same moment crash it."""


def host_document(
    name: str, graph: HostGraph, facts: HostFacts | None = None, labels: Mapping[str, str] | None = None
) -> JsonObject:
    """Return a host as an entry of `hosts`.

    Args:
        name: name of the host.
        graph: its devices and links.
        facts: the facts that its probe found; None for saved outputs, which makes cores and memory null.
        labels: its labels in the cluster file.
    """
    return {
        "name": name,
        "cores": facts.cores if facts else None,
        "memory": facts.memory if facts else None,
        "labels": dict(labels or {}),
        "devices": [_device(device) for device in graph.devices],
        "links": [_link(link) for link in graph.links],
        "problems": [msgspec.to_builtins(finding) for finding in graph.findings],
    }


def cluster_document(
    cluster: ClusterGraph,
    suggestion: Suggestion | None = None,
    facts: Mapping[str, HostFacts] | None = None,
    failed: Sequence[JsonObject] = (),
) -> ClusterDocument:
    """Return the document of `topo -o json`.

    Args:
        cluster: the hosts and the links between them.
        suggestion: the strategy that suits; None where there is nothing to synchronize.
        facts: the facts of each probed host, by name.
        failed: a row {"name", "error"} for each host that could not be probed.
    """
    hosts: list[JsonObject] = []
    for node in cluster.hosts:
        body = host_document(node.name, node.graph, (facts or {}).get(node.name), node.labels)
        hosts.append(body if node.roles == ROLES else {**body, "roles": list(node.roles)})
    return {
        "hosts": [*hosts, *({"devices": [], "links": [], **row} for row in failed)],
        "between": [msgspec.to_builtins(one) for one in cluster.between],
        "strategy": msgspec.to_builtins(suggestion) if suggestion else None,
    }


def read_cluster_document(document: object) -> ClusterGraph:
    """Read the output of `psctl topo -o json`, or one host of it.

    Raises:
        InvalidFile: the user's document is wrong; `where` is the path to the error ("hosts[0].links[3].bandwidth").
    """
    if isinstance(document, dict) and "hosts" not in document:
        if "devices" not in document:
            raise _wrong("", 'it has neither "hosts" nor "devices"')
        return ClusterGraph((_host(_convert(document, _HostDocument), ""),))
    body = _convert(document, _ClusterDocument)
    _bounded(len(body.hosts), MOST_HOSTS, "hosts", "hosts")
    if not body.hosts:
        raise _wrong("hosts", "it is empty")
    hosts = tuple(_host(host, f"hosts[{index}].") for index, host in enumerate(body.hosts))
    _once([host.name for host in hosts], "hosts", "name")
    between = body.between or []
    _bounded(len(between), MOST_LINKS, "between", "links")
    nodes = {host.name: host for host in hosts}
    for index, link in enumerate(between):
        where = f"between[{index}]"
        _different(link.a, link.b, where)
        if "bandwidth" not in document["between"][index]:  # type: ignore[index]
            raise _wrong(f"{where}.bandwidth", "it is missing; null stands for an unknown rate")
        if link.via and link.a in nodes and nodes[link.a].graph.device(link.via) is None:
            raise _wrong(f"{where}.via", f'host "{link.a}" has no device "{link.via}"')
    return ClusterGraph(hosts, tuple(between))


def _convert(document: object, kind: type[One]) -> One:
    """Return a parsed document as typed values; the path in an error is written as "hosts[0].name"."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).removesuffix("`").partition(" - at `$")
        where = place.removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`?", what):
            where, what = f"{where}.{missing[1]}".removeprefix("."), "it is missing"
        raise _wrong(where, what[0].lower() + what[1:]) from None


def _host(body: _HostDocument, path: str) -> HostNode:
    """Return a host after the checks that types cannot express; `path` is the prefix of paths in errors."""
    devices, links = body.devices, body.links
    _bounded(len(devices), MOST_DEVICES, f"{path}devices", "devices of one host")
    _bounded(sum(device.kind == "gpu" for device in devices), MOST_GPUS, f"{path}devices", "GPUs of one host")
    _bounded(len(links), MOST_LINKS, f"{path}links", "links")
    _once([device.id for device in devices], f"{path}devices", "id")
    ids = {device.id for device in devices}
    typed: dict[frozenset[str], int] = {}
    for index, link in enumerate(links):
        where = f"{path}links[{index}]"
        for key, end in (("a", link.a), ("b", link.b)):
            if end not in ids:
                raise _wrong(f"{where}.{key}", f'no device has the id "{end}"')
        _different(link.a, link.b, where)
        if link.switched is not None and not link.width:
            raise _wrong(f"{where}.switched", "only links of type NVn have it")
        if link.type not in EDGE_TYPES and typed.setdefault(link.ends, index) != index:
            raise _wrong(where, f"links[{typed[link.ends]}] already gives the link type of {link.a} and {link.b}")
    problems = [*(body.problems or []), *_failure(body.error)]
    graph = HostGraph(tuple(devices), _completed(devices, links, f"{path}links"), tuple(problems))
    labels = {key: str(value) for key, value in (body.labels or {}).items()}
    return HostNode(body.name, graph, labels, tuple(ROLES if body.roles is None else body.roles))


def _bounded(count: int, most: int, where: str, sort: str) -> None:
    """Refuse counts beyond any real machine: later work grows with their square or faster."""
    if count > most:
        raise _wrong(where, f"{count:,} {sort}; at most {most:,} are read")


def _once(values: Iterable[str], where: str, key: str) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise _wrong(f"{where}[{index}].{key}", f'an earlier entry has "{value}" already')
        seen.add(value)


def _different(a: str, b: str, where: str) -> None:
    if a == b:
        raise _wrong(f"{where}.b", f'both ends are "{a}"')


def _device(device: Device) -> JsonObject:
    rest = {key: value for key, value in msgspec.to_builtins(device).items() if value not in (None, "", False, [], ())}
    return {"id": device.id, "kind": device.kind, "numa": device.numa} | rest


def _link(link: Link) -> JsonObject:
    body: JsonObject = {
        "a": link.a, "b": link.b, "type": link.type, "bandwidth": link.bandwidth, "measured": link.measured,
    }  # fmt: skip
    if link.switched is not None:
        body["switched"] = link.switched
    if link.latency is not None:
        body["latency"] = link.latency
    return body | ({"derived": True} if link.derived else {})


def _completed(devices: Sequence[Device], links: Sequence[Link], where: str) -> tuple[Link, ...]:
    """Return the links with omitted values added: whether NVn is switched; the rate of a pair without other traffic."""
    words = {(link.a, link.b): link.type for link in links if bonded(link.type)}
    through = nvlinks.switched(words, {})
    links = [
        msgspec.structs.replace(link, switched=(link.a, link.b) in through)
        if bonded(link.type) and link.switched is None
        else link
        for link in links
    ]
    for index, link in enumerate(links):
        if link.edge and not link.bandwidth:
            raise _wrong(f"{where}[{index}].bandwidth", "a cable or slot needs its bytes/s, more than 0")
    router = Router(devices, [link for link in links if link.edge])
    return tuple(link if link.bandwidth else _alone(link, router) for link in links)


def _alone(link: Link, router: Router) -> Link:
    path = router.pair(link.a, link.b, link.type)
    return msgspec.structs.replace(link, bandwidth=path.bandwidth) if path else link


def _failure(error: object) -> list[Finding]:
    """Return the error of a host that could not be probed as a problem."""
    if not isinstance(error, dict):
        return []
    inner = error.get("error", error)
    inner = inner if isinstance(inner, dict) else {}
    return [Finding(str(inner.get("message") or "not probed"), str(inner.get("hint") or ""))]


def _wrong(where: str, what: str) -> InvalidFile:
    message = f"the topology is wrong at {where}: {what}" if where else f"this is no topology: {what}"
    return InvalidFile(message, _HINT, where)
