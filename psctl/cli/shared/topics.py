"""The topics of `psctl explain` and of the reference: keys of files, commands, events, error and exit codes."""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Iterator

import msgspec
from typer.core import TyperGroup

from psctl import errors
from psctl.cli.shared.global_options import Click
from psctl.job import events
from psctl.spec.key_reference import KeyEntry, entries

EXITS = {
    0: "done; detached; a stop that stopped", 1: "the job failed, or was stopped by another", 2: "usage, invalid file",
    3: "a host is unreachable or refuses the login", 4: "a host is not fit", 5: "timed out", 6: "not found",
    7: "busy: slots or a port are taken", 8: "host key unknown or changed", 9: "checkpoint incomplete or corrupt",
    10: "partial: some hosts done, some not", 130: "stopped by your Ctrl-C", 143: "stopped by your SIGTERM",
}  # fmt: skip
"""What psctl's exit codes mean."""


class Topic(msgspec.Struct, frozen=True):
    """One topic; `kind` is "key of job.yaml", "command", "event", "error code" or "exit code"."""

    name: str
    kind: str
    text: str


def topics(root: TyperGroup) -> list[Topic]:
    """Return all topics.

    Args:
        root: the root command.
    """
    return [
        *(Topic(each.path, f"key of {each.file}", _key_text(each)) for each in entries()),
        *(Topic(" ".join(words), "command", help_of(root, words)) for words, _ in commands_of(root)),
        *(Topic(tag_of(kind), "event", _event_text(kind)) for kind in events.PROMISED),
        *(Topic(code, "error code", _error_text(kinds)) for code, kinds in error_codes().items()),
        *(Topic(str(code), "exit code", _exit_text(code)) for code in EXITS),
    ]


def commands_of(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Click]]:
    """Yield the words and the command of every command that does something."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands_of(command, (*above, name))
        else:
            yield (*above, name), command


def help_of(root: TyperGroup, words: tuple[str, ...]) -> str:
    """Return what `psctl WORDS --help` prints."""
    command: Click = root
    context: Click = root.make_context("psctl", ["jobs"], obj=[], resilient_parsing=True)
    for word in words:
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return str(command.get_help(context)).strip()


def tag_of(kind: type[events.Event]) -> str:
    """Return the name of a kind of event, as its `event` has it."""
    return str(kind.__struct_config__.tag)


def error_codes() -> dict[str, list[type[errors.PsctlError]]]:
    """Return the classes of errors by code, in the order of exit codes."""
    found: dict[str, list[type[errors.PsctlError]]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PsctlError):
            found.setdefault(kind.code, []).append(kind)
    return dict(sorted(found.items(), key=lambda item: (item[1][0].exit, item[0])))


def summary_of(kind: type) -> str:
    """Return the description of a class, without its arguments."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:")[0].strip()


def type_text(kind: object) -> str:
    """Return a type of a field of an event as text: `list of RoleOf`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"list of {type_text(parts[0])}"
    if origin is dict:
        return f"object of {type_text(parts[1])}"
    if parts:
        return " or ".join("null" if part is type(None) else type_text(part) for part in parts)
    names = {str: "text", int: "integer", float: "number", bool: "true or false", object: "any value"}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "{" + ", ".join(field.encode_name for field in msgspec.structs.fields(kind)) + "}"
    return names.get(kind, str(kind)) if isinstance(kind, type) else str(kind)


def _key_text(key: KeyEntry) -> str:
    lines = [key.text]
    if key.value != "-":
        lines += ["", f"value:    {key.value}", f"default:  {key.default or 'none, it is required'}"]
    if key.example:
        lines.append(f"example:  {key.example}")
    return "\n".join(lines)


def _event_text(kind: type[events.Event]) -> str:
    fields = [f"  {field.encode_name}: {type_text(field.type)}" for field in msgspec.structs.fields(kind)]
    return "\n".join([summary_of(kind), "", "fields of its line under `train -o jsonl`, beside `event`:", *fields])


def _error_text(kinds: list[type[errors.PsctlError]]) -> str:
    lines = [summary_of(kinds[0]), "", f"exit code {kinds[0].exit}", *textwrap.wrap(f"cure: {kinds[0].cure}", 100)]
    for kind in kinds[1:]:
        lines += ["", summary_of(kind)]
        if "cure" in vars(kind):
            lines += textwrap.wrap(f"cure: {kind.cure}", 100)
    return "\n".join(lines)


def _exit_text(code: int) -> str:
    names = [name for name, kinds in error_codes().items() if kinds[0].exit == code]
    return "\n".join([EXITS[code], *([f"error codes: {', '.join(names)}"] if names else [])])
