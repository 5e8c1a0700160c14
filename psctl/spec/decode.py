"""Nodes in, sections out: walks a file and the declared fields side by side, and says where the two differ.

The first difference is raised as InvalidFile with its place, its path and the nearest valid name. What is well written
but not built yet is only noted (`unbuilt`), so that a contradiction is told before it.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from psctl.errors import InvalidFile, NotInThisVersion
from psctl.spec.fields import Doc, Internal, KeyOf, Notation, Section
from psctl.spec.nearest import did_you_mean
from psctl.spec.yaml import Mapping, Node, Scalar, Sequence, join

S = TypeVar("S", bound=Section)


class Field(NamedTuple):
    """One declared key of a section."""

    name: str
    kind: Any  # the type, without its notes
    notes: tuple[Any, ...]
    required: bool

    def note(self, wanted: type[Any]) -> Any:
        """Return the note of this class, or None."""
        return next((note for note in self.notes if isinstance(note, wanted)), None)

    @property
    def text(self) -> str:
        """What the key means."""
        return str(self.note(Doc).text)


def fields_of(section: type[Section]) -> list[Field]:
    """Return the keys that a file may have in this section, in their order."""
    found = []
    for field in msgspec.structs.fields(section):
        kind, notes = open_type(field.type)
        if not any(isinstance(note, Internal) for note in notes):
            found.append(Field(field.encode_name, kind, notes, field.required))
    return found


def open_type(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split Annotated[kind, notes...]."""
    if typing.get_origin(kind) is Annotated:
        inner, *notes = typing.get_args(kind)
        return inner, tuple(notes)
    return kind, ()


def members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )


def section_in(kind: Any) -> type[Section] | None:
    """Return the section among a type's members, or None."""
    return next((one for one in members(kind) if isinstance(one, type) and issubclass(one, Section)), None)


class Decoder:
    """Makes one section of one file, and remembers where each value stands."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self._unbuilt: list[NotInThisVersion] = []

    def make(self, node: Node, section: type[S]) -> S:
        """Return the section that the whole file is.

        Raises:
            InvalidFile: the first difference from what is declared.
        """
        if isinstance(node, Scalar) and node.null:
            raise InvalidFile("the file is empty", "psctl init writes a job file and a cluster file", node.where)
        return self._section(node, section, "")

    def refuse(self, path: str, message: str, hint: str = "") -> InvalidFile:
        """Return the error for the value at `path` (or the nearest key above it that the file has)."""
        known = path
        while known and known not in self.places:
            known = known.rpartition(".")[0] if "." in known else ""
        return InvalidFile(f"{path}: {message}", hint, self.places.get(known, ""))

    def refuse_unbuilt(self) -> None:
        """Raise the first key or value that is promised and not in this version."""
        if self._unbuilt:
            raise self._unbuilt[0]

    def _section(self, node: Node, section: type[S], path: str) -> S:
        if not isinstance(node, Mapping):
            raise self._wrong(node, path, "keys with values")
        self.places[path] = node.where
        declared = {field.name: field for field in fields_of(section)}
        values: dict[str, Any] = {}
        for key, where, value in ((entry.key, entry.where, entry.value) for entry in node.entries):
            below = join(path, key)
            if key in declared:
                values[key] = self._field(value, declared[key], value.path or below)
            elif key in section.later():
                self._unbuilt.append(NotInThisVersion(below, where=where))
            else:
                hint = f"valid keys here: {', '.join(declared)}"
                raise InvalidFile(f"{below}: unknown key{did_you_mean(key, declared)}", hint, where)
        given = {key: value for key, value in values.items() if value is not _ABSENT}
        for field in declared.values():
            if field.required and field.name not in given:
                missing = join(path, field.name)
                raise InvalidFile(f"{missing}: missing", f"{missing}: {field.text}", node.where)
        return section(**given)

    def _field(self, node: Node, field: Field, path: str) -> Any:
        self.places[path] = node.where
        notation = field.note(Notation)
        try:
            value = self._value(node, field.kind, notation, field.note(KeyOf), path)
        except InvalidFile as error:
            error.hint = error.hint or f"{path}: {field.text}"
            raise
        built = notation is None or notation.only is None or value in (*notation.only, _ABSENT)
        if not built and notation is not None and notation.only is not None and type(value) not in notation.only:
            has = ", ".join(_word(one) for one in notation.only)
            written = node.say() if isinstance(node, Scalar) else ", ".join(_keys(node))
            self._unbuilt.append(NotInThisVersion(f"{path}: {written}", f"this version has: {has}", node.where))
        return value

    def _value(self, node: Node, kind: Any, notation: Notation | None, keys: KeyOf | None, path: str) -> Any:
        null = isinstance(node, Scalar) and node.null
        if null and types.NoneType in members(kind):
            return None
        section, origin = section_in(kind), typing.get_origin(kind)
        if null and (kind is section or origin in (tuple, dict)):
            return _ABSENT  # a key whose lines are all commented out
        if section is not None and (isinstance(node, Mapping) or kind is section):
            return self._section(node, section, path)
        if origin is tuple:
            return self._items(node, kind, notation, path)
        if origin is dict:
            return self._entries(node, kind, notation, keys, path)
        return self._scalar(node, notation, path)

    def _items(self, node: Node, kind: Any, notation: Notation | None, path: str) -> tuple[Any, ...]:
        if not isinstance(node, Sequence):
            raise self._wrong(node, path, "a list")
        item = typing.get_args(kind)[0]
        made = []
        for index, below in enumerate(node.items):
            place = below.path or f"{path}[{index}]"
            self.places[place] = below.where
            made.append(self._value(below, item, notation, None, place))
        return tuple(made)

    def _entries(
        self, node: Node, kind: Any, notation: Notation | None, keys: KeyOf | None, path: str
    ) -> dict[str, Any]:
        if not isinstance(node, Mapping):
            raise self._wrong(node, path, "keys with values")
        made = {}
        for entry in node.entries:
            below = join(path, entry.key)
            if keys is not None and not keys.matches(entry.key):
                raise InvalidFile(f"{below}: expected {keys.says}", where=entry.where)
            self.places[below] = entry.value.where
            made[entry.key] = self._value(entry.value, typing.get_args(kind)[1], notation, None, below)
        return made

    def _scalar(self, node: Node, notation: Notation | None, path: str) -> Any:
        assert notation is not None, f"{path}: the field has no notation"
        if not isinstance(node, Scalar):
            raise self._wrong(node, path, notation.says)
        try:
            return notation.parse(node)
        except ValueError as error:
            if str(error):
                raise InvalidFile(f"{path}: {error}", where=node.where) from None
            raise self._wrong(node, path, notation.says) from None

    def _wrong(self, node: Node, path: str, expected: str) -> InvalidFile:
        begin = f"{path}: " if path else ""
        return InvalidFile(f"{begin}expected {expected}, got {node.say()}", where=node.where)


_ABSENT = object()


def _keys(node: Node) -> list[str]:
    return [entry.key for entry in node.entries] if isinstance(node, Mapping) else [node.say()]


def _word(value: Any) -> str:
    if isinstance(value, type):
        return f"{{{', '.join(one.name for one in msgspec.structs.fields(value))}: ...}}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "[]" if value == () else str(value)
