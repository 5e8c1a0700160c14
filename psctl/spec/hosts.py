"""Lists of hosts: ranges such as node[02-16], MPI's hostfiles, and cluster.yaml made from either."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence as List
from typing import NamedTuple

import msgspec

from psctl.errors import InvalidFile, PsctlError
from psctl.spec.exec_template import check_program
from psctl.spec.yaml_nodes import Mapping, Node, Scalar, Sequence

MOST = 4096
"""Hosts in one cluster: a larger range is a mistake."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
"""A host's name; it never begins with a dash, so ssh cannot take it for an option."""
ADDRESS = rf"{NAME}|[0-9A-Fa-f:]{{2,39}}(%[A-Za-z0-9._-]+)?"
"""A host's name, IPv4 or IPv6 address."""

FROM_HINT = 'such as hosts: {from: "kubectl get pods -l app=train -o name"}: one host a line, nothing else'

_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")
_PIECE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class HostLine(NamedTuple):
    """One host of a hostfile."""

    address: str
    slots: int | None


def expand(text: str) -> list[str]:
    """Return the names of a range such as node[02-16] or node[1,3-5].lab; a plain name is itself.

    Raises:
        ValueError: a malformed or too long range.
    """
    if "[" not in text and "]" not in text:
        return [text]
    match = _BRACKETS.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}": expected one range in brackets, such as node[02-16] or node[1,3-5]')
    before, inside, after = match.groups()
    numbers: list[str] = []
    for piece in inside.split(","):
        found = _PIECE.fullmatch(piece.strip())
        if found is None:
            raise ValueError(f'"{text}": expected numbers such as 02-16 or 1,3-5 in the brackets')
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f'"{text}": the range {piece.strip()} runs backwards')
        if int(last) - int(first) + len(numbers) >= MOST:
            raise ValueError(f'"{text}": more than {MOST} hosts')
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return [f"{before}{number}{after}" for number in numbers]


def expand_hosts(hosts: Node, problems: list[PsctlError]) -> Node:
    """Return the list under `hosts:` with every bare name and range as keys with values, one a host.

    Args:
        hosts: the value in the file.
        problems: gets malformed ranges, and ranges with a `name:` or `internal_address:` that all would share.

    Raises:
        InvalidFile: more hosts than a cluster may have.
    """
    if not isinstance(hosts, Sequence):
        return hosts
    items: list[Node] = []
    for index, item in enumerate(hosts.items):
        try:
            items += _hosts_of(item, f"hosts[{index}]")
        except InvalidFile as error:
            problems.append(error)
        if len(items) > MOST:
            raise InvalidFile(f"hosts[{index}]: more than {MOST} hosts", "make two clusters of them", item.where)
    return Sequence(tuple(items), hosts.where)


def command_of(hosts: Node | None, problems: list[PsctlError]) -> str:
    """Return the command under `hosts: {from: COMMAND}`; "" where hosts are listed, or where it is wrong.

    Args:
        hosts: the value in the file.
        problems: gets keys beside `from`, and a command that cannot be run.
    """
    if not isinstance(hosts, Mapping):
        return ""
    for entry in hosts.entries:
        if entry.key != "from":
            hint = "write hosts: {from: COMMAND}, or a list of hosts"
            problems.append(InvalidFile(f"hosts.{entry.key}: unknown key", hint, entry.where))
    command = hosts.get("from")
    if command is None:
        if not problems:
            problems.append(InvalidFile("hosts: expected a list, got keys with values", "- node-a", hosts.where))
        return ""
    try:
        words = shlex.split(command.text) if isinstance(command, Scalar) and not command.null else []
        if not isinstance(command, Scalar) or not words:
            raise ValueError("expected a command that prints one host a line")
        check_program(words[0])
    except ValueError as error:
        problems.append(InvalidFile(f"hosts.from: {error}", FROM_HINT, command.where))
        return ""
    return command.text


def read_found(text: str, command: str) -> list[str]:
    """Return the hosts that the command of `hosts: {from: COMMAND}` printed: one a line, `kind/name` counts as `name`.

    Raises:
        InvalidFile: it printed none, one twice, too many, or something else.
    """
    names: list[str] = []
    for line in text.splitlines():
        name = line.strip().rpartition("/")[2]
        if not name and not line.strip():
            continue
        if not re.fullmatch(ADDRESS, name):
            shown = ascii(line.strip()[:60])
            raise InvalidFile(f"hosts.from: `{command}` printed {shown}, which is no name of a host", FROM_HINT)
        if name in names:
            raise InvalidFile(f"hosts.from: `{command}` printed {name} twice", FROM_HINT)
        names.append(name)
    if not names:
        raise InvalidFile(f"hosts.from: `{command}` printed no host", "run it in a terminal; do the hosts exist?")
    if len(names) > MOST:
        raise InvalidFile(f"hosts.from: `{command}` printed more than {MOST} hosts", FROM_HINT)
    return names


def listed(names: List[str], where: str) -> Sequence:
    """Return the list under `hosts:` of hosts that a command printed; `where` is the command's place in the file."""
    return Sequence(tuple(Scalar(name, True, where) for name in names), where)


def _hosts_of(item: Node, path: str) -> list[Node]:
    """Return the hosts of one entry of the list; a malformed entry is returned for the decoder to refuse."""
    whole = Mapping((), item.where).put("address", item, item.where) if isinstance(item, Scalar) else item
    address = whole.get("address") if isinstance(whole, Mapping) else None
    if not isinstance(whole, Mapping) or not isinstance(address, Scalar):
        return [msgspec.structs.replace(item, path=path)]
    if isinstance(item, Scalar):
        _refuse_decorated(item, path)
    try:
        names = expand(address.text)
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}", "write it as node[02-16] or node[1,3-5]", address.where) from None
    if len(names) > 1:
        for key in ("name", "internal_address"):
            if (value := whole.get(key)) is not None:
                raise InvalidFile(f"{path}.{key}: a range of hosts cannot share one", "write them apart", value.where)
    return [_host(whole, address, name, path) for name in names]


def _host(whole: Mapping, address: Scalar, name: str, path: str) -> Mapping:
    own = Scalar(name, True, address.where)
    host = whole.put("address", own, address.where)
    given = host.get("name")
    if given is None or (isinstance(given, Scalar) and given.null):
        host = host.put("name", own, address.where)
    return msgspec.structs.replace(host, path=path)


def _refuse_decorated(item: Scalar, path: str) -> None:
    """Refuse `user@host` and `host:port`, which ssh and scp take, with their notation in this file."""
    user, at, rest = item.text.rpartition("@")
    host, colon, port = rest.partition(":")
    if not at and not (colon and port.isdigit() and ":" not in port and "::" not in item.text):
        return
    keys = f"address: {host}" + (f", user: {user}" if at else "") + (f", port: {port}" if port else "")
    raise InvalidFile(f'{path}: expected a name or an address, got "{item.text}"', f"write {{{keys}}}", item.where)


def read_hostfile(text: str, source: str) -> list[HostLine]:
    """Read a hostfile of MPI or DeepSpeed: `worker-0 slots=4`, one host a line, # begins a comment.

    Also `worker-0:4` (MPICH) and a bare name.

    Raises:
        InvalidFile: a malformed line, a host twice, or no host at all.
    """
    hosts: dict[str, HostLine] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(rf"({NAME})(?::([0-9]{{1,5}})|((?:\s+[A-Za-z_]+\s*=\s*[0-9]+)*))", line)
        if match is None:
            wanted = 'expected "worker-0 slots=4" or a host name'
            raise InvalidFile(f"{line[:60]}: {wanted}", "one host a line", f"{source}:{number}:1")
        if match[1] in hosts:
            raise InvalidFile(f"{match[1]}: the host is listed twice", "keep one line", f"{source}:{number}:1")
        slots = re.search(r"\b(?:slots|max[_-]slots)\s*=\s*([0-9]+)", match[3] or "")
        count = match[2] or (slots[1] if slots else None)
        hosts[match[1]] = HostLine(match[1], int(count) if count and int(count) > 0 else None)
    if not hosts:
        raise InvalidFile("no host in this hostfile", 'write one a line, such as "worker-0 slots=4"', f"{source}:1:1")
    return list(hosts.values())


def read_host_list(text: str) -> list[HostLine]:
    """Read `--hosts a,b,node[1-3]`: names, addresses and ranges.

    Raises:
        ValueError: no host, one twice, or a malformed name or range; the message says which.
    """
    names: list[str] = []
    for piece in (part.strip() for part in re.split(r",(?![^\[]*\])", text)):
        if piece:
            names += expand(piece)
    for index, name in enumerate(names):
        if not re.fullmatch(ADDRESS, name):
            raise ValueError(f'"{name}": expected the name or address of a host')
        if name in names[:index]:
            raise ValueError(f'"{name}": the host is listed twice')
    if not names:
        raise ValueError("no host: write their names or addresses with commas between, such as node-a,node-b")
    return [HostLine(name, None) for name in names]


def write_cluster(name: str, hosts: List[HostLine]) -> str:
    """Return the text of a cluster.yaml with these hosts; `load_cluster` reads it."""
    lines = [
        "version: 1",
        f"name: {_word(name)}",
        "# ssh: {user: ubuntu, identity_file: ~/.ssh/id_ed25519}   # default: as in ~/.ssh/config",
        "# network: {interface: auto, ports: 29400-29499}          # the network that training runs over",
        "runtime: {environment: existing}                          # or managed: psctl makes a venv on each host",
        "hosts:",
    ]
    for host in hosts:
        slots = f", slots: {host.slots}" if host.slots else ""
        lines.append(f"  - {{address: {_word(host.address)}{slots}}}" if slots else f"  - {_word(host.address)}")
    return "\n".join(lines) + "\n"


def _word(text: str) -> str:
    """Return a word as YAML, quoted where necessary."""
    return text if re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*|[0-9]+(\.[0-9]+){3}", text) else json.dumps(text)
