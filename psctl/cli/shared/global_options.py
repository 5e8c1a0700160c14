"""The options that every command accepts, before its name and after it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import typer
from typer.core import TyperGroup, TyperOption

from psctl.errors import UsageError
from psctl.units import parse_duration

Click: TypeAlias = Any
"""A context, parameter or command of click. Any: typer has a copy of click or uses the installed one, without a public
name for its classes."""

FORMATS = ("table", "json", "jsonl")
"""Formats of -o that every command has."""

PICTURES = ("dot", "svg")
"""Formats of -o that only `topo` has."""


class GlobalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The global options of one call, by their names; `verb` is the command, "" when it is not known.

    Raises:
        UsageError: the format is unknown or this command does not have it, or a number is invalid.
    """

    output: str = "table"
    no_color: bool = False
    quiet: bool = False
    verbose: int = 0  # how often it was given
    debug: bool = False
    yes: bool = False
    no_input: bool = False
    timeout: float | None = None  # seconds
    forks: int = 16
    verb: str = ""

    def __post_init__(self) -> None:
        if self.output in PICTURES and self.verb != "topo":
            raise UsageError(f"-o {self.output}: only topo draws pictures", hint=f"one of {', '.join(FORMATS)}")
        if self.output not in (*FORMATS, *PICTURES):
            every = ", ".join((*FORMATS, *PICTURES) if self.verb == "topo" else FORMATS)
            raise UsageError(f"-o {self.output}: unknown format", hint=f"one of {every}")
        if self.forks < 1:
            raise UsageError(f"--forks {self.forks}: at least 1", hint="--forks 16 is the default")

    @classmethod
    def of(cls, context: typer.Context) -> GlobalOptions:
        """Return the options of a command line that has been parsed.

        Raises:
            UsageError: as the class; or --timeout is no duration.
        """
        root = context.find_root()
        values = {name: value for name, value in root.params.items() if name != "version"}
        try:
            values["timeout"] = None if values["timeout"] is None else parse_duration(values["timeout"])
        except ValueError as error:
            raise UsageError(f"--timeout {error}", hint="such as --timeout 30s") from None
        return cls(**values, verb=root.invoked_subcommand or "")

    @property
    def machine(self) -> bool:
        """Whether another program reads stdout."""
        return self.output != "table"


def share_options(root: TyperGroup) -> None:
    """Let every command below `root` accept the options of `root` too; their help does not repeat them.

    A flag that a command has itself (`report -o FILE`) keeps its meaning there.
    """
    shared = [option for option in root.params if isinstance(option, TyperOption) and option.expose_value]
    for command in _commands(root):
        own = {flag for option in command.params for flag in option.opts}
        command.params = [*command.params, *(_hidden(option, own) for option in shared)]


def _hidden(option: TyperOption, taken: set[str]) -> TyperOption:
    """Return an option that sets the value of the same option of the root, by the flags that are not `taken`."""
    twin = copy.copy(option)
    twin.opts = [flag for flag in option.opts if flag not in taken]
    twin.hidden, twin.expose_value, twin.envvar = True, False, None
    inner = option.callback

    def keep(context: Click, parameter: Click, value: object) -> object:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            value = inner(context, parameter, value) if inner else value
            context.find_root().params[parameter.name] = value
        return value

    twin.callback = keep
    return twin


def _commands(group: TyperGroup) -> Iterator[Click]:
    for command in group.commands.values():
        yield command
        if isinstance(command, TyperGroup):
            yield from _commands(command)


def output_of(root: TyperGroup, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the format in which an error of this command line is printed, even if the line cannot be parsed.

    dot and svg count as table: errors are then printed on stderr only.
    """
    options = [option for command in (root, *_commands(root)) for option in command.params]
    valued = {
        name for option in options if isinstance(option, TyperOption) and not (option.is_flag or option.count)
        for name in option.opts
    }  # fmt: skip
    found = environment.get("PSCTL_OUTPUT") or "table"
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            break
        given = ""
        if word in ("-o", "--output"):
            given = next(words, "")
        elif name == "--output" and equals:
            given = value
        elif word.startswith("-o"):
            given = word[2:].removeprefix("=")
        elif word in valued:
            next(words, None)
        found = given if given in (*FORMATS, *PICTURES) else found  # else it is a file, or refused
    return found if found in FORMATS else "table"
