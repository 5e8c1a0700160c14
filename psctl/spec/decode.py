"""Nodes of a file decoded into sections: the file is compared with the declared fields, and each difference reported.

Every difference is an InvalidFile with its place, its path and the nearest valid name; all of a file are raised at
once, as one error with `others`, in the order of their lines.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from psctl.errors import InvalidFile, PsctlError
from psctl.spec.fields import Doc, Internal, KeyPattern, Notation, Section, choice
from psctl.spec.nearest import did_you_mean, nearest
from psctl.spec.yaml_nodes import Mapping, Node, Scalar, Sequence, join

S = TypeVar("S", bound=Section)
N = TypeVar("N")


class Field(NamedTuple):
    """One declared key of a section."""

    name: str
    kind: object  # the type, without its notes
    notes: tuple[object, ...]
    required: bool

    def note(self, wanted: type[N]) -> N | None:
        """Return the note of this class, or None."""
        return next((note for note in self.notes if isinstance(note, wanted)), None)

    @property
    def text(self) -> str:
        """The meaning of the key, for users."""
        note = self.note(Doc)
        return note.text if note is not None else ""


def fields_of(section: type[Section]) -> list[Field]:
    """Return the keys that a file may have in this section, in their order; a Literal is its own notation."""
    found = []
    for field in msgspec.structs.fields(section):
        annotated = typing.get_origin(field.type) is Annotated
        kind, *notes = typing.get_args(field.type) if annotated else (field.type,)
        names = next((typing.get_args(one) for one in members(kind) if typing.get_origin(one) is Literal), ())
        if names and not any(isinstance(note, Notation) for note in notes):
            notes.append(choice(*names))
        if not any(isinstance(note, Internal) for note in notes):
            found.append(Field(field.encode_name, kind, tuple(notes), field.required))
    return found


def members(kind: object) -> tuple[object, ...]:
    """Return the members of a union, or the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def sections_in(kind: object) -> list[type[Section]]:
    """Return the sections among a type's members."""
    return [one for one in members(kind) if isinstance(one, type) and issubclass(one, Section)]


def section_for(node: Node, kind: object) -> type[Section] | None:
    """Return the section among a type's members that has most of a mapping's keys, the first of several; or None."""
    keys = {entry.key for entry in node.entries} if isinstance(node, Mapping) else set()
    found = sections_in(kind)
    return max(found, key=lambda section: len(keys & set(section.__struct_encode_fields__)), default=None)


def places_of(section: type[Section], above: str = "") -> dict[str, list[str]]:
    """Return every key that a file of this kind may have, with the sections that may hold it; "" is the top level."""
    found: dict[str, list[str]] = {}
    for field in fields_of(section):
        found.setdefault(field.name, []).append(above)
        for kind in members(field.kind):
            below = kind if sections_in(kind) else next(iter(typing.get_args(kind)), None)
            for inner in sections_in(below):
                for key, places in places_of(inner, join(above, field.name)).items():
                    found.setdefault(key, []).extend(places)
    return {key: list(dict.fromkeys(places)) for key, places in found.items()}


def raise_all(problems: Iterable[PsctlError]) -> None:
    """Raise these errors as one, in the order of their lines; do nothing when there is none."""
    ordered = sorted(problems, key=lambda error: _line(error.where))
    if ordered:
        first, *others = ordered
        for each in others:
            each.others = ()  # they are listed here
        first.others = tuple(others)
        raise first


def _line(where: str) -> tuple[int, int]:
    """Return line and column of "file:line:column"; errors without a position come last."""
    numbers = where.split(":")[-2:]
    return (
        (int(numbers[0]), int(numbers[1])) if all(n.isdecimal() for n in numbers) and len(numbers) > 1 else (1 << 30, 0)
    )


LISTS = ("hosts", "links", "filters", "data", "groups")
"""Keys whose values are lists of sections."""


class Decoder:
    """Decodes one file into its section, and records the place of each value and all errors.

    Args:
        elsewhere: other kinds of file ("cluster file") and their sections, to name the file of a misplaced key.
    """

    def __init__(self, elsewhere: typing.Mapping[str, type[Section]] | None = None) -> None:
        self.places: dict[str, str] = {}
        self.problems: list[PsctlError] = []
        self._elsewhere = elsewhere or {}
        self._broken: set[str] = set()  # keys at the top below which something is wrong
        self._known: dict[str, list[str]] = {}

    def make(self, node: Node, section: type[S]) -> S:
        """Decode the whole file, for comparisons of keys that are `sound`; then call `raise_all(problems)`.

        Raises:
            InvalidFile: the file is empty, or has no keys with values.
        """
        if isinstance(node, Scalar) and node.null:
            raise InvalidFile("the file is empty", "psctl init writes a job file and a cluster file", node.where)
        self._known = places_of(section)
        made = self._section(node, section, "")
        if made is _BROKEN:
            raise_all(self.problems)
        return typing.cast(S, made)

    def sound(self, *keys: str) -> bool:
        """Return whether there is no error at or below these top-level keys, so that they can be compared."""
        return self._broken.isdisjoint(keys)

    def refuse(self, path: str, message: str, hint: str = "") -> None:
        """Add the error for the value at `path` (or the nearest key above it that the file has)."""
        known = path
        while known and known not in self.places:
            known = known.rpartition(".")[0] if "." in known else ""
        self.problems.append(InvalidFile(f"{path}: {message}", hint, self.places.get(known, "")))

    def _add(self, path: str, error: PsctlError) -> None:
        self.problems.append(error)
        self._broken.add(re.split(r"[.\[]", path, maxsplit=1)[0])

    def _section(self, node: Node, section: type[S], path: str) -> object:
        if not isinstance(node, Mapping):
            self._add(path, self._wrong(node, path, "keys with values"))
            return _BROKEN
        self.places[path] = node.where
        declared = {field.name: field for field in fields_of(section)}
        values: dict[str, object] = {}
        for key, where, value in ((entry.key, entry.where, entry.value) for entry in node.entries):
            below = join(path, key)
            if key in declared:
                values[key] = self._field(value, declared[key], value.path or below)
            else:
                near = nearest(key, declared)
                self._add(join(path, near or key), self._unknown(key, path, declared, where))
        given = {key: value for key, value in values.items() if value not in (_ABSENT, _BROKEN)}
        lacking = []
        for field in declared.values():
            if field.required and field.name not in given:
                lacking.append(field.name)
                missing = join(path, field.name)
                if values.get(field.name) is not _BROKEN and not self._misspelt(field.name, node, declared):
                    self._add(missing, InvalidFile(f"{missing}: missing", f"{missing}: {field.text}", node.where))
        if path:
            attributes = {field.encode_name: field.name for field in msgspec.structs.fields(section)}
            return _BROKEN if lacking else section(**{attributes[key]: value for key, value in given.items()})
        return section(**given, **dict.fromkeys(lacking))  # lacks keys: only its sound ones are compared

    def _misspelt(self, name: str, node: Mapping, declared: typing.Mapping[str, Field]) -> bool:
        """Return whether an unknown key was already reported as a misspelling of this one."""
        return any(entry.key not in declared and nearest(entry.key, declared) == name for entry in node.entries)

    def _unknown(self, key: str, path: str, declared: typing.Mapping[str, Field], where: str) -> InvalidFile:
        """Return the error of an unknown key: the section or file that has it, else the nearest known key."""
        below = join(path, key)
        places = [place for place in self._known.get(key, ()) if place != path]
        if not path and any(key in (each.name for each in fields_of(kind)) for kind in self._elsewhere.values()):
            places = [place for place in places if place.partition(".")[0] not in LISTS]  # the other file's own key
        if places:
            shown = " or ".join(
                f"under `{': '.join(place.split('.'))}:`" if place else "at the top" for place in places
            )
            hint = " or ".join(_written(place, key) for place in places)
            indent = "" if places[0] else " without indentation"
            return InvalidFile(f"{below}: unknown key here: `{key}` belongs {shown}", f"write {hint}{indent}", where)
        for kind, section in self._elsewhere.items():
            if not nearest(key, declared) and key in places_of(section):
                cure = f"move it to the {kind}"
                return InvalidFile(f"{below}: unknown key: `{key}` belongs in the {kind}", cure, where)
        hint = f"valid keys here: {', '.join(declared)}"
        return InvalidFile(f"{below}: unknown key{did_you_mean(key, declared)}", hint, where)

    def _field(self, node: Node, field: Field, path: str) -> object:
        self.places[path] = node.where
        notation = field.note(Notation)
        before = len(self.problems)
        value = self._value(node, field.kind, notation, field.note(KeyPattern), path)
        for error in self.problems[before:]:
            error.hint = error.hint or f"{path}: {field.text}"
        return value

    def _value(self, node: Node, kind: object, notation: Notation | None, keys: KeyPattern | None, path: str) -> object:
        null = isinstance(node, Scalar) and node.null
        if null and types.NoneType in members(kind):
            return None
        section, origin = section_for(node, kind), typing.get_origin(kind)
        if null and (kind is section or origin in (tuple, dict)):
            return _ABSENT  # a key whose lines are all commented out
        if section is not None and (isinstance(node, Mapping) or kind is section):
            return self._section(node, section, path)
        if origin is tuple:
            return self._items(node, kind, notation, path)
        if origin is dict:
            return self._entries(node, kind, notation, keys, path)
        return self._scalar(node, notation, path)

    def _items(self, node: Node, kind: object, notation: Notation | None, path: str) -> object:
        if not isinstance(node, Sequence):
            self._add(path, self._wrong(node, path, "a list"))
            return _BROKEN
        item = typing.get_args(kind)[0]
        made = []
        for index, below in enumerate(node.items):
            place = below.path or f"{path}[{index}]"
            self.places[place] = below.where
            made.append(self._value(below, item, notation, None, place))
        return _BROKEN if _BROKEN in made else tuple(made)

    def _entries(
        self, node: Node, kind: object, notation: Notation | None, keys: KeyPattern | None, path: str
    ) -> object:
        if not isinstance(node, Mapping):
            self._add(path, self._wrong(node, path, "keys with values"))
            return _BROKEN
        made = {}
        for entry in node.entries:
            below = join(path, entry.key)
            if keys is not None and not keys.matches(entry.key):
                self._add(below, InvalidFile(f"{below}: expected {keys.expected}", where=entry.where))
            self.places[below] = entry.value.where
            made[entry.key] = self._value(entry.value, typing.get_args(kind)[1], notation, None, below)
        return _BROKEN if _BROKEN in made.values() else made

    def _scalar(self, node: Node, notation: Notation | None, path: str) -> object:
        assert notation is not None, f"{path}: the field has no notation"
        if not isinstance(node, Scalar):
            self._add(path, self._wrong(node, path, notation.expected))
            return _BROKEN
        try:
            return notation.parse(node)
        except ValueError as error:
            text = str(error) or f"expected {notation.expected}, got {node.written()}"
            wrong = InvalidFile(f"{path}: {text}", where=node.where)
            self._add(path, wrong)
            return _BROKEN

    def _wrong(self, node: Node, path: str, expected: str) -> InvalidFile:
        begin = f"{path}: " if path else ""
        return InvalidFile(f"{begin}expected {expected}, got {node.written()}", where=node.where)


_ABSENT = object()
_BROKEN = object()
"""In place of a value that is absent, and of one that was refused."""


def _written(place: str, key: str) -> str:
    """Return how a key is written in a section: "sync: {strategy: ...}"."""
    text = f"{key}: ..."
    for section in reversed(place.split(".") if place else []):
        text = f"{section}: {{{text}}}" if section not in LISTS else f"{section}: [{{{text}}}]"
    return text
