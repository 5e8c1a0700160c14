"""Commands that any login shell hands to `sh` unchanged, and the error where its start-up file prevents that.

sshd gives a command to the login shell as one line of text, and csh, fish and POSIX shells read quotes differently. The
line here has no character that they disagree on: it starts `sh`, which reads the real command from standard input, as
one line with a random word before it (`read` takes byte by byte, so that the command's own input is untouched). A
second line follows, so that a start-up file which takes the first one is noticed at once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from psctl.errors import LoginShellFailed
from psctl.remote.shell import command_line

_WAIT = 5.0
"""Seconds that a look at a login shell waits for its answer, before and after its standard input is closed."""

_SAID = 300
"""Characters of the login shell's output that an error repeats."""

_FILES = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshenv",
    "csh": "~/.cshrc",
    "tcsh": "~/.tcshrc, else ~/.cshrc",
    "fish": "~/.config/fish/config.fish",
}
"""By login shell: the start-up file that it reads for a command of sshd. Others (dash, ksh) read none of the user's."""

_ANY = "; ".join(f"{shell}: {file}" for shell, file in _FILES.items())

_RETURN = {
    "bash": "[ -t 0 ] || return",
    "zsh": "[[ -o interactive ]] || return",
    "csh": "if (! $?prompt) exit",
    "fish": "status is-interactive; or return",
}


_READS = "it reads standard input, which holds psctl's command"

_TAKEN = re.compile(rb"^[0-9a-f]{16} (/\S*)$", re.MULTILINE)
"""What the line of `carried` prints where it did not read its word: the shell."""


class Stream(Protocol):
    """What a look at a login shell needs of a command in progress."""

    def end(self) -> None:
        """Close its standard input."""

    def read(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return new output and error output, None at their end."""

    def status(self) -> int | None:
        """Return its exit status once it is known."""

    def close(self) -> None:
        """Let go of it."""


def carried(argv: Sequence[str]) -> tuple[str, bytes]:
    """Return the line for the login shell, and what the `sh` that it starts is to read first."""
    word = secrets.token_hex(8)
    line = f"exec sh -c 'read -r P; case $P in {word}*) eval \"${{P#{word}}}\";; *) echo {word} $SHELL >&2;; esac'"
    # quoted words have their newlines inside single quotes
    command = command_line(argv).replace("\n", "'\"$N\"'")
    text = f'{word} read -r P; N=$(printf "\\n_"); N=${{N%_}}; exec {command}\n{word}\n'
    return line, text.encode("utf-8", "surrogateescape")


def explained(host: str, start: Callable[[str], Stream], status: int | None, said: bytes) -> LoginShellFailed | None:
    """Look at a login shell that did not run a command, and say why.

    Args:
        host: its name.
        start: starts a line in that login shell.
        status: the exit status it ended with; None: it did not end.
        said: its output and error output.

    Returns:
        the error; None where the login shell works now.
    """
    if taken := _TAKEN.search(said):
        return _failure(host, _READS, taken[1].decode("utf-8", "replace"))
    word = secrets.token_hex(8)
    stream = start(f"exec sh -c 'echo {word} $SHELL; echo {word} $SHELL >&2'")
    try:
        (out, errors), ended = _listen(stream, word, heard := [b"", b""])
        waited = not ended and not out and not errors
        if waited:
            stream.end()
            (out, errors), ended = _listen(stream, word, heard)
        if ended and status is None:
            status, said = stream.status(), b"\n".join(heard)
    finally:
        stream.close()
    if out:
        return _failure(host, _READS, out) if waited else None
    if errors:
        return _failure(host, "it sends standard output elsewhere, where psctl cannot read it", errors)
    if not ended:
        return _failure(host, "it does not end: it hangs, or waits for a terminal or for another command", "")
    text = " ".join(said.decode("utf-8", "replace").split())[-_SAID:]
    how = f"ended with exit status {status}" if status is not None else "ended"
    return _failure(host, f"the login shell {how} before psctl's command" + (f", and said: {text}" if text else ""), "")


def _listen(stream: Stream, word: str, heard: list[bytes]) -> tuple[tuple[str, str], bool]:
    """Add output and error output to `heard`; return the shell that each names, and whether the stream ended."""
    pattern = re.compile(rb"(?:^|\n)" + word.encode() + rb" (\S*)\n")
    until, ended = time.monotonic() + _WAIT, False
    while not ended and (left := until - time.monotonic()) > 0:
        got = stream.read(left)
        ended = got is None
        heard[:] = [each + new for each, new in zip(heard, got or (b"", b""), strict=True)]
    return (_named(pattern, heard[0]), _named(pattern, heard[1])), ended


def _named(pattern: re.Pattern[bytes], text: bytes) -> str:
    found = pattern.search(text)
    return (found[1].decode("utf-8", "replace") or "?") if found else ""


def _failure(host: str, what: str, shell: str) -> LoginShellFailed:
    kind = shell.rpartition("/")[2]
    file = _FILES.get(kind)
    of = f"{file} (login shell {shell})" if file else f"the login shell's start-up file ({_ANY})"
    early = _RETURN.get(kind) or _RETURN.get(kind.lstrip("t"))
    cure = f"`{early}`" if early else "; ".join(f"{name}: `{line}`" for name, line in _RETURN.items())
    return LoginShellFailed(
        f"{host}: no command runs there because of {of}: {what}",
        f"look at {file or 'that file'} on {host}; at its top, leave it when the shell is not interactive: {cure}",
        where=host,
    )
