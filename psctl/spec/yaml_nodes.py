"""YAML text parsed into nodes, each with its position in the file.

Scalars stay text (marked when they were quoted): the notation of a field interprets its scalar, so
`torch: 2.10` is not 2.1, `NCCL_IB_DISABLE: on` is "on" and `- 08` is not an octal number. Tags are refused, so only
three kinds of node exist. Aliases share a node and are never copied; size and depth are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import yaml

from psctl.errors import InvalidFile, PsctlError
from psctl.units import hide_credentials

LARGEST = 512 * 1024
"""Characters of one file; a thousand hosts with all their keys are 150,000."""
DEEPEST = 20
"""Levels of nesting; the deepest promised key is at level 4."""

NULLS = ("", "~", "null", "Null", "NULL")


class Scalar(msgspec.Struct, frozen=True):
    """A text, number, truth value or null, as written.

    `where` is file:line:column; `path`, when not empty, is the path to name in messages.
    """

    text: str
    quoted: bool
    where: str
    path: str = ""

    @property
    def null(self) -> bool:
        """Whether it is YAML's null."""
        return not self.quoted and self.text in NULLS

    def written(self) -> str:
        """Return it as an error message shows it: cut, and without passwords in URLs."""
        text = hide_credentials(self.text)
        short = text if len(text) <= 60 else text[:57] + "..."
        return "null" if self.null else f'"{short}"' if self.quoted or " " in short else short


class Sequence(msgspec.Struct, frozen=True):
    """A list."""

    items: tuple[Node, ...]
    where: str
    path: str = ""

    def written(self) -> str:
        """Return it as an error message shows it."""
        return "a list"


class Mapping(msgspec.Struct, frozen=True):
    """Keys with values; keys are unique."""

    entries: tuple[Entry, ...]
    where: str
    path: str = ""

    def get(self, key: str) -> Node | None:
        """Return the value of `key`, or None when it is not there."""
        return next((entry.value for entry in self.entries if entry.key == key), None)

    def put(self, key: str, value: Node, where: str) -> Mapping:
        """Return a mapping in which `key` has this value; it stays in its place, or comes last."""
        entry = Entry(key, where, value)
        if self.get(key) is None:
            return Mapping((*self.entries, entry), self.where, self.path)
        entries = tuple(entry if old.key == key else old for old in self.entries)
        return Mapping(entries, self.where, self.path)

    def written(self) -> str:
        """Return it as an error message shows it."""
        return "keys with values"


class Entry(msgspec.Struct, frozen=True):
    """One key of a mapping, its position, and its value."""

    key: str
    where: str
    value: Node


Node = Scalar | Sequence | Mapping


def parse(text: str, source: str, problems: list[PsctlError] | None = None) -> Node:
    """Read one YAML document.

    Args:
        text: the text of the file.
        source: the file's name, for `where`.
        problems: receives duplicate keys, tags and undefined aliases, and reading continues; None: the first of them
            is raised.

    Raises:
        InvalidFile: not YAML, more than one document, or too large.
    """
    return _Reader(text, lambda line, column: f"{source}:{line + 1}:{column + 1}", source, problems).document()


def parse_value(text: str, where: str) -> Node:
    """Read one value that is not in a file (`--set key=VALUE`); every node's position is `where`."""
    return _Reader(text, lambda line, column: where, where, None).document()


class _Reader:
    """Makes nodes from the events of PyYAML's parser."""

    def __init__(
        self, text: str, place: Callable[[int, int], str], source: str, problems: list[PsctlError] | None
    ) -> None:
        self._place = place
        self._source = source
        self._problems = problems
        self._anchors: dict[str, Node] = {}
        if len(text) > LARGEST:
            raise InvalidFile(
                f"{len(text):,} characters; at most {LARGEST:,} are read", "is it the right file?", source
            )
        self._events = self._read(text)

    def document(self) -> Node:
        """Return the one document; an empty one is a null."""
        next(self._events)  # the stream's start
        first = next(self._events)
        if isinstance(first, yaml.StreamEndEvent):
            return Scalar("", False, self._where(first))
        root = self._node(next(self._events), 0, "")
        next(self._events)  # the document's end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise InvalidFile("a second document begins here", "write one a file", self._where(after))
        return root

    def _read(self, text: str) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = ", ".join(part for part in (error.context, error.problem) if part)
            hint = "check indentation and quotes here"
            if "'\\t'" in what:
                hint = "a tab cannot indent YAML, write spaces"
            elif "got '['" in what:
                hint = 'inside [ ] a range of hosts needs quotes: ["node[01-04]", other]'
            raise InvalidFile(
                f"not YAML: {what}", hint, self._place(mark.line, mark.column) if mark else self._source
            ) from None
        except yaml.YAMLError as error:
            raise InvalidFile(
                f"not YAML: {str(error).splitlines()[0]}", "is it the right file?", self._source
            ) from None

    def _where(self, event: yaml.Event) -> str:
        mark = event.start_mark
        assert mark is not None, "the parser marks every event"
        return self._place(mark.line, mark.column)

    def _refuse(self, message: str, hint: str, where: str) -> None:
        error = InvalidFile(message, hint, where)
        if self._problems is None:
            raise error
        self._problems.append(error)

    def _node(self, event: yaml.Event, depth: int, path: str) -> Node:
        where = self._where(event)
        if isinstance(event, yaml.AliasEvent):
            anchor = str(event.anchor)
            if anchor not in self._anchors:
                what = f"{path}: *{anchor} has no anchor before it"
                self._refuse(what, "quote a value that begins with *", where)
            return self._anchors.get(anchor, Scalar("", False, where))
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag is not None:
            what = f"{path}: the tag {event.tag} is refused, only plain values are read"
            self._refuse(what, "leave it out", where)
        if depth > DEEPEST:
            raise InvalidFile(f"{path[:40]}: nested deeper than {DEEPEST} levels", "is it the right file?", where)
        node = self._made(event, where, depth, path)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _made(self, event: yaml.Event, where: str, depth: int, path: str) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(event.value, event.style is not None, where)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(tuple(self._items(depth, path)), where)
        return Mapping(tuple(self._entries(depth, path)), where)

    def _items(self, depth: int, path: str) -> Iterator[Node]:
        index = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1, f"{path}[{index}]")
            index += 1

    def _entries(self, depth: int, path: str) -> Iterator[Entry]:
        seen: dict[str, str] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            where = self._where(event)
            key = self._node(event, depth + 1, path)
            text = key.text if isinstance(key, Scalar) else ""
            below = join(path, text)
            value = self._node(next(self._events), depth + 1, below)
            if not isinstance(key, Scalar):
                self._refuse(f"{path}: a key must be a scalar, not {key.written()}", "write it as key: value", where)
            elif text in seen:
                self._refuse(f"{below}: duplicate key, first at {seen[text]}", "keep one of them", where)
            else:
                seen[text] = where
                yield Entry(text, where, value)


def join(path: str, key: str) -> str:
    """Return the path of `key` below `path`: "sync", "size" -> "sync.size"."""
    return f"{path}.{key}" if path else key
