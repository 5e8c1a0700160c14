"""Notations of the fields of a file, from which both the loader and the JSON Schema are made.

A field of a section is declared once: `port: Annotated[int | None, whole(1, 65535), Doc("Port of sshd.")] = None`.
The type is that of the value, the notation reads the text, the Doc is for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from psctl import units
from psctl.spec.nearest import did_you_mean
from psctl.spec.yaml_nodes import Scalar

JsonSchema = dict[str, Any]
"""A JSON Schema, or a part of one. Any: a keyword of JSON Schema decides the type of its value."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every group of keys in a file."""


class Notation(msgspec.Struct, frozen=True):
    """The notation of one scalar.

    `expected` completes "expected ..."; `parse` returns the value or raises ValueError, whose text, if any, replaces
    `expected`; `schema` is its JSON Schema.
    """

    expected: str
    parse: Callable[[Scalar], object]
    schema: JsonSchema


class Doc(msgspec.Struct, frozen=True):
    """The meaning of a field for users, in a sentence."""

    text: str


class KeyPattern(msgspec.Struct, frozen=True):
    """The pattern of the keys of a free mapping; `expected` completes "expected ..."."""

    pattern: str
    expected: str

    def matches(self, key: str) -> bool:
        """Whether this is a valid key."""
        return re.fullmatch(self.pattern, key) is not None


class ShortForm(msgspec.Struct, frozen=True):
    """Items may also be written as one word: `hosts: [node-a]`. `text` describes the word."""

    text: str


class Instead(msgspec.Struct, frozen=True):
    """These keys may stand in place of a list: `hosts: {from: COMMAND}`. The loader replaces them before it decodes."""

    section: type[Section]


class Internal(msgspec.Struct, frozen=True):
    """The field is set by the loader and is no key of the file."""


def text(expected: str = "text", pattern: str = "", longest: int = 4096) -> Notation:
    """Return the notation of any scalar as it is written; with `pattern`, all of it must match."""
    compiled = re.compile(pattern) if pattern else None

    def parse(scalar: Scalar) -> str:
        if scalar.null or len(scalar.text) > longest or "\0" in scalar.text:
            raise ValueError
        if compiled and not compiled.fullmatch(scalar.text):
            raise ValueError
        return scalar.text

    schema: JsonSchema = {"type": ["string", "number", "boolean"] if not pattern else "string"}
    return Notation(expected, parse, schema | ({"pattern": f"^({pattern})$"} if pattern else {}))


def whole(low: int, high: int | None = None, also: str = "") -> Notation:
    """Return the notation of a whole number within low..high; `also` is a word that may replace it."""
    limits = f"{low}..{high}" if high is not None else f"a whole number, at least {low}"
    limits = str(low) if low == high else limits
    schema: JsonSchema = {"type": "integer", "minimum": low} | ({"maximum": high} if high is not None else {})

    def parse(scalar: Scalar) -> int | str:
        if also and scalar.text == also:
            return also
        if scalar.quoted or not re.fullmatch(r"[+-]?[0-9]{1,20}", scalar.text):
            raise ValueError
        number = int(scalar.text)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    if also:
        schema = {"anyOf": [{"const": also}, schema]}
    return Notation(f"{also} or {limits}" if also else limits, parse, schema)


def real(low: float, high: float) -> Notation:
    """Return the notation of a number above `low`, at most `high`."""

    def parse(scalar: Scalar) -> float:
        if scalar.quoted or not re.fullmatch(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]{1,3})?", scalar.text):
            raise ValueError
        number = float(scalar.text)
        if not low < number <= high:
            raise ValueError
        return number

    return Notation(
        f"a number above {low:g}, at most {high:g}", parse, {"type": "number", "exclusiveMinimum": low, "maximum": high}
    )


def truth() -> Notation:
    """Return the notation of true and false; YAML's older yes, no, on and off are read too."""
    values = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

    def parse(scalar: Scalar) -> bool:
        if scalar.quoted or scalar.text.lower() not in values:
            raise ValueError
        return values[scalar.text.lower()]

    return Notation("true or false", parse, {"type": "boolean"})


def choice(*names: str) -> Notation:
    """Return the notation of one of a few words; the error of an unknown one names the nearest."""

    def parse(scalar: Scalar) -> str:
        if scalar.text not in names:
            near = did_you_mean(scalar.text, names)
            raise ValueError(f"unknown value {scalar.written()}{near}; expected {' | '.join(names)}")
        return scalar.text

    return Notation(" | ".join(names), parse, {"enum": list(names)})


def duration(longest: float = 366 * 86400.0, shortest: float = 0.0) -> Notation:
    """Return the notation of a duration with its unit; the value is seconds, at least `shortest`."""

    def parse(scalar: Scalar) -> float:
        seconds = units.parse_duration(scalar.text)
        if not shortest <= seconds <= longest:
            low, high = units.format_seconds(shortest), units.format_seconds(longest)
            raise ValueError(f"expected a duration of {low} to {high}, got {scalar.written()}")
        return seconds

    schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)? ?(d|h|ms|m|s|us|µs|ns) ?)+$"}
    return Notation("a duration such as 30s or 1h30m", parse, schema)


def size(smallest: int = 0, also: str = "") -> Notation:
    """Return the notation of a size; the value is bytes, at least `smallest`; `also` is a word that may replace it."""

    def parse(scalar: Scalar) -> int | str:
        if also and scalar.text == also:
            return also
        found = units.parse_size(scalar.text)
        if found < smallest:
            raise ValueError(f"expected a size of at least {units.format_bytes(smallest)}, got {scalar.written()}")
        return found

    pattern = r"^[0-9]+(\.[0-9]+)? ?([kKMGTP]i?)?B$"
    schema: JsonSchema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}]}
    if also:
        schema = {"anyOf": [{"const": also}, *schema["anyOf"]]}
    return Notation(f"{also} or a size such as 25MB" if also else "a size such as 160MB", parse, schema)


def rate() -> Notation:
    """Return the notation of a rate; the value is bytes per second."""
    schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?[kKMGT]?i?(B/s|bit/s|bps)$"}
    return Notation("a rate such as 25 Gbit/s", lambda scalar: units.parse_rate(scalar.text), schema)
