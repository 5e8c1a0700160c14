"""Every key of cluster.yaml and job.yaml with its meaning, values, default and an example. Pure.

All of it comes from the fields that the loader reads (fields.py), except the examples of free text.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

import msgspec

from psctl import units
from psctl.spec.cluster import ClusterSpec
from psctl.spec.decode import Field, fields_of, members, sections_in
from psctl.spec.exec_template import EXAMPLE
from psctl.spec.fields import Instead, Notation, Section, ShortForm
from psctl.spec.job import Every, JobSpec
from psctl.spec.yaml_nodes import join

FILES: dict[str, type[Section]] = {"cluster.yaml": ClusterSpec, "job.yaml": JobSpec}

_EXAMPLES = {
    "name": "digits", "script": "train.py", "module": "pkg.train", "args": "[--epochs, '20']", "exclude": "[data/]",
    "cluster": "./cluster.yaml", "env": "{NCCL_DEBUG: WARN}", "secrets": "[WANDB_API_KEY]", "workers": "4",
    "workers.per_host": "2", "workers.min": "2", "workers.max": "8", "servers": "2", "servers.per_host": "1",
    "sync.consistency.ssp": "4", "sync.compression": "{topk: 0.01}", "sync.compression.topk": "0.01",
    "sync.filters": "[{random_skip: 0.5}]", "sync.filters.random_skip": "0.5", "sync.filters.significance": "0.5",
    "sync.factor_rows": "64",
    "checkpoint.to": "/data/checkpoints", "ssh.user": "ubuntu", "ssh.port": "2222",
    "ssh.identity_file": "~/.ssh/id_ed25519", "ssh.proxy_jump": "bastion", "runtime.wheelhouse": "./wheels",
    "runtime.index": "https://packages.example/simple", "runtime.requirements": "[numpy>=1.26]",
    "runtime.env": "{HF_HOME: /data/hf}", "hosts": "[node-a, 'node[02-16]']", "hosts.address": "10.0.0.5",
    "hosts.name": "node-b", "hosts.user": "root", "hosts.port": "2222", "hosts.identity_file": "~/.ssh/id_ed25519",
    "hosts.proxy_jump": "bastion", "hosts.internal_address": "192.168.1.5", "hosts.slots": "4",
    "hosts.from": "kubectl get pods -l app=train -o name",
    "hosts.roles": "[worker]", "hosts.labels": "{rack: r1}",
    "links": "[{between: [r1, r2], bandwidth: 10 Gbit/s}]", "links.between": "[r1, r2]", "replicas": "1",
    "data": "[{from: ./corpus, to: data/corpus}]", "data.from": "./corpus", "data.to": "data/corpus",
    "outputs": "[out/, '*.png']", "groups": "[{name: evaluate, script: evaluate.py}]", "groups.name": "evaluate",
    "groups.script": "evaluate.py", "groups.module": "pkg.evaluate", "groups.args": "[--every, '100']",
    "groups.hosts": "[node-b]", "groups.consistency.ssp": "4", "groups.keys": "['encoder.*', store/items]",
    "links.bandwidth": "10 Gbit/s", "links.latency": "50us", "sync.size": "160MB", "timeouts.total": "12h",
    "nodes": "4", "partition": "gpu", "account": "lab", "gpus_per_node": "8", "time": "12h", "extra": "[--qos=high]",
    "network.interface": "eth0", "exec": f'"{EXAMPLE}"',
}  # fmt: skip
"""Examples of keys whose default says nothing, by path."""

_BESIDE = {"hosts": {"address": "node-a"}, "links": {"between": "[r1, r2]", "bandwidth": "10 Gbit/s"},
           "data": {"from": "./corpus", "to": "data/corpus"},
           "groups": {"name": "evaluate", "script": "evaluate.py"}}  # fmt: skip
"""The keys that an item of a list needs, beside the one that is shown."""


class KeyEntry(msgspec.Struct, frozen=True):
    """One key.

    Args:
        path: such as "sync.consistency"; items of lists have no index.
        file: "cluster.yaml" or "job.yaml".
        text: its meaning.
        value: what may be written.
        default: as it would be written; "" when the key is required.
        example: a line of the file.
    """

    path: str
    file: str
    text: str
    value: str
    default: str
    example: str


def entries() -> list[KeyEntry]:
    """Return all keys of both files, in the order of the files."""
    return [entry for file, section in FILES.items() for entry in _below(section, file, "")]


def _below(section: type[Section], file: str, above: str) -> Iterator[KeyEntry]:
    defaults = {field.encode_name: field for field in msgspec.structs.fields(section)}
    for field in fields_of(section):
        path = join(above, field.name)
        instead = field.note(Instead)
        sections = [*_sections_below(field.kind), *([instead.section] if instead is not None else [])]
        default = _default(defaults[field.name], field)
        text = field.text or _summary(sections)
        yield KeyEntry(path, file, text, _value(field), default, _example(path, default, field))
        for inner in sections:
            yield from _below(inner, file, path)


def _sections_below(kind: object) -> list[type[Section]]:
    return [
        inner
        for one in members(kind)
        for inner in (sections_in(one) or [each for part in typing.get_args(one) for each in sections_in(part)])
    ]


def _summary(sections: list[type[Section]]) -> str:
    return (sections[0].__doc__ or "").partition("\n")[0] if sections else ""


def _value(field: Field) -> str:
    """Return what may be written for a key."""
    notation, short, parts = field.note(Notation), field.note(ShortForm), []
    for kind in members(field.kind):
        origin, sections = typing.get_origin(kind), sections_in(kind)
        if sections:
            parts.append("{" + ", ".join(f"{each.name}:" for each in fields_of(sections[0])) + "}")
        elif origin is tuple and _sections_below(kind):
            inner = ", ".join(f"{each.name}:" for each in fields_of(_sections_below(kind)[0]))
            parts.append(f"a list of {{{inner}}}" + (f" or of words: {short.text}" if short else ""))
            if (instead := field.note(Instead)) is not None:
                parts.append("{" + ", ".join(f"{each.name}:" for each in fields_of(instead.section)) + "}")
        elif origin is dict:
            parts.append("a mapping of names to values")
        elif origin is tuple and typing.get_args(kind)[-1] is Ellipsis and notation is not None:
            parts.append(f"a list; each is {notation.expected}")
        elif notation is not None and kind is not type(None) and notation.expected not in parts:
            parts.append(notation.expected)
    return " or ".join(dict.fromkeys(parts))


def _default(declared: msgspec.structs.FieldInfo, field: Field) -> str:
    """Return a key's default as it would be written, "" when it has none."""
    if declared.required:
        return ""
    value = declared.default if declared.default is not msgspec.NODEFAULT else declared.default_factory()
    return _written(value, field)


def _written(value: object, field: Field) -> str:
    notation = field.note(Notation)
    expected = notation.expected if notation is not None else ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Every):
        return f"{value.steps} steps" if value.steps else _duration(value.seconds)
    if isinstance(value, Section):
        return "its keys' defaults"
    if expected.startswith("a duration") and isinstance(value, float):
        return _duration(value)
    if "a size such as" in expected and isinstance(value, int):
        return units.format_bytes(value).replace(" ", "")
    if isinstance(value, tuple | dict) and not value:
        return "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) or '""'


def _duration(seconds: float) -> str:
    for length, unit in ((3600, "h"), (60, "m")):
        if seconds and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"


def _example(path: str, default: str, field: Field) -> str:
    """Return a line of the file with the key."""
    notation = field.note(Notation)
    said = re.search(r"such as ([^,;()]+?)(?: or |$)", notation.expected) if notation is not None else None
    shown = _EXAMPLES.get(path)
    if shown is None and default not in ("", "null", "[]", "{}", '""', "its keys' defaults"):
        shown = default
    if shown is None and said is not None:
        shown = said[1].strip()
    if shown is None:
        return ""
    top, *rest = path.split(".")
    for name in reversed(rest):
        shown = f"{{{name}: {shown}}}"
    instead = {"module": "script"}.get(path.rpartition(".")[2], "")  # one of the two is given
    if top in _BESIDE and rest and path != "hosts.from":
        beside = [f"{name}: {value}" for name, value in _BESIDE[top].items() if name not in (rest[0], instead)]
        shown = f"[{{{', '.join([*beside, shown[1:]])}]"
    elif top == "sync" and rest[:1] == ["filters"] and len(rest) > 1:
        shown = shown.replace("{filters: {", "{filters: [{").replace("}}", "}]}")
    return f"{top}: {shown}"
