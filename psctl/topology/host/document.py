"""The documents of `topo -o json`, from graphs and back.

What is printed can be read; what is read may as well be written by hand: a host needs its devices (`id`, `kind`) and
links (`a`, `b`, `type`), an edge its bandwidth too. A mistake is refused with the path to it. Keys beyond the promised
ones are passed over, so that documents of later versions can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

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
    Suggestion,
    bonded,
)
from psctl.topology.host import nvlinks
from psctl.topology.host.inventory import MOST_GPUS
from psctl.topology.host.paths import Router

KINDS: tuple[str, ...] = get_args(DeviceKind)

ROLES = HostNode.__struct_defaults__[-1]
"""Roles of a host whose document names none."""

MOST_HOSTS = 4096
"""Hosts of one document."""

MOST_DEVICES = 2048
"""Devices of one host, switches and processors included."""

MOST_LINKS = 32_768
"""Links of one host, or between the hosts; the pairs of 128 GPUs are 8,128."""

ALONE = "host"
"""Name of a host whose document has none."""


def host_document(
    name: str, graph: HostGraph, facts: HostFacts | None = None, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a host as an entry of `hosts`.

    Args:
        name: of the host.
        graph: its devices and links.
        facts: what its probe found, None for saved outputs: cores and memory are then null.
        labels: those of the cluster file.
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
    failed: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the document of `topo -o json`.

    Args:
        cluster: hosts and what lies between them.
        suggestion: which strategy suits; None: there is nothing to synchronise.
        facts: of the hosts that were probed, by name.
        failed: a row {"name", "error"} for each host that could not be probed.
    """
    hosts = []
    for node in cluster.hosts:
        body = host_document(node.name, node.graph, (facts or {}).get(node.name), node.labels)
        hosts.append(body if node.roles == ROLES else {**body, "roles": list(node.roles)})
    return {
        "hosts": [*hosts, *({"devices": [], "links": [], **row} for row in failed)],
        "between": [msgspec.to_builtins(one) for one in cluster.between],
        "strategy": msgspec.to_builtins(suggestion) if suggestion else None,
    }


def read_cluster_document(document: object) -> ClusterGraph:
    """Read what `topo -o json` prints, or one host of it.

    Raises:
        InvalidFile: the user's file is wrong; `where` is the path to the mistake ("hosts[0].links[3].bandwidth").
    """
    body = _table(document, "")
    if "hosts" not in body:
        if "devices" not in body:
            raise _wrong("", 'neither "hosts" nor "devices" is there')
        return ClusterGraph((read_host_document(body),))
    listed = _list(body["hosts"], "hosts")
    _bounded(len(listed), MOST_HOSTS, "hosts", "hosts")
    hosts = tuple(read_host_document(one, f"hosts[{index}]") for index, one in enumerate(listed))
    if not hosts:
        raise _wrong("hosts", "it is empty")
    _once([host.name for host in hosts], "hosts", "name")
    nodes = {host.name: host for host in hosts}
    between = _list(body.get("between") or [], "between")
    _bounded(len(between), MOST_LINKS, "between", "links")
    return ClusterGraph(hosts, tuple(_read_between(one, f"between[{i}]", nodes) for i, one in enumerate(between)))


def read_host_document(document: object, where: str = "") -> HostNode:
    """Read one host of `topo -o json`.

    Args:
        document: the parsed JSON.
        where: the path to it, for errors.

    Raises:
        InvalidFile: the user's file is wrong; `where` is the path to the mistake.
    """
    body = _table(document, where)
    devices = tuple(
        _read_device(one, _at(where, f"devices[{index}]"))
        for index, one in enumerate(_list(_need(body, "devices", where), _at(where, "devices")))
    )
    _bounded(len(devices), MOST_DEVICES, _at(where, "devices"), "devices of one host")
    _bounded(sum(device.kind == "gpu" for device in devices), MOST_GPUS, _at(where, "devices"), "GPUs of one host")
    _bounded(len(_list(_need(body, "links", where), _at(where, "links"))), MOST_LINKS, _at(where, "links"), "links")
    _once([device.id for device in devices], _at(where, "devices"), "id")
    ids = {device.id for device in devices}
    links = [
        _read_link(one, _at(where, f"links[{index}]"), ids)
        for index, one in enumerate(_list(_need(body, "links", where), _at(where, "links")))
    ]
    _one_relation(links, _at(where, "links"))
    labels = {key: str(value) for key, value in _table(body.get("labels") or {}, _at(where, "labels")).items()}
    return HostNode(
        _text(body.get("name", ALONE), _at(where, "name")),
        HostGraph(devices, _completed(devices, links, _at(where, "links")), tuple(_findings(body, where))),
        labels,
        _roles(body, where),
    )


def _bounded(count: int, most: int, where: str, sort: str) -> None:
    """Refuse counts beyond any real machine: later work grows with their square or faster."""
    if count > most:
        raise _wrong(where, f"{count:,} {sort}; {most:,} are the most that are read")


def _device(device: Device) -> dict[str, Any]:
    rest = {key: value for key, value in msgspec.to_builtins(device).items() if value not in (None, "", False, [], ())}
    return {"id": device.id, "kind": device.kind, "numa": device.numa} | rest


def _link(link: Link) -> dict[str, Any]:
    body: dict[str, Any] = {
        "a": link.a, "b": link.b, "type": link.type, "bandwidth": link.bandwidth, "measured": link.measured,
    }  # fmt: skip
    if link.switched is not None:
        body["switched"] = link.switched
    if link.latency is not None:
        body["latency"] = link.latency
    return body | ({"derived": True} if link.derived else {})


def _read_device(document: object, where: str) -> Device:
    body = _table(document, where)
    kind = _text(_need(body, "kind", where), _at(where, "kind"))
    if kind not in KINDS:
        raise _wrong(_at(where, "kind"), f'"{kind}" is none of {", ".join(KINDS)}')
    return Device(
        id=_text(_need(body, "id", where), _at(where, "id")),
        kind=kind,  # type: ignore[arg-type]
        numa=_whole(body, "numa", where),
        name=str(body.get("name") or ""),
        derived=_flag(body, "derived", where),
        bus=str(body.get("bus") or ""),
        cores=_whole(body, "cores", where),
        memory=_whole(body, "memory", where),
        interface=str(body.get("interface") or ""),
        addresses=tuple(str(one) for one in _list(body.get("addresses") or [], _at(where, "addresses"))),
        bandwidth=_rate(body, "bandwidth", where),
    )


def _read_link(document: object, where: str, ids: set[str]) -> Link:
    body = _table(document, where)
    a, b, sort = (_text(_need(body, key, where), _at(where, key)) for key in ("a", "b", "type"))
    for key, end in (("a", a), ("b", b)):
        if end not in ids:
            raise _wrong(_at(where, key), f'no device has the id "{end}"')
    if a == b:
        raise _wrong(_at(where, "b"), f'both ends are "{a}"')
    switched = body.get("switched")
    if switched is not None and (not isinstance(switched, bool) or not bonded(sort)):
        raise _wrong(_at(where, "switched"), "it is true or false, and only for NVn")
    if sort in EDGE_TYPES or switched is False:
        _need(body, "bandwidth", where)
    return Link(
        a, b, sort, _rate(body, "bandwidth", where) or 0.0, _rate(body, "latency", where), switched,
        _flag(body, "measured", where), _flag(body, "derived", where),
    )  # fmt: skip


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


def _one_relation(links: Sequence[Link], where: str) -> None:
    seen: dict[frozenset[str], int] = {}
    for index, link in enumerate(links):
        if link.type in EDGE_TYPES:
            continue
        if link.ends in seen:
            raise _wrong(f"{where}[{index}]", f"{link.a} and {link.b} have a word already, in [{seen[link.ends]}]")
        seen[link.ends] = index


def _read_between(document: object, where: str, nodes: Mapping[str, HostNode]) -> Between:
    body = _table(document, where)
    a, b = (_text(_need(body, key, where), _at(where, key)) for key in ("a", "b"))
    if a == b:
        raise _wrong(_at(where, "b"), f'both ends are "{a}"')
    _need(body, "bandwidth", where)
    via = str(body.get("via") or "")
    if via and a in nodes and nodes[a].graph.device(via) is None:
        raise _wrong(_at(where, "via"), f'host "{a}" has no device "{via}"')
    return Between(
        a,
        b,
        _rate(body, "bandwidth", where),
        _rate(body, "latency", where),
        _flag(body, "measured", where),
        via,
        str(body.get("type") or "Ethernet"),
    )


def _findings(body: Mapping[str, Any], where: str) -> list[Finding]:
    """Return the problems; the error of a host that failed is one of them."""
    found = []
    for index, one in enumerate(_list(body.get("problems") or [], _at(where, "problems"))):
        problem = _table(one, _at(where, f"problems[{index}]"))
        found.append(Finding(str(problem.get("what") or ""), str(problem.get("cure") or "")))
    error = body.get("error")
    if isinstance(error, dict):
        inner = error.get("error", error)
        inner = inner if isinstance(inner, dict) else {}
        found.append(Finding(str(inner.get("message") or "not asked"), str(inner.get("hint") or "")))
    return found


def _roles(body: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if body.get("roles") is None:
        return tuple(ROLES)
    path = _at(where, "roles")
    roles = tuple(_text(one, f"{path}[{index}]") for index, one in enumerate(_list(body["roles"], path)))
    for index, role in enumerate(roles):
        if role not in ROLES:
            raise _wrong(f"{path}[{index}]", f'"{role}" is none of {", ".join(ROLES)}')
    return roles


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _wrong(where: str, what: str, hint: str = "") -> InvalidFile:
    message = f"the topology is wrong at {where}: {what}" if where else f"this is no topology: {what}"
    return InvalidFile(message, hint or "`psctl topo -o json` prints such a document: compare with it", where)


def _need(body: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in body:
        raise _wrong(_at(where, key), "it is missing")
    return body[key]


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "expected an object in braces")
    return value


def _list(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, "expected a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, "expected a text that is not empty")
    return value


def _whole(body: Mapping[str, Any], key: str, where: str) -> int | None:
    value = body.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise _wrong(_at(where, key), "expected a whole number, 0 or more, or null")


def _flag(body: Mapping[str, Any], key: str, where: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(_at(where, key), "expected true or false")
    return bool(value)


def _rate(body: Mapping[str, Any], key: str, where: str) -> float | None:
    """A number that is not negative and not infinite."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        unit = "seconds" if key == "latency" else "bytes/s"
        raise _wrong(_at(where, key), f"expected a number of {unit}, 0 or more")
    return float(value)


def _once(values: Sequence[str], where: str, key: str) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise _wrong(f"{where}[{index}].{key}", f'"{value}" is there already')
