"""The `exec:` of a cluster file: a command that starts another one on a host, such as `kubectl exec {host} ...`. Pure.

The text is split into words once, as a shell would; nothing else of a shell is interpreted, and a host's address is
put into a word as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import msgspec

from psctl.spec.nearest import did_you_mean

HOST, COMMAND, LINE = "{host}", "{command}", "{line}"

EXAMPLE = "kubectl exec {host} -i -- {command}"

_NAMED = re.compile(r"\{([A-Za-z_]+)\}")


def check_program(word: str) -> None:
    """Refuse a program whose meaning depends on the folder that psctl runs in.

    Raises:
        ValueError: a relative path.
    """
    if "/" in word and not word.startswith(("/", "~/")):
        raise ValueError(f"{word} is a relative path: write a name on PATH, or a path that begins with / or ~/")


class ExecTemplate(msgspec.Struct, frozen=True):
    """A command with places for a host and for what runs there."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ExecTemplate:
        """Read the text of `exec:`.

        Raises:
            ValueError: quotes that do not close, an unknown place, none for the command, or more than one.
        """
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {str(error).lower()}") from None
        for name in _NAMED.findall(text):
            if f"{{{name}}}" not in (HOST, COMMAND, LINE):
                near = did_you_mean(name, ("host", "command", "line"))
                raise ValueError(f"unknown place {{{name}}}{near}; there are {HOST}, {COMMAND} and {LINE}")
        places = sum(word.count(place) for word in words for place in (COMMAND, LINE))
        if places != 1:
            has = "no place for the command that psctl runs" if not places else "more than one place for the command"
            raise ValueError(f"{has}: write {COMMAND} or {LINE} once")
        if COMMAND in words[0] or LINE in words[0]:
            raise ValueError(f"it begins with {words[0]}: the program that reaches the host comes first")
        check_program(words[0])
        if any(COMMAND in word and word != COMMAND for word in words):
            raise ValueError(f"{COMMAND} stands for several words, so it is a word of its own; {LINE} is one word")
        return cls(words)

    @property
    def names_host(self) -> bool:
        """Whether the command depends on the host."""
        return any(HOST in word for word in self.words)

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the words of the whole command.

        Args:
            host: its address.
            command: what runs there, in place of {command}; quoted for a shell as one word in place of {line}.
        """
        made: list[str] = []
        for word in self.words:
            filled = word.replace(HOST, host)
            if word == COMMAND:
                made += command
            else:
                made.append(filled.replace(LINE, shlex.join(command)))
        return made
