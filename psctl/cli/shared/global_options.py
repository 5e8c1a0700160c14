"""Options that every command has: before it or after it. They are moved to the front, where one place reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from psctl.errors import UsageError
from psctl.units import parse_duration

FORMATS = ("table", "json", "jsonl")
"""What -o takes with every command."""

PICTURES = ("dot", "svg")
"""What -o takes with topo alone."""

FLAGS = {
    "--no-color": "no_color", "-q": "quiet", "--quiet": "quiet", "-v": "verbose", "--verbose": "verbose",
    "--debug": "debug", "-y": "yes", "--yes": "yes", "--no-input": "no_input", "--version": "version",
}  # fmt: skip

VALUES = {"-o": "output", "--output": "output", "--timeout": "timeout", "--forks": "forks"}

TAKES_VALUE = frozenset({
    "--cluster", "--workers", "--servers", "--strategy", "--set", "--env", "--resume", "--on-interrupt", "--hosts",
    "--from-hostfile", "--template", "--from", "--topology", "--size", "--world", "-r", "--role", "--tail", "--since",
    "--grep", "--job", "--keep", "--sizes",
})  # fmt: skip
"""Options of commands whose next word is theirs, whatever it looks like."""

_SHORT = re.compile(r"-[qvy]{2,}")


def hoist(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the global options first; everything behind `--` stays where it is."""
    front, rest = split(arguments)
    return front + rest


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the global options and all the rest."""
    front: list[str] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            rest += [word, *words]
            break
        if word in TAKES_VALUE and words:
            rest += [word, words.pop(0)]
        elif word[:2] == "-o" and len(word) > 2:
            front.append(f"--output={word[2:].removeprefix('=')}")  # -ojson and -o=json, for which typer has one form
        elif word in FLAGS or (equals and name in VALUES):
            front.append(word)
        elif _SHORT.fullmatch(word):
            front += [f"-{letter}" for letter in word[1:]]
        elif word in VALUES:
            front += [word, *words[:1]]
            del words[:1]
        else:
            rest.append(word)
    return front, rest


class Options:
    """The global options of one call.

    Args:
        front: what `hoist` put first.
        environment: for PSCTL_OUTPUT.
        verb: the command that they are for; "" where it is not known.

    Raises:
        UsageError: a format that is unknown or that this command has not, a number or duration that is none.
    """

    def __init__(
        self,
        *,
        output: str = "table",
        no_color: bool = False,
        quiet: bool = False,
        verbose: int = 0,
        debug: bool = False,
        yes: bool = False,
        no_input: bool = False,
        timeout: str | None = None,
        forks: int = 16,
        verb: str = "",
    ) -> None:
        self.output, self.no_color, self.quiet, self.verbose = output, no_color, quiet, verbose
        self.debug, self.yes, self.no_input = debug, yes, no_input
        self.forks = forks
        if output in PICTURES and verb != "topo":
            raise UsageError(f"-o {output}: only topo draws pictures", hint=f"one of {', '.join(FORMATS)}")
        if output not in (*FORMATS, *PICTURES):
            every = ", ".join((*FORMATS, *PICTURES) if verb == "topo" else FORMATS)
            raise UsageError(f"-o {output}: unknown format", hint=f"one of {every}")
        if forks < 1:
            raise UsageError(f"--forks {forks}: at least 1", hint="--forks 16 is the default")
        try:
            self.timeout = None if timeout is None else parse_duration(timeout)
        except ValueError as error:
            raise UsageError(f"--timeout {error}", hint="such as --timeout 30s") from None

    @property
    def machine(self) -> bool:
        """Whether another program reads stdout."""
        return self.output != "table"


def output_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the format that the arguments ask for, however wrong the rest of them is: errors are printed in it.

    Pictures count as table: what goes wrong stands on stderr, and no picture on stdout.
    """
    front, _ = split(arguments)
    found = environment.get("PSCTL_OUTPUT") or "table"
    for index, word in enumerate(front):
        name, equals, value = word.partition("=")
        if VALUES.get(name) == "output":
            found = value if equals else front[index + 1] if index + 1 < len(front) else found
    return found if found in FORMATS else "table"
