"""JSON Schemas of cluster.yaml and job.yaml, made from the fields that the loader reads, for completion in editors.

Contradictions between keys are found by the loader only.
"""

from __future__ import annotations

import inspect
import types
import typing

from psctl.spec.cluster import ClusterSpec
from psctl.spec.decode import Field, fields_of, members, sections_in
from psctl.spec.fields import Instead, JsonSchema, KeyPattern, Notation, Section, ShortForm
from psctl.spec.job import JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def cluster_schema() -> JsonSchema:
    """Return the JSON Schema of cluster.yaml; hosts are required where the kind is not given: Slurm has its own."""
    schema = section_schema(ClusterSpec)
    schema["required"].remove("hosts")
    either = {"anyOf": [{"required": ["hosts"]}, {"required": ["kind"]}]}
    return {"$schema": DIALECT, "title": "psctl cluster file"} | schema | either


def job_schema() -> JsonSchema:
    """Return the JSON Schema of job.yaml; exactly one of script and module is required."""
    one_of = [{"required": ["script"]}, {"required": ["module"]}]
    return {"$schema": DIALECT, "title": "psctl job file"} | section_schema(JobSpec) | {"oneOf": one_of}


def section_schema(section: type[Section]) -> JsonSchema:
    """Return the schema of one group of keys."""
    declared = fields_of(section)
    schema: JsonSchema = {
        "type": "object",
        "description": inspect.cleandoc(section.__doc__ or "").partition("\n")[0],
        "properties": {each.name: {"description": each.text} | _kind(each.kind, each) for each in declared},
        "additionalProperties": False,
    }
    required = [field.name for field in declared if field.required]
    return schema | ({"required": required} if required else {})


def _kind(kind: object, field: Field) -> JsonSchema:
    """Return the schema of a type whose scalars have the field's notation."""
    notation = field.note(Notation)
    origin = typing.get_origin(kind)
    if origin is tuple and field.kind is kind and typing.get_args(kind)[-1] is Ellipsis:
        items: JsonSchema = {"type": "array", "items": _items(typing.get_args(kind)[0], field)}
        instead = field.note(Instead)
        return {"anyOf": [items, section_schema(instead.section)]} if instead is not None else items
    if origin is dict:
        keys = field.note(KeyPattern)
        names = {"propertyNames": {"pattern": f"^({keys.pattern})$"}} if keys else {}
        return {"type": "object", "additionalProperties": _kind(typing.get_args(kind)[1], field)} | names
    written = dict(notation.schema) if notation is not None else {"anyOf": []}
    choices = list(written["anyOf"]) if list(written) == ["anyOf"] else [written]
    choices += [section_schema(section) for section in sections_in(kind)]
    if types.NoneType in members(kind):
        choices.append({"type": "null"})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _items(kind: object, field: Field) -> JsonSchema:
    short = field.note(ShortForm)
    inner = _kind(kind, field)
    return {"anyOf": [{"type": "string", "description": short.text}, inner]} if short else inner
